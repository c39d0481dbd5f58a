"""Times each chunk of the head's weight gradient beside cuBLAS; run on one GPU, half a minute.

    python benchmarks/sweeps/weight_gradient_sweep.py

Every kernel that the GPU can run is checked first: the error of a sum over three chunks beside that of one rounding.
"first" stores the sum, "middle" adds to it, "last" adds and rounds; cuBLAS's counterparts are `mm` and `addmm`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.kernels.head.weight_gradient import WeightGradientSum, hopper_launch, launch

SHAPES = {  # vocabulary, hidden size, tokens of a chunk
    "llama3-8b": (128256, 4096, 2048),
    "gemma3-4b": (262208, 2560, 1024),
    "qwen3-30b-a3b": (151936, 2048, 2048),
}


def milliseconds(works: dict[str, Callable[[], object]], rounds: int = 8) -> dict[str, float]:
    """Median time of each work, in turns."""
    device = Device(torch.device("cuda"))
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(device.median(work, rounds=1))
    return {name: statistics.median(samples) for name, samples in times.items()}


def chunk_of(total: WeightGradientSum, left: torch.Tensor, right: torch.Tensor, added: int) -> Callable[[], None]:
    """Adding a chunk as number `added` of three."""

    def add() -> None:
        total.added = added
        total.add(left, right)

    return add


def main() -> None:
    """Prints one line a shape and kernel."""
    kernels = {"plain": launch, "gluon": hopper_launch()}
    for name, (vocab_size, hidden_size, tokens) in SHAPES.items():
        left = torch.randn(tokens, vocab_size, device="cuda", dtype=torch.bfloat16) * 0.02
        right = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16)
        weight_gradient = torch.empty(vocab_size, hidden_size, device="cuda", dtype=torch.bfloat16)
        rows = torch.arange(0, vocab_size, 997, device="cuda")
        exact = 3 * (left[:, rows].double().t() @ right.double())
        rounding = (exact.bfloat16().double() - exact).norm() / exact.norm()
        works: dict[str, Callable[[], object]] = {
            "mm": partial(torch.mm, left.t(), right, out=weight_gradient),
            "addmm": partial(torch.addmm, weight_gradient, left.t(), right, out=weight_gradient),
        }
        for kernel, launcher in kernels.items():
            if launcher is None:
                continue
            total = WeightGradientSum(weight_gradient, 3)
            total.launch = launcher
            chunks = [chunk_of(total, left, right, added) for added in range(3)]
            for chunk in chunks:
                chunk()
            error = (weight_gradient[rows].double() - exact).norm() / exact.norm()
            print(f"{name} {kernel}: error {error.item():.3e}, one rounding {rounding.item():.3e}")
            works |= {f"{kernel} {state}": chunk for state, chunk in zip(("first", "middle", "last"), chunks)}
        times = milliseconds(works)
        print(name, ", ".join(f"{work} {time:.3f} ms" for work, time in times.items()))


if __name__ == "__main__":
    main()
