"""Launches that an operation of `liger-trainer bench` makes, on its inputs and beside its reference in float64."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import Runner, exact_results
from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.registry import OPERATIONS, Data
from liger_trainer.benchmarks.sweeps.launch import Launch, Launches, chosen_by, patched
from liger_trainer.kernels import rows
from liger_trainer.kernels.head import cross_entropy_kernel
from liger_trainer.kernels.mlp import gated_activation
from liger_trainer.kernels.norms import layer_norm, rms_norm
from liger_trainer.kernels.rope import qk_norm_rope as qk_norm_rope_kernel
from liger_trainer.kernels.rope import rope_kernel
from liger_trainer.kernels.rows import NormConfig


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass of an operation, and the launches that are tried for it.

    Attributes:
        work: "forward", "backward", or "both" for a forward that makes the gradients.
        module: Where the kernel is launched.
        table: The module's function that chooses the launch, which a sweep replaces.
        configs: The configurations that it may return.
    """

    operation: str
    model: str
    work: str
    module: ModuleType
    table: str
    configs: Sequence[Any]
    variant: str = ""
    tokens: int = 16384
    provider: str = "liger_trainer"
    tolerance: float = 4e-3


Passes = Iterator[Pass]


def norms() -> Passes:
    """Forward and backward of the norms, which are configured apart: rows, warps, stages, programs per SM."""
    narrow, usual, wide = (
        ((16, 32, 64), (4, 8), (2, 3), (2, 3, 4, 6)),
        ((1, 2), (4, 8, 16), (2, 3, 4), (1, 2, 3, 4)),
        ((1,), (8, 16, 32), (1, 2, 3), (1, 2)),
    )
    for operation, model, variant, module, (tile, warps, stages, programs) in (
        ("rms_norm", "llama3-8b", "", rms_norm, usual),
        ("rms_norm", "qwen3-8b", "heads", rms_norm, narrow),
        ("rms_norm", "llama3-405b", "", rms_norm, wide),
        ("fused_add_rms_norm", "llama3-8b", "", rms_norm, usual),
        ("layer_norm", "llama3-8b", "", layer_norm, usual),
    ):
        forward = [NormConfig(*choice) for choice in itertools.product(tile, warps)]
        choices = itertools.product(tile, warps, stages, programs)
        backward = [NormConfig(*choice) for choice in choices if choice[1] * choice[3] <= 32]
        more: dict[str, Any] = {"variant": variant, "tolerance": 1e-2}
        yield Pass(operation, model, "forward", rows, "forward_config", forward, **more)
        yield Pass(operation, model, "backward", module, "backward_config", backward, **more)


def ropes() -> Passes:
    """RoPE's forward: tokens a program, programs the heads are split over, warps. The backward only has other signs."""
    configs = [(1, 1, 2), (1, 1, 4), (1, 1, 8), (2, 1, 4), (2, 1, 8), (4, 1, 4), (4, 1, 8), (1, 2, 2), (1, 2, 4)]
    for model in ("llama3-8b", "gemma3-4b"):
        yield Pass("rope", model, "forward", rope_kernel, "launch_config", [*configs, (1, 4, 2)])
        yield Pass("rope", model, "backward", rope_kernel, "launch_config", [])


def qk_norm_rope() -> Passes:
    """QK-norm with RoPE: rows, warps, stages, programs per SM."""
    forward = [NormConfig(*choice) for choice in itertools.product((16, 32, 64), (4, 8))]
    backward = [
        *((32, 4, 2, programs) for programs in (2, 3, 4)),
        *((32, 4, 1, 4), (32, 4, 3, 3), (32, 8, 2, 2)),
        *((16, 4, 2, 4), (16, 4, 2, 6), (16, 4, 3, 4)),
        *((64, 8, 1, 2), (64, 8, 2, 1), (64, 8, 2, 2)),
    ]
    of_pass = partial(Pass, "qk_norm_rope", "llama3-8b", module=qk_norm_rope_kernel, tolerance=1e-2)
    yield of_pass(work="forward", table="forward_config", configs=forward)
    yield of_pass(work="backward", table="backward_config", configs=[NormConfig(*choice) for choice in backward])


def gated() -> Passes:
    """SwiGLU and tanh GeGLU: elements a program, warps."""
    choices = itertools.product((512, 1024, 2048, 4096, 8192), (2, 4, 8))
    configs = [(block, warps) for block, warps in choices if 8 <= block // (32 * warps) <= 32]
    for operation, work in itertools.product(("swiglu", "geglu"), ("forward", "backward")):
        yield Pass(operation, "llama3-8b", work, gated_activation, "launch_config", configs)


def cross_entropy() -> Passes:
    """The row kernel: its statistics and its gradient by themselves, and both passes at once."""
    configs = [
        *((4096, 8, 1), (4096, 16, 1), (8192, 8, 1), (8192, 16, 1), (8192, 16, 2), (8192, 16, 3), (8192, 32, 1)),
        *((16384, 16, 1), (16384, 32, 1), (16384, 32, 2), (16384, 32, 3), (32768, 32, 1)),
    ]
    for tokens, model in itertools.product((2048, 4096), ("llama3-8b", "gemma3-4b")):
        of_pass = partial(Pass, "cross_entropy", model, module=cross_entropy_kernel, table="row_config", tokens=tokens)
        for work in ("forward", "backward"):
            yield of_pass(work=work, configs=configs)
        yield of_pass(work="both", configs=configs, provider="liger_trainer expected_grad=1.0")


def launches(passes: Callable[[], Passes]) -> Callable[[Device, argparse.Namespace], Launches]:
    """The launches of these passes, each made when it is swept."""
    return lambda device, _: (launch(each, device) for each in passes())


def launch(swept: Pass, device: Device, dtype: torch.dtype = torch.bfloat16) -> Launch:
    """A pass on the inputs of its operation; a backward has its graph kept, and runs again and again."""
    operation = OPERATIONS[swept.operation]
    cases = operation.cases(Data(device.device, dtype), MODELS[swept.model], swept.tokens)
    case = next(case for case in cases if case.variant == swept.variant)
    truth = exact_results(operation.exact(), case)
    runner = Runner(operation.providers[swept.provider], case.arguments, case.upstream)
    run: Callable[[], Sequence[torch.Tensor]] = runner.forward
    if swept.work == "backward":
        inputs, upstream = list(runner.inputs.values()), case.upstream or None
        run = partial(torch.autograd.grad, runner.forward(), inputs, upstream, retain_graph=True)
    numbers = {"forward": case.floor.forward, "backward": case.floor.backward}
    numbers["both"] = sum(numbers.values())
    return Launch(
        f"{swept.operation} {swept.variant} {swept.work} {case.shape}".replace("  ", " "),
        chosen_by(swept.module, swept.table, run),
        swept.configs,
        patched(swept.module, swept.table, run),
        [value for name, value in truth.items() if name.startswith("d") is (swept.work == "backward")],
        dtype.itemsize * numbers[swept.work],
        tolerance=swept.tolerance,
    )
