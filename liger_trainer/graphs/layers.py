"""Layers that run from graphs: their capture, its proof, and the autograd function that replays them.

A checkpointed layer has a graph of its forward, and one that recomputes the forward and differentiates it; between the
two nothing but its input is kept, as without graphs. A layer that is not checkpointed has a graph of each pass, and
what the forward keeps stays in the memory of the graphs until the backward.

What a layer adds to a dict among its arguments is a result beside the hidden states. Tensors among its arguments may
have gradients, as the hidden states do: keys that an earlier layer has put into the dict, for instance.

A graph draws the random numbers that follow the generator's state at its replay. So a recomputed forward starts from
the state of the first one, and the generator then continues from its own.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import CALLS_OF_LAYERS, COPIES_OF_MANY
from liger_trainer.graphs.calls import Held, LayerState
from liger_trainer.graphs.capture import Captures, Run
from liger_trainer.graphs.memory import Buffers
from liger_trainer.kernels.host_random import HostState

(copy_all,) = require(COPIES_OF_MANY)
tree_flatten, tree_unflatten, *_ = require(CALLS_OF_LAYERS)

Layer = Callable[[torch.Tensor, dict[int, torch.Tensor]], tuple[torch.Tensor, dict[str | int, Any] | None]]
"""Takes hidden states, and tensors that replace some of the layer's fixed ones, by the `id` of the fixed one.

Returns hidden states of the same shape, and what the layer adds to the dict that it is given; None in place of these
additions if it changes the dict in another way.
"""

_NOISE = 4.0  # how far a graph's gradients may be from the layer's, as a multiple of how far two runs of it are apart
_REPEATS = 4  # the most repetitions of the layer's gradients, to see how far they are apart
_TIMED = 3  # timed runs of a layer without a graph
_TRIES = 3  # comparisons of a graph: where the order of a sum seldom changes, one may differ and the next not


class NotCaptured(Exception):
    """A layer cannot be captured, or the results of its graph differ; the message says why."""


class LayerGraphs:
    """The graphs of one layer for one kind of call.

    Args:
        captures: Captures launches.
        layer: The layer, bound to `held` in place of the other tensors of its call.
        state: The state of the layer when it is captured.
        buffers: Tensors that the layer reads and writes.
        held: Copies of the other tensors of the call.
        further: The indices of the tensors in `held` that have a gradient, each tensor once.
        needs_input: Whether the input has a gradient.
        keeps: Whether the forward keeps what the backward needs; otherwise the backward recomputes it.
        captured_in: The number of the forward of the model in which they are captured.

    Attributes:
        failure: Why the backward could not be captured; empty while it is not known to fail.
        kept: Bytes of results that a checkpointed layer keeps here instead of recomputing them.
        spec: How the results of the layer are nested.
    """

    def __init__(
        self,
        captures: Captures,
        layer: Layer,
        state: LayerState,
        buffers: Buffers,
        held: Sequence[Held],
        further: Sequence[int],
        needs_input: bool,
        keeps: bool,
        captured_in: int,
    ) -> None:
        self._captures, self._layer, self.state, self.keeps = captures, layer, state, keeps
        self.captured_in = captured_in
        self.buffers, self._held, self.further, self._needs_input = buffers, held, further, needs_input
        self._results = [buffers.result]
        self.differentiable: list[bool] = []  # which of the results are
        self._given: list[torch.Tensor | None] = []  # the gradients of the results
        self._further_gradients: list[torch.Tensor | None] = []
        self.spec: Any = None
        self._differentiated = torch.is_grad_enabled()
        self._recorded: _Recording | None = None
        self._used: list[bool] = []  # which gradients exist: of the input, of further tensors, then of the parameters
        self._replay_forward: Run | None = None
        self._replay_backward: Run | None = None
        self._draws = False  # random numbers
        self.failure = ""
        self.kept = 0

    @property
    def needs_hidden(self) -> bool:
        """Whether the backward has to be given the input of the forward.

        With several results it always has to: their gradients may be such that it runs without its graph.
        """
        return not self.keeps or self._replay_backward is None or len(self._results) > 1

    def run(
        self, hidden: torch.Tensor, sources: Sequence[torch.Tensor], forward_pass: ForwardPass
    ) -> tuple[torch.Tensor, dict[str | int, Any]]:
        """The layer's result, which autograd differentiates by the graph of the backward, and what it adds to its dict.

        Args:
            hidden: The hidden states, (B, S, H).
            sources: The other tensors of the call.
            forward_pass: This forward of the model.
        """
        if torch.is_grad_enabled():
            further = [sources[place] for place in self.further]
            results = _Replayed.apply(self, sources, forward_pass, hidden, *further, *self.state.trained)
        else:
            results = self.forward(hidden, sources)[0]
        return tree_unflatten([*results], self.spec)

    @torch.no_grad()
    def tried(self, hidden: torch.Tensor, sources: Sequence[torch.Tensor], given: Layer) -> _Tried:
        """Runs the layer as it is, where waiting for the device is an error.

        Args:
            hidden: The hidden states of a call, (B, S, H).
            sources: Its other tensors.
            given: The layer with the documents as they were given, and copies of other tensors.

        Returns:
            The results of the layer, and the state of the generator before them.

        Raises:
            NotCaptured: if it cannot be captured.
        """
        self._take(hidden, sources)
        read = [self.buffers.hidden, *(held.tensor for held in self._held)]
        versions = [each._version for each in read]
        before, of_torch = self._captures.random_state(), torch.get_rng_state()
        of_host = HostState.now()
        self._draws = True  # until it is known that it does not
        with self._drawing_from(before), self.state.put_back() as changed:
            try:
                with self._captures.tried():
                    expected, added = given(self.buffers.hidden, {})
            except RuntimeError as error:
                raise _not_captured(error) from error
            finally:
                draws = not torch.equal(self._captures.random_state(), before)
                draws_on_host = HostState.now() != of_host
                draws_on_host |= hidden.device.type != "cpu" and not torch.equal(torch.get_rng_state(), of_torch)
                if draws_on_host:
                    torch.set_rng_state(of_torch)
                    of_host.restore()
            if what := changed():
                raise NotCaptured(f"it changes its {what}")
        self._draws = draws
        if draws_on_host:
            raise NotCaptured("it draws random numbers on the host")
        if versions != [each._version for each in read]:
            for held in self._held:
                held.forget()
            raise NotCaptured("it changes a tensor that it is given")
        if not isinstance(expected, torch.Tensor) or (expected.shape, expected.dtype) != (hidden.shape, hidden.dtype):
            raise NotCaptured("it returns something other than hidden states")
        results, self.spec = tree_flatten((expected, added))
        if not _are_new(results[1:], [*read, expected]):
            raise NotCaptured("it changes what is in a dict, or adds something other than new tensors")
        return _Tried(results, before)

    def bytes_to_keep(self) -> int:
        """Bytes that graphs of the layer hold from its forward to its backward if they keep what the backward needs.

        To be called after `tried`, since it runs the layer.
        """
        found: dict[int, int] = {}  # by address; `results` holds the tensors, so none is reused

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a result that its own autograd graph holds would never be freed

        random = self._captures.random_state()
        with self._drawing_from(random), self._captures.beside(), saved_tensors_hooks(pack, lambda tensor: tensor):
            _, results = self._recording(hidden := self.buffers.hidden.clone())
        for each in (hidden, *results):
            pack(each)
        for each in (*self.state.tensors, *(held.tensor for held in self._held)):  # these exist in any case
            found.pop(each.untyped_storage().data_ptr(), None)
        return sum(found.values())

    def keeps_device_busy(self) -> bool:
        """Whether the device takes longer than the host for a call and its backward, in most of some trials.

        Raises:
            NotCaptured: if the host waits for the device in the backward.
        """
        busy = 0
        for trial in range(1 + _TIMED):
            with self._drawing_from(self._captures.random_state()):
                try:
                    with self._captures.tried() as was_busy:
                        self._run_eagerly()
                except RuntimeError as error:
                    raise _not_captured(error) from error
            # The first one does not count: it allocates and compiles, so the host takes longer.
            busy += was_busy() if trial else False
        return 2 * busy > _TIMED

    def _run_eagerly(self) -> None:
        """A forward, and what the backward of a checkpointed layer computes."""
        with torch.no_grad():
            first, *_ = self._called(self.buffers.hidden)
        if self._differentiated:
            leaves, results = self._recording(self.buffers.hidden)
            if results[0].requires_grad:
                self._gradients(leaves, results, [first])  # any numbers will do

    @torch.no_grad()
    def capture(self, tried: _Tried) -> None:
        """Captures the forward, and compares its results with the layer's.

        Args:
            tried: The results of the layer itself.

        Raises:
            NotCaptured: if it cannot be captured, or has another result.
        """
        self._results += self.buffers.others("results", tried.results[1:])  # type: ignore[arg-type]  # none is None
        if self._differentiated:
            with self._drawing_from(tried.random), self._captures.beside():
                self._check_leaves(*self._recording(self.buffers.hidden))
        with self._drawing_from(tried.random):
            self._replay_forward = self._captured(self._write_results)
        if self._recorded is not None:
            self.differentiable = [each.requires_grad for each in self._recorded[1]]
        _spoil(self._results)
        with self._drawing_from(tried.random):
            self._replay_forward()
        if not all(map(torch.equal, self._results, tried.results)):
            raise NotCaptured("the result of its graph differs")

    def _check_leaves(self, leaves: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Checks that a graph of the backward would find all gradients.

        Raises:
            NotCaptured: if it would not.
        """
        uses = _uses(results)
        if any(uses[leaf] > 1 for leaf in leaves[1:]):
            raise NotCaptured("it uses twice a tensor whose gradient is summed over layers")
        if uses.keys() - {*leaves, *self.state.leaves}:
            raise NotCaptured("it uses a weight that is not one of its parameters")

    def forward(
        self, hidden: torch.Tensor, sources: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The layer's results, and the generator's state before them; None if the layer draws no random numbers."""
        assert self._replay_forward is not None
        self._take(hidden, sources)
        before = self._captures.random_state() if self._draws else None
        self._replay_forward()
        return [each.clone() for each in self._results], before

    def backward(
        self,
        hidden: torch.Tensor | None,
        sources: Sequence[torch.Tensor],
        random: torch.Tensor | None,
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """The gradients of the input, of further tensors and of the trained parameters; None for those that are unused.

        Args:
            hidden: The input of the forward, where `needs_hidden` asked for it.
            sources: The other tensors of its call.
            random: The state of the generator before the forward, which `forward` returned.
            gradients: The gradients of the results; None for those that nothing has used.
        """
        if hidden is not None:
            self.buffers.hidden.copy_(hidden)
        self._hold(sources)
        first, *others = gradients
        self.buffers.gradient.zero_() if first is None else self.buffers.gradient.copy_(first)
        if self._replay_backward is None:
            self._given = [self.buffers.gradient, *self.buffers.others("gradients of results", others)]
        if [*map(_layout, others)] != [*map(_layout, self._given[1:])]:
            return self._own_gradients(random, self._captures.beside, [self.buffers.gradient, *others])
        for buffer, gradient in zip(self._given[1:], others):
            if buffer is not None and gradient is not None:
                buffer.copy_(gradient)
        if self._replay_backward is None:
            return self._first_backward(random)
        with self._drawing_from(None if self.keeps else random):
            self._replay_backward()
        # Copies, because autograd may still hold these gradients when other layers write to the buffers.
        return [None if gradient is None else gradient.clone() for gradient in self._written()]

    def _first_backward(self, random: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Gradients of the layer itself, with which those of its graph are compared."""
        try:
            expected = self._own_gradients(random, self._captures.tried)
        except RuntimeError as error:
            self.failure = str(_not_captured(error))
            return self._own_gradients(random, self._captures.beside)
        self._further_gradients = self.buffers.others("gradients", expected[1 : 1 + len(self.further)])
        if not all(each is None or each.isfinite().all() for each in expected):
            return expected  # the loss was scaled too far to compare anything; the next backward is compared instead
        try:
            with self._drawing_from(random):
                replay = self._captured(self._write_gradients)
            self._prove(replay, expected, random)
        except NotCaptured as error:
            self.failure = str(error)
        else:
            self._replay_backward = replay
        return expected

    def _prove(self, replay: Run, expected: Sequence[torch.Tensor | None], random: torch.Tensor | None) -> None:
        """Compares gradients of the graph with those of the layer, several times if they differ.

        Raises:
            NotCaptured: if they are further apart than repetitions of the layer's own, each time.
        """
        again = functools.partial(self._own_gradients, random, self._captures.beside)
        reason = ""
        for tried in range(_TRIES):
            with self._drawing_from(random):
                if tried and self.keeps and self._replay_forward is not None:
                    self._replay_forward()  # the last backward has overwritten what the forward kept
                _spoil(self._written())
                replay()
            reason = _beyond_noise(self._written(), again() if tried else expected, again)
            if not reason:
                return
        raise NotCaptured(f"the gradients of its graph differ: {reason}")

    def _captured(self, run: Run) -> Run:
        try:
            return self._captures(run, self.keeps)
        except RuntimeError as error:
            raise _not_captured(error) from error

    @contextlib.contextmanager
    def _drawing_from(self, state: torch.Tensor | None) -> Iterator[None]:
        """In the context, random numbers are those after `state`, if that is given and the layer draws any."""
        if state is None or not self._draws:
            yield
            return
        before = self._captures.random_state()
        self._captures.set_random_state(state)
        try:
            yield
        finally:
            self._captures.set_random_state(before)

    def _take(self, hidden: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        self.buffers.hidden.copy_(hidden)
        self._hold(sources)

    def _hold(self, sources: Sequence[torch.Tensor]) -> None:
        for held, source in zip(self._held, sources):
            held.hold(source)

    def _written(self) -> list[torch.Tensor | None]:
        written = [self.buffers.hidden_gradient, *self._further_gradients, *self.buffers.parameter_gradients]
        return [tensor if used else None for tensor, used in zip(written, self._used)]

    # What is captured

    def _write_results(self) -> None:
        if not self._differentiated:
            copy_all(self._results, self._called(self.buffers.hidden))
            return
        # If the input is kept, a copy of it: other layers write to the buffer before the backward reads it.
        hidden = self.buffers.hidden.clone() if self.keeps else self.buffers.hidden
        leaves, found = self._recording(hidden, checkpointed=not self.keeps)
        copy_all(self._results, [each.detach() for each in found])
        # Nothing reads the results of a checkpointed layer again. All forwards are captured before the first backward,
        # so without this, a result of each layer would occupy memory of the graphs.
        if not self.keeps:
            with torch.enable_grad():
                found = [_WithoutMemory.apply(each) for each in found]
        self._recorded = leaves, found

    def _write_gradients(self) -> None:
        recorded, self._recorded = self._recorded or self._recording(self.buffers.hidden), None
        found = self._gradients(*recorded)
        self._used = [gradient is not None for gradient in found]
        copy_all([each for each in self._written() if each is not None], [each for each in found if each is not None])

    def _own_gradients(
        self,
        random: torch.Tensor | None,
        run: Callable[[], contextlib.AbstractContextManager[Any]],
        given: Sequence[torch.Tensor | None] | None = None,
    ) -> list[torch.Tensor | None]:
        with self._drawing_from(random), run():
            return self._gradients(*self._recording(self.buffers.hidden), given)

    def _recording(self, hidden: torch.Tensor, checkpointed: bool = False) -> _Recording:
        """Leaves with the memory of `hidden` and of the copies, and the layer's results from these leaves.

        With `checkpointed`, the backward recomputes only what it needs, so not the last product.
        """
        with torch.enable_grad(), self.state.with_own_leaves():
            # `data`, so that autograd ignores the writes of other layers: the backward restores the numbers it reads.
            leaf = hidden.data.requires_grad_(self._needs_input)
            further = [self._held[place].tensor.data.requires_grad_() for place in self.further]
            if not checkpointed:
                return [leaf, *further], self._called(leaf, *further)
            results = checkpoint(self._called, leaf, *further, use_reentrant=False, preserve_rng_state=False)
            return [leaf, *further], results

    def _called(self, hidden: torch.Tensor, *further: torch.Tensor) -> list[torch.Tensor]:
        replaced = {id(self._held[place].tensor): each for place, each in zip(self.further, further)}
        return tree_flatten(self._layer(hidden, replaced))[0]

    def _gradients(
        self,
        leaves: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        given: Sequence[torch.Tensor | None] | None = None,
    ) -> list[torch.Tensor | None]:
        pairs = [(one, other) for one, other in zip(results, given or self._given) if other is not None]
        outputs, gradients = map(list, zip(*pairs))
        with self.state.with_own_leaves() as parameters:
            wanted = [*(leaf for leaf in leaves if leaf.requires_grad), *parameters]
            found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
        return [*found] if self._needs_input else [None, *found]


class _WithoutMemory(torch.autograd.Function):
    """Stands for a result: a tensor of the same shape that takes the memory of one number, with the same gradient."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:
        """The tensor, whose values do not matter."""
        return result.new_empty(1).expand(result.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The gradient of the result."""
        return gradient


class _Tried(NamedTuple):
    """Results of the layer itself, and the state of the generator before them."""

    results: list[torch.Tensor]
    random: torch.Tensor


_Recording = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The input and further tensors that have a gradient, and the layer's results with a graph of autograd."""


class ForwardPass:
    """One forward of the model, with its graphs that keep something which the backward has not read yet (`open`).

    Such graphs have to come from one forward, where they were captured in this order: others would overwrite what these
    keep.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.open: set[LayerGraphs] = set()
        self._captured_in: int | None = None

    def claims(self, captured_in: int) -> bool:
        """Whether graphs that keep something may run if they were captured in that forward; the first call decides."""
        if self._captured_in is None:
            self._captured_in = captured_in
        return self._captured_in == captured_in


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        graphs: LayerGraphs,
        sources: Sequence[torch.Tensor],
        forward_pass: ForwardPass,
        hidden: torch.Tensor,
        *further: torch.Tensor,  # tensors of `sources`, then parameters
    ) -> tuple[torch.Tensor, ...]:
        ctx.graphs, ctx.sources, ctx.forward_pass = graphs, sources, forward_pass
        ctx.again = graphs.needs_hidden
        # With `keeps`, parameters too, though none is read again: autograd notices if one is changed in place.
        ctx.save_for_backward(
            *(further if graphs.keeps else further[: len(graphs.further)]), *([hidden] if ctx.again else [])
        )
        if graphs.keeps:
            forward_pass.open.add(graphs)
        results, ctx.random = graphs.forward(hidden, sources)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each, may in zip(results, graphs.differentiable) if not may))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        graphs: LayerGraphs = ctx.graphs
        if graphs.keeps and graphs not in ctx.forward_pass.open:
            raise RuntimeError(
                "A second backward through the same forward needs results that a CUDA graph has overwritten. Set "
                "`cuda_graphs` to false."
            )
        ctx.forward_pass.open.discard(graphs)
        saved = ctx.saved_tensors
        return None, None, None, *graphs.backward(saved[-1] if ctx.again else None, ctx.sources, ctx.random, gradients)


def _layout(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tensor.stride()


def _are_new(added: Sequence[Any], others: Sequence[torch.Tensor]) -> bool:
    """Whether all that a layer adds to its dict are new tensors, for which copies can stand.

    A tensor that is there twice, under two names, would have its gradients summed in another order.
    """
    if not all(type(each) is torch.Tensor and torch.empty_like(each).stride() == each.stride() for each in added):
        return False
    return len({*map(id, added), *map(id, others)}) == len(added) + len({*map(id, others)})


def _spoil(tensors: Sequence[torch.Tensor | None]) -> None:
    """Writes NaN to what a graph is to write, so that a graph which writes nothing is found out."""
    for each in tensors:
        if each is not None:
            each.data.fill_(torch.nan)


def _uses(results: Sequence[torch.Tensor]) -> Counter[torch.Tensor]:
    """The leaves that the results are computed from, and how often each is used.

    Autograd adds up the gradients of all uses of a tensor one by one; a graph adds up those in its layer first.
    """
    nodes = [result.grad_fn for result in results if result.grad_fn is not None]
    seen, uses = {*nodes}, Counter[torch.Tensor]()
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if (leaf := getattr(node, "variable", None)) is not None:
                uses[leaf] += 1
            if node is not None and node not in seen:
                seen.add(node)
                nodes.append(node)
    return uses


def _not_captured(error: RuntimeError) -> NotCaptured:
    return NotCaptured(f"its launches cannot be captured: {str(error).partition(chr(10))[0]}")


def _beyond_noise(
    found: Sequence[torch.Tensor | None],
    expected: Sequence[torch.Tensor | None],
    again: Callable[[], Sequence[torch.Tensor | None]],
) -> str:
    """Why gradients are further from the layer's than its own are from each other; empty if they are not.

    Some backwards add in an order that changes from call to call, such as that of torch's flash attention. Where the
    layer's gradients are the same each time, those of its graph have to be, bit for bit.
    """
    if [each is None for each in found] != [each is None for each in expected]:
        return "other tensors have one"
    error, noise = _largest_difference(found, expected), 0.0
    for _ in range(_REPEATS if error else 0):
        noise = max(noise, _largest_difference(again(), expected))
        if error <= _NOISE * noise < math.inf:
            return ""
    return f"they are {error:.1e} off, and repetitions of the layer's own {noise:.1e} apart" if error else ""


def _largest_difference(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> float:
    """The largest difference between two tensors, in norms of the one in `other`; infinite if one is not finite."""
    largest = 0.0
    for left, right in zip(one, other):
        if left is None or right is None or torch.equal(left, right):
            continue
        difference = (left.double() - right.double()).norm() / right.double().norm()
        largest = max(largest, difference.item()) if difference.isfinite() else math.inf
    return largest
