"""Sweeps the tiles of the activation's kernels that add adapters' products; run on one GPU, half a minute.

    python benchmarks/sweeps/lora_gated_sweep.py

The MLP of Llama-3 8B, 4 x 4096 tokens, intermediate size 14,336, bf16, adapters of rank 16 in fp32.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import torch
from triton.testing import do_bench

from liger_trainer.kernels import _lora_gated_kernels as kernels
from liger_trainer.kernels._lora_gated_kernels import LowRank

TOKENS, COLUMNS, RANK = 16384, 14336, 16
TILES = [  # rows, columns, warps
    *((64, 128, 4), (64, 128, 8), (64, 64, 4), (64, 64, 8), (128, 64, 8), (128, 128, 8)),
    *((32, 64, 4), (32, 128, 4), (32, 128, 8), (32, 256, 8)),
    *((16, 64, 2), (16, 128, 2), (16, 128, 4), (16, 256, 4), (16, 256, 8)),
]


def main() -> None:
    """Prints one line a tile: milliseconds of the forward and of the backward."""
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    gate, up, dh = (torch.randn(TOKENS, COLUMNS, **half) for _ in range(3))
    h, z = torch.empty_like(gate), torch.randn(TOKENS, 3 * RANK, **half)
    factors = [0.1 * torch.randn(RANK, COLUMNS, device="cuda") for _ in range(3)]
    updates = [LowRank(part, factor, 1.0) for part, factor in zip(z.split(RANK, dim=1), factors)]
    for rows, columns, warps in TILES:
        tile: dict[str, Any] = {"_BLOCK_ROWS": rows, "_BLOCK_COLS": columns, "_NUM_WARPS": warps}
        with mock.patch.multiple(kernels, **tile):
            forward = do_bench(
                lambda: kernels.launch_forward(gate, up, h, updates[:2], "silu", math.inf), return_mode="median"
            )
            # Each backward writes over its inputs; what they hold does not change its time.
            backward = do_bench(
                lambda: kernels.launch_backward(dh, gate, up, updates, "silu", math.inf), return_mode="median"
            )
        print(f"{rows:4} x {columns:3}, {warps} warps: forward {forward:.3f} ms, backward {backward:.3f} ms")


if __name__ == "__main__":
    main()
