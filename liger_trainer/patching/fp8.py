"""Linear layers of the decoder that multiply in fp8 (`kernels/fp8/linear.py`).

This changes the arithmetic, so nothing is proved: `fp8` has to be set. The layers are the plain linear layers of all
decoder layers but the first and the last, with at least 1,024 input and output features. The head, embeddings, routers,
experts and vision towers stay in bf16, and so do layers with adapters, whose own operators multiply their bases.

Calls with fewer than 512 rows, such as the steps of a generation, run in bf16: casting the weight would take longer
than the product saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.head.lm_head import without_adapters
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.fp8.linear import MULTIPLE, fp8_linear, has_fp8, takes_fp8
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.finding import Finding
from liger_trainer.patching.lora.operands import is_lora_linear

_LEAST_FEATURES = 1024
_LEAST_ROWS = 512


def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward that is bound to a linear layer."""
    if not is_long_enough(input):
        return F.linear(input, self.weight, self.bias)
    if not takes_fp8(input, self.weight):
        warn_once(
            "fp8",
            f"`fp8` is set, but a layer multiplies {input.dtype} by {self.weight.dtype}, as without it: fp8 is for "
            "models in bfloat16 and for bf16 autocast. (Shown once.)",
        )
    return fp8_linear(input, self.weight, self.bias)


def is_long_enough(x: torch.Tensor) -> bool:
    """Whether `x`, (..., features), has as many rows as it takes for fp8 to pay."""
    return x.shape[:-1].numel() >= _LEAST_ROWS


def multiplies_in_fp8(module: nn.Module) -> bool:
    """Whether the forward that is bound to `module` is ours for fp8."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def find_fp8(model: nn.Module, recipe: str | None, device: torch.device) -> Iterator[Finding]:
    """A finding for each linear layer of `model`'s decoder, if `recipe` is set.

    Args:
        model: The model, adapters included.
        recipe: A value of `fp8`.
        device: Where the model will run.
    """
    if recipe is None:
        return
    layers = decoder_layers(model)
    if not layers:
        yield Finding("fp8", type(without_adapters(model)).__name__, model, reason="its decoder has no list of layers")
    for place, layer in enumerate(layers):
        adapted = {id(part) for module in layer.modules() if is_lora_linear(module) for part in module.modules()}
        for name, module in layer.named_modules():
            if type(module) is not nn.Linear:
                continue
            reason = "the first and the last layer stay in bf16" if place in (0, len(layers) - 1) else ""
            reason = reason or _obstacle(name, module, id(module) in adapted, device)
            if reason:
                yield Finding("fp8", "Linear", module, reason=reason)
            else:
                yield Finding("fp8", "Linear", module, f"fp8_linear ({recipe})", forward)


def decoder_layers(model: nn.Module) -> nn.ModuleList | list[nn.Module]:
    """The layers of the language model in `model`; none if it has no decoder with a list of them."""
    base: Any = without_adapters(model)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    layers = getattr(decoder, "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else []


def _obstacle(name: str, module: nn.Linear, has_adapters: bool, device: torch.device) -> str:
    if not has_fp8(device):
        return f"{device.type} has no fp8 matmuls with a scale for each row, which NVIDIA's Hopper and newer have"
    if min(module.weight.shape) < _LEAST_FEATURES:
        return f"fewer than {_LEAST_FEATURES} features, for which fp8 does not pay"
    if has_adapters:
        return "it has adapters; their bases are multiplied in bf16"
    if "experts" in name.split("."):
        return "experts stay in bf16"
    if is_dtensor(module.weight):
        return "its weight is split over processes"
    if any(size % MULTIPLE for size in module.weight.shape):
        return f"its weight is {tuple(module.weight.shape)}; the sizes must be multiples of {MULTIPLE}"
    foreign = overriding_forward(module)
    return "" if foreign is None else f"its forward is already overridden by {foreign}"
