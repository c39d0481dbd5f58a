"""The last cast of a layer's input to fp8, for the other layers that read the same input: q, k and v, or gate and up.

A cast is given for the very tensor that it was made of, unchanged: the same object and memory, with the version counter
of that time, on the same stream. A view, a copy and another tensor in the same memory are other objects. What the
counter misses, as writes through `.data`, autograd misses in a saved tensor, too. Nothing is shared where contents may
change uncounted as a rule: in compiled code, which reuses memory; in a CUDA graph, which replays; and for inference
tensors, which have no counter.

At most one cast is held, M (K + 4) bytes for an input of (M, K), and none of a tensor that is gone: neither is the
input kept alive, nor are its codes without it.

Shapes: M tokens, K inputs.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import CHANGED_IN_PLACE
from liger_trainer.kernels.fp8.row_cast import cast_rows

require(CHANGED_IN_PLACE)

Cast = tuple[torch.Tensor, torch.Tensor]
"""Codes and scales, as `cast_rows` returns them."""


class _Shared(NamedTuple):
    """A cast, and what it was made of; the reference frees it with its tensor, and is never followed."""

    key: tuple[int, ...]
    reference: weakref.ref[torch.Tensor]
    cast: Cast


_last: _Shared | None = None


def may_share(x: torch.Tensor) -> bool:
    """Whether casts of `x`, or of what is computed from it now, may be shared. Ask outside of operators.

    Inside of one, code that torch compiled cannot be told from any other.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return type(x) is torch.Tensor and not x.is_inference() and not captured


def share(x: torch.Tensor, cast: Cast) -> None:
    """Holds the `cast` of `x`, (..., K), instead of the last one."""
    global _last
    _last = _Shared(_key(x), weakref.ref(x, _free), cast)


def shared(x: torch.Tensor) -> Cast | None:
    """The cast of `x`, (..., K), if it is the last one."""
    last = _last
    return last.cast if last is not None and last.key == _key(x) else None


def drop() -> None:
    """Frees the last cast, before other memory is allocated."""
    global _last
    _last = None


def cast_input(x: torch.Tensor, keep: bool) -> Cast:
    """The cast of a layer's input, (..., K): the last one if it is of `x`, else a new one, which `keep` shares."""
    cast = shared(x)
    if cast is None:
        drop()
        cast = cast_rows(x.reshape(-1, x.shape[-1]))
        if keep:
            share(x, cast)
    return cast


def _key(x: torch.Tensor) -> tuple[int, ...]:
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    return id(x), x.data_ptr(), x._version, stream


def _free(reference: weakref.ref[torch.Tensor]) -> None:
    last = _last
    if last is not None and last.reference is reference:
        drop()
