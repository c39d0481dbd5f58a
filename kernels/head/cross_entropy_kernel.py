"""The row kernel of cross entropy: statistics and gradient of one row of logits (`cross_entropy_rows` runs it).

With x a row of logits (bias added), z its transform (`logit_rows`), p the softmax of z, lse = logsumexp(z), t the
label, w the class weights (1 if absent) and e the label smoothing, a token's loss is that of
``torch.nn.functional.cross_entropy`` plus the z-loss of PaLM (arXiv 2204.02311):

    (1 - e) * w[t] * (lse - z[t])  +  e / V * sum_c w[c] * (lse - z[c])  +  z_loss * lse**2

and its gradient is

    dL/dz[c] = p[c] * ((1 - e) * w[t] + e / V * sum(w) + 2 * z_loss * lse) - (1 - e) * w[t] * [c == t] - e / V * w[c]
    dL/dx[c] = dL/dz[c] * logit_scale / temperature * (1 - tanh(x[c] * logit_scale / softcap)**2)

The entropy H of p may have an upstream gradient of its own; -p[c] * (log p[c] + H) times it is then added to dL/dz[c].
For a shard of the vocabulary, `row_partials_` gives the shard's contribution (`RowPartials`), and the gradient takes
the statistics of the whole row.

One program takes one row. Pass 1 reads it once and keeps a running maximum and sum of exponentials *per lane*. So its
loop has no barrier and one exponential an element: with d = exp(-|z - m|) the sum becomes s + d, or s * d + 1 where z
is the new maximum. Pass 2 goes through the tiles backwards, because the last ones are still in cache, and writes the
gradient. The label's exponential is left out of the running sum and added at the end: then the loss of a confident
token is log1p(rest) and its p - 1 is -rest / sum, exact where lse - z[t] and p - 1 would cancel.

Bytes moved for (N, V) logits of b bytes: statistics N*V*b; gradient 2*N*V*b; both at once 2 to 3 N*V*b, depending on
how much of the row is still in L2. Ignored rows are not read. A label outside [0, V) reads nothing out of bounds; its
row is NaN.

Shapes: N tokens, V vocabulary; logits (N, V), or (B, S, V) of B sequences of S tokens.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.head.logit_rows import (
    load_logits,
    row_config,
    row_layout,
    row_start,
    transform_factors,
    transform_logits,
)
from liger_trainer.kernels.head.loss_options import LossOptions
from liger_trainer.kernels.head.token_statistics import ExtraStats, RowStats, Shard
from liger_trainer.kernels.runtime import has_elements, on_device, tl, triton

_LARGEST_BOUND = 60.0  # of log2(e) * |z| under a soft-cap: exp(z - cap) stays well above fp32's smallest number


@triton.jit
def _cross_entropy_row_kernel(
    logits_ptr,
    gradient_ptr,
    inner_rows,
    outer_stride,
    inner_stride,
    gradient_outer_stride,
    gradient_inner_stride,
    width,
    vocab_size,
    target_ptr,
    bias_ptr,
    weights_ptr,
    weight_sum_ptr,
    coefficient_ptr,
    coefficient_stride,
    loss_ptr,
    nll_ptr,
    lse_ptr,
    entropy_ptr,
    predicted_ptr,
    mean_logit_ptr,
    squares_ptr,
    entropy_coefficient_ptr,
    entropy_coefficient_stride,
    partials_ptr,
    vocab_start,  # of the columns in the whole vocabulary, which has `classes` of them
    classes,
    ignore_index,
    label_smoothing,
    z_loss,
    inner,
    outer,
    slope_scale,
    STATS: tl.constexpr,
    GRADIENT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SMOOTHING: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BIAS: tl.constexpr,
    ENTROPY: tl.constexpr,
    PREDICTED: tl.constexpr,
    MEAN_LOGIT: tl.constexpr,
    SQUARES: tl.constexpr,
    PARTIALS: tl.constexpr,
    ENTROPY_GRADIENT: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    LN2: tl.constexpr = 0.6931471805599453
    LOG2E: tl.constexpr = 1.4426950408889634
    LOWEST: tl.constexpr = -3.0e38  # finite, so that differences of running maxima are never inf - inf
    row = tl.program_id(0).to(tl.int64)
    row_ptr = row_start(logits_ptr, row, inner_rows, outer_stride, inner_stride)
    gradient_ptr = row_start(gradient_ptr, row, inner_rows, gradient_outer_stride, gradient_inner_stride)
    lanes = tl.arange(0, BLOCK)
    label = tl.load(target_ptr + row).to(tl.int64)

    if label == ignore_index:
        if PARTIALS:
            tl.store(partials_ptr + row * 8 + tl.arange(0, 8), tl.zeros([8], tl.float32))
        elif STATS:
            tl.store(loss_ptr + row, 0.0)
            tl.store(nll_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
            if ENTROPY:
                tl.store(entropy_ptr + row, 0.0)
            if PREDICTED:
                tl.store(predicted_ptr + row, tl.full([], -1, tl.int64))
            if MEAN_LOGIT:
                tl.store(mean_logit_ptr + row, 0.0)
            if SQUARES:
                tl.store(squares_ptr + row, 0.0)
        if GRADIENT:
            for start in tl.range(0, width, BLOCK):
                columns = start + lanes
                zeros = tl.zeros([BLOCK], dtype=gradient_ptr.dtype.element_ty)
                tl.store(gradient_ptr + columns, zeros, mask=columns < width)
        return

    label -= vocab_start
    in_range = (label >= 0) & (label < vocab_size)
    target = tl.where(in_range, label, -1).to(tl.int32)
    label_weight = 1.0
    weight_sum = classes * 1.0
    if WEIGHTS:
        label_weight = tl.load(weights_ptr + tl.maximum(target, 0))
        weight_sum = tl.load(weight_sum_ptr)
    hard = (1.0 - label_smoothing) * label_weight
    soft = label_smoothing / (classes * 1.0)

    if STATS:
        label_logit = load_logits(row_ptr, bias_ptr, tl.maximum(target, 0), width, vocab_size, BIAS)
        label_z, _ = transform_logits(label_logit, inner, outer, SOFTCAP)
        label_z = tl.where(in_range, label_z, float("-inf") if PARTIALS else float("nan"))
        peaks = tl.full([BLOCK], LOWEST, tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        moments = tl.zeros([BLOCK], tl.float32)
        totals = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        best = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = start + lanes
            x = load_logits(row_ptr, bias_ptr, columns, width, vocab_size, BIAS)
            z, slope = transform_logits(x, inner, outer, SOFTCAP)
            if SMOOTHING or MEAN_LOGIT:
                weighted = z
                if WEIGHTS:
                    weighted = z * tl.load(weights_ptr + columns, mask=columns < vocab_size, other=0.0)
                totals += tl.where(columns < vocab_size, weighted, 0.0)
            z = tl.where((columns < vocab_size) & (columns != target), z, float("-inf"))
            if BOUNDED:
                sums += tl.exp2(z - outer)
            else:
                grows = z > peaks
                distance = tl.minimum(tl.abs(z - peaks), -LOWEST)
                decay = tl.exp2(-distance)
                if ENTROPY:  # of z - peak: moments of z itself would cancel against the log-sum-exp
                    moments = tl.where(grows, (moments - sums * distance) * decay, moments - distance * decay)
                sums = tl.where(grows, sums * decay + 1.0, sums + decay)
                if SQUARES:
                    squares = tl.where(grows, squares * decay * decay + 1.0, squares + decay * decay)
                if PREDICTED:
                    best = tl.where(grows, columns, best)
                peaks = tl.where(grows, z, peaks)

        # Below a soft-cap no term overflows, and the sum itself serves as the peak.
        peak = outer + tl.log2(tl.sum(sums, 0)) if BOUNDED else tl.max(peaks, 0)
        first = vocab_size
        if PREDICTED:
            first = tl.min(tl.where(peaks == peak, best, 2147483647), 0)
            label_wins = (label_z > peak) | ((label_z == peak) & (target < first))
            first = tl.where(label_wins, target, first)
        top = peak if PARTIALS else tl.maximum(peak, label_z)
        lane_scale = tl.exp2((outer if BOUNDED else peaks) - top)
        rest = tl.sum(sums * lane_scale, 0)
        moment = tl.sum((moments + sums * (peaks - top)) * lane_scale, 0)
        square = tl.sum(squares * lane_scale * lane_scale, 0)
        if PARTIALS:
            partials_ptr += row * 8
            tl.store(partials_ptr, (top + tl.log2(rest)) * LN2)
            tl.store(partials_ptr + 1, tl.where(rest > 0.0, top + moment / rest, 0.0) * LN2)
            tl.store(partials_ptr + 2, (2.0 * top + tl.log2(square)) * LN2)
            tl.store(partials_ptr + 3, tl.where(in_range, label_z * LN2, 0.0))
            tl.store(partials_ptr + 4, in_range.to(tl.float32))
            tl.store(partials_ptr + 5, tl.sum(totals, 0) * LN2)
            tl.store(partials_ptr + 6, tl.maximum(peak, label_z))
            tl.store(partials_ptr + 7, (first + vocab_start).to(tl.float32))
        else:
            label_exp = tl.exp2(label_z - top)
            total = rest + label_exp
            lse2 = top + tl.log2(total)
            lse = lse2 * LN2
            # log1p(rest) by its series while 1 + rest would lose digits (the next term is below fp32 there).
            series = rest * (1.0 - rest * (0.5 - rest * (0.3333333333333333 - rest * 0.25)))
            confident = tl.where(rest < 0.015625, series, tl.log(1.0 + rest))
            nll = tl.where(label_z >= top, confident, (top - label_z) * LN2 + tl.log(total))
            label_error = -rest / total  # p[t] - 1
            loss = hard * nll + z_loss * lse * lse
            if SMOOTHING:
                loss += soft * (weight_sum * lse - tl.sum(totals, 0) * LN2)
            tl.store(loss_ptr + row, loss)
            tl.store(nll_ptr + row, nll)
            tl.store(lse_ptr + row, lse)
            if ENTROPY:
                mean = (moment + tl.maximum(label_z - top, LOWEST) * label_exp) / total
                tl.store(entropy_ptr + row, (tl.log2(total) - mean) * LN2)
            if PREDICTED:
                tl.store(predicted_ptr + row, first.to(tl.int64))
            if MEAN_LOGIT:
                tl.store(mean_logit_ptr + row, tl.sum(totals, 0) * LN2 / classes)
            if SQUARES:
                tl.store(squares_ptr + row, (tl.log2(square + label_exp * label_exp) - 2.0 * tl.log2(total)) * LN2)
    else:
        nll = tl.load(nll_ptr + row)
        lse = tl.load(lse_ptr + row)
        lse2 = lse * LOG2E
        series = -nll * (1.0 - nll * (0.5 - nll * (0.16666666666666666 - nll * 0.041666666666666664)))
        label_error = tl.where(nll < 0.015625, series, tl.exp2(-nll * LOG2E) - 1.0)

    if GRADIENT:
        coefficient = tl.load(coefficient_ptr + row * coefficient_stride).to(tl.float32) * slope_scale
        spread = 2.0 * z_loss * lse
        if SMOOTHING:
            spread += soft * weight_sum
        at_label = coefficient * (hard * label_error + spread * (label_error + 1.0) - soft * label_weight)
        entropy = 0.0
        entropy_head = 0.0
        if ENTROPY_GRADIENT:
            entropy = tl.load(entropy_ptr + row)
            entropy_head = tl.load(entropy_coefficient_ptr + row * entropy_coefficient_stride).to(tl.float32)
            entropy_head *= slope_scale
            at_label -= entropy_head * (label_error + 1.0) * (entropy - nll)
        head = coefficient * (hard + spread)
        soft = coefficient * soft
        tiles = tl.cdiv(width, BLOCK)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            columns = (tiles - 1 - tile) * BLOCK + lanes
            x = load_logits(row_ptr, bias_ptr, columns, width, vocab_size, BIAS)
            z, slope = transform_logits(x, inner, outer, SOFTCAP)
            probability = tl.exp2(z - lse2)
            gradient = head * probability
            if ENTROPY_GRADIENT:
                surprise = (tl.maximum(z, -3.0e38) - lse2) * LN2  # finite, as p * log p is 0 where p is
                gradient -= entropy_head * probability * (surprise + entropy)
            if SMOOTHING:
                if WEIGHTS:
                    gradient -= soft * tl.load(weights_ptr + columns, mask=columns < vocab_size, other=0.0)
                else:
                    gradient -= soft
            gradient = tl.where(columns == target, at_label, gradient)
            if SOFTCAP:
                gradient *= slope
            tl.store(gradient_ptr + columns, gradient.to(gradient_ptr.dtype.element_ty), mask=columns < width)


def launch_rows(
    logits: torch.Tensor,
    gradient: torch.Tensor | None,
    target: torch.Tensor,
    stats: RowStats,
    options: LossOptions,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    coefficient: torch.Tensor | None,
    width: int | None,
    with_stats: bool,
    extra: ExtraStats | None = None,
    entropy_coefficient: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
    shard: Shard | None = None,
) -> None:
    """Runs the kernel: pass 1 `with_stats`, pass 2 with a `coefficient`, and pass 1 of a shard with `partials`."""
    if not has_elements(target):
        return
    softcap = options.softcap
    width = width or logits.shape[-1]
    block, warps, stages = row_config(width)
    destination = logits if gradient is None else gradient
    smoothing = options.label_smoothing > 0.0
    weight_sum = class_weights.sum() if class_weights is not None and smoothing else class_weights
    everything = partials is not None
    inner, outer, slope_scale = transform_factors(softcap, options.logit_scale, options.temperature)
    entropy = everything or (with_stats and stats.entropy.numel() > 0)
    predicted = everything or (with_stats and stats.predicted.numel() > 0)
    squares = everything or (extra is not None and extra.sum_squared_probs.numel() > 0)
    with on_device(logits):
        _cross_entropy_row_kernel[(target.numel(),)](
            logits,
            destination,
            *row_layout(logits),
            *row_layout(destination)[1:],
            width,
            logits.shape[-1],
            target,
            bias,
            class_weights,
            weight_sum,
            coefficient,
            coefficient.stride(0) if coefficient is not None and coefficient.dim() else 0,
            stats.loss,
            stats.nll,
            stats.lse,
            stats.entropy,
            stats.predicted,
            None if extra is None else extra.mean_logit,
            None if extra is None else extra.sum_squared_probs,
            entropy_coefficient,
            0 if entropy_coefficient is None else entropy_coefficient.stride(0),
            partials,
            0 if shard is None else shard.vocab_start,
            logits.shape[-1] if shard is None else shard.vocab_size,
            options.ignore_index,
            options.label_smoothing,
            options.z_loss,
            inner,
            outer,
            slope_scale,
            STATS=with_stats,
            GRADIENT=coefficient is not None,
            SOFTCAP=softcap is not None,
            SMOOTHING=smoothing,
            WEIGHTS=class_weights is not None,
            BIAS=bias is not None,
            ENTROPY=entropy,
            PREDICTED=predicted,
            MEAN_LOGIT=everything or (extra is not None and extra.mean_logit.numel() > 0),
            SQUARES=squares,
            PARTIALS=everything,
            ENTROPY_GRADIENT=entropy_coefficient is not None,
            BOUNDED=softcap is not None and outer <= _LARGEST_BOUND and not (entropy or predicted or squares),
            BLOCK=block,
            STAGES=stages,
            num_warps=warps,
        )
