"""What every cross entropy shares besides its kernel: options, checks of the arguments, normaliser, extra outputs.

A token's loss, with z its transformed logits, lse = logsumexp(z), t its label, w the class weights (1 where absent) and
e the label smoothing, is that of ``torch.nn.functional.cross_entropy`` plus the z-loss of PaLM (arXiv 2204.02311):

    (1 - e) * w[t] * (lse - z[t])  +  e / V * sum_c w[c] * (lse - z[c])  +  z_loss * lse**2

The loss is the sum over valid tokens divided by the normaliser: their number for "mean", 1 for "sum", `num_items` where
it is given. For "mean" the weights w are first divided by their mean over the labels (`checked_class_weights`), so that
the cross entropy is divided by the sum of w[t] as in torch, and the z-loss, which has no weights, by the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.head.loss_checks import check_num_items, check_outputs, check_transform

OUTPUTS = ("z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll")
REDUCTIONS = ("mean", "sum", "none")
OPTIONS_SCHEMA = (
    "int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale, float temperature"
)
"""`RowOptions` among the arguments of an operator."""


class RowOptions(NamedTuple):
    """The options of one row's loss, in the order in which the operators take them."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    temperature: float


class RowStats(NamedTuple):
    """What the row step finds for every token; floating tensors are fp32 (float64 for float64 logits).

    `entropy` and `predicted` are empty where they were not asked for. Ignored tokens hold 0, and -1 in `predicted`.
    """

    loss: torch.Tensor
    nll: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    predicted: torch.Tensor

    @classmethod
    def allocate(cls, logits: torch.Tensor, tokens: int, entropy: bool, predicted: bool) -> RowStats:
        """Uninitialised statistics of `tokens` tokens on the device of `logits`."""
        dtype = compute_dtype(logits)
        loss, nll, lse = (logits.new_empty(tokens, dtype=dtype) for _ in range(3))
        return cls(
            loss,
            nll,
            lse,
            logits.new_empty(tokens if entropy else 0, dtype=dtype),
            logits.new_empty(tokens if predicted else 0, dtype=torch.int64),
        )

    def rows(self, start: int, stop: int) -> RowStats:
        """The statistics of tokens `start` to `stop`, as views."""
        return RowStats(*(field[start:stop] for field in self))


class ExtraStats(NamedTuple):
    """Statistics that log-probabilities offer besides `RowStats`; empty where not asked for, 0 at ignored tokens.

    `mean_logit` is the mean of z over the vocabulary, `sum_squared_probs` the logarithm of the sum of p**2.
    """

    mean_logit: torch.Tensor
    sum_squared_probs: torch.Tensor

    @classmethod
    def allocate(cls, logits: torch.Tensor, tokens: int, mean_logit: bool, sum_squared_probs: bool) -> ExtraStats:
        """Uninitialised statistics of `tokens` tokens on the device of `logits`."""
        sizes = (tokens if asked else 0 for asked in (mean_logit, sum_squared_probs))
        return cls(*(logits.new_empty(size, dtype=compute_dtype(logits)) for size in sizes))

    def rows(self, start: int, stop: int) -> ExtraStats:
        """The statistics of tokens `start` to `stop`, as views."""
        return ExtraStats(*(field[start:stop] for field in self))


class Shard(NamedTuple):
    """Which columns of a vocabulary of `vocab_size` the logits are: as many as they have, from `vocab_start` on."""

    vocab_start: int
    vocab_size: int


class RowPartials(NamedTuple):
    """What one shard of the vocabulary gives to a row's statistics; "rest" are its columns but the label's.

    Attributes:
        rest: logsumexp of z over the rest, -inf where there is none.
        rest_mean: Mean of z under the softmax of the rest.
        rest_squares: logsumexp of 2 z over the rest.
        label_z: z of the label, 0 where another shard holds it.
        found: 1 where the label is here, else 0.
        total: Sum of z.
        best: The largest z, in a unit that is the same on every shard.
        best_id: Its id in the whole vocabulary, the lowest of equals.
    """

    rest: torch.Tensor
    rest_mean: torch.Tensor
    rest_squares: torch.Tensor
    label_z: torch.Tensor
    found: torch.Tensor
    total: torch.Tensor
    best: torch.Tensor
    best_id: torch.Tensor


@dataclasses.dataclass
class CrossEntropyOutput:
    """The loss and the outputs that were asked for; the others are None. Only `loss` carries a gradient.

    Attributes:
        loss: fp32, 0-d, or per token with reduction "none".
        z_loss: The part of `loss` that is z-loss, fp32, shaped as `loss`.
        token_accuracy: fp32 0-d, the share of valid tokens whose label is the most likely one.
        predicted_tokens: int64 per token, the most likely id (the lowest of equals); -1 at ignored tokens.
        entropy: fp32 per token, of the distribution after soft-cap, scale and temperature; 0 at ignored tokens.
        token_nll: fp32 per token, lse - z[target]; 0 at ignored tokens.
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    token_nll: torch.Tensor | None = None


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of losses and statistics: fp32, or float64 where the input is float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def check_options(
    options: RowOptions,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
    outputs: Sequence[str],
) -> None:
    """Raises ValueError for an option out of its range, naming the option and what is allowed."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"`reduction` is {reduction!r}; it must be one of {', '.join(map(repr, REDUCTIONS))}.")
    check_outputs(outputs, OUTPUTS)
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"`label_smoothing` is {options.label_smoothing}; it must lie in [0, 1].")
    check_transform(options.temperature, softcap=options.softcap)
    if num_items is not None and reduction == "none":
        raise ValueError("`num_items` is given with reduction='none', which divides by nothing; use 'sum' or 'mean'.")
    check_num_items(num_items)


@torch.no_grad()
def checked_class_weights(
    weights: torch.Tensor | None,
    vocab_size: int,
    like: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    average: bool,
) -> torch.Tensor | None:
    """`weights` as a contiguous tensor of the computing dtype, for an `average` divided by their mean over the labels.

    Raises:
        ValueError: If its shape is not ``(vocab_size,)``, its dtype not floating, or its device another one.
    """
    if weights is None:
        return None
    if weights.shape != (vocab_size,) or not weights.is_floating_point():
        raise ValueError(
            f"`class_weights` has shape {tuple(weights.shape)} and dtype {weights.dtype}; "
            f"it must be a floating tensor of shape ({vocab_size},)."
        )
    if weights.device != like.device:
        raise ValueError(f"`class_weights` is on {weights.device} but the logits on {like.device}; move it there.")
    weights = weights.to(compute_dtype(like)).contiguous()
    if not average:
        return weights
    valid = target != ignore_index
    total = torch.where(valid, weights[target.clamp(0, vocab_size - 1)], 0.0).sum()
    return torch.where(total == 0, 0.0, weights * (valid.sum() / total))


@torch.no_grad()
def inverse_normalizer(
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """1 / normaliser as a 0-d tensor on the device of `target`, 0 where the normaliser is 0; no sync."""
    one = torch.ones((), dtype=dtype, device=target.device)
    if isinstance(num_items, torch.Tensor):
        if num_items.device.type != "cpu" and num_items.device != target.device:
            num_items = num_items.to(target.device, non_blocking=True)
        # A 0-d CPU tensor enters a device operation by value, without a copy that would wait.
        total = one * num_items.reshape(())
    elif num_items is not None:
        total = one * num_items
    elif reduction == "mean":
        total = (target != ignore_index).sum().to(dtype)
    else:
        return one
    return torch.where(total == 0, 0.0, 1.0 / total)


@torch.no_grad()
def with_outputs(
    loss: torch.Tensor,
    outputs: Sequence[str],
    stats: RowStats,
    target: torch.Tensor,
    options: RowOptions,
    scale: torch.Tensor | None,
) -> torch.Tensor | CrossEntropyOutput:
    """`loss` alone, or with the asked `outputs`; `scale` is the inverse normaliser, None for reduction "none"."""
    if not outputs:
        return loss
    result = CrossEntropyOutput(loss)
    if "z_loss" in outputs:
        rows = options.z_loss * stats.lse.detach().square()
        result.z_loss = rows.view(target.shape) if scale is None else rows.sum() * scale
    if "token_accuracy" in outputs:
        valid = target.reshape(-1) != options.ignore_index
        correct = valid & (stats.predicted == target.reshape(-1))
        result.token_accuracy = correct.sum().to(stats.nll.dtype) / valid.sum().clamp(min=1)
    if "predicted_tokens" in outputs:
        result.predicted_tokens = stats.predicted.view(target.shape)
    if "entropy" in outputs:
        result.entropy = stats.entropy.detach().view(target.shape)
    if "token_nll" in outputs:
        result.token_nll = stats.nll.detach().view(target.shape)
    return result
