"""`activation_memory`: what the checkpointed layers of a model in training keep, from the fourth step on.

Each step has a phase: [`WarmUp`], [`Recording`], [`Proving`] and then [`Keeping`]. The plan depends on nothing but the
record, the limits and the number of tokens, all of which are the same on every process, so that processes with batches
of one size keep the same. A longer batch than the recorded one gets a plan of its own, with less.

Layers that run from graphs (`liger_trainer/graphs/`) keep all or nothing. Their memory comes off what the others keep:
it is theirs as long as the graphs exist, so with ``"auto"`` it has to be free at every moment of a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from liger_trainer.head.step import Pass, current_step
from liger_trainer.recompute.budget import (
    Call,
    DeviceMemory,
    Plan,
    RecordedStep,
    choose,
    left_always,
    merged,
    most,
    proved,
)
from liger_trainer.recompute.keeping import (
    Checkpoint,
    Layers,
    Proof,
    is_reentrant,
    keeping_contexts,
    layers_of,
    replace_checkpoints,
)
from liger_trainer.recompute.recording import StepRecorder

logger = logging.getLogger("liger_trainer")

_GIB = 2**30
_SHARES = 32  # a batch's tokens are rounded up to a multiple of a 32nd of the recorded one's
_SHRINK = 0.92  # of the limit, when the allocator ran out of memory
_CAPTURING = 4  # how often what a layer keeps has to fit: once, and what its backward and other layers compute in
_WATCH_EVERY = 50  # steps at most, and fewer at first, as the processes wait for each other


@dataclasses.dataclass
class WarmUp:
    """The first step, `step`, in which the optimizer allocates what it needs: nothing is kept, nothing recorded."""

    step: int | None = None


@dataclasses.dataclass
class Recording:
    """The second step: its micro-batches are recorded in `steps`, and keep nothing either."""

    steps: list[RecordedStep]
    recorder: StepRecorder | None = None


@dataclasses.dataclass
class Planned:
    """The layers keep what follows from a record."""

    # A step that kept nothing; once proved, with the candidates that are the same when computed again.
    record: RecordedStep
    limit: float  # bytes that may be allocated

    def __post_init__(self) -> None:
        self.tokens = {layer.name: layer.tokens for layer in self.record.layers}
        self.sizes = {layer.name: {one.call: one.bytes for one in layer.candidates} for layer in self.record.layers}
        self.most = 1.0  # the largest growth so far
        self.plans: dict[float, Plan] = {}  # by growth


@dataclasses.dataclass
class Proving(Planned):
    """The third step: what the layers keep is computed again nevertheless, and compared.

    `tried` has the calls whose results were compared, by layer; `is_idle` says that a whole step had none.
    """

    proof: Proof = dataclasses.field(default_factory=Proof)
    tried: dict[str, frozenset[Call]] = dataclasses.field(default_factory=dict)
    is_idle: bool = False


@dataclasses.dataclass
class Keeping(Planned):
    """All later steps: what was the same, bit for bit, is kept and not computed again.

    At step `watched` it was last asked whether the device ran out of memory, and is again `watch_again` steps later.
    """

    watched: int = 0
    watch_again: int = 1


@dataclasses.dataclass
class MicroBatch:
    """The micro-batch that runs."""

    calls: Counter[str] = dataclasses.field(default_factory=Counter)  # how often each layer has run
    growth: float | None = None  # its tokens, as a multiple of the recorded ones; None before its first layer
    computation: Pass | None = None  # which of the two computations runs, of a forward that is computed twice
    kept: float = 0.0  # bytes that layers without graphs keep
    in_graphs: int = 0  # bytes that layers keep in theirs


@dataclasses.dataclass(frozen=True)
class InGraphs:
    """Memory that graphs of layers have until they are dropped.

    Attributes:
        kept: Bytes that checkpointed layers keep there for their backward.
        taken: Bytes of all that graphs compute, read and write, with these.
    """

    kept: int = 0
    taken: int = 0


class ActivationMemory:
    """Lets the checkpointed layers of a model keep results for their backward.

    Args:
        budget: Bytes to keep, or ``"auto"`` for as many as fit.
        device: Where the model is trained.
        memory: The device's allocator; only needed for ``"auto"``.

    Attributes:
        phase: The phase that this step belongs to.
        kept: Bytes that the layers kept in the last micro-batch, with those of graphs.
        may_grow: Whether steps to come may take more memory than those so far, beside their batches, such as where
            texts are generated. With ``"auto"``, graphs then keep nothing.
    """

    def __init__(self, budget: int | Literal["auto"], device: torch.device, memory: DeviceMemory | None = None) -> None:
        assert budget != "auto" or memory is not None
        self.budget, self._device, self._memory = budget, device, memory
        self.kept = 0
        self.may_grow = False
        self.phase: WarmUp | Recording | Proving | Keeping = WarmUp()
        self._batch = MicroBatch()
        self._at_step = -1
        self._model: weakref.ref[nn.Module] | None = None  # whose `_layers` are known
        self._layers: Layers = weakref.WeakKeyDictionary()
        self._in_graphs = InGraphs()
        self._checked: tuple[float, ...] = ()  # what the memory of graphs was last compared with
        self._knows_evaluations = False

    def begin(self, model: nn.Module, step: int) -> str | None:
        """To be called before the forward of a micro-batch of optimizer step `step`, counted from any number.

        Returns:
            A line about what the layers keep, where that has just been decided.
        """
        if step < self._at_step:  # another run, maybe of another model or batch
            self.phase, self._model = WarmUp(), None
        is_new, self._at_step = step != self._at_step, step
        self.attach(model)
        self._batch, self.kept = MicroBatch(), 0
        phase = self.phase
        if isinstance(phase, WarmUp):
            if phase.step is None:
                phase.step = step
            elif is_new:
                self.phase = phase = Recording([]) if step == phase.step + 1 else phase
        elif isinstance(phase, Recording) and is_new and phase.steps:
            self._decide(phase)
            return None if self.plan().bytes else self.summary()
        elif isinstance(phase, Proving) and is_new:
            return self._conclude(phase)
        elif isinstance(phase, Keeping):
            self._watch(phase, step)
        if isinstance(phase, Recording):
            phase.recorder = StepRecorder(self._device, self._memory)
            phase.recorder.begin()
        return None

    def attach(self, model: nn.Module) -> None:
        """Has the checkpointed layers of `model` ask what they keep."""
        if self._model is None or self._model() is not model:  # to walk through all modules takes milliseconds
            self._model, self._layers = weakref.ref(model), layers_of(model)
        replace_checkpoints(self._layers, self._checkpoint)

    def end(self) -> None:
        """To be called after the backward of a micro-batch."""
        phase = self.phase
        if isinstance(phase, Recording) and phase.recorder is not None:
            phase.steps.append(phase.recorder.step())
            phase.recorder = None
        if self._memory is not None and not isinstance(phase, Keeping):
            self._memory.note_peak()  # callbacks at the end of a step may reset the counter

    def resume(self, record: RecordedStep, limit: float) -> None:
        """Goes on with the record and the limit of an earlier run, without recording again."""
        self.phase, self._at_step, self._model = Proving(record, limit), -1, None

    @property
    def planned(self) -> Planned | None:
        """The record and what follows from it; None before there is one."""
        return self.phase if isinstance(self.phase, Planned) else None

    @property
    def is_decided(self) -> bool:
        """Whether layers may run from graphs, which hide the operators that are recorded, and then compared."""
        phase = self.phase
        return isinstance(phase, Keeping) or (isinstance(phase, Proving) and phase.is_idle)

    def note_graphs(self, in_graphs: InGraphs) -> None:
        """Leaves other layers what graphs have not taken."""
        if in_graphs != self._in_graphs and self.planned is not None:
            self.planned.plans.clear()
        self._in_graphs = in_graphs

    def forgive(self) -> None:
        """To be called after a step with captures: if it ran out of memory for them, that is no reason to keep less."""
        if self._memory is not None:
            self._memory.ran_out()

    def graph_may_keep(self, name: str, tokens: int, nbytes: int, beside: int, taken: int) -> bool:
        """Whether a layer may keep all that its backward needs in a graph.

        Args:
            name: The layer's name.
            tokens: The number of tokens of the call.
            nbytes: Bytes that it would keep.
            beside: Bytes that graphs of other layers keep in the same forward.
            taken: Bytes that all graphs take so far.
        """
        if self.budget != "auto":
            return beside + nbytes <= self.budget - self._batch.kept
        phase, growth = self.planned, self._growth(name, tokens)
        if phase is None or growth is None or self.may_grow:
            return False
        left = left_always(phase.record, max(growth, phase.most), phase.limit)
        return taken + _CAPTURING * nbytes <= left - self._batch.kept

    def note_graph(self, name: str, nbytes: int) -> None:
        """To be called for every call in training that runs from a graph, with the bytes that this keeps of it."""
        batch = self._batch
        batch.calls[name] += 1
        batch.in_graphs += nbytes
        self.kept = max(self.kept, int(batch.kept) + batch.in_graphs)

    def is_short(self, name: str, tokens: int) -> bool:
        """Whether graphs have more memory than is left: to be asked before a layer runs in training.

        Either its batch is larger than all before, or the limit is lower, or an evaluation has taken more than a step.
        """
        phase, growth = self.planned, None if self.budget != "auto" else self._growth(name, tokens)
        if phase is None or growth is None:
            return False
        phase.most = max(phase.most, growth)
        now = (phase.most, phase.limit, float(phase.record.highest))
        if now == self._checked:
            return False
        self._checked = now
        return self._in_graphs.taken > left_always(phase.record, phase.most, phase.limit)

    @contextlib.contextmanager
    def evaluating(self, give_back: Callable[[], None]) -> Iterator[None]:
        """Around an evaluation: from then on, what graphs have fits beside one like it.

        Args:
            give_back: Drops graphs that keep something; called before the first evaluation, of unknown memory.
        """
        if self.budget != "auto" or self._memory is None:
            yield
            return
        if not self._knows_evaluations:
            give_back()
        self._knows_evaluations = True
        self._memory.take_peak()
        yield
        phase, peak = self.planned, self._memory.take_peak()
        if phase is not None:
            phase.record = dataclasses.replace(phase.record, highest=max(phase.record.highest, peak))

    def _growth(self, name: str, tokens: int) -> float | None:
        """The tokens of a call as a multiple of the recorded ones, rounded up; None for a layer without a record."""
        recorded = None if self.planned is None else self.planned.tokens.get(name)
        return None if recorded is None else math.ceil(_SHARES * tokens / recorded) / _SHARES

    def _checkpoint(self, name: str, checkpoint: Checkpoint, function: Callable, *args: Any, **kwargs: Any) -> Any:
        hidden = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if hidden is None or not hidden.numel() or not torch.is_grad_enabled() or is_reentrant(checkpoint):
            return checkpoint(function, *args, **kwargs)
        phase, computation = self.phase, current_step().computation
        recorder = phase.recorder if isinstance(phase, Recording) else None
        if computation is not None and (not computation.again or recorder is not None):
            return checkpoint(function, *args, **kwargs)
        if computation is not self._batch.computation:  # the memory of the one before is free
            self._batch = MicroBatch(computation=computation)
        calls = self._batch.calls
        calls[name] += 1
        name = name if calls[name] == 1 else f"{name}#{calls[name]}"
        if recorder is not None:
            contexts = recorder.contexts(name, hidden)
            return checkpoint(function, *args, context_fn=lambda: contexts, **kwargs)
        kept = self._calls_to_keep(phase, name, math.prod(hidden.shape[:-1])) if isinstance(phase, Planned) else None
        if not kept or not isinstance(phase, Planned) or not self._fits(phase, name, kept):
            return checkpoint(function, *args, **kwargs)
        if not isinstance(phase, Proving):
            return checkpoint(function, *args, context_fn=lambda: keeping_contexts(kept), **kwargs)
        phase.tried[name] = phase.tried.get(name, frozenset()) | kept
        contexts = phase.proof.contexts(name, kept)
        return checkpoint(function, *args, context_fn=lambda: contexts, **kwargs)

    def _calls_to_keep(self, phase: Planned, name: str, tokens: int) -> frozenset[Call]:
        growth, batch = self._growth(name, tokens), self._batch
        if growth is None:
            return frozenset()
        if batch.growth is None:
            batch.growth = growth
        # A layer of more tokens than were planned for, such as those of images, keeps nothing.
        return self.plan(batch.growth).calls.get(name, frozenset()) if growth <= batch.growth else frozenset()

    def _fits(self, phase: Planned, name: str, kept: frozenset[Call]) -> bool:
        """Counts what a layer is to keep, if all of the micro-batch is within the plan.

        It is, unless graphs have taken memory since the first layer, and the plan has become another one.
        """
        batch = self._batch
        assert batch.growth is not None
        nbytes = batch.kept + batch.growth * sum(phase.sizes[name][call] for call in kept)
        if nbytes > self.plan(batch.growth).bytes + 1:  # which are rounded down
            return False
        batch.kept = nbytes
        self.kept = max(self.kept, int(nbytes) + batch.in_graphs)
        return True

    def plan(self, growth: float = 1.0) -> Plan:
        """What layers without graphs keep of a micro-batch with `growth` times the tokens of the recorded one."""
        phase = self.phase
        assert isinstance(phase, Planned)
        if growth not in phase.plans:
            kept = math.inf if self.budget == "auto" else self.budget - self._in_graphs.kept
            limit = phase.limit - self._in_graphs.taken
            phase.plans[growth] = choose(phase.record, growth, kept, limit, isinstance(phase, Proving))
        return phase.plans[growth]

    def _decide(self, recording: Recording) -> None:
        """Agrees with the other processes on a record and a limit."""
        limit = self._measured_limit()  # which notes the peak
        highest = 0 if self._memory is None else self._memory.highest
        found = _gathered((dataclasses.replace(merged(recording.steps), highest=highest), limit))
        self.phase = Proving(merged([each for each, _ in found]), min(each for _, each in found))

    def _conclude(self, proving: Proving) -> str | None:
        """Agrees with the other processes on what was the same when it was computed again, if anything was tried."""
        found = _gathered((proving.tried, proving.proof.failed(), self._measured_limit()))
        tried: dict[str, frozenset[Call]] = {}
        for own, _, _ in found:
            tried |= {name: tried.get(name, frozenset()) | calls for name, calls in own.items()}
        if not tried:
            proving.is_idle = True
            return None
        record = proved(proving.record, tried, {one for _, failed, _ in found for one in failed})
        # Keeping activations may fragment memory, so the limit may be lower by now.
        self.phase = Keeping(record, min(proving.limit, *(limit for _, _, limit in found)))
        return self.summary()

    def _measured_limit(self) -> float:
        return math.inf if self.budget != "auto" or self._memory is None else self._memory.limit()

    def _watch(self, keeping: Keeping, step: int) -> None:
        """Lowers the limit of all processes if one of them ran out of memory for a moment."""
        if self.budget != "auto" or self._memory is None or step < keeping.watched + keeping.watch_again:
            return
        keeping.watched, keeping.watch_again = step, min(2 * keeping.watch_again, _WATCH_EVERY)
        if any(_gathered(self._memory.ran_out())):
            keeping.limit *= _SHRINK
            keeping.plans.clear()
            logger.warning(
                "`activation_memory`: the device was out of memory for a moment, so the layers keep less from now on: "
                "at most %.1f GiB are allocated.",
                keeping.limit / _GIB,
            )

    def summary(self) -> str:
        """One line about what is kept of a micro-batch as large as the recorded one."""
        phase = self.phase
        assert isinstance(phase, Planned)
        plan, candidates = self.plan(), [one for layer in phase.record.layers for one in layer.candidates]
        if not candidates:
            return "activation_memory: the checkpointed layers have no results that are worth keeping."
        if not plan.bytes:
            room = phase.limit - phase.record.peak if self.budget == "auto" else self.budget
            least = min(candidate.bytes for candidate in candidates)
            return (
                f"activation_memory: nothing is kept; there is room for {_size(max(room, 0))}, and the smallest result "
                f"of a layer takes {_size(least)}."
            )
        of_all = sum(candidate.seconds for candidate in candidates)
        return (
            f"activation_memory: {len(plan.calls)} of {len(phase.record.layers)} layers keep {_size(plan.bytes)} of "
            f"{_size(most(phase.record))}, which saves {plan.seconds:.3f} of {of_all:.3f} s of recomputation in a "
            "micro-batch."
        )


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**28 else f"{count / 2**20:.2f} MiB"


def _gathered(value: Any) -> list[Any]:
    """The values of all processes."""
    if not dist.is_available() or not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
