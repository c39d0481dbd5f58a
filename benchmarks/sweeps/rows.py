"""Launches of the norms, the rotations and the activations.

A launch is swept before the next is made, so functions may read the variables of the loop that they are made in.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

import liger_trainer.liger.operators.fused_add_norms  # noqa: F401 (registers its operator)
from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.sweeps.launch import Launch, Launches, Tensors, patched, randn, show
from liger_trainer.functional import qk_norm_rope as qk_norm_rope_function
from liger_trainer.functional import rms_norm, rope
from liger_trainer.kernels import rows as row_launches
from liger_trainer.kernels.activation import GatedActivation
from liger_trainer.kernels.fp8 import shared_cast
from liger_trainer.kernels.fp8.row_cast import cast_rows
from liger_trainer.kernels.lora import lora_gated_kernels
from liger_trainer.kernels.lora.lora_gated_kernels import LaunchConfig, LowRank
from liger_trainer.kernels.mlp import gated_activation
from liger_trainer.kernels.norms import layer_norm as layer_norms
from liger_trainer.kernels.norms import rms_norm as rms_norms
from liger_trainer.kernels.norms.layer_norm import layer_norm_reference
from liger_trainer.kernels.norms.rms_norm import rms_norm_reference
from liger_trainer.kernels.rope import qk_norm_rope as qk_norm_rope_module
from liger_trainer.kernels.rope import rope_kernel
from liger_trainer.kernels.rope.rope import rope_reference
from liger_trainer.kernels.rows import NormConfig
from liger_trainer.kernels.runtime import cdiv


def norms(device: Device, arguments: argparse.Namespace) -> Launches:
    """Forward and backward of the norms, which are configured apart: rows, warps, stages, programs per SM."""
    for kind, rows, size in (
        *(("rms", 16384, 4096), ("rms", 655360, 128), ("rms", 16384, 16384)),
        *(("add", 16384, 4096), ("ln", 16384, 4096)),
    ):
        tile = {128: (16, 32, 64), 4096: (1, 2), 16384: (1,)}[size]
        warps = {128: (4, 8), 4096: (4, 8, 16), 16384: (8, 16, 32)}[size]
        stages = {128: (2, 3), 4096: (2, 3, 4), 16384: (1, 2, 3)}[size]
        programs = {128: (2, 3, 4, 6), 4096: (1, 2, 3, 4), 16384: (1, 2)}[size]
        backward_choices = itertools.product(tile, warps, stages, programs)
        forward, backward, truth = _norm(kind, rows, size)
        moved = 2 * rows * size * (2 if kind == "add" else 1)
        name = f"{kind} {rows}x{size}"
        yield Launch(
            f"{name} forward",
            row_launches.forward_config(size),
            [NormConfig(*choice) for choice in itertools.product(tile, warps)],
            patched(row_launches, "forward_config", forward),
            truth[:1],
            2 * moved,
            tolerance=1e-2,
        )
        module = layer_norms if kind == "ln" else rms_norms
        yield Launch(
            f"{name} backward",
            module.backward_config(size),
            [NormConfig(*choice) for choice in backward_choices if choice[1] * choice[3] <= 32],
            patched(module, "backward_config", backward),
            truth[1:],
            (2 if kind == "add" else 3) * moved,
            tolerance=1e-2,
        )


def _norm(kind: str, rows: int, size: int) -> tuple[Callable[[], Tensors], Callable[[], Tensors], list[torch.Tensor]]:
    """Forward, backward, and their truth in fp32."""
    x, dy, other = (randn(rows, size) for _ in range(3))
    weight, bias = randn(size), randn(size)
    ops = torch.ops.liger_trainer
    total = x + other if kind == "add" else x
    leaves: list[Any] = [tensor.float().requires_grad_() for tensor in (total, weight, bias)]
    y = layer_norm_reference(*leaves) if kind == "ln" else rms_norm_reference(*leaves[:2])
    truth = [y.detach(), *torch.autograd.grad(y, leaves[: 3 if kind == "ln" else 2], dy.float())]
    if kind == "add":
        truth[1] = truth[1] + other.float()
        forward = partial(ops.fused_add_rms_norm, x, other, weight, 1e-6, 0.0, "llama")
        _, total, rstd = forward()
        backward = partial(ops.fused_add_rms_norm_backward, dy, other, total, weight, rstd, 0.0, "llama", [True, True])
    elif kind == "ln":
        forward = partial(ops.layer_norm, x, weight, bias, 1e-6, x.dtype)
        _, mean, rstd = forward()
        backward = partial(ops.layer_norm_backward, dy, x, weight, bias, mean, rstd, [True] * 3)
    else:
        forward = partial(ops.rms_norm, x, weight, 1e-6, 0.0, "llama")
        _, rstd = forward()
        backward = partial(ops.rms_norm_backward, dy, x, weight, rstd, 0.0, "llama", [True, True])
    return forward, backward, truth


def ropes(device: Device, arguments: argparse.Namespace) -> Launches:
    """RoPE's forward: tokens a program, programs the heads are split over, warps. The backward only has other signs."""
    configs = [(1, 1, 2), (1, 1, 4), (1, 1, 8), (2, 1, 4), (2, 1, 8), (4, 1, 4), (4, 1, 8), (1, 2, 2), (1, 2, 4)]
    for name, (batch, seq, q_heads, k_heads, dim) in {
        "llama3-8b": (4, 4096, 32, 8, 128),
        "gemma3-4b": (4, 4096, 8, 4, 256),
    }.items():
        q, k = randn(batch, seq, q_heads, dim), randn(batch, seq, k_heads, dim)
        cos, sin = randn(2, 1, seq, dim).unbind(0)
        outputs = torch.empty_like(q), torch.empty_like(k)
        last = [x[-1:].double().requires_grad_() for x in (q, k)]
        rotated = rope_reference(last[0], last[1], cos.double(), sin.double(), unsqueeze_dim=2)
        transposed = torch.autograd.grad(rotated, last, [x.detach() for x in last])

        def launch() -> Tensors:
            rope_kernel.launch(q, k, cos, sin, *outputs, direction == "backward")
            return outputs

        for direction, exact, tried in (
            ("forward", [x.detach() for x in rotated], [*configs, (1, 4, 2)]),
            ("backward", transposed, []),
        ):
            yield Launch(
                f"rope {name} {direction}",
                rope_kernel.launch_config(max(q_heads, k_heads), dim // 2),
                tried,
                patched(rope_kernel, "launch_config", launch),
                exact,
                4 * (q.numel() + k.numel()),
            )


def qk_norm_rope(device: Device, arguments: argparse.Namespace) -> Launches:
    """QK-norm with RoPE at Llama-3 8B's shape, beside the three kernels apart."""
    trained = [x.requires_grad_() for x in (randn(4, 4096, 32, 128), randn(4, 4096, 8, 128), randn(128), randn(128))]
    q, k, q_weight, k_weight = trained
    cos, sin = randn(1, 4096, 128), randn(1, 4096, 128)

    def fused() -> tuple[torch.Tensor, torch.Tensor]:
        return qk_norm_rope_function(q, k, q_weight, k_weight, cos, sin)

    def apart() -> tuple[torch.Tensor, torch.Tensor]:
        return rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin, unsqueeze_dim=2)

    outputs = fused()
    upstream = [torch.randn_like(output) for output in outputs]

    def passes(outputs: Tensors) -> Tensors:
        return torch.autograd.grad(outputs, trained, upstream)

    works = {"apart": lambda: passes(apart()), "fused": lambda: passes(fused())}
    show("QK-norm and RoPE, both passes", device, works)
    moved = 4 * (q.numel() + k.numel())
    yield Launch(
        "QK-norm and RoPE forward",
        qk_norm_rope_module.forward_config(128),
        [NormConfig(rows, warps) for rows, warps in itertools.product((16, 32, 64), (4, 8))],
        patched(qk_norm_rope_module, "forward_config", lambda: [x.detach() for x in fused()]),
        [x.detach() for x in apart()],
        moved,
        tolerance=1e-2,
    )
    backward = [
        *((32, 4, 2, programs) for programs in (2, 3, 4)),
        *((32, 4, 1, 4), (32, 4, 3, 3), (32, 8, 2, 2)),
        *((16, 4, 2, 4), (16, 4, 2, 6), (16, 4, 3, 4)),
        *((64, 8, 1, 2), (64, 8, 2, 1), (64, 8, 2, 2)),
    ]
    yield Launch(
        "QK-norm and RoPE backward",
        qk_norm_rope_module.backward_config(128),
        [NormConfig(*choice) for choice in backward],
        patched(
            qk_norm_rope_module,
            "backward_config",
            lambda: torch.autograd.grad(outputs, trained, upstream, retain_graph=True),
        ),
        passes(apart()),
        1.5 * moved,
        tolerance=1e-2,
    )


def gated(device: Device, arguments: argparse.Namespace) -> Launches:
    """SwiGLU, on separate and on fused projections, and tanh GeGLU: elements a program, warps."""
    rows, cols = 16384, 14336
    configs = [
        (block, warps)
        for block, warps in itertools.product((512, 1024, 2048, 4096, 8192), (2, 4, 8))
        if 8 <= block // (32 * warps) <= 32
    ]
    kernels = gated_activation
    for activation, fused in (("silu", False), ("silu", True), ("gelu_tanh", False)):
        both = randn(2, rows, 2 * cols)
        (gate, up), (dgate, dup) = (x.chunk(2, dim=-1) if fused else x.view(2, rows, cols).unbind(0) for x in both)
        dh, h = randn(2, rows, cols).unbind(0)
        last = [x[-64:].double().requires_grad_() for x in (gate, up)]
        act = F.silu if activation == "silu" else partial(F.gelu, approximate="tanh")
        exact = act(last[0]) * last[1]
        gradients = torch.autograd.grad(exact, last, dh[-64:].double())
        directions: tuple[tuple[str, Callable[..., object], Any, Tensors, Tensors, int], ...] = (
            ("forward", kernels.launch_forward, (gate, up, h), (h,), (exact.detach(),), 3),
            (
                "backward",
                gated_activation.launch_backward,
                (dh, gate, up, dgate, dup, None),
                (dgate, dup),
                gradients,
                5,
            ),
        )
        for direction, run, tensors, outputs, right, passes in directions:

            def launch() -> Tensors:
                run(*tensors, GatedActivation.of(activation))
                return outputs

            yield Launch(
                f"{activation} {'fused ' if fused else ''}{direction} {rows}x{cols}",
                gated_activation.launch_config(2),
                configs,
                patched(gated_activation, "launch_config", launch),
                right,
                2 * rows * cols * passes,
            )


def fp8_casts(device: Device, arguments: argparse.Namespace) -> Launches:
    """What a cast to fp8 costs as part of a norm or a gated activation; blocks, warps and registers of the latter."""
    rows = 16384
    for size, with_residual in itertools.product((2048, 4096, 5120), (False, True)):
        x, residual, weight = randn(rows, size), randn(rows, size) if with_residual else None, randn(size)

        def norm(fp8: bool) -> torch.Tensor:
            return rms_norms.launch_forward(x, residual, weight, 1e-6, 0.0, "llama", fp8=fp8)[0]

        works: dict[str, Callable[[], object]] = {
            "without a cast": partial(norm, False),
            "with it": partial(norm, True),
            "with a separate one": lambda: cast_rows(norm(False)),
        }
        show(f"RMSNorm{' with residual' if with_residual else ''}, {size}", device, works)
        shared_cast.drop()
    for activation, columns in (("silu", 14336), ("gelu_tanh", 10240), ("silu", 28672)):
        gate, up, h = (randn(rows, columns) for _ in range(3))
        options = GatedActivation.of(activation)

        def alone() -> torch.Tensor:
            gated_activation.launch_forward(gate, up, h, options)
            return h

        works = {"without a cast": alone, "with a separate one": lambda: cast_rows(alone())}
        show(f"{activation}, {columns}", device, works)

        def cast(config: tuple[int, int, int]) -> Tensors:
            block, warps, registers = config
            given = {"PARTS": cdiv(columns, block), "BLOCK": block, "num_warps": warps, "maxnreg": registers}
            with mock.patch.object(gated_activation, "cast_config", return_value=given):
                return [gated_activation.cast_of_h(gate, up, options)[1]]

        chosen = gated_activation.cast_config(columns)
        yield Launch(
            f"{activation}, {columns}, with the cast: block, warps, registers",
            tuple(chosen[key] for key in ("BLOCK", "num_warps", "maxnreg")),
            [(block, warps, most) for block, warps in ((2048, 8), (4096, 16)) for most in (64, 80, 96)],
            cast,
            [cast_rows(alone())[1]],
            5 * rows * columns,
        )


def lora_gated(device: Device, arguments: argparse.Namespace) -> Launches:
    """The activation of Llama-3 8B with adapters in fp32: rows, columns, warps, stages and programs per SM."""
    tokens, columns, kernels = 16384, 14336, lora_gated_kernels
    options: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, arguments.dtype)}
    gate, up, dh = (torch.randn(tokens, columns, **options) for _ in range(3))
    h, z = torch.empty_like(gate), torch.randn(tokens, 3 * arguments.rank, **options)
    factors = [0.1 * torch.randn(arguments.rank, columns, device="cuda") for _ in range(3)]
    updates = [LowRank(part, factor, 1.0) for part, factor in zip(z.split(arguments.rank, dim=1), factors)]
    tiles = [
        *((16, 32, 4), (16, 64, 2), (16, 64, 4), (16, 128, 4), (16, 256, 4), (16, 256, 8)),
        *((32, 32, 4), (32, 64, 4), (32, 128, 4), (32, 128, 8), (64, 64, 4), (64, 128, 8)),
    ]
    configs = [LaunchConfig(*tile, *more) for tile, *more in itertools.product(tiles, (1, 2, 3, 4), (4, 8, 16, 32))]

    def forward() -> None:
        kernels.launch_forward(gate, up, h, updates[:2], "silu", math.inf)

    def backward() -> None:  # writes over its inputs; what they hold does not change its time
        kernels.launch_backward(dh, gate, up, updates, "silu", math.inf)

    for launch, config, passes in ((forward, kernels._FORWARD, 3), (backward, kernels._BACKWARD, 6)):

        def run(config: LaunchConfig) -> Tensors:
            fitting = mock.Mock(side_effect=lambda given, *_: given)
            with mock.patch.multiple(kernels, _FORWARD=config, _BACKWARD=config, _fitting=fitting):
                launch()
            return ()

        yield Launch(
            f"silu {launch.__name__} with adapters of rank {arguments.rank}, {arguments.dtype}",
            kernels._fitting(config, updates, gate.element_size()),
            configs,
            run,
            work=passes * gate.numel() * gate.element_size(),
        )
