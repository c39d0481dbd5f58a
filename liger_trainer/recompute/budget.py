"""Which results the checkpointed layers keep: the choice that a budget of memory allows.

A layer that keeps the result of an operator does not call it again in its recomputation. Kept bytes take memory from
the layer's forward to its backward, so with k_i bytes kept by layer i

    at the loss              peak_loss + sum of all k_i      <= limit
    in the backward of j     peak_j + sum of k_i with i < j  <= limit

where the peaks are those of a step that keeps nothing; what layer j keeps is part of what its recomputation allocates
anyway. The last layers' bytes are free again before most gradients exist, so among equals the last layer is first.

The limit is what an accelerator has left for activations.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from liger_trainer.callbacks.memory import remember_peak, share_of

_GIB = 2**30
_SLACK = 0.02  # of the device's memory, and at least 1 GiB, is left free
_FRAGMENTATION = 0.03  # of what is allocated, at least, is taken to be reserved beyond it


class DeviceMemory:
    """The caching allocator of torch on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self._retries = self._failed()
        self._highest = 0

    def allocated(self) -> int:
        """Bytes that are allocated now."""
        return self._backend.memory_allocated(self._device)

    def take_peak(self) -> int:
        """The most bytes that were allocated since the last call, of which `MemoryCallback` is told."""
        self.note_peak()
        peak = self._backend.max_memory_allocated(self._device)
        remember_peak(self._device)
        self._backend.reset_peak_memory_stats(self._device)
        return peak

    def note_peak(self) -> None:
        """Remembers the most bytes allocated so far, for [`limit`], should anybody reset the allocator's counter.

        Without the peak of the step that reserved them, reserved bytes would all count as fragments.
        """
        self._highest = max(self._highest, self._backend.max_memory_allocated(self._device))

    @property
    def highest(self) -> int:
        """The most bytes allocated so far, as far as they were noted."""
        return self._highest

    def limit(self) -> float:
        """Bytes that may be allocated, so that what else is on the device and the allocator's fragments fit beside it.

        The allocator reserves more than it gives out: fragments, and the blocks of other streams, such as those in
        which FSDP2 gathers weights. That much is taken off as it is, since it does not grow with what layers keep.

        To be called after a whole training step, when the optimizer and the communication have what they need.
        """
        free, total = self._backend.mem_get_info(self._device)
        statistics = self._backend.memory_stats(self._device)
        self.ran_out()  # what happened before is in these numbers
        others = total - free - statistics["reserved_bytes.all.current"]
        room = min(total - others, share_of(self._device) * total) - max(_SLACK * total, _GIB)
        self.note_peak()
        fragments = statistics["reserved_bytes.all.peak"] - self._highest
        return min(room - fragments, room / (1 + _FRAGMENTATION))

    def ran_out(self) -> bool:
        """Whether the allocator had to give its fragments back since the last call, for a block that did not fit."""
        before, self._retries = self._retries, self._failed()
        return self._retries > before

    def _failed(self) -> int:
        return self._backend.memory_stats(self._device).get("num_alloc_retries", 0)


class Call(NamedTuple):
    """One call of an operator in the forward of a layer."""

    operator: str  # such as "aten::mm"
    number: int  # of calls of the operator that come before it in the layer


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A result that a layer could keep: its bytes, and the seconds that calling the operator again takes."""

    call: Call
    bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Layer:
    """A checkpointed layer, as it was measured."""

    name: str  # the module's, with the number of its call if it runs more than once
    tokens: int  # tokens that it was given
    candidates: tuple[Candidate, ...]  # the results that the layer could keep
    peak: int = 0  # most bytes allocated from its recomputation to that of the layer before


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """A micro-batch that kept nothing, as it was measured."""

    layers: tuple[Layer, ...]  # the layers, in the order of the forward
    start: int = 0  # bytes allocated before its forward
    peak: int = 0  # most bytes allocated from there to the first recomputation
    # Most bytes allocated at any time while nothing was kept, such as in the optimizer's step.
    highest: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The step in types that JSON has."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RecordedStep:
        """The inverse of `to_dict`, also after a journey through JSON."""
        layers = []
        for layer in values["layers"]:
            candidates = [Candidate(Call(*one["call"]), one["bytes"], one["seconds"]) for one in layer["candidates"]]
            layers.append(Layer(layer["name"], layer["tokens"], tuple(candidates), layer["peak"]))
        return cls(tuple(layers), values["start"], values["peak"], values["highest"])


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the layers keep."""

    calls: dict[str, frozenset[Call]]  # the kept calls, by the layer's name
    bytes: int = 0  # bytes that all layers together keep when the loss is computed
    seconds: float = 0.0  # time saved, since the operators are not called again


def merged(steps: Sequence[RecordedStep]) -> RecordedStep:
    """One step that stands for several micro-batches, or for those of several processes: the highest of their peaks.

    Layers, tokens and candidates are those of the step with most layers, and most tokens among these; layers that it
    lacks are left out.
    """
    base = max(steps, key=lambda step: (len(step.layers), sum(layer.tokens for layer in step.layers)))
    peaks: dict[str, int] = defaultdict(int)
    for step in steps:
        for layer in step.layers:
            peaks[layer.name] = max(peaks[layer.name], layer.peak)
    layers = tuple(dataclasses.replace(layer, peak=peaks[layer.name]) for layer in base.layers)
    start, peak = min(step.start for step in steps), max(step.peak for step in steps)
    return RecordedStep(layers, start, peak, max(step.highest for step in steps))


def proved(step: RecordedStep, tried: Mapping[str, frozenset[Call]], failed: Set[tuple[str, Call]]) -> RecordedStep:
    """The step without the kinds of results that were not tried, or that failed, in any layer.

    `tried` are the calls whose results were kept and computed again, by the layer's name.
    """
    known: dict[tuple[Call, int], bool] = {}
    for layer in step.layers:
        for one in layer.candidates:
            if one.call in tried.get(layer.name, ()):
                kind = one.call, one.bytes
                known[kind] = known.get(kind, True) and (layer.name, one.call) not in failed
    layers = []
    for layer in step.layers:
        kept = tuple(one for one in layer.candidates if known.get((one.call, one.bytes), False))
        layers.append(dataclasses.replace(layer, candidates=kept))
    return dataclasses.replace(step, layers=tuple(layers))


def most(step: RecordedStep) -> int:
    """Bytes of all candidates."""
    return sum(candidate.bytes for layer in step.layers for candidate in layer.candidates)


def choose(step: RecordedStep, growth: float, kept: float, allocated: float, proving: bool = False) -> Plan:
    """The plan that saves most time, for a micro-batch of `growth` times the tokens of the measured one.

    It keeps at most `kept` bytes, and at most `allocated` bytes are allocated. While `proving`, the layers compute
    again what they keep, which then comes on top of their own peak.
    """
    # Rooms of the layers' backwards in the order of the forward, and last that of the loss.
    rooms = [allocated - _grown(layer.peak, step.start, growth) for layer in step.layers]
    rooms.append(min(kept, allocated - _grown(step.peak, step.start, growth)))
    calls: dict[str, set[Call]] = defaultdict(set)
    size = seconds = 0.0
    for place, candidate in _by_worth(step.layers):
        need, first = candidate.bytes * growth, place if proving else place + 1
        if need > min(rooms[first:]):
            continue
        rooms[first:] = [room - need for room in rooms[first:]]
        calls[step.layers[place].name].add(candidate.call)
        size, seconds = size + need, seconds + candidate.seconds * growth
    return Plan({name: frozenset(chosen) for name, chosen in calls.items()}, int(size), seconds)


def left_always(step: RecordedStep, growth: float, allocated: float) -> float:
    """Bytes that are free at every moment of a training that keeps nothing.

    Args:
        step: The measured step.
        growth: The most tokens of a micro-batch, as a multiple of the measured one's.
        allocated: Bytes that may be allocated.
    """
    peaks = (_grown(peak, step.start, growth) for peak in (step.peak, *(layer.peak for layer in step.layers)))
    return allocated - max(step.highest, *peaks)


def _grown(peak: int, start: int, growth: float) -> float:
    """A peak with more tokens; with fewer it is not counted on to fall."""
    return start + (peak - start) * max(growth, 1.0)


def _by_worth(layers: Sequence[Layer]) -> Iterable[tuple[int, Candidate]]:
    """Places of layers and their candidates: most seconds a byte first, and the last layer among equals.

    Layers measured alike but for noise are equals: a call's worth is that of all calls of its kind.
    """
    kinds: dict[tuple[Call, int], list[float]] = defaultdict(list)
    found = [(place, candidate) for place, layer in enumerate(layers) for candidate in layer.candidates]
    for _, candidate in found:
        kinds[candidate.call, candidate.bytes].append(candidate.seconds / candidate.bytes)
    worth = {kind: sorted(values)[len(values) // 2] for kind, values in kinds.items()}
    return sorted(found, key=lambda one: (-worth[one[1].call, one[1].bytes], one[1].call, -one[0]))
