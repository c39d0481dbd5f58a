"""Logits that are not built until a function needs them.

A `DeferredLogits` has the shape `(..., V)`, dtype and device of the logits, but no storage. It refers to the hidden
states and the head (`lm_head.py`), and records the operations on the logits (`recorded.py`, `recorded_ops.py`).
`F.cross_entropy` of it runs as one linear cross entropy (`fused_loss.py`). Any other function gets the real logits,
which are built once, with the same values and gradients.

Gradients flow in three ways, all exact. The fused loss and the built logits are functions of the hidden states and the
head's parameters. Code that bypasses ``__torch_function__`` (an ``autograd.Function``, a C++ extension) finds the
autograd node of the wrapper itself, whose backward recomputes the logits.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import DEFERRED_LOGITS
from liger_trainer.head.chunked_module import ModuleCall, chunked_rows
from liger_trainer.head.lm_head import Recorded, through_owner, version_of
from liger_trainer.head.recorded import (
    ComputedOnUse,
    RecordedChain,
    build,
    call_built,
    own_function,
    tree_leaves,
    tree_map,
)
from liger_trainer.head.warn_once import warn_once

require(DEFERRED_LOGITS)
unwrapped = torch._C.DisableTorchFunctionSubclass
"""A context in which functions act on the wrapper itself, without our ``__torch_function__``."""

RECORDERS: dict[Callable, Callable] = {}
"""Functions that leave the logits deferred; a recorder returns NotImplemented if they have to be built after all."""

METADATA: dict[Callable, Callable] = {}
"""Functions that only need the metadata, also after the logits are built, and what runs instead of each."""


class _LogitsNode(torch.autograd.Function):
    """The wrapper's own autograd node, for code that bypasses ``__torch_function__``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, holder: list[DeferredLogits], *parameters: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # Not save_for_backward: offloading hooks would copy tensors that the fused loss never reads.
        ctx.hidden, ctx.parameters, ctx.recorded = hidden, parameters, holder[0].recorded
        return holder[0]  # not an argument itself, of which this would be a view

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needed)
        ctx.recorded.check()
        hidden = ctx.hidden.detach().requires_grad_(needed[0])
        with torch.enable_grad():
            logits = ctx.recorded.chain.replay(ctx.recorded.call.local_product(hidden))
        inputs = (hidden, None, *ctx.parameters)
        wanted = [x for x, need in zip(inputs, needed) if need]
        found = iter(torch.autograd.grad(logits, wanted, build(grad), allow_unused=True))
        return tuple(next(found) if need else None for need in needed)


class _BuiltFromNode(torch.autograd.Function):
    """Builds the logits of a wrapper that another Function returned, keeping that Function's graph."""

    @staticmethod
    def forward(ctx: Any, deferred: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return deferred.values_without_grad().clone()  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


class DeferredLogits(ComputedOnUse, torch.Tensor):
    """Logits `(..., V)` that are recorded, not built; see the module's docstring.

    Attributes:
        recorded: Hidden states, head and chain.
        meta: The logits on the meta device, with the shape, strides and dtype of the real ones.
        tracked: Whether gradients flow to the hidden states and the head through `recorded`.
        value: The built logits; once they exist, every function runs on them.
        value_no_grad: Logits built under `torch.no_grad`, without a graph.
        parent: The logits that this is a view of; once built, the two share memory.
        replay_view: The view, as a function of the parent's built logits.
    """

    recorded: Recorded
    meta: torch.Tensor
    tracked: bool
    value: torch.Tensor | None
    value_no_grad: torch.Tensor | None
    parent: DeferredLogits | None
    replay_view: Callable[[torch.Tensor], torch.Tensor]  # only where there is a parent
    views: list[weakref.ref[DeferredLogits]]

    @staticmethod
    def create(recorded: Recorded, meta: torch.Tensor, detached: bool = False) -> DeferredLogits:
        """Deferred logits `(..., V)`, unless `detached` with a graph; `meta` is like them, on the meta device."""
        deferred = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=recorded.hidden.device
        )
        deferred.recorded, deferred.meta, deferred.tracked = recorded, meta, False
        deferred.value = deferred.value_no_grad = deferred.parent = None
        deferred.views = []
        if detached or not torch.is_grad_enabled():
            return deferred
        deferred = _LogitsNode.apply(recorded.hidden, [deferred], *recorded.call.parameters)
        with unwrapped():
            deferred.tracked = deferred.requires_grad
        return deferred

    def derive(
        self,
        meta: torch.Tensor,
        hidden: torch.Tensor | None = None,
        chain: RecordedChain | None = None,
        detached: bool = False,
    ) -> DeferredLogits:
        """Logits derived from these, with other `hidden` states (taken from theirs) or another `chain`.

        No gradient flows back if these have none, or with `detached`.
        """
        origin = self.recorded
        hidden = origin.hidden if hidden is None else hidden
        detached = detached or not self.has_graph
        version = version_of(hidden)
        if version is not None and origin.version is not None:  # a change of their hidden states is a change of these
            version -= (version_of(origin.hidden) or 0) - origin.version
        recorded = Recorded(origin.call, hidden.detach() if detached else hidden, chain or origin.chain, version)
        return DeferredLogits.create(recorded, meta, detached)

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """``func(*args, **kwargs)``: recorded if it can be, else on the built logits."""
        kwargs = kwargs or {}
        if func in METADATA:
            with unwrapped():
                return METADATA[func](*args, **kwargs)
        recorder = RECORDERS.get(func) or RECORDERS.get(own_function(func))
        if recorder is not None and args and isinstance(args[0], cls):
            logits = recordable(args[0])
            result = NotImplemented if logits is None else recorder(logits, *args[1:], **kwargs)
            if result is not NotImplemented:
                return result
        return _on_built_logits(func, args, kwargs)

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Reached from C++ only, below autograd, which has recorded the wrapper's own node.
        mutates = func._schema.is_mutable
        unwrap = lambda x: x.values_without_grad(mutates) if isinstance(x, cls) else x  # noqa: E731
        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        built = "" if self.value is None else ", built"
        return f"DeferredLogits(shape={tuple(self.meta.shape)}, dtype={self.meta.dtype}{built})"

    @property
    def has_graph(self) -> bool:
        """`requires_grad` of the wrapper itself."""
        with unwrapped():
            return self.requires_grad

    def build(self, for_write: bool = False) -> torch.Tensor:
        """The real logits, with the graph of the native ones; the same tensor at every call.

        Args:
            for_write: Whether they will be changed in place, which all views must see.
        """
        if self.value is None:
            if not torch.is_grad_enabled() and self.has_graph and not for_write:
                return self.values_without_grad()
            with torch.set_grad_enabled(self.has_graph):
                if self.has_graph and not self.tracked:
                    ours = without_owner(self)
                    self.value = _BuiltFromNode.apply(self) if ours is self else ours.build(for_write)
                elif for_write:
                    self._build_family()
                else:
                    parent = self._parent_to_build
                    self.value = self._compute() if parent is None else self.replay_view(parent.build())
        elif for_write:
            self._build_family()
        assert self.value is not None
        return self.value

    @contextlib.contextmanager
    def operands(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Hidden states `(..., H)`, weight `(V, H)` and bias `(V,)` of the deferred logits of a linear head.

        For a fused head they are in the dtype of its call. They have no graph if the logits have none. If tensor
        parallel processes share the head, weight and bias are the rows of this process. Autocast is off inside.

        Raises:
            RuntimeError: if hidden states or parameters have been changed in place since the call.
        """
        recorded = self.recorded
        call = recorded.call
        assert not isinstance(call, ModuleCall)
        recorded.check()
        weight, bias = call.gathered()
        hidden = recorded.hidden
        if not (self.tracked or self.has_graph):
            hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
        if call.fused:
            hidden, weight = hidden.to(call.dtype), weight.to(call.dtype)
            bias = None if bias is None else bias.to(call.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            yield hidden, weight, bias

    def values_without_grad(self, for_write: bool = False) -> torch.Tensor:
        """The values of the logits without a graph, which reading a metric should not keep alive."""
        if for_write and self.value is None:
            with torch.set_grad_enabled(self.tracked):
                self.build(for_write=True)
        if self.value is not None:
            return self.value.detach()
        if self.value_no_grad is None:
            with torch.no_grad():
                known = None if self.parent is None else self.parent.value_no_grad
                self.value_no_grad = self._compute() if known is None else self.replay_view(known)
        return self.value_no_grad

    def _compute(self) -> torch.Tensor:
        recorded = self.recorded
        if self.meta.shape[-1] < recorded.call.vocab_size:  # a slice of the vocabulary, which no gradient reaches
            return chunked_rows(self, lambda rows: [rows.clone()])[0]
        recorded.check()
        logits = recorded.call.gathered_product()(recorded.hidden)
        return recorded.chain.replay(through_owner(recorded.call.head, logits))

    @property
    def _parent_to_build(self) -> DeferredLogits | None:
        """The parent, if these are built as a view of it; a slice of logits that are not built is computed alone."""
        parent = self.parent
        if parent is None or parent.value is not None:
            return parent
        is_whole = parent.meta.numel() == self.meta.numel() and parent.has_graph == self.has_graph
        return parent if is_whole else None

    def _build_family(self) -> None:
        """Builds everything that shares memory with this, so that all see a change in place."""
        root = self
        while root.parent is not None:
            root = root.parent
        fresh = root.value is None
        if root.value is None:
            root.value = root._compute()
        root._build_views(root.value, fresh)

    def _build_views(self, value: torch.Tensor, again: bool) -> None:
        """Builds the views of these logits, whose value is `value`; with `again` also those that are built."""
        for child in self._live_views:
            if child.value is None or again:
                child.value = child.replay_view(value)
            child._build_views(child.value, again)

    @property
    def _live_views(self) -> list[DeferredLogits]:
        return [view for view in (reference() for reference in self.views) if view is not None]

    def add_view(self, child: DeferredLogits, replay_view: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        """Registers `child` as the view ``replay_view(self)``."""
        child.parent, child.replay_view = self, replay_view
        self.views = [weakref.ref(view) for view in (*self._live_views, child)]
        return child

    @property
    def shares_memory(self) -> bool:
        """Whether another tensor would see a change in place."""
        return self.parent is not None or bool(self._live_views)


def recordable(logits: Any) -> DeferredLogits | None:
    """Deferred `logits` on which operations can be recorded, as the head returned them; else None.

    None for logits that are built, and for those that another Function than ZeRO-3's returned.
    """
    if not isinstance(logits, DeferredLogits):
        return None
    if not logits.tracked:
        logits = without_owner(logits)
    return logits if logits.value is None and (logits.tracked or not logits.has_graph) else None


def without_owner(logits: DeferredLogits) -> DeferredLogits:
    """Deferred `logits` as the head returned them, without the Function that ZeRO-3's hook has applied to them.

    That Function is the identity and gathers the head's weight for the backward; `through_owner` applies it where the
    gradients really pass. Others are returned as they are.
    """
    if logits.tracked or logits.parent is None:
        return logits
    if not hasattr(logits.recorded.call.head, "pre_bwd_fn"):
        return logits
    with unwrapped():
        node = type(logits.grad_fn).__name__
    return logits.parent if node == "PreBackwardFunctionForModuleBackward" else logits


def _on_built_logits(func: Callable, args: tuple, kwargs: dict) -> Any:
    """``func(*args, **kwargs)`` on the real logits."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    writes = "out" in kwargs or name == "__set__" or _is_in_place(name)
    deferred = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DeferredLogits)]
    for logits in deferred:
        _announce(name, logits)
    return call_built(func, args, kwargs, writes)


def _is_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
        )
    return name.endswith("_")


def _announce(name: str, logits: DeferredLogits) -> None:
    """Warns once for each function, in training, that the logits are built for it."""
    if logits.value is not None or not logits.has_graph or not torch.is_grad_enabled():
        return
    if not logits.recorded.call.head.training:
        return
    warn_once(
        name,
        f"`{name}` needs the logits, so all {tuple(logits.meta.shape)} of them were built and the fused cross entropy "
        "is not used for them. The result is right, but takes as much memory as unfused training. (Shown once.)",
    )
