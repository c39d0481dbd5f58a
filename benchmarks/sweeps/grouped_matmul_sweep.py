"""Times the grouped products of a block of experts: torch's grouped matmul, and the Triton kernels at several tiles.

    python benchmarks/sweeps/grouped_matmul_sweep.py [--tokens 8192] [--dtype bfloat16]

Shapes of Qwen3-30B-A3B: 128 experts, 8 a token, hidden size 2,048, intermediate size 768; random choices. Prints the
milliseconds and TFLOP/s of each product: the first and the second layer's, the gradients of their inputs, and of their
weights. A row a token is read through its index by the Triton kernels, and repeated before torch's; the passes beside
the products stand last.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from liger_trainer.kernels.activation import GatedActivation
from liger_trainer.kernels.moe.activation import activate, activation_gradients_
from liger_trainer.kernels.moe.grouped_matmul import Tile, launch_rows, launch_weights
from liger_trainer.kernels.moe.sort_by_expert import sort_by_expert
from liger_trainer.kernels.moe.token_rows import combine_rows, repeat_rows

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
TILES = [
    *(Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 8, 3)),
    *(Tile(128, 128, 64, 8, 4), Tile(64, 256, 64, 8, 3), Tile(64, 256, 64, 4, 3), Tile(128, 256, 32, 8, 5)),
]


def milliseconds(run: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """The median, infinite where a multiprocessor has too little memory or too few registers."""
    try:
        return do_bench(lambda: run(*arguments, **options), warmup=10, rep=60, return_mode="median")
    except OutOfResources:
        return math.inf


def show(name: str, flops: float, times: dict[str, float]) -> None:
    """One line."""
    parts = (f"{label} {time:.3f} ({flops / time / 1e9:.0f})" for label, time in times.items())
    print(f"{name}: " + ", ".join(parts), flush=True)


def main() -> None:
    """Prints a line a product."""
    parser = argparse.ArgumentParser(description="Times the grouped products of a block of experts.")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    given = parser.parse_args()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=getattr(torch, given.dtype))

    tokens = given.tokens
    index = torch.randn(tokens, EXPERTS, device="cuda").topk(TOP_K).indices
    rows, count = sort_by_expert(index, EXPERTS), tokens * TOP_K
    gate_up, down = random(EXPERTS, 2 * INTERMEDIATE, HIDDEN), random(EXPERTS, HIDDEN, INTERMEDIATE)
    x, pre, h = random(tokens, HIDDEN), random(count, 2 * INTERMEDIATE), random(count, INTERMEDIATE)
    repeated, ends = repeat_rows(x, rows, TOP_K), rows.offsets[1:]
    unit = 2.0 * count * HIDDEN * INTERMEDIATE
    for name, flops, operand, weight, transposed, top_k in (
        ("first layer", 2 * unit, x, gate_up, False, TOP_K),
        ("second layer", unit, h, down, False, 0),
        ("gradient of the second's input", unit, x, down, True, TOP_K),
        ("gradient of the first's input", 2 * unit, pre, gate_up, True, 0),
    ):
        right = weight if transposed else weight.mT
        out = random(count, right.shape[2])
        times = {"torch": milliseconds(F.grouped_mm, repeated if top_k else operand, right, offs=ends)}
        for tile in TILES:
            given_to = operand, weight, rows, top_k, transposed, None, None, tile
            times[str(tuple(tile))] = milliseconds(launch_rows, out, *given_to)
        show(name, flops, times)
    for name, flops, left, other, left_top_k, other_top_k in (
        ("gradient of the first weight", 2 * unit, pre, x, 0, TOP_K),
        ("gradient of the second weight", unit, x, h, TOP_K, 0),
    ):
        sources = repeated if left_top_k else left, repeated if other_top_k else other
        out = random(EXPERTS, left.shape[1], other.shape[1])
        times = {"torch": milliseconds(F.grouped_mm, sources[0].t(), sources[1], offs=ends)}
        for tile in TILES:
            times[str(tuple(tile))] = milliseconds(
                launch_weights, out, left, other, rows, left_top_k, other_top_k, tile
            )
        show(name, flops, times)
    weights, dpre = torch.rand(tokens, TOP_K, device="cuda"), torch.empty_like(pre)
    silu = GatedActivation.of("silu")
    beside: dict[str, float] = {
        "sort": milliseconds(sort_by_expert, index, EXPERTS),
        "repeat": milliseconds(repeat_rows, x, rows, TOP_K),
        "activation": milliseconds(activate, pre, silu),
        "its gradient": milliseconds(activation_gradients_, dpre, h, pre, weights, rows, silu, True, True),
        "combine": milliseconds(combine_rows, repeated, rows, TOP_K, weights),
    }
    print(", ".join(f"{name} {time:.3f}" for name, time in beside.items()))


if __name__ == "__main__":
    main()
