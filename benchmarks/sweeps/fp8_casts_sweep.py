"""What a cast to fp8 costs as part of a norm or a gated activation, and the blocks, warps and registers of the latter.

    python benchmarks/sweeps/fp8_casts_sweep.py        # a GPU with fp8

Microseconds of each kernel without the cast, with it, and followed by a cast of its own. The ratio is the time with the
cast to that without it and the additional bytes at the bandwidth of an H200, 4.8 TB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.kernels.activation import GatedActivation
from liger_trainer.kernels.fp8 import shared_cast
from liger_trainer.kernels.fp8.row_cast import cast_rows
from liger_trainer.kernels.mlp import gated_activation as gated
from liger_trainer.kernels.norms import rms_norm
from liger_trainer.kernels.runtime import cdiv

ROWS = 16384
BANDWIDTH = 4.8e12  # bytes a second
CONFIGURATIONS = [(block, warps, registers) for block, warps in ((2048, 8), (4096, 16)) for registers in (64, 80, 96)]


def show(name: str, times: list[float], additional_bytes: int) -> None:
    """A line for the milliseconds without the cast, with it, and with a separate one."""
    alone, fused, separate = (1000 * time for time in times)
    ratio = fused / (alone + additional_bytes / BANDWIDTH * 1e6)
    print(f"{name:58} {alone:8.1f} {fused:8.1f} {separate:8.1f} {ratio:6.2f}", flush=True)


def norms(device: Device, hidden: int, with_residual: bool) -> None:
    """RMSNorm, which writes a byte an element more."""
    x, r = (torch.randn(ROWS, hidden, device=device.device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.ones(hidden, device=device.device, dtype=torch.bfloat16)

    def run(fp8: bool) -> torch.Tensor:
        return rms_norm.launch_forward(x, r if with_residual else None, weight, 1e-6, 0.0, "llama", fp8=fp8)[0]

    calls: list[Callable[[], object]] = [lambda: run(False), lambda: run(True), lambda: cast_rows(run(False))]
    name = f"RMSNorm{' with residual' if with_residual else ''}, {hidden}"
    show(name, [device.median(call, 20) for call in calls], x.numel())
    shared_cast.drop()


def activations(device: Device, activation: str, columns: int) -> None:
    """A gated activation, which writes a byte an element in place of two."""
    gate, up, h = (torch.randn(ROWS, columns, device=device.device, dtype=torch.bfloat16) for _ in range(3))
    options = GatedActivation.of(activation)

    def alone() -> None:
        gated.launch_forward(gate, up, h, options)

    def separate() -> None:
        alone()
        cast_rows(h)

    chosen = tuple(gated.cast_config(columns)[key] for key in ("BLOCK", "num_warps", "maxnreg"))
    times = [device.median(call, 20) for call in (alone, separate)]
    for block, warps, registers in (chosen, *CONFIGURATIONS):
        config = {"PARTS": cdiv(columns, block), "BLOCK": block, "num_warps": warps, "maxnreg": registers}
        with mock.patch.object(gated, "cast_config", return_value=config):
            fused = device.median(partial(gated.cast_of_h, gate, up, options), 20)
        name = f"{activation}, {columns}, block {block}, {warps} warps of {registers} registers"
        show(name, [times[0], fused, times[1]], -gate.numel())


if __name__ == "__main__":
    gpu = Device(torch.device("cuda"))
    print(f"{ROWS} rows, us: without, with, and with a separate cast; ratio")
    for hidden in (2048, 4096, 5120):
        for with_residual in (False, True):
            norms(gpu, hidden, with_residual)
    for activation, columns in (("silu", 14336), ("gelu_tanh", 10240), ("silu", 28672)):
        activations(gpu, activation, columns)
