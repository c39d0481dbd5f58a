"""Measuring a training step that keeps nothing: what its layers could keep, and the memory that it takes.

A layer's forward shows which results could be kept: new tensors that depend on its hidden states and that nothing is
seen to write to afterwards, of operators that draw no random numbers and exchange nothing with other processes, which
might not keep the same. Its recomputation shows what each of them would save, and ends where nothing more is needed. A
layer that calls an operator more often in the recomputation than in the forward keeps nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import OPERATOR_CALLS
from liger_trainer.recompute.budget import Call, Candidate, DeviceMemory, Layer, RecordedStep
from liger_trainer.recompute.keeping import NOT_COUNTED, memory_of, next_call, plain

TorchDispatchMode, tree_leaves, *_ = require(OPERATOR_CALLS)

_LEAST_SHARE = 0.002  # of the time of its layer, that a candidate must save
_LEAST_COPIES = 0.5  # a candidate must take as long as this many copies of its result


@dataclasses.dataclass
class _Frame:
    """One checkpointed call of a layer."""

    name: str
    tokens: int
    hidden: int  # the address of its input
    calls: Counter[str] = dataclasses.field(default_factory=Counter)  # of the forward
    bytes: dict[Call, int] = dataclasses.field(default_factory=dict)
    timings: list[tuple[Call, Callable[[], float]]] = dataclasses.field(default_factory=list)
    peak: int = 0


class StepRecorder:
    """Records micro-batches; without `memory`, the allocator of the device, no memory is measured."""

    def __init__(self, device: torch.device, memory: DeviceMemory | None) -> None:
        self._device, self._memory = device, memory
        self._frames: list[_Frame] = []
        self._start = 0
        self._peak: int | None = None
        self._running: _Frame | None = None  # the layer whose recomputation was the last to start

    def begin(self) -> None:
        """To be called before the forward of a micro-batch."""
        if self._memory is not None:
            self._memory.take_peak()
            self._start = self._memory.allocated()

    def contexts(self, name: str, hidden: torch.Tensor) -> tuple[contextlib.AbstractContextManager, ...]:
        """The contexts of the forward and of the recomputation of a layer that is given `hidden` `(..., H)`."""
        frame = _Frame(name, math.prod(hidden.shape[:-1]), next(_addresses(hidden), 0))
        self._frames.append(frame)
        return _ForwardMode(frame, self._device), self._recomputation(frame)

    def step(self) -> RecordedStep:
        """The recorded micro-batch, after its backward; waits for the device."""
        self._end_moment()
        frames = [frame for frame in self._frames if frame.timings]
        copy = _copy_seconds(self._device) if frames else 0.0
        layers = (Layer(frame.name, frame.tokens, _candidates(frame, copy), frame.peak) for frame in frames)
        return RecordedStep(tuple(layers), self._start, self._peak or 0)

    @contextlib.contextmanager
    def _recomputation(self, frame: _Frame) -> Iterator[None]:
        self._end_moment()
        self._running = frame
        with _RecomputationMode(frame, self._device):
            yield

    def _end_moment(self) -> None:
        """Notes the peak of what ends now: the forward and the loss, or the backward of a layer."""
        peak = 0 if self._memory is None else self._memory.take_peak()
        if self._running is not None:
            self._running.peak = peak
        elif self._peak is None:
            self._peak = peak


class _ForwardMode(TorchDispatchMode):  # type: ignore[misc, valid-type]
    """Notes the bytes of every result that could be kept."""

    def __init__(self, frame: _Frame, device: torch.device) -> None:
        super().__init__()
        self._frame, self._device = frame, device
        self._made: dict[int, Call | None] = {frame.hidden: None}  # what depends on the input, by its address

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        call = next_call(func, self._frame.calls)
        drawn = _random_state(self._device)
        result = func(*args, **kwargs)
        given = {address for tensor in _tensors((args, kwargs)) for address in _addresses(tensor)}
        if func._schema.is_mutable:
            for address in given:  # which of them is written to does not matter: such a call is rare
                self._forget(address)
        results = list(_tensors(result))
        made = {address for tensor in results for address in _addresses(tensor)}
        is_new = bool(made) and not given & made and all(plain(tensor) is not None for tensor in results)
        depends = not given.isdisjoint(self._made)
        communicates = any(argument.name in ("group", "group_name") for argument in func._schema.arguments)
        keepable = is_new and depends and not communicates
        keepable = keepable and all(map(torch.equal, drawn, _random_state(self._device)))
        for address in made - given:  # a view leaves the memory to the call that made it
            self._made.pop(address, None)  # of a tensor that is gone
            if depends:
                self._made[address] = call if keepable else None
        if keepable:
            self._frame.bytes[call] = sum(memory_of(tensor) for tensor in results)
        return result

    def _forget(self, address: int) -> None:
        call = self._made.get(address)
        if call is not None:
            self._frame.bytes.pop(call, None)


class _RecomputationMode(TorchDispatchMode):  # type: ignore[misc, valid-type]
    """Notes the time of every call."""

    def __init__(self, frame: _Frame, device: torch.device) -> None:
        super().__init__()
        self._frame, self._device = frame, device
        self._count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        call = next_call(func, self._count)
        stop = _stopwatch(self._device)
        result = func(*args, **(kwargs or {}))
        self._frame.timings.append((call, stop()))
        return result


def _candidates(frame: _Frame, copy: float) -> tuple[Candidate, ...]:
    """What is worth its memory; `copy` is the time in which a byte is copied."""
    seconds = {call: elapsed() for call, elapsed in frame.timings}
    if any(call.number >= frame.calls[call.operator] for call in seconds if call.operator not in NOT_COUNTED):
        return ()  # such as a weight that autocast casts once in the forward, for two layers that share it
    least = _LEAST_SHARE * sum(seconds.values())
    found = []
    for call, took in seconds.items():
        size = frame.bytes.get(call, 0)
        if size and took >= max(least, _LEAST_COPIES * copy * size):
            found.append(Candidate(call, size, took))
    return tuple(found)


def _stopwatch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts to measure; the result stops, and its result is the seconds between the two, once the device is idle."""
    if device.type == "cpu":
        begun = time.perf_counter()

        def stop_host() -> Callable[[], float]:
            took = time.perf_counter() - begun
            return lambda: took

        return stop_host
    first, last = (torch.get_device_module(device).Event(enable_timing=True) for _ in range(2))
    first.record()

    def stop_device() -> Callable[[], float]:
        last.record()

        def elapsed() -> float:
            last.synchronize()
            return first.elapsed_time(last) / 1e3

        return elapsed

    return stop_device


def _copy_seconds(device: torch.device, size: int = 2**26) -> float:
    """The time in which a byte is copied on the device."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        stop = _stopwatch(device)
        target.copy_(source)
        times.append(stop()())
    return min(times) / size


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _addresses(tensor: torch.Tensor) -> Iterator[int]:
    own = plain(tensor)
    if own is not None and own.untyped_storage().nbytes():
        yield own.untyped_storage().data_ptr()
