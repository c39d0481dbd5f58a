"""Embedding: rows of a table, and a gradient that is the same bit for bit in every run.

::

    y[t] = W[ids[t]]                        dW[v] = sum of dy[t] over the t with ids[t] = v, but 0 for the padding id

The backward sorts the ids on the device (stable, so equal ids keep their order) and adds up dy along the runs of equal
ids in fp32, in blocks of 32 tokens: a run inside one block is a row of dW; of a run that crosses blocks the shares are
put aside and a second kernel joins them. Every row is written once and rounded once. No atomics, no host sync, and no
shape that depends on the ids.

Bytes moved in bf16, N tokens, H columns, V rows: forward 4 NH; backward 2 NH to read dy and 2 VH to zero dW, beside the
rows written. `embedding_backward_` adds to a gradient that is there and so never touches the other rows.

Saved for backward: the ids. Memory: dW, and for N tokens 20 N bytes of sorting and NH / 4 bytes of shares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.kernels.parity.embedding_kernels import launch_backward, launch_gather
from liger_trainer.kernels.runtime import graph_is_kept, is_expanded, use_triton

_NO_PADDING = -1


def _contiguous_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


@torch.library.custom_op("liger_trainer::embedding", mutates_args=())
def _embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int) -> torch.Tensor:
    out = weight.new_empty((*ids.shape, weight.shape[1]))
    launch_gather(ids.reshape(-1).contiguous(), _contiguous_columns(weight), out.view(ids.numel(), weight.shape[1]))
    return out


@_embedding.register_fake
def _(ids, weight, padding_idx):
    return weight.new_empty((*ids.shape, weight.shape[1]))


@torch.library.custom_op("liger_trainer::embedding_backward", mutates_args=())
def _embedding_backward(dy: torch.Tensor, ids: torch.Tensor, vocab: int, padding_idx: int) -> torch.Tensor:
    gradient = dy.new_zeros((vocab, dy.shape[-1]))
    _add_rows(gradient, dy, ids, padding_idx, accumulate=False)
    return gradient


@_embedding_backward.register_fake
def _(dy, ids, vocab, padding_idx):
    return dy.new_empty((vocab, dy.shape[-1]))


@torch.library.custom_op("liger_trainer::embedding_backward_", mutates_args=("grad_weight",))
def _embedding_backward_(grad_weight: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> None:
    _add_rows(grad_weight, dy, ids, padding_idx, accumulate=True)


@_embedding_backward_.register_fake
def _(grad_weight, dy, ids, padding_idx):
    return None


def _add_rows(gradient: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor, padding_idx: int, accumulate: bool) -> None:
    dy = _contiguous_columns(dy.reshape(-1, dy.shape[-1]))
    launch_backward(dy, ids.reshape(-1).contiguous(), gradient, padding_idx, accumulate)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ids, weight, ctx.padding_idx = inputs
    ctx.vocab = weight.shape[0]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(ids)


def _backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None
    (ids,) = ctx.saved_tensors
    return None, _embedding_backward(dy, ids, ctx.vocab, ctx.padding_idx), None


_embedding.register_autograd(_backward, setup_context=_setup_context)


def _setup_second_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ids, _, ctx.padding_idx = inputs
    ctx.save_for_backward(ids)


def _second_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    # The gradient of the gradient is a lookup again, of everything but the padding.
    (ids,) = ctx.saved_tensors
    rows = _embedding(ids, gradient, ctx.padding_idx)
    return rows.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0.0), None, None, None


_embedding_backward.register_autograd(_second_backward, setup_context=_setup_second_context)


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, padding_idx: int) -> tuple[torch.Tensor, ...]:
        ctx.padding_idx, ctx.vocab = padding_idx, weight.shape[0]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        return _embedding(ids, weight, padding_idx), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        dy, gradient = gradients
        (ids,) = ctx.saved_tensors
        if dy is None:
            return None, gradient, None
        if gradient is None:
            return None, _embedding_backward(dy, ids, ctx.vocab, ctx.padding_idx), None
        if torch.is_grad_enabled():  # a backward that is recorded
            return None, gradient + _embedding_backward(dy, ids, ctx.vocab, ctx.padding_idx), None
        if torch.compiler.is_compiling() or graph_is_kept() or is_expanded(gradient) or gradient.stride(1) != 1:
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        else:
            gradient = gradient.detach()
        _embedding_backward_(gradient, dy, ids, ctx.padding_idx)
        return None, gradient, None


def _checked(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, name: str = "weight") -> int:
    if weight.dim() != 2:
        raise ValueError(f"`{name}` is {tuple(weight.shape)}; it must be (vocabulary, hidden).")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`ids` is {ids.dtype}; it must be int32 or int64.")
    if ids.device != weight.device:
        raise ValueError(f"`ids` is on {ids.device} and `{name}` on {weight.device}; they must be on one device.")
    vocab = weight.shape[0]
    if padding_idx is None:
        return _NO_PADDING
    if not -vocab <= padding_idx < vocab:
        raise ValueError(f"`padding_idx` is {padding_idx}, but the vocabulary has {vocab} rows.")
    return padding_idx % vocab


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """The rows `ids` of `weight`, with a deterministic backward.

    Args:
        ids: Any shape, int32 or int64. An id outside of the table gives a row of NaN and no gradient where the kernel
            runs, and an IndexError where the reference does.
        weight: (vocabulary, hidden), of any strides. float16, bfloat16 or float32 for the kernel; other dtypes run as
            the reference.
        padding_idx: An id whose row gets no gradient; negative ones count from the end.

    Returns:
        A new tensor, ``(*ids.shape, hidden)``, in `weight`'s dtype.

    Raises:
        ValueError: If `weight` is not two-dimensional, `ids` are no integers or on another device, or `padding_idx` is
            not in the table.
    """
    padding = _checked(ids, weight, padding_idx)
    return _embedding(ids, weight, padding) if use_triton(weight) else embedding_reference(ids, weight, padding_idx)


def tied_embedding(
    ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`embedding` for a model whose head has the same weight: its gradient goes into the head's, not beside it.

    Give the second result to the head in the place of `weight`. The backward then gets the head's gradient and adds the
    embedding's rows to it, in fp32 and rounded once, which saves a second gradient of the table's size and the passes
    over it (in bf16 2 VH bytes of memory and 8 VH bytes moved).

    Args:
        ids: See `embedding`.
        weight: See `embedding`; it has to stay gathered between the two uses (under FSDP2: be in the root's unit).
        padding_idx: See `embedding`; of this id's row the head's gradient stays.

    Returns:
        The embeddings, and `weight` for the head. The gradient that arrives for the latter is written to, if the
        backward does not keep its graph; nothing else may hold on to it, as ``head_weight + other`` would, whose other
        branch receives the same tensor.

    Raises:
        ValueError: As `embedding`.
    """
    padding = _checked(ids, weight, padding_idx)
    if not use_triton(weight):
        return embedding_reference(ids, weight, padding_idx), weight
    embeddings, head_weight = _TiedEmbedding.apply(ids, weight, padding)
    return embeddings, head_weight


def embedding_backward_(
    grad_weight: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor, padding_idx: int | None = None
) -> torch.Tensor:
    """Adds the gradient of `embedding` to `grad_weight`, in place; only the rows of `ids` are touched.

    Args:
        grad_weight: (vocabulary, hidden), with contiguous columns, such as a ``weight.grad``. Each row is added to in
            fp32 and rounded once.
        dy: Gradient of the embeddings, ``(*ids.shape, hidden)``, in any floating dtype.
        ids: See `embedding`.
        padding_idx: See `embedding`.

    Returns:
        `grad_weight`.

    Raises:
        ValueError: As `embedding`, and if the shapes do not fit or `grad_weight` has no contiguous columns.
    """
    padding = _checked(ids, grad_weight, padding_idx, "grad_weight")
    if dy.shape != (*ids.shape, grad_weight.shape[1]):
        raise ValueError(f"`dy` is {tuple(dy.shape)}; it must be {(*ids.shape, grad_weight.shape[1])}.")
    if is_expanded(grad_weight) or (grad_weight.stride(1) != 1 and grad_weight.shape[1] > 1):
        raise ValueError("`grad_weight` is written in place; it needs contiguous columns and memory of its own.")
    if use_triton(grad_weight) and use_triton(dy):
        _embedding_backward_(grad_weight, dy, ids, padding)
        return grad_weight
    wide = torch.promote_types(grad_weight.dtype, torch.float32)
    rows = torch.ops.aten.embedding_dense_backward(dy.to(wide), ids, grad_weight.shape[0], padding, False)
    return grad_weight.copy_(grad_weight.to(wide) + rows)


def embedding_reference(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """`embedding` in plain torch."""
    return F.embedding(ids, weight, padding_idx)
