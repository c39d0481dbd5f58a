"""Matrices and models in 4 bits: quantised by bitsandbytes, or the test is skipped; and random ones without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig

from liger_trainer.benchmarks.training_step import quantise
from liger_trainer.kernels.lora.nf4 import NF4_CODE, NestedAbsmax, NF4Weight

__all__ = ["library", "loading_in_4_bits", "matrix", "moved", "quantise", "random_weight"]


def library() -> Any:
    """bitsandbytes, or the test is skipped."""
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install liger-trainer[test]")


def loading_in_4_bits() -> dict[str, Any]:
    """`model_init_kwargs` with which transformers loads a base in 4 bits, its scales quantised too."""
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": quantised, "dtype": torch.bfloat16, "device_map": None}


def matrix(
    values: torch.Tensor, quant_type: str = "nf4", nested: bool = False, blocksize: int = 64
) -> tuple[NF4Weight, torch.Tensor]:
    """A matrix in 4 bits, and what bitsandbytes makes of it."""
    functions, inner = library().functional, None
    packed, state = functions.quantize_4bit(
        values, blocksize=blocksize, compress_statistics=nested, quant_type=quant_type
    )
    if nested:
        inner = NestedAbsmax(state.state2.code, state.state2.absmax, state.offset, state.state2.blocksize)
    weight = NF4Weight(packed, state.absmax, state.code, tuple(state.shape), blocksize, inner)
    return weight, functions.dequantize_4bit(packed, state)


def random_weight(rows, columns, nested=False, blocksize=64, quantised_scales=256):
    """A matrix in 4 bits of random parts, without bitsandbytes."""
    blocks = -(-rows * columns // blocksize)
    packed, code = torch.randint(256, (-(-rows * columns // 2), 1), dtype=torch.uint8), torch.tensor(NF4_CODE)
    if not nested:
        return NF4Weight(packed, torch.rand(blocks), code, (rows, columns), blocksize)
    scales = torch.rand(-(-blocks // quantised_scales))
    inner = NestedAbsmax(torch.randn(256).sort().values, scales, torch.tensor(3.0), quantised_scales)
    absmax = torch.randint(256, (blocks,), dtype=torch.uint8)
    return NF4Weight(packed, absmax, code, (rows, columns), blocksize, inner)


def moved(weight, device):
    """The matrix on another device."""
    nested = weight.nested
    if nested is not None:
        nested = nested._replace(**{name: getattr(nested, name).to(device) for name in ("code", "absmax", "offset")})
    parts = {name: getattr(weight, name).to(device) for name in ("packed", "absmax", "code")}
    return weight._replace(**parts, nested=nested)
