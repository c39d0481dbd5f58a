"""The gradients of the first step: the stock run's are saved, and those of the other runs compared with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

_LAYER = re.compile(r"(.*?\.\d+\.[^.]+)\.")


def group_of(name: str) -> str:
    """The part of a layer that a parameter belongs to, such as ``"model.layers.3.mlp"``; outside of layers its name."""
    found = _LAYER.match(name)
    return found.group(1) if found else name.removesuffix(".weight")


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradient of each parameter that has one."""
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def norm_of(model: nn.Module) -> float:
    """The norm of all gradients, summed in fp32: that of bf16 gradients, which is logged, is rounded to bf16."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients_of(model).values()]
    return torch.stack(norms).double().norm().item() if norms else 0.0


def save_gradients(model: nn.Module, folder: Path) -> None:
    """Writes the gradients into `folder`, one file each, so that the host holds one at a time."""
    folder.mkdir()
    names = {}
    for number, (name, gradient) in enumerate(gradients_of(model).items()):
        names[name] = f"{number}.pt"
        torch.save(gradient.detach().cpu(), folder / names[name])
    (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")


def compare_gradients(model: nn.Module, folder: Path) -> dict[str, dict[str, float]]:
    """The distance of the gradients of `model` from the saved ones, by group.

    Returns:
        For each group ``norm``, the norm of the saved gradients, and ``difference``, the norm of the differences. A
        gradient that one of the two lacks is compared with 0.
    """
    names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
    found, squares = gradients_of(model), dict[str, list[float]]()
    for name in dict.fromkeys((*names, *found)):
        saved = torch.load(folder / names[name]) if name in names else torch.zeros(())
        saved = saved.double()
        own: Any = found[name].detach().cpu().double() if name in found else 0.0
        sums = squares.setdefault(group_of(name), [0.0, 0.0])
        sums[0] += saved.square().sum().item()
        sums[1] += (own - saved).square().sum().item()
    return {group: {"norm": norm**0.5, "difference": difference**0.5} for group, (norm, difference) in squares.items()}
