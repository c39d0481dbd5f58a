"""Sweeps the launch of QK-norm + RoPE and sets it beside the three kernels apart; run on one GPU, half a minute.

    python benchmarks/sweeps/qk_norm_rope_sweep.py

Queries and keys of Llama-3 8B's shape, 4 x 4096 tokens with 32 + 8 heads of 128, bf16.
"""

from __future__ import annotations

import itertools
from functools import partial
from unittest import mock

import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.functional import qk_norm_rope, rms_norm, rope
from liger_trainer.kernels.rope import qk_norm_rope as qk_norm_rope_module
from liger_trainer.kernels.rows import NormConfig

FORWARD = itertools.product((16, 32, 64), (4, 8))  # rows, warps
BACKWARD = [  # rows, warps, stages, programs a multiprocessor
    *((32, 4, 2, programs) for programs in (2, 3, 4)),
    *((32, 4, 1, 4), (32, 4, 3, 3), (32, 8, 2, 2)),
    *((16, 4, 2, 4), (16, 4, 2, 6), (16, 4, 3, 4)),
    *((64, 8, 1, 2), (64, 8, 2, 1), (64, 8, 2, 2)),
]


def main() -> None:
    """Prints one line a configuration."""
    median = partial(Device(torch.device("cuda")).median, rounds=15)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    trained = [x.requires_grad_() for x in (randn(4, 4096, 32, 128), randn(4, 4096, 8, 128), randn(128), randn(128))]
    q, k, q_weight, k_weight = trained
    cos, sin = randn(1, 4096, 128), randn(1, 4096, 128)

    def fused() -> tuple[torch.Tensor, torch.Tensor]:
        return qk_norm_rope(q, k, q_weight, k_weight, cos, sin)

    def apart() -> tuple[torch.Tensor, torch.Tensor]:
        return rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin, unsqueeze_dim=2)

    outputs = fused()
    upstream = [torch.randn_like(output) for output in outputs]
    print(f"apart, both passes: {median(lambda: torch.autograd.grad(apart(), trained, upstream)):.4f} ms")
    print(f"fused, both passes: {median(lambda: torch.autograd.grad(fused(), trained, upstream)):.4f} ms")
    for rows, warps in FORWARD:
        config = NormConfig(rows=rows, num_warps=warps)
        with mock.patch.object(qk_norm_rope_module, "forward_config", return_value=config):
            print(f"forward {rows} rows, {warps} warps: {median(fused):.4f} ms")
    for rows, warps, stages, programs in BACKWARD:
        config = NormConfig(rows=rows, num_warps=warps, num_stages=stages, programs_per_sm=programs)
        with mock.patch.object(qk_norm_rope_module, "backward_config", return_value=config):
            time = median(lambda: torch.autograd.grad(outputs, trained, upstream, retain_graph=True))
        print(f"backward {rows} rows, {warps} warps, {stages} stages, {programs} programs: {time:.4f} ms")


if __name__ == "__main__":
    main()
