"""The forwards of norms, for the formulas that `norms.py` proves."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import nn

from liger_trainer.kernels.norms.gated_rms_norm import gated_rms_norm
from liger_trainer.kernels.norms.layer_norm import layer_norm
from liger_trainer.kernels.norms.rms_norm import rms_norm
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.patching.as_written import serves_as_written
from liger_trainer.patching.binding import call_like
from liger_trainer.patching.fp8 import is_long_enough
from liger_trainer.patching.pending_norm import PendingNorm, may_pend
from liger_trainer.patching.probe import Precisions


def _plain(mixed: bool, precisions: Precisions, x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the kernel is proved equal for such tensors; DTensors run the original."""
    given = [other for other in others if other is not None]
    if is_dtensor(x) or any(map(is_dtensor, given)):
        return False
    if not mixed and any(other.dtype != x.dtype for other in given):
        return False
    return precisions.cover(x)


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
        if (
            serves_as_written(hidden_states)
            or not _along(hidden_states, weight, weighted)
            or not _plain(mixed, precisions, hidden_states, weight)
        ):
            return original(self, hidden_states)
        if pending and weight is not None and may_pend(self):
            return PendingNorm(hidden_states, weight, (getattr(self, eps), offset, casting))
        fp8 = casts and is_long_enough(hidden_states)
        return rms_norm(hidden_states, weight, getattr(self, eps), offset, casting, fp8)

    if weighted:
        options = (original, argument, eps, offset, casting, weighted)
        forward.rms_norm_options = options, {"mixed": mixed, "precisions": precisions}  # type: ignore[attr-defined]
    return call_like(forward, argument)


def pending_rms_norm_forward(forward: Callable) -> Callable:
    """The forward that may return a [`PendingNorm`], for one of [`rms_norm_forward`] with a weight."""
    options, cases = forward.rms_norm_options  # type: ignore[attr-defined]
    return rms_norm_forward(*options, **cases, pending=True)


def casting_rms_norm_forward(forward: Callable) -> Callable:
    """The forward that also casts its result to fp8, for one of [`rms_norm_forward`] with a weight."""
    options, cases = forward.rms_norm_options  # type: ignore[attr-defined]
    return rms_norm_forward(*options, **cases, casts=True)


@functools.cache
def layer_norm_forward(*, mixed: bool, precisions: Precisions) -> Callable:
    """A forward for `nn.LayerNorm`; see [`rms_norm_forward`] for the arguments."""

    def forward(self, input):
        if serves_as_written(input) or not _plain(mixed, precisions, input, self.weight, self.bias):
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
        if (
            serves_as_written(hidden_states)
            or not _along(hidden_states, weight, weighted)
            or not _along(hidden_states, bias, biased)
            or not _plain(mixed, precisions, hidden_states, weight, bias)
        ):
            return original(self, hidden_states)
        if not heads:
            return layer_norm(hidden_states, weight, bias, getattr(self, eps), None, hidden_states.dtype)
        return _layer_norm_of_heads(hidden_states, weight, bias, getattr(self, eps))

    return call_like(forward, argument)


def _along(x: torch.Tensor, parameter: torch.Tensor | None, expected: bool) -> bool:
    """Whether `parameter` is as `expected`: of the shape of the last dimensions of `x`, or None."""
    if parameter is None or not expected:
        return parameter is None and not expected
    return x.shape[x.dim() - parameter.dim() :] == parameter.shape


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
            or not _along(hidden_states, weight, True)
            or serves_as_written(hidden_states)
            or gate.shape != hidden_states.shape
            or hidden_states.shape[-1] != size
            or not _plain(mixed, precisions, hidden_states, gate, weight)
        ):
            return original(self, hidden_states, gate)
        groups = None if group_size == size else group_size
        return gated_rms_norm(hidden_states, gate, weight, getattr(self, eps), groups, activation, gate_first, casting)

    default = [*inspect.signature(original).parameters.values()][2].default
    forward.__defaults__ = None if default is inspect.Parameter.empty else (default,)
    return call_like(forward, *arguments)
