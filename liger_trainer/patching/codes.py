"""Weights that are codes of 8 bits and fewer, by their dtypes and values, whatever library has put them there.

A code means something only together with its scale. What takes codes for numbers computes something else without an
error: adding an adapter to them, initialising an adapter in their dtype, or multiplying by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.runtime import is_dtensor

_PLAIN = (torch.Tensor, nn.Parameter)
_SAMPLE = 1024  # elements of a weight that are looked at
_LEAST = 16.0  # weights are far smaller than that, and codes far larger: their largest is 127, 448 or more
_GRIDS = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_code(tensor: torch.Tensor | None) -> bool:
    """Whether the elements of a weight are codes: whole numbers, or floats of one byte and less.

    Subclasses, such as those of torchao, show the dtype that they stand for, and know their scales.
    """
    if tensor is None or type(tensor) not in _PLAIN:
        return False
    return not (tensor.is_complex() or tensor.is_floating_point()) or tensor.element_size() == 1


def stored(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter or buffer `name` of `module` as it is kept, not what a parametrisation makes of it."""
    return own_tensors(module).get(name)


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of `module` itself."""
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def adds_to_codes(wrapper: Any) -> str:
    """Why PEFT's `wrapper` of a parameter cannot train; empty if the parameter is no code."""
    weight = stored(wrapper.get_base_layer(), wrapper.parameter_name)
    if weight is None or not is_code(weight):
        return ""
    return (
        f"its {wrapper.parameter_name} holds codes ({_name(weight.dtype)}), and PEFT adds the adapter to the codes, "
        "which does not train"
    )


def unscaled_weights(model: nn.Module) -> list[str]:
    """The names of weights in 16 bits and more whose numbers are codes, since their scales were not loaded.

    Of each weight, the first 1,024 elements are looked at: all are whole numbers up to 128, or numbers of 8-bit floats,
    and some are larger than any trained weight. Weights that are on another device or split are not looked at.
    """
    alike: dict[Any, list[tuple[str, torch.Tensor]]] = {}
    for name, sample in _samples(model):
        alike.setdefault((sample.device, sample.dtype), []).append((name, sample))
    found = []
    for samples in alike.values():
        names, rows = zip(*samples)
        verdicts = _are_codes(torch.stack(rows).float()).tolist()  # one wait for the device
        found += [name for name, verdict in zip(names, verdicts) if verdict]
    return found


def _samples(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        wide = type(parameter) in _PLAIN and weight.is_floating_point() and weight.element_size() > 1
        if not wide or weight.is_meta or is_dtensor(weight) or weight.dim() < 2 or weight.numel() < _SAMPLE:
            continue
        if weight.is_contiguous():
            yield name, weight.view(-1)[:_SAMPLE]


def _are_codes(samples: torch.Tensor) -> torch.Tensor:
    """For each row of `samples`, (N, 1024) in fp32, whether it is of codes."""
    size = samples.abs()
    whole = ((samples == samples.round()) & (size <= 128)).all(-1)
    for dtype in _GRIDS:
        whole = whole | (samples.to(dtype).float() == samples).all(-1)
    # Not a table of one number, nor of few.
    return whole & (size.amax(-1) >= _LEAST) & (samples.roll(1, -1) != samples).float().mean(-1).gt(0.5)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
