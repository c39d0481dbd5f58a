"""The Triton kernel of `_cross_entropy_rows`."""

from __future__ import annotations

from liger_trainer.kernels.head.logit_rows import row_start
from liger_trainer.kernels.head.logit_transform import load_logits, transform_logits
from liger_trainer.kernels.runtime import tl, triton


@triton.jit
def cross_entropy_row_kernel(
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
                decay = tl.exp2(-tl.abs(z - peaks))
                sums = tl.where(grows, sums * decay + 1.0, sums + decay)
                if ENTROPY:
                    moments = tl.where(grows, moments * decay + z, moments + tl.maximum(z, LOWEST) * decay)
                if SQUARES:
                    squares = tl.where(grows, squares * decay * decay + 1.0, squares + decay * decay)
                if PREDICTED:
                    best = tl.where(grows, columns, best)
                peaks = tl.where(grows, z, peaks)

        # Below a soft-cap no term overflows; the sum itself then says how large the largest is.
        peak = outer + tl.log2(tl.sum(sums, 0)) if BOUNDED else tl.max(peaks, 0)
        first = vocab_size
        if PREDICTED:
            first = tl.min(tl.where(peaks == peak, best, 2147483647), 0)
            label_wins = (label_z > peak) | ((label_z == peak) & (target < first))
            first = tl.where(label_wins, target, first)
        top = peak if PARTIALS else tl.maximum(peak, label_z)
        lane_scale = tl.exp2((outer if BOUNDED else peaks) - top)
        rest = tl.sum(sums * lane_scale, 0)
        mean2 = tl.sum(moments * lane_scale, 0)
        square = tl.sum(squares * lane_scale * lane_scale, 0)
        if PARTIALS:
            partials_ptr += row * 8
            tl.store(partials_ptr, (top + tl.log2(rest)) * LN2)
            tl.store(partials_ptr + 1, tl.where(rest > 0.0, mean2 / rest, 0.0) * LN2)
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
                mean2 = (mean2 + tl.maximum(label_z, LOWEST) * label_exp) / total
                tl.store(entropy_ptr + row, (lse2 - mean2) * LN2)
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
