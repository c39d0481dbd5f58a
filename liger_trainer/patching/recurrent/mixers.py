"""The forward of a layer that mixes tokens by a recurrence or a short convolution, around what each kind computes.

All of it is ours but the projections and the norm, which are called as modules: adapters, quantised weights and hooks
on them keep working. The class's own forward runs where ours does not compute what it does: with a cache, in float64,
on sharded weights, and where another library moves the weights of the convolution to the device for one call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from liger_trainer.compat.accelerate import OFFLOADED_WEIGHTS
from liger_trainer.compat.private import available
from liger_trainer.compat.rebound import without_packages
from liger_trainer.compat.transformers import CONVOLUTIONS
from liger_trainer.head.step import current_step
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.documents import ROWS, Documents
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.patching.as_written import Precisions, runs_ours
from liger_trainer.patching.model_forward import CACHE_NAMES
from liger_trainer.patching.recurrent.documents import BOUNDARIES, KEYWORD

Compute = Callable[[Any, torch.Tensor, "torch.Tensor | None", Documents], Any]
"""What a kind of layer computes of itself, the hidden states (batch, length, size), the padding mask (batch, length) if
there is one, and the documents."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MASKS = ("attention_mask", "conv_mask")


@functools.cache
def mixer_forward(
    original: Callable, compute: Compute, conv: str | None, precisions: Precisions, biased: bool
) -> Callable:
    """The forward of a layer.

    Args:
        original: The class's forward.
        compute: The function that runs instead.
        conv: Name of the child whose weights are read, not called; None if there is none.
        precisions: Where the proof holds.
        biased: Whether the convolution had a bias in the proof.
    """
    names, mask = arguments(original)[1:], mask_name(original)
    assert mask is not None

    def forward(self, hidden_states, *args, **kwargs):
        if KEYWORD not in kwargs and not torch.compiler.is_compiling():
            made = current_step().documents
            _say(self, None if made is None else made(), "its model does not tell it of them")
        documents = kwargs.pop(KEYWORD, None)
        given = {**dict(zip(names, args)), **kwargs}
        reason = _reason_to_step_aside(self, hidden_states, given, documents, conv, precisions, biased)
        if reason:
            _say(self, documents, f"{reason}, so its class's own forward runs")
            return original(self, hidden_states, *args, **kwargs)
        if documents is None:
            return compute(self, hidden_states, given.get(mask), ROWS)
        return compute(self, hidden_states, None, documents)

    forward.precisions = precisions  # type: ignore[attr-defined]
    return forward


def precisions_of(forward: Any) -> Precisions:
    """Where the proof of a [`mixer_forward`] holds."""
    return forward.precisions


def arguments(forward: Callable) -> tuple[str, ...]:
    """The names of the arguments of a forward that may be given by their places, besides `self`."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def mask_name(forward: Callable) -> str | None:
    """The name of the padding mask among the arguments of a forward, if there is one."""
    return next((each for each in arguments(forward) if each in _MASKS), None)


def masked(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`x` (batch, length, size) with zeros where the mask (batch, length) has any."""
    return x if mask is None else (x * mask[:, :, None]).to(x.dtype)


def _reason_to_step_aside(
    module: nn.Module,
    x: torch.Tensor,
    given: Mapping[str, Any],
    documents: Documents | None,
    conv: str | None,
    precisions: Precisions,
    biased: bool,
) -> str:
    if documents is None and any(given.get(name) is not None for name in BOUNDARIES):
        return "its documents are not known"
    # A row of several documents has no next token, so nobody reads a cache of it.
    if (documents is None or documents.padding) and any(given.get(name) is not None for name in CACHE_NAMES):
        return "it has a cache"
    if x.dtype not in _DTYPES or is_dtensor(x) or x.dim() != 3:
        return f"its input is {x.dtype}"
    if not runs_ours(x, precisions):
        return "it was not proved in this precision"
    held = [*module._parameters.values()]
    if conv is not None:
        convolution: Any = getattr(module, conv)
        if _knows_offloading() and hasattr(convolution, "_hf_hook"):
            return "the weights of its convolution are offloaded"
        if (convolution.bias is not None) != biased:
            return "its convolution has gained or lost its bias since the proof"
        held += [convolution.weight, convolution.bias]
    if any(is_dtensor(each) for each in held if each is not None):
        return "its weights are sharded"
    return ""


@torch.compiler.assume_constant_result  # a compiler would look for the names itself
def _knows_offloading() -> bool:
    return available(OFFLOADED_WEIGHTS)


def _say(module: nn.Module, documents: Documents | None, reason: str) -> None:
    """Says why a layer mixes the documents of a row, if there are several in it."""
    if documents is None or documents.padding:
        return
    message = f"{type(module).__name__} mixes the documents of a packed row: {reason}."
    if current_step().plan_of is not None:
        raise RuntimeError(f"{message} Set `padding_free` to false.")
    warn_once(f"mixes {type(module).__name__} {reason}", f"{message} (Shown once.)")


def torch_forward(module: nn.Module) -> Callable | None:
    """The forward of the class of `module`, which calls no functions of packages; None if it cannot be told."""
    return without_packages(type(module).forward) if available(CONVOLUTIONS) else None


def conv_weight(conv: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight (channels, taps) and the bias of a convolution of each channel by itself.

    Autocast would cast them to `dtype`, that of what it convolves.
    """
    weight, bias = conv.weight.flatten(1), conv.bias
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def is_depthwise(module: Any) -> TypeGuard[nn.Conv1d]:
    """Whether `module` is a causal convolution of each channel by itself, of the kind that models write."""
    return (
        isinstance(module, nn.Conv1d)
        and module.groups == module.in_channels == module.out_channels > 1
        and module.kernel_size[0] > 1
        and module.stride == module.dilation == (1,)
        and module.padding == (module.kernel_size[0] - 1,)
    )
