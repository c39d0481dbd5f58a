"""`activation_memory`: what the checkpointed layers of a model in training keep, from the fourth step on.

The first step warms up, and allocates what the optimizer needs. The second is recorded, and keeps nothing either. The
third keeps what follows from the record, and computes it again nevertheless: what is not the same, bit for bit, is
never kept. The plan depends on nothing but the record, the limits and the number of tokens, all of which are the same
on every process, so that processes with batches of one size keep the same. A longer batch than the recorded one gets a
plan of its own, with less.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from liger_trainer.recompute.budget import Call, Plan, Step, choose, merged, most, proved
from liger_trainer.recompute.device_memory import DeviceMemory
from liger_trainer.recompute.keeping import Proof, keeping_contexts
from liger_trainer.recompute.layers import Checkpoint, Layers, is_reentrant, layers_of, replace_checkpoints
from liger_trainer.recompute.passes import Pass, current_pass
from liger_trainer.recompute.recording import StepRecorder

logger = logging.getLogger("liger_trainer")

_GIB = 2**30
_RECORDED = 1  # the second step
_SHARES = 32  # a batch's tokens are rounded up to a multiple of a 32nd of the recorded one's
_SHRINK = 0.92  # of the limit, when the allocator ran out of memory
_WATCH_EVERY = 50  # steps at most, and fewer at first, as the processes wait for each other


class ActivationMemory:
    """Lets the checkpointed layers of a model keep results for their backward.

    Args:
        budget: Bytes to keep, or ``"auto"`` for as many as fit.
        device: Where the model is trained.
        memory: The device's allocator; only needed for ``"auto"``.
    """

    def __init__(self, budget: int | Literal["auto"], device: torch.device, memory: DeviceMemory | None = None) -> None:
        assert budget != "auto" or memory is not None
        self.budget, self._device, self._memory = budget, device, memory
        self.kept = 0
        """Bytes that the layers kept in the last micro-batch."""
        self._calls: Counter[str] = Counter()
        self._growth: float | None = None  # of this micro-batch; None before its first layer
        self._pass: Pass | None = None
        self._at_step = -1
        self._start()

    def _start(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None  # whose `_layers` are known
        self._layers: Layers = weakref.WeakKeyDictionary()
        self.record: Step | None = None
        self.limit = math.inf  # of what is allocated
        self._first: int | None = None
        self._recorded: list[Step] = []
        self._recorder: StepRecorder | None = None
        self._proof: Proof | None = None
        self._tried: dict[str, frozenset[Call]] = {}
        self._proved = False
        self._watched, self._watch_again = 0, 1  # at which step, and how many steps later
        self._tokens: dict[str, int] = {}  # of the record's layers
        self._plans: dict[float, Plan] = {}  # by growth

    def begin(self, model: nn.Module, step: int) -> str | None:
        """To be called before the forward of a micro-batch of optimizer step `step`, counted from any number.

        Returns:
            A line about what the layers keep, where that has just been decided.
        """
        if step < self._at_step:  # another run, maybe of another model or batch
            self._start()
        is_new, self._at_step = step != self._at_step, step
        self.attach(model)
        self._first = step if self._first is None else self._first
        self._calls.clear()
        self._growth, self.kept, self._recorder = None, 0, None
        if self.record is None and step == self._first + _RECORDED:
            self._recorder = StepRecorder(self._device, self._memory)
            self._recorder.begin()
        elif self.record is None and self._recorded:
            self._decide()
            return None if self.plan().bytes else self.summary()
        elif is_new and self._proof is not None:
            self._conclude()
            return self.summary() if self._proved else None
        elif self._proved:
            self._watch(step)
        return None

    def attach(self, model: nn.Module) -> None:
        """Has the checkpointed layers of `model` ask what they keep."""
        if self._model is None or self._model() is not model:  # to walk through all modules takes milliseconds
            self._model, self._layers = weakref.ref(model), layers_of(model)
        replace_checkpoints(self._layers, self._checkpoint)

    def end(self) -> None:
        """To be called after the backward of a micro-batch."""
        if self._recorder is not None:
            self._recorded.append(self._recorder.step())
            self._recorder = None
        if self._memory is not None and not self._proved:
            self._memory.note_peak()  # callbacks at the end of a step may reset the counter

    def resume(self, record: Step, limit: float) -> None:
        """Goes on with the record and the limit of an earlier run, without recording again."""
        self._start()
        self._at_step = -1
        self.record, self.limit = record, limit
        self._tokens = {layer.name: layer.tokens for layer in record.layers}
        self._proof = Proof()

    def _checkpoint(self, name: str, checkpoint: Checkpoint, function: Callable, *args: Any, **kwargs: Any) -> Any:
        hidden = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if hidden is None or not hidden.numel() or not torch.is_grad_enabled() or is_reentrant(checkpoint):
            return checkpoint(function, *args, **kwargs)
        current = current_pass()
        if current is not None and (not current.again or self._recorder is not None):
            return checkpoint(function, *args, **kwargs)
        if current is not self._pass:  # the memory of the one before is free
            self._pass, self._growth = current, None
            self._calls.clear()
        self._calls[name] += 1
        name = name if self._calls[name] == 1 else f"{name}#{self._calls[name]}"
        if self._recorder is not None:
            contexts = self._recorder.contexts(name, hidden)
            return checkpoint(function, *args, context_fn=lambda: contexts, **kwargs)
        calls = self._calls_to_keep(name, math.prod(hidden.shape[:-1]))
        if not calls:
            return checkpoint(function, *args, **kwargs)
        if self._proof is None:
            return checkpoint(function, *args, context_fn=lambda: keeping_contexts(calls), **kwargs)
        self._tried[name] = self._tried.get(name, frozenset()) | calls
        contexts = self._proof.contexts(name, calls)
        return checkpoint(function, *args, context_fn=lambda: contexts, **kwargs)

    def _calls_to_keep(self, name: str, tokens: int) -> frozenset:
        recorded = self._tokens.get(name)
        if recorded is None:
            return frozenset()
        growth = math.ceil(_SHARES * tokens / recorded) / _SHARES
        if self._growth is None:
            self._growth = growth
            self.kept = self.plan(growth).bytes
        # A layer of more tokens than were planned for, such as those of images, keeps nothing.
        return self.plan(self._growth).calls.get(name, frozenset()) if growth <= self._growth else frozenset()

    def plan(self, growth: float = 1.0) -> Plan:
        """What the layers keep of a micro-batch with `growth` times the tokens of the recorded one."""
        assert self.record is not None
        if growth not in self._plans:
            kept = math.inf if self.budget == "auto" else self.budget
            self._plans[growth] = choose(self.record, growth, kept, self.limit, self._proof is not None)
        return self._plans[growth]

    def _conclude(self) -> None:
        """Agrees with the other processes on what was the same when it was computed again, if anything was tried."""
        assert self._proof is not None
        assert self.record is not None
        found = _gathered((self._tried, self._proof.failed(), self._measured_limit()))
        tried: dict[str, frozenset[Call]] = {}
        for own, _, _ in found:
            tried |= {name: tried.get(name, frozenset()) | calls for name, calls in own.items()}
        if not tried:
            return
        self.record = proved(self.record, tried, {one for _, failed, _ in found for one in failed})
        self.limit = min(self.limit, *(limit for _, _, limit in found))  # fragments may be more where layers keep
        self._proof, self._proved = None, True
        self._plans.clear()

    def _decide(self) -> None:
        """Agrees with the other processes on a record and a limit."""
        found = _gathered((merged(self._recorded), self._measured_limit()))
        step = self._at_step
        self.resume(merged([each for each, _ in found]), min(each for _, each in found))
        self._at_step = step

    def _measured_limit(self) -> float:
        return math.inf if self.budget != "auto" or self._memory is None else self._memory.limit()

    def _watch(self, step: int) -> None:
        """Lowers the limit of all processes if one of them ran out of memory for a moment."""
        if self.budget != "auto" or self._memory is None or step < self._watched + self._watch_again:
            return
        self._watched, self._watch_again = step, min(2 * self._watch_again, _WATCH_EVERY)
        if any(_gathered(self._memory.ran_out())):
            self.limit *= _SHRINK
            self._plans.clear()
            logger.warning(
                "`activation_memory`: the device was out of memory for a moment, so the layers keep less from now on: "
                "at most %.1f GiB are allocated.",
                self.limit / _GIB,
            )

    def summary(self) -> str:
        """One line about what is kept of a micro-batch as large as the recorded one."""
        assert self.record is not None
        plan, candidates = self.plan(), [one for layer in self.record.layers for one in layer.candidates]
        if not candidates:
            return "activation_memory: the checkpointed layers have no results that are worth keeping."
        if not plan.bytes:
            room = self.limit - self.record.peak if self.budget == "auto" else self.budget
            least = min(candidate.bytes for candidate in candidates)
            return (
                f"activation_memory: nothing is kept; there is room for {_size(max(room, 0))}, and the smallest result "
                f"of a layer takes {_size(least)}."
            )
        of_all = sum(candidate.seconds for candidate in candidates)
        return (
            f"activation_memory: {len(plan.calls)} of {len(self.record.layers)} layers keep {_size(plan.bytes)} of "
            f"{_size(most(self.record))}, which saves {plan.seconds:.3f} of {of_all:.3f} s of recomputation in a "
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
