"""Sweeps the launches of the activation's kernels that add adapters' products; run on one GPU, two to three minutes.

    python benchmarks/sweeps/lora_gated_sweep.py [--rank 16] [--dtype bfloat16]

The MLP of Llama-3 8B, 4 x 4096 tokens, intermediate size 14,336, adapters in fp32. Of tiles, stages and programs for
each multiprocessor, prints what the kernels choose and the best; forward and backward apart, as they are configured.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from liger_trainer.kernels.lora import lora_gated_kernels as kernels
from liger_trainer.kernels.lora.lora_gated_kernels import LaunchConfig, LowRank

TOKENS, COLUMNS = 16384, 14336
TILES = [  # rows, columns, warps
    *((16, 32, 4), (16, 64, 2), (16, 64, 4), (16, 128, 4), (16, 256, 4), (16, 256, 8)),
    *((32, 32, 4), (32, 64, 4), (32, 128, 4), (32, 128, 8), (64, 64, 4), (64, 128, 8)),
]
STAGES = (1, 2, 3, 4)
PROGRAMS_PER_SM = (4, 8, 16, 32)
SHOWN = 12


def configs() -> Iterator[LaunchConfig]:
    for tile, stages, programs in itertools.product(TILES, STAGES, PROGRAMS_PER_SM):
        yield LaunchConfig(*tile, stages, programs)


def milliseconds(launch: Callable[[], None]) -> float:
    return do_bench(launch, warmup=5, rep=30, return_mode="median")


def timed(launch: Callable[[], None], config: LaunchConfig) -> float:
    """Milliseconds, infinite where a multiprocessor has too little memory or too few registers."""
    fitting = mock.Mock(side_effect=lambda given, *_: given)
    with mock.patch.multiple(kernels, _FORWARD=config, _BACKWARD=config, _fitting=fitting):
        try:
            return milliseconds(launch)
        except OutOfResources:
            return math.inf


def main() -> None:
    """Prints, of the forward and of the backward, the chosen launch and the best ones."""
    parser = argparse.ArgumentParser(description="Sweeps the launches of the activation's kernels with adapters.")
    parser.add_argument("--rank", type=int, default=16, help="rank of the three adapters (default: 16)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    given = parser.parse_args()
    options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, given.dtype)}
    gate, up, dh = (torch.randn(TOKENS, COLUMNS, **options) for _ in range(3))
    h, z = torch.empty_like(gate), torch.randn(TOKENS, 3 * given.rank, **options)
    factors = [0.1 * torch.randn(given.rank, COLUMNS, device="cuda") for _ in range(3)]
    updates = [LowRank(part, factor, 1.0) for part, factor in zip(z.split(given.rank, dim=1), factors)]

    def forward() -> None:
        kernels.launch_forward(gate, up, h, updates[:2], "silu", math.inf)

    def backward() -> None:  # writes over its inputs; what they hold does not change its time
        kernels.launch_backward(dh, gate, up, updates, "silu", math.inf)

    for launch, config in ((forward, kernels._FORWARD), (backward, kernels._BACKWARD)):
        chosen = kernels._fitting(config, updates, gate.element_size())
        print(f"{launch.__name__}, rank {given.rank}, {given.dtype}: {milliseconds(launch):.3f} ms with {chosen}")
        for took, other in sorted((timed(launch, each), each) for each in configs())[:SHOWN]:
            print(f"  {took:.3f} ms  {other}")


if __name__ == "__main__":
    main()
