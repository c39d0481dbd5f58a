"""The first chunk of `linear_cross_entropy`, with its logits in the memory of the weight gradient.

That memory is free until dW is written, and dW (V, H) has as many elements as the logits of H tokens. So the first
chunk takes up to H tokens, however few the buffer holds, and dW is summed over that many fewer chunks. Its logits are
cut into panels of columns, of which the first may be narrower. Each panel lies where the rows of dW that belong to the
next panel will be, and the last panel lies in the buffer:

    rows of dW of     panel 0       panel 1       panel 2     ...   panel K-1
    hold              sums of dX    Z_0           Z_1         ...   Z_(K-2)          and the buffer Z_(K-1)

    1. Z_j = X @ W_j.T for all j
    2. the statistics of the rows, from those of each panel            (`row_partials_`, `combine`: a panel is a shard)
    3. Z_j = dL/dZ_j in place, for all j
    4. dX = sum over j of Z_j @ W_j in fp32, for as many tokens at a time as fit into panel 0 of dW
    5. dW_j = Z_j.T @ X for j = 0, 1, ...: over Z_(j-1), which is no longer needed

Each result is rounded as often as in any other chunk. Bytes moved in addition to an ordinary chunk's, b bytes an
element: R*V*b for R tokens, because the logits are read once more, and 8*R*H for each panel to sum dX. Memory: only the
buffer.

Shapes: N tokens, H hidden size, V vocabulary; R tokens of the first chunk, K panels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_partials_
from liger_trainer.kernels.head.head_chunks import COLUMN_MULTIPLE, ROW_MULTIPLE, HeadGradients
from liger_trainer.kernels.head.loss_options import LossOptions
from liger_trainer.kernels.head.token_statistics import RowStats, Shard, combine
from liger_trainer.kernels.runtime import cdiv, matmul_into, multiplies_into_fp32, num_sms

_TILE = (256, 128)  # of a vendor's matmul, to estimate how full the device is


class PanelPlan(NamedTuple):
    """How the first chunk is cut: its tokens, its number of panels, and the columns of every panel but the first."""

    tokens: int
    panels: int
    width: int


class _Panel(NamedTuple):
    start: int  # columns of the vocabulary
    stop: int
    logits: torch.Tensor  # (R, stop - start), later their gradient; each row is padded to a multiple of 64 columns

    @property
    def width(self) -> int:
        """Columns of memory of a row."""
        return cdiv(self.stop - self.start, COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def plan_panels(hidden: torch.Tensor, weight: torch.Tensor, rows: int) -> PanelPlan | None:
    """The cut of the first chunk if all others have `rows` tokens; None if a larger first chunk would not pay."""
    (tokens, hidden_size), vocab_size = hidden.shape, weight.shape[0]
    if tokens == 0:
        return None
    first = min(tokens, hidden_size)
    if ROW_MULTIPLE <= first < tokens:
        first -= first % ROW_MULTIPLE
    rows_of_16_bytes = weight.is_contiguous() and hidden_size * hidden.element_size() % 16 == 0
    exact = torch.promote_types(hidden.dtype, torch.float32) == hidden.dtype or multiplies_into_fp32(hidden.device)
    widest = rows * (vocab_size + -vocab_size % COLUMN_MULTIPLE) // first
    cut = _cut(vocab_size, hidden_size, widest, hidden.device) if rows_of_16_bytes and exact else None
    if cut is None:
        return None
    count, width = cut
    saved = cdiv(tokens, rows) - 1 - cdiv(tokens - first, rows)
    # Elements moved. Gain: each saved chunk would read and write dW, 2*V*H, half of it hidden by its matmul. Cost: the
    # logits are read once more, by a kernel that computes every statistic and so counts twice, and the sums of dX are
    # read and written in twice the bytes.
    if saved * vocab_size * hidden_size < 2 * first * vocab_size + 4 * first * hidden_size * count:
        return None
    return PanelPlan(first, count, width)


def _cut(vocab_size: int, hidden_size: int, widest: int, device: torch.device) -> tuple[int, int] | None:
    """Number and width of even panels, none wider than `widest`; None if there is no such cut.

    Of the eight smallest numbers it takes the one that leaves the fewest multiprocessors idle in the last wave of each
    panel's tiles.
    """
    if widest < COLUMN_MULTIPLE:
        return None
    least = cdiv(vocab_size, widest)
    cuts = []
    for count in range(least, least + 8):
        width = cdiv(cdiv(vocab_size, count), COLUMN_MULTIPLE) * COLUMN_MULTIPLE
        # The first panel takes the remaining columns; at least half a panel, so that the sums of dX fit.
        if width <= widest and 2 * (vocab_size - (count - 1) * width) >= width:
            waves = cdiv(cdiv(width, _TILE[0]) * cdiv(hidden_size, _TILE[1]), num_sms(device))
            cuts.append((count * waves, count, width))
    return min(cuts)[1:] if cuts else None


def _panels(plan: PanelPlan, d_weight: torch.Tensor, buffer: torch.Tensor) -> list[_Panel]:
    """The panels of the logits, each placed in its memory."""
    vocab_size, size = d_weight.shape[0], plan.tokens * plan.width
    panels, start = [], 0
    for after in range(plan.panels - 1, -1, -1):
        stop = vocab_size - after * plan.width
        memory = (d_weight[stop:] if after else buffer).view(-1)[:size].view(plan.tokens, plan.width)
        panels.append(_Panel(start, stop, memory[:, : stop - start]))
        start = stop
    return panels


def run_panels(
    plan: PanelPlan,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: LossOptions,
    stats: RowStats,
    coefficient: torch.Tensor,
    recompute: bool,
    buffer: torch.Tensor,
    gradients: HeadGradients,
) -> None:
    """Runs the chunk of `plan.tokens` tokens: statistics, dX, and its addition to dW and dbias.

    Args:
        plan: The cut.
        target: `(R,)`.
        bias: `(V,)`.
        options: The loss, without class weights, which the statistics of a shard do not support.
        stats: Statistics of the R tokens; filled, or with `recompute` read.
        coefficient: Upstream gradient of the token losses, 0-d or `(R,)`.
        recompute: Whether `stats` are already known.
        buffer: At least ``R * plan.width`` elements, contiguous.
        gradients: The gradients of the head, to which nothing has been added yet.
    """
    weight_sum, bias_sum = gradients.weight_sum, gradients.bias_sum
    assert weight_sum is not None
    hidden, weight, d_weight = gradients.hidden[: plan.tokens], gradients.weight, weight_sum.weight_gradient
    vocab_size = weight.shape[0]
    panels = _panels(plan, d_weight, buffer)
    for start, stop, logits in panels:
        torch.mm(hidden, weight[start:stop].t(), out=logits)
    if not recompute:
        _fill_statistics(panels, target, bias, options, stats, vocab_size)
    for panel in panels:
        start, stop, logits = panel
        part, shard = None if bias is None else bias[start:stop], Shard(start, vocab_size)
        row_gradient_(logits, target, stats, options, coefficient, part, width=panel.width, shard=shard)
        if bias_sum is not None:
            bias_sum[start:stop] += logits.sum(0, dtype=bias_sum.dtype)
    if gradients.d_hidden is not None:
        _sum_hidden_gradient(panels, weight, gradients.d_hidden[: plan.tokens], d_weight[: panels[0].stop])
    for start, _, logits in panels:
        weight_sum.add(logits, hidden, start)


def _fill_statistics(
    panels: list[_Panel],
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: LossOptions,
    stats: RowStats,
    vocab_size: int,
) -> None:
    """Fills `stats` from the partial statistics of every panel."""
    partials = stats.lse.new_empty(len(panels), target.numel(), 8)
    for panel, out in zip(panels, partials):
        part, shard = None if bias is None else bias[panel.start : panel.stop], Shard(panel.start, vocab_size)
        row_partials_(panel.logits, target, out, options, shard, part, panel.width)
    found, _ = combine(partials, target, options, Shard(0, vocab_size), vocab_size, None)
    for field, value in zip(stats, found):
        if field.numel():
            field.copy_(value)


def _sum_hidden_gradient(
    panels: list[_Panel], weight: torch.Tensor, d_hidden: torch.Tensor, memory: torch.Tensor
) -> None:
    """Fills dX, the sum of dZ @ W over the panels, a block of tokens at a time; the sum lies in `memory` in fp32."""
    tokens, hidden_size = d_hidden.shape
    memory = memory.view(-1)
    memory = memory[: memory.numel() // 2 * 2].view(torch.promote_types(d_hidden.dtype, torch.float32))
    fit = memory.numel() // hidden_size
    block = cdiv(tokens, cdiv(tokens, fit))
    block = min(fit, block + -block % ROW_MULTIPLE)
    for first in range(0, tokens, block):
        rows = slice(first, min(first + block, tokens))
        total = memory[: (rows.stop - first) * hidden_size].view(-1, hidden_size)
        for index, (start, stop, logits) in enumerate(panels):
            matmul_into(total, logits[rows], weight[start:stop], add=index > 0)
        d_hidden[rows].copy_(total)
