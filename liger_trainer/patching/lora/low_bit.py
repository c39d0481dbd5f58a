"""Base layers of adapters in 4 bits (bitsandbytes) and in fp8 (`fp8_base`): the weight that one multiplies by.

A layer in 4 bits is read without calling it. It casts its input to its compute dtype. If that is not the dtype of the
activation, or autocast's, the layer itself runs. It also runs for a few rows without a gradient, as in a generation,
for which bitsandbytes has products that read the 4 bits directly; but not with dropout, because the forward of a
checkpoint has no gradient either, and must draw the same masks as its recomputation.

The `weight` of a frozen layer in fp8 has no values, so whatever reads or changes these, such as merging adapters, is an
error and not a wrong result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import FOUR_BIT_WEIGHTS, FP8_LAYERS
from liger_trainer.kernels.fp8.stored import Fp8Weight, fp8_stored_linear, store
from liger_trainer.kernels.lora.nf4 import NestedAbsmax, NF4Weight, nf4_dequantize
from liger_trainer.packed.modules import without_values
from liger_trainer.patching.probe import Probe

require(FOUR_BIT_WEIGHTS)

_FEW_ROWS = 64
_KINDS = ("Linear4bit", "LinearNF4", "LinearFP4")
_PROBED_BLOCKS = 300  # more than one scale of scales has


def is_linear_4bit(module: nn.Module) -> bool:
    """Whether `module` is exactly one of bitsandbytes' linear layers in 4 bits."""
    kind = type(module)
    return kind.__name__ in _KINDS and kind.__module__ == "bitsandbytes.nn.modules"


def nf4_weight_of(module: Any, x: torch.Tensor, drops: bool) -> NF4Weight | None:
    """The weight that `module`, a layer in 4 bits, multiplies `x`, `(..., in_features)`, by; None if it must be called.

    `drops` says whether an adapter of the layer has dropout now.
    """
    if not drops and not torch.is_grad_enabled() and x.numel() <= _FEW_ROWS * x.shape[-1]:
        return None
    if type(x) not in (torch.Tensor, nn.Parameter) or (module.compute_dtype or x.dtype) != _product_dtype(x):
        return None
    weight, state = module.weight, state_of(module)
    if state is None or weight.requires_grad or weight.device != x.device or not weight.is_contiguous():
        return None
    if type(weight) not in (torch.Tensor, nn.Parameter) and type(weight).__name__ != "Params4bit":
        return None
    if getattr(state, "packing_format_for_cpu", False) or tuple(state.shape) != (module.out_features, x.shape[-1]):
        return None
    if 2 * weight.numel() * weight.element_size() != state.shape.numel():  # a shard, or not quantised yet
        return None
    return _weight(weight, state)


def state_of(module: Any) -> Any:
    """The quantisation state of a layer; FSDP's copies of its weight lack it, the layer has it."""
    state = getattr(module.weight, "quant_state", None)
    return module.quant_state if state is None else state


def _product_dtype(x: torch.Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _weight(packed: torch.Tensor, state: Any) -> NF4Weight:
    nested = None
    if state.nested:
        inner = state.state2
        nested = NestedAbsmax(inner.code, inner.absmax, state.offset, inner.blocksize)
    # The bytes are stored in any dtype that sharding needs. bitsandbytes' `__torch_function__` only preserves the
    # class, and torch.compile cannot trace it, so it is left out.
    with torch._C.DisableTorchFunctionSubclass():
        memory = packed.data.view(torch.uint8)
    return NF4Weight(memory, state.absmax, state.code, tuple(state.shape), state.blocksize, nested)


def layout_of(module: Any) -> tuple[str, int, bool]:
    """The type, the block size and whether scales are quantised too, of a layer that is quantised or will be."""
    state, weight = state_of(module), module.weight
    if state is None:
        return weight.quant_type, weight.blocksize, weight.compress_statistics
    return state.quant_type, state.blocksize, state.nested


def reads_as_bitsandbytes(layout: tuple[str, int, bool], probe: Probe) -> bool:
    """Whether ours dequantises a small matrix of this `layout` to exactly the numbers that bitsandbytes gives."""
    library = sys.modules["bitsandbytes.functional"]
    quant_type, blocksize, nested = layout
    for dtype in (torch.float32, torch.bfloat16):
        matrix = probe.randn(_PROBED_BLOCKS, blocksize).to(dtype)
        packed, made = library.quantize_4bit(
            matrix, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type
        )
        if not torch.equal(nf4_dequantize(_weight(packed, made), dtype), library.dequantize_4bit(packed, made)):
            return False
    return True


# ---------------------------------------------------------------------------------------------------------------------
# In fp8
# ---------------------------------------------------------------------------------------------------------------------

require(FP8_LAYERS)


class Fp8Linear(nn.Module):
    """``nn.Linear`` with a weight in fp8; see `kernels/fp8/stored.py`.

    Codes and scales are frozen parameters, since DDP would broadcast buffers at every forward.

    Attributes:
        codes: (out_features, in_features), uint8: the bytes of float8_e4m3fn.
        scales: (out_features, 1), fp32.
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        stored = store(linear.weight.detach().to(device))
        self.codes = nn.Parameter(stored.codes, requires_grad=False)
        self.scales = nn.Parameter(stored.scales, requires_grad=False)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The sizes and the device of the weight, without its values."""
        return without_values((self.out_features, self.in_features), self.codes.device)

    @property
    def stored(self) -> Fp8Weight:
        """The weight, as our operators take it."""
        return Fp8Weight(self.codes, self.scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features), in the dtype of `x`, or that of autocast."""
        return fp8_stored_linear(x, self.stored, self.bias)

    def extra_repr(self) -> str:
        """The sizes, for `print`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Linear:
        """Moves with the model; a cast of the model changes neither codes nor scales."""
        before = self.codes.data, self.scales.data
        super()._apply(fn, recurse)
        for parameter, data in zip((self.codes, self.scales), before):
            if parameter.dtype != data.dtype:
                parameter.data = data.to(parameter.device)
        return self
