"""Which layers of a model run from graphs, at which calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from liger_trainer.graphs.calls import (
    Arguments,
    Held,
    LayerState,
    Room,
    arguments_of,
    attention_backends,
    fixed,
    nested,
    operators_are_observed,
    tensors_of,
)
from liger_trainer.graphs.capture import Captures
from liger_trainer.graphs.known_calls import Gains, KnownCalls
from liger_trainer.graphs.layers import ForwardPass, Layer, LayerGraphs, NotCaptured
from liger_trainer.graphs.memory import Buffers, SharedMemory
from liger_trainer.kernels.lowbit.buffers import free_buffers
from liger_trainer.recompute.activation_memory import ActivationMemory, InGraphs
from liger_trainer.recompute.keeping import (
    OF_TRANSFORMERS,
    Checkpoint,
    Replaced,
    is_reentrant,
    itself,
    layers_of,
    put_back,
)

_APART = 512  # the fewest forwards of the model between two times that all graphs are dropped for their memory


class CapturedLayers:
    """Runs the layers of a model in training from graphs, once a kind of call has come three times.

    Args:
        captures: Captures launches.
        only_if_faster: Whether calls that keep the device busy run without graphs, by which they would gain nothing.
        memory: The memory in which checkpointed layers may keep results; None if they keep none. In the order of the
            forward, as many layers as fit keep all that their backward needs, as long as their graphs exist.

    Attributes:
        gains: Which calls keep the device busy.
    """

    def __init__(
        self, captures: Captures, only_if_faster: bool = False, memory: ActivationMemory | None = None
    ) -> None:
        self._captures, self.gains, self._kept = captures, Gains(always=not only_if_faster), memory
        self._kept_in: Counter[int] = Counter()  # bytes that checkpointed layers keep, by the forward of their capture
        self._has_tried = False  # to capture a layer, since the last backward
        self._model: weakref.ref[nn.Module] | None = None
        self._layers: dict[nn.Module, Replaced] = {}  # each with what its checkpoint becomes
        self._forwards: dict[nn.Module, tuple[Any, _Forward]] = {}  # a layer's own forward, and its stand-in
        self._of: dict[str, KnownCalls] = {}
        self._shared: weakref.WeakValueDictionary[Hashable, Buffers] = weakref.WeakValueDictionary()
        self._memory = SharedMemory()
        self._gradients: weakref.WeakValueDictionary[Hashable, torch.Tensor] = weakref.WeakValueDictionary()
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        self._passes: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self._numbers = itertools.count()
        self._pass = ForwardPass(next(self._numbers))
        self._in_pass: set[str] = set()
        self._may_keep = True
        self._renewals = captures.renewals
        self._renewed_in = 0  # the number of the forward that dropped all graphs last
        self._is_full = False  # a kind of call has no graphs, because these would take too much memory
        self._said: tuple[int, int, Counter[str], bool, bool] | None = None

    @property
    def reasons(self) -> Counter[str]:
        """The reasons why layers run without graphs, each with the number of layers."""
        return Counter(known.reason for known in self._of.values() if known.reason)

    @property
    def captured(self) -> int:
        """How many layers have graphs."""
        return sum(any(known.graphs.values()) for known in self._of.values())

    def news(self) -> str | None:
        """A line about the layers that run from graphs, where it has changed since the last one; else None.

        To be called after a backward.
        """
        tokens = self.gains.in_training
        keeping = [graphs.kept for known in self._of.values() if (graphs := known.keeping) is not None]
        now = self.captured, len(keeping), self.reasons, self._is_full, tokens is not None
        if now == self._said or not (self.captured or self.reasons or tokens):
            return None
        self._said = now
        most = f"{self._captures.limit / 2**30:.1f} GiB"
        full = f"graphs fill the {most} that they may take, and batches of other shapes run without"
        line = f"cuda_graphs: {self.captured} of {len(self._of)} layers run from graphs"
        if keeping:
            line += f", and {len(keeping)} of these keep {sum(keeping) / 2**20:,.1f} MiB instead of recomputing it"
        others = [f"{count} do not: {reason}" for reason, count in self.reasons.items()]
        busy = f"batches of {tokens} tokens or more keep the device busy without graphs"
        return "; ".join([line, *others, *([full] if self._is_full else []), *([busy] if tokens else [])]) + "."

    def settle(self) -> None:
        """To be called after a backward: gives back memory that is no longer needed."""
        self._captures.settle()
        self._tell()
        if self._has_tried and self._kept is not None:
            self._kept.forgive()
        self._has_tried = False

    def give_back(self) -> None:
        """Drops all graphs if checkpointed layers keep something in theirs; later calls are captured anew."""
        if self._kept_in:
            self.free()

    def free(self) -> None:
        """Drops all graphs, and gives back their memory; later calls are captured anew."""
        self._captures.renew()
        self._renew()
        self._captures.settle()

    def _tell(self) -> None:
        """Tells `ActivationMemory` how much memory graphs have."""
        if self._kept is not None:
            # The largest, not the sum: later captures reuse the memory of earlier ones, whose backward is over.
            self._kept.note_graphs(InGraphs(max(self._kept_in.values(), default=0), self._taken()))

    @contextlib.contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """In the context, the layers of `model` run from graphs; one context for each forward of a loss."""
        if self._model is None or self._model() is not model:
            self._model, self._of = weakref.ref(model), {}
            layers = [(name, layer) for layer, (name, kind) in layers_of(model).items() if kind == OF_TRANSFORMERS]
            self._layers = {layer: Replaced(name, _plain, self._run) for name, layer in layers}
            self._forwards = {}
        # This comes first, so that the last pass is freed unless something else holds it.
        self._pass, self._in_pass = ForwardPass(next(self._numbers)), set()
        self._may_keep = not any(each.open for each in self._passes)
        self._passes.add(self._pass)
        self._renew()
        with put_back(self._layers, (OF_TRANSFORMERS, "forward")):
            for layer, replaced in self._layers.items():
                if layer.gradient_checkpointing:
                    replaced.checkpoint = getattr(layer, OF_TRANSFORMERS)
                    setattr(layer, OF_TRANSFORMERS, replaced)
                layer.forward = self._forward_of(replaced.name, layer)
            yield

    def _renew(self) -> None:
        """Drops all graphs where they, or those of another model, have taken too much memory.

        Graphs share memory, so it comes back with the last of them. Kinds of calls that still come are captured anew.
        """
        if self._is_full and self._pass.number - self._renewed_in >= _APART:
            self._captures.renew()
        if self._captures.renewals != self._renewals:
            self._renewals, self._renewed_in, self._is_full = self._captures.renewals, self._pass.number, False
            for known in self._of.values():
                known.forget()
            self._kept_in.clear()
            self._tell()

    def _taken(self) -> int:
        """Bytes that graphs take, and what they read and write."""
        tensors = [*self._gradients.values(), *(held.tensor for held in self._held)]
        return self._captures.taken + self._memory.nbytes + sum(each.nbytes for each in tensors)

    def _forward_of(self, name: str, layer: nn.Module) -> _Forward:
        """The forward that `layer` gets.

        It is the same object as long as the layer's own forward is: with another object, graphs would not be valid.
        """
        own = vars(layer).get("forward", type(layer).forward)
        known, instead = self._forwards.get(layer, (None, None))
        if instead is None or known is not own:
            instead = _Forward(layer, functools.partial(self._run, name, _plain))
            self._forwards[layer] = own, instead
        return instead

    def _run(self, name: str, checkpoint: Checkpoint, function: Callable, *args: Any, **kwargs: Any) -> Any:
        found = None if kwargs else self._found(name, checkpoint, function, args)
        if found is None:
            return checkpoint(function, *args, **kwargs)
        graphs, arguments = found
        if self._kept is not None and torch.is_grad_enabled():
            self._kept.note_graph(name, graphs.kept)
        result, added = graphs.run(args[0], [tensor for tensor, _ in tensors_of(arguments.leaves)], self._pass)
        if arguments.store is not None:
            arguments.store.update(added)
        return result

    def _found(
        self, name: str, checkpoint: Checkpoint, function: Any, args: Sequence[Any]
    ) -> tuple[LayerGraphs, Arguments] | None:
        """The graphs for a call, and its arguments; None if it runs without."""
        known = self._of.setdefault(name, KnownCalls())
        hidden = args[0] if args else None
        if known.obstacle or not isinstance(hidden, torch.Tensor) or not isinstance(function, functools.partial):
            return None
        differentiated = torch.is_grad_enabled()
        plain = checkpoint is _plain
        keeps = differentiated and plain
        may_keep = differentiated and self._may_keep and name not in self._in_pass
        if keeps and not may_keep:
            return None
        if torch.compiler.is_compiling() or is_reentrant(checkpoint):
            return None
        if operators_are_observed():
            known.unserved["a mode, a hook or a transform sees its operators"] += 1
            return None
        tokens = hidden.shape[:-1].numel()
        if differentiated and self._kept is not None and self._kept.is_short(name, tokens):
            self.give_back()
        if self.gains.is_busy(tokens, differentiated):
            return None
        arguments = arguments_of(hidden, args[1:], function.keywords)
        if arguments is None:
            known.unserved["it is given something that no graph can hold, such as a cache"] += 1
            return None
        key = (arguments.key, differentiated, keeps)
        known.count()
        keeps_as = name if self._kept is not None and may_keep and not plain else None
        graphs = None if keeps_as is None else self._keeping(known, key)
        graphs = known.find(key) if graphs is None else graphs
        if graphs is None and known.is_due(key):
            self._has_tried = True
            try:
                graphs = self._made(known, key, function, args, arguments, keeps, keeps_as)
            except torch.OutOfMemoryError:  # for what graphs read and write; the layer alone may fit
                known.drop("there was no memory for its graphs")
            if graphs is not None:
                known.add((*key[:2], graphs.keeps), graphs)
        if graphs is not None and graphs.failure:
            known.drop(graphs.failure)
        if graphs is None or known.obstacle or (graphs.keeps and not self._pass.claims(graphs.captured_in)):
            return None
        if graphs.keeps:
            self._in_pass.add(name)
        return graphs, arguments

    def _keeping(self, known: KnownCalls, key: tuple[Hashable, bool, bool]) -> LayerGraphs | None:
        """Graphs in which a checkpointed layer keeps something, if they may run in this forward."""
        graphs = known.find((*key[:2], True))
        return graphs if graphs is not None and self._pass.claims(graphs.captured_in) else None

    def _made(
        self,
        known: KnownCalls,
        key: Hashable,
        function: functools.partial,
        args: Sequence[Any],
        arguments: Arguments,
        keeps: bool,
        keeps_as: str | None,
    ) -> LayerGraphs | None:
        """New graphs of a layer; None if it gets none. If it cannot be captured, `known` gets the obstacle.

        Args:
            known: The known calls of the layer.
            key: The kind of this call.
            function: The function that a checkpoint of the layer is given.
            args: The arguments of `function`.
            arguments: The arguments except the hidden states, as graphs take them.
            keeps: Whether the layer's forward keeps what its backward needs.
            keeps_as: The name of a checkpointed layer that may keep this where it fits; None for any other.
        """
        self._is_full = self._is_full or self._taken() > self._captures.limit
        if self._is_full:
            return None
        (layer, forward), hidden = self._layer_of(function), args[0]
        state = LayerState(layer)
        tensors = tensors_of(arguments.leaves)
        places = {id(tensor): place for place, (tensor, _) in enumerate(tensors) if tensor.requires_grad}
        trained, further = (state.trained, [*places.values()]) if torch.is_grad_enabled() else ([], [])
        if torch.is_grad_enabled() and not trained and not further and not hidden.requires_grad:
            known.wait(key)
            return None
        if obstacle := state.obstacle():
            known.drop(obstacle)
            return None
        if keeps and not self._pass.claims(self._pass.number):
            # Layers before this one have run from graphs of an earlier forward; all are captured anew in one forward.
            known.has_changed(key)
            for each in self._of.values():
                each.forget_kept()
            self._may_keep = False
            return None
        held = [self._copy_of(tensor, room) for tensor, room in tensors]
        copies = [each.tensor for each in held]
        # The layer itself runs on the copies, except for tables of documents: these it gets as given, not filled up.
        as_given = [tensor if room else each for (tensor, room), each in zip(tensors, copies)]
        run, given = (
            _as_now(hidden.device.type, functools.partial(_called, forward, layer, each))
            for each in (fixed(arguments, copies, hidden, True), fixed(arguments, as_given, hidden, False))
        )
        buffers = self._buffers_for(hidden, trained)
        needs = hidden.requires_grad
        graphs = LayerGraphs(self._captures, run, state, buffers, held, further, needs, keeps, self._pass.number)
        free_buffers()  # graphs decode packed weights into memory of their own
        try:
            results = graphs.tried(hidden, [tensor for tensor, _ in tensors], given)
            tokens = hidden.shape[:-1].numel()
            if not self._gains_by(graphs, tokens):
                return None
            if keeps_as is not None and (nbytes := self._may_keep_of(keeps_as, tokens, graphs)):
                graphs.keeps, graphs.kept = True, nbytes
            graphs.capture(results)
        except NotCaptured as error:
            known.drop(str(error))
            return None
        if graphs.kept:
            self._kept_in[self._pass.number] += graphs.kept
        self._tell()
        return graphs

    def _layer_of(self, function: functools.partial) -> tuple[nn.Module, Callable]:
        """The layer that a checkpoint is to run by `function`, and its forward, which takes the layer first."""
        if function.args:
            return function.args[0], function.func
        layer: nn.Module = function.func.__self__  # type: ignore[attr-defined]  # a call, up to transformers 5.22
        return layer, self._forwards[layer][1].called

    def _may_keep_of(self, name: str, tokens: int, graphs: LayerGraphs) -> int:
        """Bytes that a checkpointed layer is to keep for its backward; 0 if they do not fit."""
        assert self._kept is not None
        number = self._pass.number
        nbytes, beside = graphs.bytes_to_keep(), self._kept_in[number]
        # The other half of what graphs may take is for their temporary memory, and for layers that keep nothing.
        fits = beside + nbytes <= self._captures.limit // 2
        fits = fits and self._kept.graph_may_keep(name, tokens, nbytes, beside, self._taken())
        return nbytes if fits and self._pass.claims(number) else 0

    def _gains_by(self, graphs: LayerGraphs, tokens: int) -> bool:
        """Whether a call of that many tokens gains by graphs: without them, it does not keep the device busy."""
        differentiated = torch.is_grad_enabled()
        if not self.gains.is_timed(tokens, differentiated):
            self.gains.note(tokens, differentiated, graphs.keeps_device_busy())
        return not self.gains.is_busy(tokens, differentiated)

    def _copy_of(self, source: torch.Tensor, room: Room | None) -> Held:
        for held in self._held:
            if held.holds(source) and held.room == room:
                return held
        held = Held(source, room)
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
            gradients = [*map(self._gradient_of, range(len(parameters)), parameters)]
            buffers = self._shared[key] = Buffers(hidden, gradients, self._memory)
        return buffers

    def _gradient_of(self, place: int, parameter: nn.Parameter) -> torch.Tensor:
        """The tensor to which graphs write the gradient of a parameter: the same one for all kinds of calls."""
        key = (place, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        found = self._gradients.get(key)
        if found is None:
            found = self._gradients[key] = torch.empty_like(parameter.data)
        return found


class _Forward:
    """Stands for the forward of a layer, and has `run` call it where no checkpoint does: without gradients, none does.

    Args:
        layer: The layer, with its own forward.
        run: Runs ``function(*args)``.
    """

    def __init__(self, layer: nn.Module, run: Callable[..., Any]) -> None:
        self._layer, self._own, self._run = layer, layer.forward, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the layer's own forward."""
        if torch.is_grad_enabled() and self._layer.gradient_checkpointing:
            return self._own(*args, **kwargs)
        return self._run(functools.partial(self.called, self._layer, **kwargs), *args)

    def called(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The result of the layer's own forward, without graphs."""
        return self._own(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable, tuple[Callable]]:
        return itself, (self._own,)  # a copy of the layer has its own forward


def _plain(function: Callable, *args: Any) -> Any:
    """Runs a layer that is not checkpointed."""
    return function(*args)


def _called(
    forward: Callable, layer: nn.Module, arguments: Arguments, hidden: torch.Tensor, replaced: dict[int, torch.Tensor]
) -> tuple[torch.Tensor, dict[str | int, Any] | None]:
    args, kwargs, store = nested(arguments, replaced)
    before = {} if store is None else dict(store)
    result = forward(layer, hidden, *args, **kwargs)
    after = {} if store is None else dict(store)
    added = {name: after.pop(name) for name in [*after] if name not in before}
    is_as_it_was = after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
    return result, added if is_as_it_was else None


def _as_now(kind: str, run: Layer) -> Layer:
    """`run` under the current autocast, without its cache of weights, and with the current backends of attention.

    Args:
        kind: The type of the device.
        run: Runs a layer. A backward, which may need the layer's results again, is called under other settings.
    """
    enabled, dtype, backends = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), attention_backends()

    def run_so(hidden: torch.Tensor, replaced: dict[int, torch.Tensor]) -> Any:
        with torch.autocast(kind, dtype, enabled, cache_enabled=False), sdpa_kernel(backends):
            return run(hidden, replaced)

    return run_so
