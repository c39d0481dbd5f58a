"""The row step of cross entropy: statistics and gradient of one row of logits, by Triton or in plain torch.

With x a row of logits (bias added), z its transform (`_logit_transform`), w the class weights and e the smoothing:

    dL/dz[c] = p[c] * ((1 - e) * w[t] + e / V * sum(w) + 2 * z_loss * lse) - (1 - e) * w[t] * [c == t] - e / V * w[c]
    dL/dx[c] = dL/dz[c] * logit_scale / temperature * (1 - tanh(x[c] * logit_scale / softcap)**2)

The entropy H of p may have an upstream gradient of its own, then -p[c] * (log p[c] + H) times it joins dL/dz[c].
Where the row is one shard of a vocabulary that lies over several processes, `row_partials_` gives what the shard
contributes (`RowPartials`), and the gradient takes the statistics of the whole row.

One program takes a row. Pass 1 reads it once and keeps a running maximum and sum of exponentials *per lane*, so that
its loop holds no barrier, and one exponential an element: with d = exp(-|z - m|) the sum becomes s + d, or s * d + 1
where z is the new maximum. Pass 2 goes through the tiles backwards, as the last ones are still in cache, and writes the
gradient. The label's own exponential is left out of the running sum and added at the end: then the loss of a confident
token is log1p(rest) and its p - 1 is -rest / sum, exact where lse - z[t] and p - 1 would cancel.

Bytes moved for (N, V) logits of b bytes: statistics N*V*b; gradient 2*N*V*b; both at once 2 to 3 N*V*b, by how much of
the row is still in L2. Ignored rows read nothing. A label outside [0, V) reads nothing out of bounds: its row is NaN.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.head.cross_entropy_options import ExtraStats, RowOptions, RowStats, Shard
from liger_trainer.kernels.head.cross_entropy_reference import (
    row_gradient_torch_,
    row_partials_torch_,
    row_statistics_torch_,
)
from liger_trainer.kernels.head.cross_entropy_row_kernel import cross_entropy_row_kernel
from liger_trainer.kernels.head.logit_rows import row_config, row_layout
from liger_trainer.kernels.head.logit_transform import transform_factors
from liger_trainer.kernels.runtime import on_device, use_triton

_LARGEST_BOUND = 60.0  # of log2(e) * |z| with a soft-cap, so that exp(z - cap) is well above fp32's smallest number


def _launch_rows(
    logits: torch.Tensor,
    gradient: torch.Tensor | None,
    target: torch.Tensor,
    stats: RowStats,
    options: RowOptions,
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
    if target.numel() == 0:
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
        cross_entropy_row_kernel[(target.numel(),)](
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


def row_statistics_(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: RowStats,
    options: RowOptions,
    bias: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    coefficient: torch.Tensor | None = None,
    width: int | None = None,
    extra: ExtraStats | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Fills `stats`; with a `coefficient` it also writes the gradient times it to `out`, else over `logits`.

    Args:
        logits: `(N, V)` or `(B, S, V)`, last stride 1.
        target: `(N,)` contiguous labels.
        stats: Statistics of N tokens, filled; its empty fields are not computed.
        options: The loss.
        bias: `(V,)`, added to the logits in fp32.
        class_weights: `(V,)` of the computing dtype.
        coefficient: Upstream gradient of the token losses, 0-d or `(N,)`; None for statistics alone.
        width: Columns of memory each row owns, at least V (the default); those from V on are scratch.
        extra: More statistics, filled; not together with class weights.
        out: Shaped as `logits`, last stride 1.
    """
    if use_triton(logits):
        _launch_rows(logits, out, target, stats, options, bias, class_weights, coefficient, width, True, extra)
    else:
        destination = logits if out is None else out.copy_(logits)
        row_statistics_torch_(destination, target, stats, options, bias, class_weights, coefficient, extra)


def row_gradient_(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: RowStats,
    options: RowOptions,
    coefficient: torch.Tensor,
    bias: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    width: int | None = None,
    entropy_coefficient: torch.Tensor | None = None,
    shard: Shard | None = None,
) -> None:
    """Writes the gradient of `logits` to `out`, else over `logits`; of `stats` it reads `nll` and `lse`.

    `entropy_coefficient`, `(N,)`, is the upstream gradient of the entropies, which are then read from `stats` too.
    With a `shard` the logits are its columns of the vocabulary, and the statistics those of all of it. The other
    arguments are those of `row_statistics_`; `out` has the shape of `logits` and last stride 1.
    """
    if use_triton(logits):
        _launch_rows(
            logits, out, target, stats, options, bias, class_weights, coefficient, width, False,
            entropy_coefficient=entropy_coefficient, shard=shard,
        )  # fmt: skip
    else:
        destination = logits if out is None else out.copy_(logits)
        row_gradient_torch_(
            destination, target, stats, options, bias, class_weights, coefficient, entropy_coefficient, shard
        )


def row_partials_(
    logits: torch.Tensor,
    target: torch.Tensor,
    partials: torch.Tensor,
    options: RowOptions,
    shard: Shard,
    bias: torch.Tensor | None = None,
    width: int | None = None,
) -> None:
    """Fills `partials`, `(N, 8)` of the computing dtype, with what a shard of the vocabulary gives to its rows.

    The fields are those of `RowPartials`; a row with the label `ignore_index` is 0. The labels are ids of the whole
    vocabulary, and most lie in another shard.
    """
    if use_triton(logits):
        unused = partials.new_empty(0)
        stats = RowStats(unused, unused, unused, unused, target)
        _launch_rows(
            logits, None, target, stats, options, bias, None, None, width, True, partials=partials, shard=shard
        )
    else:
        row_partials_torch_(logits, target, partials, options, shard, bias)
