"""The forwards of norms, for the formulas that `norms.py` proves, and the result that one does not compute at once.

The norms of queries and keys return a [`PendingNorm`]. The rotary function, given two, normalises and rotates in one
pass; for any other function the norm is computed, once, with the values and the graph that it would have had.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.hooks import is_call_hooked
from liger_trainer.head.recorded import Pending
from liger_trainer.kernels.norms.gated_rms_norm import gated_rms_norm
from liger_trainer.kernels.norms.layer_norm import layer_norm
from liger_trainer.kernels.norms.rms_norm import rms_norm
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.patching.as_written import Precisions, runs_ours
from liger_trainer.patching.binding import call_like
from liger_trainer.patching.fp8 import is_long_enough

# The norms of the attentions that are running. The call that adds an entry removes it, so threads that run different
# layers (when autograd recomputes checkpoints) do not interfere.
_awaited: list[nn.Module] = []


class PendingNorm(Pending):
    """RMSNorm of `x`, not yet computed.

    Args:
        x: The norm's input, or a view of it after the result was transposed.
        weight: The norm's weight.
        options: epsilon, offset and casting, as [`liger_trainer.functional.rms_norm`] takes them.
        value: Computes the result if it is not simply the norm of `x`.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        options: tuple[float, float, str],
        value: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.x, self.weight, self.options = x, weight, options
        self._value = value
        self._result: torch.Tensor | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the result has not been computed yet."""
        return self._result is None

    def build(self, for_write: bool = False) -> torch.Tensor:
        """The result, the same tensor at every call."""
        if self._result is None:
            self._result = rms_norm(self.x, self.weight, *self.options) if self._value is None else self._value()
        return self._result

    def transpose(self, dim0: int, dim1: int) -> Any:
        """The transposed result; not computed either if the normalised dimension stays the last."""
        last = self.x.dim() - 1
        if not self.is_pending or last in (dim0 % (last + 1), dim1 % (last + 1)):
            return self.build().transpose(dim0, dim1)
        view = self.x.transpose(dim0, dim1)
        return PendingNorm(view, self.weight, self.options, lambda: self.build().transpose(dim0, dim1))


def may_pend(module: nn.Module) -> bool:
    """Whether `module` may return a [`PendingNorm`]: its attention expects one, and there are no hooks.

    Hooks would get the result, and may gather and free parameters around the call (FSDP2, ZeRO-3).
    """
    return any(awaited is module for awaited in _awaited) and not is_call_hooked(module)


@functools.cache
def forward_awaiting(forward: Callable, names: tuple[str, ...]) -> Callable:
    """`forward` of a module whose children `names` may return a [`PendingNorm`] meanwhile."""

    @functools.wraps(forward)
    def awaiting(self, *args, **kwargs):
        children = [getattr(self, name) for name in names]
        _awaited.extend(children)
        try:
            return forward(self, *args, **kwargs)
        finally:
            for child in children:
                _awaited.remove(child)

    return awaiting


# ---------------------------------------------------------------------------------------------------------------------
# Forwards
# ---------------------------------------------------------------------------------------------------------------------


def _covers(x: torch.Tensor, others: Iterable[torch.Tensor | None], mixed: bool, precisions: Precisions) -> bool:
    """Whether the proof holds for `x` and these `others`, weights and biases of its last dimensions, or its gate.

    The original runs for DTensors, other shapes and a missing weight.
    """
    if is_dtensor(x) or not runs_ours(x, precisions):
        return False
    for other in others:
        if other is None or is_dtensor(other) or not (mixed or other.dtype == x.dtype):
            return False
        if x.shape[x.dim() - other.dim() :] != other.shape:
            return False
    return True


@functools.cache
def rms_norm_forward(
    original: Callable,
    argument: str,
    eps: str,
    offset: float,
    casting: str,
    weighted: bool,
    *,
    mixed: bool,
    precisions: Precisions,
    pending: bool = False,
    casts: bool = False,
) -> Callable:
    """A forward for one kind of RMSNorm; the same function for equal arguments.

    With a weight, its attributes `pending` and `casting` make the forward that may pend, and the one that casts.

    Args:
        original: The class's forward, which runs for inputs that the proof does not cover.
        argument: Name of the forward's argument.
        eps: Name of the attribute that holds epsilon.
        offset: Added to the weight.
        casting: Where the result is rounded; see [`liger_trainer.functional.rms_norm`].
        weighted: Whether the module has a weight.
        mixed: Whether input and weight may differ in dtype.
        precisions: Where the proof holds.
        pending: Return a [`PendingNorm`] where [`may_pend`] says so.
        casts: Cast the result to fp8 as well, if linear layers in fp8 take as many rows.
    """

    def forward(self, hidden_states):
        weight = self.weight if weighted else None
        if not _covers(hidden_states, (weight,) if weighted else (), mixed, precisions):
            return original(self, hidden_states)
        if pending and weight is not None and may_pend(self):
            return PendingNorm(hidden_states, weight, (getattr(self, eps), offset, casting))
        fp8 = casts and is_long_enough(hidden_states)
        return rms_norm(hidden_states, weight, getattr(self, eps), offset, casting, fp8)

    if weighted and not pending and not casts:
        again = functools.partial(
            rms_norm_forward, original, argument, eps, offset, casting, weighted, mixed=mixed, precisions=precisions
        )
        forward.pending = functools.partial(again, pending=True)  # type: ignore[attr-defined]
        forward.casting = functools.partial(again, casts=True)  # type: ignore[attr-defined]
    return call_like(forward, argument)


@functools.cache
def layer_norm_forward(*, mixed: bool, precisions: Precisions) -> Callable:
    """A forward for `nn.LayerNorm`; see [`rms_norm_forward`] for the arguments."""

    def forward(self, input):
        given = [each for each in (self.weight, self.bias) if each is not None]
        if not _covers(input, given, mixed, precisions):
            return nn.LayerNorm.forward(self, input)
        return layer_norm(input, self.weight, self.bias, self.eps)

    return forward


@functools.cache
def own_layer_norm_forward(
    original: Callable,
    argument: str,
    eps: str,
    weighted: bool,
    biased: bool,
    heads: bool,
    *,
    mixed: bool,
    precisions: Precisions,
) -> Callable:
    """A forward for a LayerNorm whose result has the dtype of its input.

    Args:
        original: As in [`rms_norm_forward`], like `argument`, `eps`, `weighted`, `mixed` and `precisions`.
        argument: See `original`.
        eps: See `original`.
        weighted: See `original`.
        biased: Whether the module has a bias.
        heads: Whether weight and bias are of shape (heads, head_dim), one row for each head of an attention.
        mixed: See `original`.
        precisions: See `original`.
    """

    def forward(self, hidden_states):
        weight, bias = self.weight if weighted else None, self.bias if biased else None
        given = (*((weight,) if weighted else ()), *((bias,) if biased else ()))
        if not _covers(hidden_states, given, mixed, precisions):
            return original(self, hidden_states)
        if not heads:
            return layer_norm(hidden_states, weight, bias, getattr(self, eps), None, hidden_states.dtype)
        return _layer_norm_of_heads(hidden_states, weight, bias, getattr(self, eps))

    return call_like(forward, argument)


def _layer_norm_of_heads(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """LayerNorm of `x`, (..., heads, head_dim), in its dtype, with weight and bias of shape (heads, head_dim)."""
    weight, bias = (None if each is None else each.flatten() for each in (weight, bias))
    return layer_norm(x.flatten(-2), weight, bias, eps, x.shape[-1], x.dtype).unflatten(-1, x.shape[-2:])


@functools.cache
def gated_rms_norm_forward(
    original: Callable,
    arguments: tuple[str, str],
    eps: str,
    size: int,
    group_size: int,
    activation: str,
    gate_first: bool,
    casting: str,
    *,
    mixed: bool,
    precisions: Precisions,
) -> Callable:
    """A forward for one kind of RMSNorm with a gate; without a gate, the class's own runs.

    Args:
        original: As in [`rms_norm_forward`], like `eps`, `mixed` and `precisions`.
        arguments: Names of the forward's arguments.
        eps: See `original`.
        size: Elements of a row.
        group_size: Elements of a group in a row.
        activation: The gate's; see [`liger_trainer.functional.gated_rms_norm`] for this and the next.
        gate_first: Whether the norm is of the product.
        casting: Where the result is rounded.
        mixed: See `original`.
        precisions: See `original`.
    """

    def forward(self, hidden_states, gate=None):
        weight = self.weight
        if (
            not isinstance(gate, torch.Tensor)
            or gate.shape != hidden_states.shape
            or hidden_states.shape[-1] != size
            or not _covers(hidden_states, (gate, weight), mixed, precisions)
        ):
            return original(self, hidden_states, gate)
        groups = None if group_size == size else group_size
        return gated_rms_norm(hidden_states, gate, weight, getattr(self, eps), groups, activation, gate_first, casting)

    default = [*inspect.signature(original).parameters.values()][2].default
    forward.__defaults__ = None if default is inspect.Parameter.empty else (default,)
    return call_like(forward, *arguments)
