"""What one side of a comparison measures besides its logs: rounding, gradients and completions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from liger_trainer.recipe.file import RecipeError


def split_sums(model: nn.Module) -> int:
    """Makes every linear layer of `model` sum its products in two halves; returns how many there are.

    A layer with a forward of its own, such as bitsandbytes', is called on each half of the columns with the others 0.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.in_features > 1]
    for layer in layers:
        plain = type(layer).forward is nn.Linear.forward
        forward = partial(_halves, layer) if plain else partial(_masked_halves, layer, layer.forward)
        layer.forward = forward  # type: ignore[method-assign]
    return len(layers)


def _halves(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of a plain linear layer, whose weight is sliced."""
    half = layer.in_features // 2
    first = functional.linear(input[..., :half], layer.weight[:, :half], layer.bias)
    return first + functional.linear(input[..., half:], layer.weight[:, half:])


def _masked_halves(layer: nn.Linear, forward: Callable, input: torch.Tensor) -> torch.Tensor:
    """The `forward` of any other linear layer; its bias, which is added twice, is taken off once."""
    first = torch.arange(input.shape[-1], device=input.device) < layer.in_features // 2
    total = forward(input * first) + forward(input * ~first)
    return total if layer.bias is None else total - layer.bias


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


class Completions:
    """Takes the place of `generate` of every model in this process.

    It records the calls in a folder, one file each, or repeats those that are recorded there.
    """

    def __init__(self, folder: Path, record: bool) -> None:
        self.folder, self.record = folder, record
        self.calls = 0
        self.seconds = 0.0
        """The time in `generate` so far, which is not training."""
        folder.mkdir(exist_ok=True)

    def install(self) -> None:
        """Replaces `generate`."""
        from transformers import GenerationMixin

        mixin: Any = GenerationMixin
        native, completions = mixin.generate, self

        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return completions._recorded(model, native, *args, **kwargs)
            finally:
                completions.seconds += time.perf_counter() - start

        mixin.generate = generate

    def _recorded(self, model: Any, native: Any, *args: Any, **kwargs: Any) -> Any:
        file = self.folder / f"{self.calls}.pt"
        prompts: Any = kwargs.get("input_ids", args[0] if args else None)
        self.calls += 1
        if self.record:
            result = native(model, *args, **kwargs)
            on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
            torch.save({"prompts": prompts, "result": result, "random": (torch.get_rng_state(), on_gpu)}, file)
            return result
        if not file.is_file():
            raise RecipeError(f"The stock run generated {self.calls - 1} times, and this one once more.")
        call = torch.load(file, map_location=model.device, weights_only=False)  # written by the stock run
        if prompts is not call["prompts"] and not torch.equal(prompts, call["prompts"].to(prompts.device)):
            raise RecipeError("The runs asked for completions of different prompts, so they cannot be compared.")
        on_cpu, on_gpu = call["random"]
        torch.set_rng_state(on_cpu.cpu())
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu.cpu())
        return call["result"]
