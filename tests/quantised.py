"""Matrices and models that bitsandbytes has quantised, for tests that skip where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_trainer.benchmarks.quantised import quantise
from liger_trainer.kernels.lora.nf4 import NestedAbsmax, NF4Weight

__all__ = ["library", "matrix", "quantise"]


def library() -> Any:
    """bitsandbytes, or the test is skipped."""
    return pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install liger-trainer[test]")


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
