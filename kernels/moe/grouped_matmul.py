"""Products of rows with the weight of their expert, and the gradients of these weights.

With e the expert of row r, as `moe_routing.ExpertRows` has them::

    rows       z_r  = x_r @ W_e^T + b_e + y_r @ V_e^T
    weights    dW_e = sum over the rows r of e of left_r^T right_r
    combine    o_t  = sum over j of w_tj * y_slot(t, j)

An operand may have one row a token instead of one a choice. The thin second product (y, V) is how adapters join in.
Rows of no expert are never computed: what `grouped_rows` leaves there is undefined; `combine_rows` does not read it.
"""

from __future__ import annotations

import itertools

import torch

from liger_trainer.kernels.moe import combine_kernel as _combine_kernel
from liger_trainer.kernels.moe import grouped_library as _grouped_library
from liger_trainer.kernels.moe import grouped_rows_kernel as _grouped_rows_kernel
from liger_trainer.kernels.moe import grouped_weights_kernel as _grouped_weights_kernel
from liger_trainer.kernels.moe.routing import ExpertRows
from liger_trainer.kernels.runtime import use_triton


def grouped_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: ExpertRows,
    *,
    top_k: int = 0,
    transposed: bool = False,
    bias: torch.Tensor | None = None,
    extra: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``x_r @ weight_e.T`` for every row r of every expert e.

    Args:
        x: (R, K), a row a choice; with `top_k`, (T, K), a row a token.
        weight: (E, N, K), or (E, K, N) if `transposed`.
        rows: Of the R = T * k choices.
        top_k: Choices a token, where x has a row a token; else 0.
        transposed: Whether the weight is multiplied as it lies.
        bias: (E, N), added.
        extra: y (R, r) and V (E, N, r), of which ``y_r @ V_e.T`` is added.

    Returns:
        (R, N) in x's dtype.
    """
    if _grouped_library.takes(x, weight):
        operand = _grouped_library.repeat_rows(x, rows, top_k) if top_k else x
        right = weight if transposed else weight.transpose(1, 2)
        out = _grouped_library.grouped_mm(operand, right, offs=rows.offsets[1:])
        _grouped_library.add_to_rows(out, rows, bias, extra)
        return out
    out = x.new_empty(rows.order.shape[0], weight.shape[2 if transposed else 1])
    if use_triton(x):
        _grouped_rows_kernel.launch(out, x, weight, rows, top_k, transposed, bias, extra)
        return out
    for expert, start, stop in _groups(rows):
        operand = x[rows.order[start:stop].long() // top_k] if top_k else x[start:stop]
        product = operand @ (weight[expert] if transposed else weight[expert].T)
        if bias is not None:
            product += bias[expert]
        if extra is not None:
            product += extra[0][start:stop] @ extra[1][expert].T
        out[start:stop] = product
    return out


def grouped_weight_gradient(
    left: torch.Tensor,
    right: torch.Tensor,
    rows: ExpertRows,
    *,
    left_top_k: int = 0,
    right_top_k: int = 0,
) -> torch.Tensor:
    """The sum of ``left_r.T @ right_r`` over the rows r of every expert; zeros for an expert without rows.

    Args:
        left: (R, M), a row a choice; with `left_top_k`, (T, M), a row a token.
        right: (R, N), likewise.
        rows: Of the R choices.
        left_top_k: Choices a token, where `left` has a row a token.
        right_top_k: Likewise.

    Returns:
        (E, M, N) in left's dtype.
    """
    if _grouped_library.takes(left, right):
        left = _grouped_library.repeat_rows(left, rows, left_top_k) if left_top_k else left
        right = _grouped_library.repeat_rows(right, rows, right_top_k) if right_top_k else right
        return _grouped_library.grouped_mm(left.t(), right, offs=rows.offsets[1:])
    out = left.new_empty(rows.offsets.shape[0] - 1, left.shape[1], right.shape[1])
    if use_triton(left):
        _grouped_weights_kernel.launch(out, left, right, rows, left_top_k, right_top_k)
        return out
    out.zero_()
    for expert, start, stop in _groups(rows):
        indices = rows.order[start:stop].long()
        left_rows = left[indices // left_top_k] if left_top_k else left[start:stop]
        right_rows = right[indices // right_top_k] if right_top_k else right[start:stop]
        out[expert] = left_rows.T @ right_rows
    return out


def rows_of_choices(x: torch.Tensor, weight: torch.Tensor, rows: ExpertRows, top_k: int) -> tuple[torch.Tensor, int]:
    """An operand and its `top_k`; where every product with `weight` would repeat its rows, repeated, and 0."""
    return (_grouped_library.repeat_rows(x, rows, top_k), 0) if _grouped_library.takes(x, weight) else (x, top_k)


def _groups(rows: ExpertRows) -> list[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of every expert with rows."""
    offsets = rows.offsets.tolist()
    return [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise(offsets)) if b > a]


def combine_rows(y: torch.Tensor, rows: ExpertRows, top_k: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of each token's rows, in fp32, rounded once; rows of no expert count as zeros.

    Args:
        y: (R, H).
        rows: Of the R = T * top_k choices.
        top_k: Choices a token.
        weights: (T, top_k), a factor for each row; None for ones.

    Returns:
        (T, H) in y's dtype.
    """
    tokens = rows.slots.shape[0] // top_k
    if use_triton(y):
        return _combine_kernel.launch(y, rows, top_k, weights)
    slots = rows.slots.long()
    exists = (slots < rows.offsets[-1]).unsqueeze(1)
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    chosen = y[slots].to(wide)
    if weights is not None:
        chosen = chosen * weights.reshape(-1, 1).to(wide)
    chosen = torch.where(exists, chosen, 0.0)
    return chosen.view(tokens, top_k, y.shape[1]).sum(1).to(y.dtype)
