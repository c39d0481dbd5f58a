"""Which layers of a model run from graphs, at which calls."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.graphs.calls import Arguments, Held, LayerState, arguments_of, fixed, is_watched, tensors_of
from liger_trainer.graphs.capture import Captures
from liger_trainer.graphs.layers import Buffers, ForwardPass, LayerGraphs, NotCaptured
from liger_trainer.recompute.keeping import OF_TRANSFORMERS, Checkpoint, Replaced, is_reentrant, layers_of

_CHECKPOINTED = "gradient_checkpointing"
_ATTRIBUTES = (_CHECKPOINTED, OF_TRANSFORMERS)
_AT = 3  # a kind of call is captured when it comes this often
_MOST = 16  # kinds of calls of a layer that have graphs at a time
_COUNTED = 512  # kinds of calls of a layer that are counted
_CHANGES = 3  # how often a layer is captured anew because it has changed


class KnownCalls:
    """The kinds of calls of one layer: how often each came, and its graphs, the last used last."""

    def __init__(self) -> None:
        self.graphs: OrderedDict[Hashable, LayerGraphs] = OrderedDict()
        self.counts: Counter[Hashable] = Counter()
        self.changes = 0
        self.obstacle = ""

    def is_due(self, key: Hashable) -> bool:
        """Counts a call, and returns whether its kind has come often enough."""
        if len(self.counts) > _COUNTED:
            self.counts.clear()
        self.counts[key] += 1
        return self.counts[key] >= _AT

    def forget(self) -> None:
        """Drops graphs of a layer that has changed since."""
        self.graphs.clear()
        self.counts.clear()
        self.changes += 1
        if self.changes > _CHANGES:
            self.obstacle = "its attributes change while it is trained"


class CapturedLayers:
    """Runs the layers of a model in training from graphs, once a kind of call has come three times.

    Args:
        captures: Captures launches.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._model: weakref.ref[nn.Module] | None = None
        self._replaced: dict[nn.Module, Replaced] = {}
        self._of: dict[str, KnownCalls] = {}
        self._shared: weakref.WeakValueDictionary[Hashable, Buffers] = weakref.WeakValueDictionary()
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        self._passes: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self._pass = ForwardPass()
        self._in_pass: set[str] = set()
        self._may_keep = True
        self._said: tuple[int, Counter[str]] | None = None

    @property
    def reasons(self) -> Counter[str]:
        """Why layers run without graphs, and how many."""
        return Counter(known.obstacle for known in self._of.values() if known.obstacle)

    @property
    def captured(self) -> int:
        """How many layers have graphs."""
        return sum(bool(known.graphs) for known in self._of.values())

    def news(self) -> str | None:
        """A line about the layers that run from graphs, where their number or a reason has changed; else None.

        To be called after a backward.
        """
        now = self.captured, self.reasons
        if now == self._said or not (self.captured or self.reasons):
            return None
        self._said = now
        line = f"cuda_graphs: {self.captured} of {len(self._of)} layers run from graphs"
        return "; ".join([line, *(f"{count} do not: {reason}" for reason, count in self.reasons.items())]) + "."

    @contextlib.contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Has the layers of `model` run from graphs in one forward of a loss."""
        if self._model is None or self._model() is not model:
            self._model, self._of = weakref.ref(model), {}
            layers = [(name, layer) for layer, (name, kind) in layers_of(model).items() if kind == OF_TRANSFORMERS]
            self._replaced = {layer: Replaced(name, _plain, self._run) for name, layer in layers}
        self._pass, self._in_pass = ForwardPass(), set()  # first, so that the last one is free if nothing else holds it
        self._may_keep = not any(each.open for each in self._passes)
        self._passes.add(self._pass)
        before = [(layer, {name: vars(layer).get(name) for name in _ATTRIBUTES}) for layer in self._replaced]
        for layer, replaced in self._replaced.items():
            checkpointed = bool(layer.gradient_checkpointing)
            replaced.checkpoint = getattr(layer, OF_TRANSFORMERS) if checkpointed else _plain
            setattr(layer, OF_TRANSFORMERS, replaced)
            setattr(layer, _CHECKPOINTED, True)
        try:
            yield
        finally:
            for layer, values in before:
                for name, value in values.items():
                    delattr(layer, name) if value is None else setattr(layer, name, value)

    def _run(self, name: str, checkpoint: Checkpoint, function: Callable, *args: Any, **kwargs: Any) -> Any:
        found = None if kwargs else self._found(name, checkpoint, function, args)
        if found is None:
            return checkpoint(function, *args, **kwargs)
        graphs, sources = found
        return graphs.run(args[0], sources, self._pass)

    def _found(
        self, name: str, checkpoint: Checkpoint, function: Any, args: Sequence[Any]
    ) -> tuple[LayerGraphs, list[torch.Tensor]] | None:
        """The graphs for a call and the tensors that they read; None if it runs without."""
        known = self._of.setdefault(name, KnownCalls())
        hidden = args[0] if args else None
        if known.obstacle or not isinstance(hidden, torch.Tensor) or not isinstance(function, functools.partial):
            return None
        keeps = checkpoint is _plain
        if keeps and (not self._may_keep or name in self._in_pass):
            return None
        if torch.compiler.is_compiling() or is_watched() or is_reentrant(checkpoint):
            return None
        arguments = arguments_of(hidden, args[1:], function.keywords)
        if arguments is None:
            return None
        key = (arguments.key, keeps)
        sources = [tensor for tensor, _ in tensors_of(arguments.leaves)]
        graphs = known.graphs.get(key)
        if graphs is None:
            graphs = self._made(known, key, function, args, arguments, keeps) if known.is_due(key) else None
        elif graphs.failure:
            known.obstacle, graphs = graphs.failure, None
            known.graphs.clear()
        elif not graphs.state.holds():
            known.forget()
            graphs = None
        else:
            known.graphs.move_to_end(key)
        if graphs is None:
            return None
        self._in_pass.add(name)
        return graphs, sources

    def _made(
        self,
        known: KnownCalls,
        key: Hashable,
        function: functools.partial,
        args: Sequence[Any],
        arguments: Arguments,
        keeps: bool,
    ) -> LayerGraphs | None:
        """New graphs of a layer; None, with the obstacle, if it cannot be captured."""
        (layer,), hidden = function.args, args[0]
        state = LayerState(layer)
        if not state.trained and not hidden.requires_grad:
            return None
        known.obstacle = state.obstacle()
        if known.obstacle:
            return None
        held = [self._copy_of(tensor, capacity) for tensor, capacity in tensors_of(arguments.leaves)]
        called = functools.partial(functools.partial, _called, function.func, layer)
        run = _under_autocast(hidden.device.type, called(*fixed(arguments, held, hidden)))
        given = _under_autocast(hidden.device.type, called(args[1:], function.keywords))
        buffers = self._buffers_for(hidden, state.trained)
        graphs = LayerGraphs(self._captures, run, state, buffers, held, hidden.requires_grad, keeps)
        try:
            graphs.prepare(hidden, [tensor for tensor, _ in tensors_of(arguments.leaves)], given)
        except NotCaptured as error:
            known.obstacle = str(error)
            return None
        known.graphs[key] = graphs
        while len(known.graphs) > _MOST:
            known.graphs.popitem(last=False)
        return graphs

    def _copy_of(self, source: torch.Tensor, capacity: int | None) -> Held:
        shape = source.shape if capacity is None else (capacity,)
        for held in self._held:
            if held.holds(source) and held.tensor.shape == shape:
                return held
        held = Held(source, capacity)
        self._held.add(held)
        return held

    def _buffers_for(self, hidden: torch.Tensor, parameters: Sequence[nn.Parameter]) -> Buffers:
        key = (
            hidden.shape,
            hidden.stride(),
            hidden.dtype,
            hidden.device,
            *((each.shape, each.dtype) for each in parameters),
        )
        buffers = self._shared.get(key)
        if buffers is None:
            buffers = self._shared[key] = Buffers(hidden, parameters)
        return buffers


def _plain(function: Callable, *args: Any) -> Any:
    """Runs a layer that is not checkpointed."""
    return function(*args)


def _called(
    forward: Callable, layer: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], hidden: torch.Tensor
) -> torch.Tensor:
    return forward(layer, hidden, *args, **kwargs)


def _under_autocast(kind: str, run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """`run` under the autocast of now, wherever it is called; weights that autocast has cast are not kept."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def cast(hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, dtype, enabled, cache_enabled=False):
            return run(hidden)

    return cast
