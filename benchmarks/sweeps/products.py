"""Launches of the experts' products and of the head.

A launch is swept before the next is made, so functions may read the variables of the loop that they are made in.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import relative_error
from liger_trainer.benchmarks.sweeps.launch import Launch, Launches, Tensors, patched, randn, show
from liger_trainer.kernels.activation import GatedActivation
from liger_trainer.kernels.head import cross_entropy_kernel
from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels.head.head_chunks import WeightGradientSum
from liger_trainer.kernels.head.loss_options import LossOptions
from liger_trainer.kernels.head.token_statistics import RowStats
from liger_trainer.kernels.head.weight_gradient import hopper_launch
from liger_trainer.kernels.head.weight_gradient import launch as plain_launch
from liger_trainer.kernels.moe.activation import activate, activation_gradients_
from liger_trainer.kernels.moe.grouped_matmul import Tile, launch_rows, launch_weights
from liger_trainer.kernels.moe.sort_by_expert import sort_by_expert
from liger_trainer.kernels.moe.token_rows import combine_rows, repeat_rows


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


def cross_entropy(device: Device, arguments: argparse.Namespace) -> Launches:
    """The row kernel: both passes in place, as in the fused head, and its statistics and its gradient by themselves."""
    configs = [
        *((4096, 8, 1), (4096, 16, 1), (8192, 8, 1), (8192, 16, 1), (8192, 16, 2), (8192, 16, 3), (8192, 32, 1)),
        *((16384, 16, 1), (16384, 32, 1), (16384, 32, 2), (16384, 32, 3), (32768, 32, 1)),
    ]
    shapes = ((128256, None), (262208, None), (262208, 30.0))
    for tokens, (vocab, softcap) in itertools.product((2048, 4096), shapes):
        if tokens == 4096 and softcap:
            continue
        source = 2 * randn(tokens, vocab)
        target = torch.randint(0, vocab, (tokens,), device="cuda")
        options, one = LossOptions(-100, 0.0, 0.0, softcap, 1.0, 1.0), torch.ones((), device="cuda")
        stats = RowStats.allocate(source, tokens, False, False)
        double = source[-64:].double().requires_grad_()
        z = double if softcap is None else softcap * torch.tanh(double / softcap)
        exact_rows = F.cross_entropy(z, target[-64:], reduction="none")
        exact = torch.autograd.grad(exact_rows.sum(), double)
        buffer, out = source.clone(), torch.empty_like(source)
        row_statistics_(source, target, stats, options)

        def both() -> Tensors:
            row_statistics_(buffer, target, stats, options, coefficient=one)
            return [buffer]

        def statistics() -> Tensors:
            row_statistics_(source, target, stats, options)
            return [stats.loss]

        def gradient() -> Tensors:
            row_gradient_(source, target, stats, options, one, out=out)
            return [out]

        for name, launch, right, passes in (
            ("both passes", both, exact, 3),
            ("statistics", statistics, [exact_rows.detach()], 1),
            ("gradient", gradient, exact, 2),
        ):
            yield Launch(
                f"{name} {tokens}x{vocab}, softcap {softcap}",
                cross_entropy_kernel.row_config(vocab),
                configs,
                patched(cross_entropy_kernel, "row_config", launch),
                right,
                2 * passes * tokens * vocab,
                restore=lambda: buffer.copy_(source),
            )


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
