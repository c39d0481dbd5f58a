"""Time, peak memory and gradient error of each case of an operation, measured the same way for every provider."""

from __future__ import annotations

import dataclasses
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.records import Machine, Record, compare_with_eager
from liger_trainer.benchmarks.registry import Case, Data, Operation, choose_providers

Tensors = tuple[torch.Tensor, ...]


def summary(samples: list[float]) -> tuple[float, float]:
    """The median of the samples, and the width of their middle half."""
    if len(samples) < 2:
        return samples[0], 0.0
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return median, high - low


class Runner:
    """One provider on one case."""

    def __init__(self, function: Callable, arguments: Mapping[str, Any], upstream: Tensors) -> None:
        self.function = function
        self.arguments = arguments
        self.upstream = upstream
        self.inputs = {
            name: value for name, value in arguments.items() if isinstance(value, torch.Tensor) and value.requires_grad
        }

    def forward(self, _: object = None) -> Tensors:
        """The outputs."""
        output = self.function(**self.arguments)
        return tuple(output) if isinstance(output, (tuple, list)) else (output,)

    def backward(self, outputs: Tensors) -> Tensors:
        """The gradients of the inputs."""
        if self.upstream and len(outputs) != len(self.upstream):
            raise ValueError(f"returned {len(outputs)} outputs where {len(self.upstream)} are expected")
        self.upstream = tuple(  # in the provider's own dtype, cast once
            gradient if gradient.dtype == output.dtype else gradient.to(output.dtype)
            for gradient, output in zip(self.upstream, outputs)
        )
        inputs = list(self.inputs.values())
        found = torch.autograd.grad(outputs, inputs, self.upstream or None, allow_unused=True)
        return tuple(self._gradient(*named) for named in zip(self.inputs, inputs, found))

    @staticmethod
    def _gradient(name: str, tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
        """`gradient`, or `tensor.grad` if a backward that runs another one inside has set that."""
        gradient, tensor.grad = tensor.grad if gradient is None else gradient, None
        if gradient is None:
            raise ValueError(f"gave no gradient of {name}")
        return gradient

    def step(self) -> None:
        """Forward and backward."""
        self.backward(self.forward())

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients by name."""
        outputs = self.forward()
        named = {f"output {i}" if i else "output": output.detach() for i, output in enumerate(outputs)}
        return named | {f"d{name}": value for name, value in zip(self.inputs, self.backward(outputs))}


class Pristine:
    """Copies of the tensors of a case, as some providers overwrite their inputs."""

    def __init__(self, case: Case) -> None:
        inputs = [value for value in case.arguments.values() if isinstance(value, torch.Tensor)]
        kinds = {"its inputs": inputs, "the gradient it is given": case.upstream}
        self._pairs = {
            kind: [(tensor.detach(), tensor.detach().clone()) for tensor in tensors] for kind, tensors in kinds.items()
        }

    def changed(self) -> str:
        """The names of tensors that have changed; empty if none have."""
        kinds = [
            kind for kind, pairs in self._pairs.items() if not all(torch.equal(tensor, copy) for tensor, copy in pairs)
        ]
        return " and ".join(kinds)

    def restore(self) -> None:
        """Restores the tensors."""
        for pairs in self._pairs.values():
            for tensor, copy in pairs:
                tensor.copy_(copy)


def exact_results(function: Callable, case: Case) -> dict[str, torch.Tensor]:
    """Outputs and gradients in float64, from the same values."""

    def double(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    arguments = {name: double(value) for name, value in case.arguments.items()}
    return Runner(function, arguments, tuple(double(gradient) for gradient in case.upstream)).results()


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """The norm of the difference over the norm of `truth`, taken in slices so that it needs little memory."""
    if value.shape != truth.shape:
        raise ValueError(f"a result is shaped {tuple(value.shape)}, not {tuple(truth.shape)}")
    flat, true = (
        tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.view(1, 1) for tensor in (value, truth)
    )
    rows = max(1, 2**26 // flat.shape[1])
    squares = [(a.double() - b).square().sum() for a, b in zip(flat.split(rows), true.split(rows))]
    return (torch.stack(squares).sum().sqrt() / truth.norm().clamp_min(torch.finfo(torch.double).tiny)).item()


def explain(error: BaseException) -> str:
    """Why a provider did not run, in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"skipped: {error.name.split('.')[0]} is not installed"
    if isinstance(error, ImportError):
        lacks = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
        return f"skipped: {f'{lacks[2]} has no {lacks[1]}' if lacks else error}"[:120]
    if isinstance(error, TimeoutError):
        return "skipped: no time left"
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text}"[:120]


class DeviceLost(RuntimeError):
    """A provider broke the device for this process."""


def measure(
    case: Case,
    providers: Mapping[str, Callable],
    records: Mapping[str, Record],
    exact: Callable | None,
    device: Device,
    rounds: int = 12,
    deadline: float = float("inf"),
) -> float | None:
    """Measures every provider on one case, in turns, so that clocks and power treat them alike.

    Args:
        case: The inputs.
        providers: Name to function.
        records: Name to the record that is filled.
        exact: The function that is exact in float64; None to skip the errors.
        device: Where it runs.
        rounds: Samples of each provider.
        deadline: `time.monotonic()` after which no further provider is started.

    Returns:
        The median time of the case's matmuls, if they are its floor.

    Raises:
        DeviceLost: if a provider left the device unusable.
    """
    pristine = Pristine(case)
    runners = {name: Runner(function, case.arguments, case.upstream) for name, function in providers.items()}
    overwriting: set[str] = set()

    def attempt(name: str, work: Callable[[str], None]) -> None:
        if records[name].failure:
            return
        try:
            work(name)
        except Exception as error:  # a peer that cannot run the case is a result, not a crash
            records[name].failure = explain(error)
            if not device.works():
                raise DeviceLost(f"{name}: {explain(error)}") from error
            if not isinstance(error, (ImportError, TimeoutError)):
                device.collect()
        if name in overwriting:
            pristine.restore()

    truth: dict[str, torch.Tensor] = {}
    lacking = ""
    if exact is not None:
        try:
            truth = exact_results(exact, case)
        except torch.OutOfMemoryError:
            lacking = "no memory for float64"
        device.empty_cache()

    def warm_up(name: str) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError
        found, record = runners[name].results(), records[name]
        record.errors = {key: relative_error(value, truth[key]) for key, value in found.items() if key in truth}
        record.remark = lacking
        changed = pristine.changed()
        if changed:
            overwriting.add(name)
            record.remark = f"writes over {changed}"

    def memory(name: str) -> None:
        records[name].peak_gibibytes = device.peak_gibibytes(runners[name].step)
        records[name].saved_gibibytes = device.saved_gibibytes(runners[name].forward)

    # The slowest to start comes last, in case the time runs out.
    for name in sorted(runners, key=lambda name: (name == "torch.compile", name != "liger_trainer")):
        attempt(name, warm_up)
        device.empty_cache()
    truth.clear()
    device.empty_cache()
    for name in runners:
        attempt(name, memory)

    samples: dict[str, list[list[float]]] = {name: [] for name in runners}
    floor, floors = case.floor.matmuls, []

    def sample(name: str) -> None:
        # A power-limited card runs faster after idle or light work, so an untimed step of the provider comes first.
        runners[name].step()
        samples[name].append(device.time(runners[name].forward, runners[name].backward))

    order = list(runners)
    shuffle = random.Random(0).shuffle
    for turn in range(rounds):
        if turn and time.monotonic() > deadline:
            break
        shuffle(order)
        for name in order:
            attempt(name, sample)
        if floor is not None:
            floor()
            floors += device.time(lambda _: floor())
    for name, rows in samples.items():
        record = records[name]
        if rows and not record.failure:
            record.forward, record.forward_spread = summary([forward for forward, _ in rows])
            record.backward, record.backward_spread = summary([backward for _, backward in rows])
            record.both, record.both_spread = summary([sum(row) for row in rows])
    return statistics.median(floors) if floors else None


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
