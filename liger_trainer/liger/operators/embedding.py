"""Embedding: rows of a table, and a gradient that is the same bit for bit in every run.

::

    y[t] = W[ids[t]]                        dW[v] = sum of dy[t] over the t with ids[t] = v, but 0 for the padding id

The backward sorts the ids on the device with a stable sort, so that equal ids keep their order, and sums dy along each
run of equal ids in fp32, in blocks of 32 tokens. A run inside one block gives its row of dW at once; of a run that
crosses blocks, each block stores a partial sum, and a second kernel adds these. Every row is written once and rounded
once. There are no atomics, no host synchronisation and no shapes that depend on the ids.

Bytes moved in bf16 for N tokens, H columns and V rows: forward 4 NH; backward 2 NH to read dy and 2 VH to zero dW, plus
the rows written. `embedding_backward_` adds to an existing gradient and so never touches the other rows.

Saved for backward: the ids. Memory: dW, and for N tokens 20 N bytes to sort and NH / 4 bytes of partial sums.

Shapes: ids (N,), W (V, H), y (N, H).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import as_rows
from liger_trainer.kernels.runtime import (
    cdiv,
    graph_is_kept,
    has_elements,
    is_expanded,
    on_device,
    tl,
    triton,
    use_triton,
)


@triton.jit
def _gather_kernel(ids_ptr, weight_ptr, out_ptr, vocab, cols, weight_stride, BLOCK: tl.constexpr):
    """Copies BLOCK columns of one token's row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < cols
    row = tl.load(ids_ptr + token).to(tl.int64)
    out_row_ptr = out_ptr + token * cols
    if (row >= 0) & (row < vocab):
        values = tl.load(weight_ptr + row * weight_stride + columns, mask=mask)
        tl.store(out_row_ptr + columns, values, mask=mask)
    else:  # an id outside of the table gives NaN, and nothing is read
        tl.store(out_row_ptr + columns, tl.full((BLOCK,), float("nan"), out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _keys_kernel(ids_ptr, keys_ptr, tokens, vocab, padding_idx, BLOCK: tl.constexpr):
    """The ids in 32 bits, which halves the passes of the sort; -1 for ids without a gradient."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < tokens
    ids = tl.load(ids_ptr + offsets, mask=mask, other=-1)
    counts = (ids >= 0) & (ids < vocab) & (ids != padding_idx)
    tl.store(keys_ptr + offsets, tl.where(counts, ids, -1).to(tl.int32), mask=mask)


@triton.jit
def _write_row(grad_row_ptr, columns, total, mask, ACCUMULATE: tl.constexpr):
    """Writes `total` to a row of the gradient, or adds it."""
    if ACCUMULATE:
        total += tl.load(grad_row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_row_ptr + columns, total.to(grad_row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_runs_kernel(
    dy_ptr,
    keys_ptr,
    order_ptr,
    grad_ptr,
    partial_ptr,
    tokens,
    cols,
    dy_stride,
    grad_stride,
    ACCUMULATE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums dy over TOKENS sorted tokens, one run of equal keys at a time.

    A run inside the block gives a row of the gradient. Of a run that crosses the block's border, the partial sum is
    stored: in slot 0 if the run began before the block, else in slot 1.
    """
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < cols
    start = block * TOKENS
    following = start + TOKENS
    key = tl.load(keys_ptr + start)
    before = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1)
    begun = (key != before).to(tl.int32)  # whether the run began in this block
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOKENS):  # past the last token the keys are -1
        position = start + i
        after = tl.load(keys_ptr + position + 1, mask=position + 1 < tokens, other=-1)
        if key >= 0:
            row = tl.load(order_ptr + position)
            total += tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        ends = after != key
        if (key >= 0) & (ends | (position + 1 == following)):
            if ends & (begun == 1):
                _write_row(grad_ptr + key.to(tl.int64) * grad_stride, columns, total, mask, ACCUMULATE)
            else:
                tl.store(partial_ptr + (2 * block + begun) * cols + columns, total, mask=mask)
        total = tl.where(ends, 0.0, total)
        begun = tl.where(ends, 1, begun)
        key = after


@triton.jit
def _join_runs_kernel(
    keys_ptr,
    grad_ptr,
    partial_ptr,
    tokens,
    cols,
    grad_stride,
    ACCUMULATE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the partial sums of the run that begins in this block and continues in the next; few blocks have one."""
    block = tl.program_id(0).to(tl.int64)
    start = block * TOKENS
    following = start + TOKENS
    if following >= tokens:
        return
    key = tl.load(keys_ptr + following - 1)
    after = tl.load(keys_ptr + following)
    before = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1)
    if (key < 0) | (key != after) | (key == before):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < cols
    total = tl.load(partial_ptr + (2 * block + 1) * cols + columns, mask=mask, other=0.0)
    rest = tl.zeros((ROWS, BLOCK), tl.float32)
    first = block + 1
    while after == key:
        blocks = first + tl.arange(0, ROWS)
        theirs = tl.load(keys_ptr + blocks * TOKENS, mask=blocks * TOKENS < tokens, other=-1) == key
        shares = partial_ptr + (2 * blocks[:, None]) * cols + columns[None, :]
        rest += tl.load(shares, mask=theirs[:, None] & mask[None, :], other=0.0)
        first += ROWS
        after = tl.load(keys_ptr + first * TOKENS, mask=first * TOKENS < tokens, other=-1)
    total += tl.sum(rest, axis=0)
    _write_row(grad_ptr + key.to(tl.int64) * grad_stride, columns, total, mask, ACCUMULATE)


_COLUMNS, _TOKENS = 512, 32  # of a program: small ones, so that many run


def _num_warps(x: torch.Tensor) -> int:
    """Warps for rows of `x`: 16 bytes per thread."""
    return 2 if x.element_size() == 2 else 4


@operator("liger_trainer::embedding")
def _embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int) -> torch.Tensor:
    vocab, cols = weight.shape
    out = weight.new_empty((*ids.shape, cols))
    if not has_elements(out):
        return out
    ids, weight = ids.reshape(-1).contiguous(), as_rows(weight, None)
    grid, options = (len(ids), cdiv(cols, _COLUMNS)), {"BLOCK": _COLUMNS, "num_warps": _num_warps(weight)}
    with on_device(weight):
        _gather_kernel[grid](ids, weight, out, vocab, cols, weight.stride(0), **options)
    return out


@operator("liger_trainer::embedding_backward")
def _embedding_backward(dy: torch.Tensor, ids: torch.Tensor, vocab: int, padding_idx: int) -> torch.Tensor:
    gradient = dy.new_zeros((vocab, dy.shape[-1]))
    _add_rows(gradient, dy, ids, padding_idx, accumulate=False)
    return gradient


@operator("liger_trainer::embedding_backward_", mutates=("grad_weight",))
def _embedding_backward_(grad_weight: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor, padding_idx: int) -> None:
    _add_rows(grad_weight, dy, ids, padding_idx, accumulate=True)


def _add_rows(gradient: torch.Tensor, dy: torch.Tensor, ids: torch.Tensor, padding_idx: int, accumulate: bool) -> None:
    """Writes, or adds, the sums of the rows of `dy` with equal ids to those rows of `gradient`."""
    if not has_elements(dy):
        return
    dy, ids = as_rows(dy, None), ids.reshape(-1).contiguous()
    (tokens, cols), stride = dy.shape, gradient.stride(0)
    keys = torch.empty(tokens, dtype=torch.int32, device=dy.device)
    with on_device(dy):
        _keys_kernel[(cdiv(tokens, 1024),)](ids, keys, tokens, len(gradient), padding_idx, BLOCK=1024, num_warps=4)
        keys, order = torch.sort(keys, stable=True)
        blocks = cdiv(tokens, _TOKENS)
        partial = torch.empty((blocks, 2, cols), dtype=torch.float32, device=dy.device)
        grid = (blocks, cdiv(cols, _COLUMNS))
        options = {"ACCUMULATE": accumulate, "TOKENS": _TOKENS, "BLOCK": _COLUMNS, "num_warps": _num_warps(dy)}
        _sum_runs_kernel[grid](dy, keys, order, gradient, partial, tokens, cols, dy.stride(0), stride, **options)
        _join_runs_kernel[grid](keys, gradient, partial, tokens, cols, stride, ROWS=16, **options)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ids, weight, ctx.padding_idx = inputs
    ctx.vocab = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
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
        if torch.is_grad_enabled():  # this backward is itself recorded
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
        return -1
    if not -vocab <= padding_idx < vocab:
        raise ValueError(f"`padding_idx` is {padding_idx}, but the vocabulary has {vocab} rows.")
    return padding_idx % vocab


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """The rows `ids` of `weight`, with a deterministic backward.

    Args:
        ids: Any shape, int32 or int64. An id outside of the table gives a row of NaN and no gradient in the kernel,
            and an IndexError in the reference.
        weight: (vocabulary, hidden), of any strides. float16, bfloat16 or float32 for the kernel; other dtypes run the
            reference.
        padding_idx: An id whose row gets no gradient; a negative one counts from the end.

    Returns:
        A new tensor, ``(*ids.shape, hidden)``, in `weight`'s dtype.

    Raises:
        ValueError: If `weight` is not two-dimensional, `ids` are not integers or on another device, or `padding_idx`
            is not in the table.
    """
    padding = _checked(ids, weight, padding_idx)
    return _embedding(ids, weight, padding) if use_triton(weight) else embedding_reference(ids, weight, padding_idx)


def tied_embedding(
    ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`embedding` for a model whose head shares the weight: its gradient is added to that of the head, in place.

    Pass the second result to the head instead of `weight`. The backward then receives the head's gradient and adds the
    embedding's rows to it, in fp32 and rounded once. This saves a second gradient of the size of the table and the
    passes over it (in bf16, 2 VH bytes of memory and 8 VH bytes moved).

    Args:
        ids: See `embedding`.
        weight: See `embedding`; it must stay gathered between the two uses (under FSDP2: belong to the root's unit).
        padding_idx: See `embedding`; its row gets the head's gradient alone.

    Returns:
        The embeddings, and `weight` for the head. Unless the backward keeps its graph, it writes to the gradient that
        it receives for the latter. Nothing else may hold that tensor; with ``head_weight + other``, the other branch
        would receive it too.

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
    """Adds the gradient of `embedding` to `grad_weight` in place; only the rows of `ids` are touched.

    Args:
        grad_weight: (vocabulary, hidden), with contiguous columns, such as a ``weight.grad``. Each row is summed in
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
