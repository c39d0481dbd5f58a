"""Runs operations on the shapes of models and collects the records."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import DeviceLost, explain, measure
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.records import Machine, Record, compare_with_eager
from liger_trainer.benchmarks.registry import Case, Data, Operation, choose_providers


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure, and how."""

    models: tuple[Model, ...]
    tokens: tuple[int, ...] = ()  # none for each operation's own
    providers: tuple[str, ...] = ()  # libraries; none for all
    dtype: torch.dtype = torch.bfloat16  # of the inputs
    rounds: int = 12  # samples of each provider
    seconds: float = 60.0  # time limit of one operation on one model and token count
    deadline: float = float("inf")  # `time.monotonic()` after which nothing further is started
    accuracy: bool = True  # whether to compare with float64


def run_operation(
    operation: Operation,
    settings: Settings,
    device: Device,
    machine: Machine,
    complain: Callable[[str], None],
) -> Iterator[list[Record]]:
    """The records of one operation, case by case.

    Args:
        operation: The operation to run.
        settings: The cases to measure, and how.
        device: The device.
        machine: Measured rates, which turn bytes into milliseconds.
        complain: Called with a message for a case that cannot be built; the suite then continues.

    Raises:
        DeviceLost: if a provider left the device unusable.
    """
    if not choose_providers(operation, settings.providers):
        complain(f"{operation.name}: none of these providers")
        return
    for model in settings.models:
        for tokens in settings.tokens or (operation.tokens,):
            deadline = min(time.monotonic() + settings.seconds, settings.deadline)
            cases = operation.cases(Data(device.device, settings.dtype), model, tokens)
            found = False
            while True:
                if time.monotonic() > deadline:
                    complain(f"{operation.name}, {model.name}, {tokens} tokens: no time left")
                    break
                try:
                    case = next(cases, None)
                    if case is None:
                        if not found:
                            complain(f"{operation.name}, {model.name}: the model has no such layer")
                        break
                    found = True
                    records = run_case(operation, case, model, tokens, settings, device, machine, deadline)
                except DeviceLost:
                    raise
                except Exception as error:  # such as no memory for the inputs
                    complain(f"{operation.name}, {model.name}, {tokens} tokens: {explain(error)}")
                    break
                yield records
                del case
                device.collect()
                torch.compiler.reset()


def run_case(
    operation: Operation,
    case: Case,
    model: Model,
    tokens: int,
    settings: Settings,
    device: Device,
    machine: Machine,
    deadline: float,
) -> list[Record]:
    """Measures the chosen providers on one case."""
    providers = choose_providers(operation, settings.providers)
    dtype = str(settings.dtype).removeprefix("torch.")
    records = {
        provider: Record(operation.name, model.name, tokens, case.variant, case.shape, dtype, provider)
        for provider in providers
    }
    exact = operation.exact() if settings.accuracy else None
    matmuls = measure(case, providers, records, exact, device, settings.rounds, deadline)
    size, least = settings.dtype.itemsize, case.floor
    forward = _least_time(machine, least.forward * size, least.forward_flops)
    backward = _least_time(machine, least.backward * size, least.backward_flops)
    floor = matmuls or (forward or 0.0) + (backward or 0.0) or None
    for record in records.values():
        record.floor, record.forward_floor, record.backward_floor = floor, forward, backward
    compare_with_eager(list(records.values()))
    return list(records.values())


def _least_time(machine: Machine, moved: float, flops: float) -> float | None:
    """Milliseconds for so many bytes and FLOPs at the machine's rates, whichever takes longer; None for neither."""
    return max(moved / machine.copy_rate, flops / machine.matmul_rate) * 1e3 or None
