"""Sweeps the launch configurations of the norm kernels on this GPU and prints the best beside the table's choice.

    python benchmarks/sweeps/norms_sweep.py [--only SUBSTRING] [--seconds 55]

Forward and backward are timed apart, as they are configured apart, by the clock of the benchmarks. Every configuration
is checked against fp32 before it is timed. "floor" is bytes moved divided by the copy bandwidth measured here.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch

import liger_trainer.liger.operators.fused_add_rms_norm  # noqa: F401 (registers its operator)
from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.records import Machine
from liger_trainer.kernels import rows as launch
from liger_trainer.kernels.norms import layer_norm as ln
from liger_trainer.kernels.norms import rms_norm as rms
from liger_trainer.kernels.norms.layer_norm import layer_norm_reference
from liger_trainer.kernels.norms.rms_norm import rms_norm_reference
from liger_trainer.kernels.rows import NormConfig

DEVICE = torch.device("cuda")
CLOCK = Device(DEVICE)
WORK = {  # name: (kind, rows, hidden size)
    "RMSNorm 16384x4096": ("rms", 16384, 4096),
    "RMSNorm 655360x128": ("rms", 655360, 128),
    "RMSNorm 16384x16384": ("rms", 16384, 16384),
    "add+RMSNorm 16384x4096": ("add", 16384, 4096),
    "LayerNorm 16384x4096": ("ln", 16384, 4096),
}


def forward_configs(hidden_size: int) -> Iterator[NormConfig]:
    tile = {128: (16, 32, 64), 4096: (1, 2), 16384: (1,)}[hidden_size]
    warps = {128: (4, 8), 4096: (4, 8, 16), 16384: (8, 16, 32)}[hidden_size]
    return (NormConfig(*choice) for choice in itertools.product(tile, warps))


def backward_configs(hidden_size: int) -> Iterator[NormConfig]:
    tile = {128: (16, 32, 64), 4096: (1, 2), 16384: (1,)}[hidden_size]
    warps = {128: (4, 8), 4096: (4, 8, 16), 16384: (16, 32)}[hidden_size]
    stages = {128: (2, 3), 4096: (2, 3, 4), 16384: (1, 2, 3)}[hidden_size]
    programs = {128: (2, 3, 4, 6), 4096: (1, 2, 3, 4), 16384: (1, 2)}[hidden_size]
    choices = itertools.product(tile, warps, stages, programs)
    return (NormConfig(*choice) for choice in choices if choice[1] * choice[3] <= 32)


def build(kind: str, rows: int, hidden_size: int) -> tuple[Callable, Callable, list, object, int, int]:
    """Forward, backward, their fp32 truth, the module with the backward's table, and bytes moved by each."""
    x, dy, other = (torch.randn(rows, hidden_size, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    weight, bias = (torch.randn(hidden_size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    ops = torch.ops.liger_trainer
    total = x + other if kind == "add" else x
    leaves = [tensor.float().requires_grad_() for tensor in (total, weight, bias)]
    x32, weight32, bias32 = leaves
    y = layer_norm_reference(x32, weight32, bias32) if kind == "ln" else rms_norm_reference(x32, weight32)
    truth = [y.detach(), *torch.autograd.grad(y, leaves[: 3 if kind == "ln" else 2], dy.float())]
    if kind == "add":
        truth[1] = truth[1] + other.float()
    truth = [tensor.bfloat16() for tensor in truth]
    once = 2 * rows * hidden_size  # bytes
    if kind == "ln":
        forward = partial(ops.layer_norm, x, weight, bias, 1e-6, x.dtype)
        _, mean, rstd = forward()
        backward = partial(ops.layer_norm_backward, dy, x, weight, bias, mean, rstd, [True] * 3)
        return forward, backward, truth, ln, 2 * once, 3 * once
    if kind == "add":
        forward = partial(ops.fused_add_rms_norm, x, other, weight, 1e-6, 0.0, "llama")
        _, total, rstd = forward()
        backward = partial(ops.fused_add_rms_norm_backward, dy, other, total, weight, rstd, 0.0, "llama", [True, True])
        return forward, backward, truth, rms, 4 * once, 4 * once
    forward = partial(ops.rms_norm, x, weight, 1e-6, 0.0, "llama")
    _, rstd = forward()
    backward = partial(ops.rms_norm_backward, dy, x, weight, rstd, 0.0, "llama", [True, True])
    return forward, backward, truth, rms, 2 * once, 3 * once


def check(results: tuple[torch.Tensor, ...], truth: list[torch.Tensor]) -> None:
    """Compares the results that have a truth, the first ones."""
    for index, (ours, exact) in enumerate(zip(results, truth)):
        error = torch.linalg.vector_norm(ours - exact, dtype=torch.float32)
        relative = (error / torch.linalg.vector_norm(exact, dtype=torch.float32)).item()
        assert relative < 1e-2, f"result {index} is off by {relative:.1e}"


def sweep(
    function: Callable, truth: list, table: object, attribute: str, configs: list[NormConfig]
) -> list[tuple[float, NormConfig]]:
    results = []
    for config in configs:
        with mock.patch.object(table, attribute, lambda hidden_size, config=config: config):
            try:
                check(function(), truth)
                results.append((CLOCK.median(function), config))
            except Exception as error:  # too much shared memory or too many registers for this device
                print(f"    {tuple(config)} cannot run: {type(error).__name__}: {str(error)[:80]}")
    return sorted(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run the rows of work whose name contains this")
    parser.add_argument("--seconds", type=float, default=55, help="stop after about this long")
    arguments = parser.parse_args()
    began = time.perf_counter()
    machine = Machine.measure(CLOCK, torch.bfloat16)
    print(f"{machine}. Configs: rows, warps, stages, programs per SM.")
    for name, (kind, rows, hidden_size) in WORK.items():
        if arguments.only not in name:
            continue
        forward, backward, truth, module, forward_bytes, backward_bytes = build(kind, rows, hidden_size)
        for label, function, expected, table, attribute, configs, moved in (
            ("forward", forward, truth[:1], launch, "forward_config", forward_configs(hidden_size), forward_bytes),
            ("backward", backward, truth[1:], module, "backward_config", backward_configs(hidden_size), backward_bytes),
        ):
            chosen = getattr(table, attribute)(hidden_size)
            candidates = [chosen, *(config for config in configs if config != chosen)]
            spent = time.perf_counter() - began
            if spent > arguments.seconds:
                print(f"{name} {label}: skipped, {spent:.0f} s are over")
                continue
            results = sweep(function, expected, table, attribute, candidates)
            print(f"{name} {label}: floor {moved / machine.copy_rate * 1e3:.4f} ms")
            for ms, config in results[:4]:
                print(f"    {ms:.4f} ms  {tuple(config)}")
            print(f"    {next((ms for ms, config in results if config == chosen), float('nan')):.4f} ms  table")
        del forward, backward, truth
        torch.cuda.empty_cache()
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
