"""Launches of kernels that no operation of the benchmarks runs by themselves.

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

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import relative_error
from liger_trainer.benchmarks.sweeps.launch import Launch, Launches, Tensors, randn, show
from liger_trainer.kernels.activation import GatedActivation
from liger_trainer.kernels.fp8 import shared_cast
from liger_trainer.kernels.fp8.row_cast import cast_rows
from liger_trainer.kernels.head.head_chunks import WeightGradientSum
from liger_trainer.kernels.head.weight_gradient import hopper_launch
from liger_trainer.kernels.head.weight_gradient import launch as plain_launch
from liger_trainer.kernels.lora import lora_gated_kernels
from liger_trainer.kernels.lora.lora_gated_kernels import LaunchConfig, LowRank
from liger_trainer.kernels.mlp import gated_activation
from liger_trainer.kernels.moe.activation import activate, activation_gradients_
from liger_trainer.kernels.moe.grouped_matmul import Tile, launch_rows, launch_weights
from liger_trainer.kernels.moe.sort_by_expert import sort_by_expert
from liger_trainer.kernels.moe.token_rows import combine_rows, repeat_rows
from liger_trainer.kernels.norms import rms_norm as rms_norms
from liger_trainer.kernels.runtime import cdiv


def grouped_matmul(device: Device, arguments: argparse.Namespace) -> Launches:
    """The products of Qwen3-30B-A3B's experts at several tiles, beside torch's grouped matmul.

    A row a token is read through its index by the Triton kernels, and repeated before torch's.
    """
    experts, top_k, hidden, intermediate = 128, 8, 2048, 768
    tiles = [
        *(Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 8, 3)),
        *(Tile(128, 128, 64, 8, 4), Tile(64, 256, 64, 8, 3), Tile(64, 256, 64, 4, 3), Tile(128, 256, 32, 8, 5)),
    ]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=getattr(torch, arguments.dtype))

    tokens = arguments.tokens
    index = torch.randn(tokens, experts, device="cuda").topk(top_k).indices
    rows, count = sort_by_expert(index, experts), tokens * top_k
    gate_up, down = random(experts, 2 * intermediate, hidden), random(experts, hidden, intermediate)
    x, pre, h = random(tokens, hidden), random(count, 2 * intermediate), random(count, intermediate)
    repeated, ends = repeat_rows(x, rows, top_k), rows.offsets[1:]
    weights, silu, dpre = torch.rand(tokens, top_k, device="cuda"), GatedActivation.of("silu"), torch.empty_like(pre)
    beside: dict[str, Callable[[], object]] = {
        "sort": lambda: sort_by_expert(index, experts),
        "repeat": lambda: repeat_rows(x, rows, top_k),
        "activation": lambda: activate(pre, silu),
        "its gradient": lambda: activation_gradients_(dpre, h, pre, weights, rows, silu, True, True),
        "combine": lambda: combine_rows(repeated, rows, top_k, weights),
    }
    show("beside the products", device, beside)
    unit = 2.0 * count * hidden * intermediate
    for name, flops, operand, weight, transposed, each in (
        ("first layer", 2 * unit, x, gate_up, False, top_k),
        ("second layer", unit, h, down, False, 0),
        ("gradient of the second's input", unit, x, down, True, top_k),
        ("gradient of the first's input", 2 * unit, pre, gate_up, True, 0),
    ):
        right, left = weight if transposed else weight.mT, repeated if each else operand
        out = random(count, right.shape[2])

        def rows_of(tile: Any) -> Tensors:
            if tile == "torch":
                return [F.grouped_mm(left, right, offs=ends)]
            launch_rows(out, operand, weight, rows, each, transposed, None, None, tile)
            return [out]

        yield Launch(name, "torch", tiles, rows_of, rows_of("torch"), flops, flops=True, tolerance=1e-2)
    for name, flops, first, other, first_top_k, other_top_k in (
        ("gradient of the first weight", 2 * unit, pre, x, 0, top_k),
        ("gradient of the second weight", unit, x, h, top_k, 0),
    ):
        left, right = repeated if first_top_k else first, repeated if other_top_k else other
        out = random(experts, first.shape[1], other.shape[1])

        def weights_of(tile: Any) -> Tensors:
            if tile == "torch":
                return [F.grouped_mm(left.t(), right, offs=ends)]
            launch_weights(out, first, other, rows, first_top_k, other_top_k, tile)
            return [out]

        yield Launch(name, "torch", tiles, weights_of, weights_of("torch"), flops, flops=True, tolerance=1e-2)


def weight_gradient(device: Device, arguments: argparse.Namespace) -> Launches:
    """Each chunk of the head's weight gradient beside cuBLAS, and the error of a sum over three chunks.

    "first" stores the sum, "middle" adds to it, "last" adds and rounds; cuBLAS's counterparts are `mm` and `addmm`.
    """
    for name, (vocab, hidden, tokens) in {
        "llama3-8b": (128256, 4096, 2048),
        "gemma3-4b": (262208, 2560, 1024),
        "qwen3-30b-a3b": (151936, 2048, 2048),
    }.items():
        left, right, gradient = 0.02 * randn(tokens, vocab), randn(tokens, hidden), randn(vocab, hidden)
        rows = torch.arange(0, vocab, 997, device="cuda")
        exact = 3 * (left[:, rows].double().t() @ right.double())
        works: dict[str, Callable[[], object]] = {
            "mm": partial(torch.mm, left.t(), right, out=gradient),
            "addmm": partial(torch.addmm, gradient, left.t(), right, out=gradient),
        }
        for kernel, launcher in {"plain": plain_launch, "gluon": hopper_launch()}.items():
            if launcher is None:
                continue
            total = WeightGradientSum(gradient, 3)
            total.launch = launcher

            def chunk(total: WeightGradientSum, added: int) -> None:
                total.added = added
                total.add(left, right)

            for added in range(3):
                chunk(total, added)
            rounding = relative_error(exact.bfloat16(), exact)
            error = relative_error(gradient[rows], exact)
            print(f"{name} {kernel}: error {error:.3e}, one rounding {rounding:.3e}")
            works |= {
                f"{kernel} {state}": partial(chunk, total, i) for i, state in enumerate(("first", "middle", "last"))
            }
        show(name, device, works)
    yield from ()


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
