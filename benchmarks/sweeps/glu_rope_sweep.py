"""Sweeps the launch configurations of RoPE, SwiGLU and GeGLU on this GPU and sets them beside the current tables.

    python benchmarks/sweeps/glu_rope_sweep.py [--ops rope gated] [--top 4]

Every configuration is checked against float64 before it is timed, by the clock of the benchmarks; GB/s counts the bytes
that the operation has to move.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from unittest import mock

import torch
from torch.nn import functional as F

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.records import Machine
from liger_trainer.kernels.activation import GatedActivation
from liger_trainer.kernels.mlp import gated_activation
from liger_trainer.kernels.rope import rope_kernel
from liger_trainer.kernels.rope.rope import rope_reference

DEVICE = Device(torch.device("cuda"))
ROPE_SHAPES = {  # (batch, seq, q heads, k heads, head_dim)
    "llama3-8b": (4, 4096, 32, 8, 128),
    "gemma3-4b": (4, 4096, 8, 4, 256),
}
# (tokens a program, programs the heads are split over, warps)
ROPE_CONFIGS = [
    (1, 1, 2),
    (1, 1, 4),
    (1, 1, 8),
    (2, 1, 4),
    (2, 1, 8),
    (4, 1, 4),
    (4, 1, 8),
    (1, 2, 2),
    (1, 2, 4),
    (1, 4, 2),
]
GATED_SHAPE = (16384, 14336)
# (elements a program, warps)
GATED_CONFIGS = [
    (block, warps)
    for block, warps in itertools.product((512, 1024, 2048, 4096, 8192), (2, 4, 8))
    if 8 <= block // (32 * warps) <= 32
]
Outputs = Sequence[torch.Tensor]


def check(name: str, outputs: Outputs, exact: Outputs) -> None:
    """Compares the last rows, then spoils the outputs for the next configuration."""
    for ours, right in zip(outputs, exact):
        error = ((ours[-len(right) :].double() - right).norm() / right.norm()).item()
        if not error < 4e-3:  # bf16 rounding, twice in the gated forward, is 1.6e-3 a value on average
            raise SystemExit(f"{name} is wrong: relative error {error:.2e}")
        ours.fill_(float("nan"))


def sweep(
    name: str,
    configs: list[tuple],
    current: tuple,
    launch: Callable[[tuple], None],
    outputs: Outputs,
    exact: Outputs,
    moved: int,
    top: int,
) -> None:
    """Checks and times every configuration, and prints the best ones and the table's choice."""
    times = {}
    for config in dict.fromkeys([current, *configs]):
        launch(config)
        check(f"{name} with {config}", outputs, exact)
        times[config] = DEVICE.median(partial(launch, config))
    ranked = sorted(times, key=times.__getitem__)
    print(f"\n{name}")
    for config in dict.fromkeys([*ranked[:top], current]):
        mark = "  <- current table" if config == current else ""
        print(f"  {times[config]:.4f} ms  {moved / times[config] / 1e6:5.0f} GB/s  {config}{mark}")


def sweep_rope(top: int) -> None:
    """Sweeps the forward; the backward runs the same instructions with other signs, and is checked with the table's."""
    for name, (batch, seq, q_heads, k_heads, dim) in ROPE_SHAPES.items():
        q = torch.randn(batch, seq, q_heads, dim, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(batch, seq, k_heads, dim, device="cuda", dtype=torch.bfloat16)
        cos, sin = torch.randn(2, 1, seq, dim, device="cuda", dtype=torch.bfloat16).unbind(0)
        outputs = torch.empty_like(q), torch.empty_like(k)
        last = [q[-1:].double().requires_grad_(), k[-1:].double().requires_grad_()]
        rotated = rope_reference(last[0], last[1], cos.double(), sin.double(), unsqueeze_dim=2)
        transposed = torch.autograd.grad(rotated, last, [x.detach() for x in last])
        current = rope_kernel.launch_config(max(q_heads, k_heads), dim // 2)
        rope_kernel.launch(q, k, cos, sin, *outputs, True)
        check(f"rope {name} backward", outputs, transposed)

        def launch(config: tuple, tensors: Outputs = (q, k, cos, sin, *outputs)) -> None:
            q, k, cos, sin, q_out, k_out = tensors
            with mock.patch.object(rope_kernel, "launch_config", return_value=config):
                rope_kernel.launch(q, k, cos, sin, q_out, k_out, False)

        moved = 2 * 2 * (q.numel() + k.numel())
        exact = [x.detach() for x in rotated]
        sweep(f"rope {name}", ROPE_CONFIGS, current, launch, outputs, exact, moved, top)


def sweep_gated(top: int) -> None:
    """Sweeps forward and backward of SwiGLU, on separate and on fused projections, and of tanh GeGLU."""
    rows, cols = GATED_SHAPE
    for activation, fused in (("silu", False), ("silu", True), ("gelu_tanh", False)):
        both = torch.randn(2, rows, 2 * cols, device="cuda", dtype=torch.bfloat16)
        (gate, up), (dgate, dup) = (x.chunk(2, dim=-1) if fused else x.view(2, rows, cols).unbind(0) for x in both)
        dh, h = torch.randn(2, rows, cols, device="cuda", dtype=torch.bfloat16).unbind(0)
        last = [x[-64:].double().requires_grad_() for x in (gate, up)]
        act = F.silu if activation == "silu" else partial(F.gelu, approximate="tanh")
        exact, options = act(last[0]) * last[1], GatedActivation.of(activation)
        gradients = torch.autograd.grad(exact, last, dh[-64:].double())
        for direction, run, arguments, outputs, right in (
            ("forward", gated_activation.launch_forward, (gate, up, h), (h,), (exact.detach(),)),
            ("backward", gated_activation.launch_backward, (dh, gate, up, dgate, dup, None), (dgate, dup), gradients),
        ):

            def launch(config: tuple, run: Callable = run, arguments: tuple = (*arguments, options)) -> None:
                with mock.patch.object(gated_activation, "launch_config", return_value=config):
                    run(*arguments)

            name = f"{activation} {'fused ' if fused else ''}{direction} {GATED_SHAPE}"
            current = gated_activation.launch_config(2)
            moved = 2 * rows * cols * (3 if direction == "forward" else 5)
            sweep(name, GATED_CONFIGS, current, launch, outputs, right, moved, top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=("rope", "gated"), default=["rope", "gated"])
    parser.add_argument("--top", type=int, default=4, help="configurations to print for each kernel")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(Machine.measure(DEVICE, torch.bfloat16))
    if "rope" in arguments.ops:
        sweep_rope(arguments.top)
    if "gated" in arguments.ops:
        sweep_gated(arguments.top)


if __name__ == "__main__":
    main()
