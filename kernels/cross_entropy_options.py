"""What every cross entropy shares besides its kernel: options, checks of the arguments, normaliser, extra outputs.

A token's loss, with z its transformed logits, lse = logsumexp(z), t its label, w the class weights (1 where absent) and
e the label smoothing, is that of ``torch.nn.functional.cross_entropy`` plus the z-loss of PaLM (arXiv 2204.02311):

    (1 - e) * w[t] * (lse - z[t])  +  e / V * sum_c w[c] * (lse - z[c])  +  z_loss * lse**2

The loss is the sum over valid tokens divided by the normaliser: the sum of w[t] for "mean", 1 for "sum", `num_items`
where it is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

OUTPUTS = ("z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll")
REDUCTIONS = ("mean", "sum", "none")


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
    if isinstance(outputs, str):
        raise ValueError(f"`outputs` is the string {outputs!r}; give a tuple of names, such as ({outputs!r},).")
    unknown = [name for name in outputs if name not in OUTPUTS]
    if unknown:
        raise ValueError(f"`outputs` names {unknown}; the allowed names are {', '.join(map(repr, OUTPUTS))}.")
    if not 0.0 <= options.label_smoothing <= 1.0:
        raise ValueError(f"`label_smoothing` is {options.label_smoothing}; it must lie in [0, 1].")
    if not options.temperature > 0.0:
        raise ValueError(f"`temperature` is {options.temperature}; it must be more than 0.")
    if options.softcap is not None and not options.softcap > 0.0:
        raise ValueError(f"`softcap` is {options.softcap}; it must be more than 0, or None for no soft-cap.")
    if num_items is not None:
        if reduction == "none":
            raise ValueError(
                "`num_items` is given with reduction='none', which divides by nothing; use 'sum' or 'mean'."
            )
        if isinstance(num_items, torch.Tensor):
            if num_items.numel() != 1:
                raise ValueError(
                    f"`num_items` has shape {tuple(num_items.shape)}; it must be a number or a 0-d tensor."
                )
        elif num_items < 0:
            raise ValueError(f"`num_items` is {num_items}; it must be 0 or more.")


def check_target(target: torch.Tensor, shape: torch.Size, vocab_size: int, like: torch.Tensor, name: str) -> None:
    """Raises ValueError unless `target` holds one integer label for each row of `like`, the argument called `name`."""
    if target.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`target` has dtype {target.dtype}; class ids must be int64 or int32.")
    if target.shape != shape:
        raise ValueError(
            f"`target` has shape {tuple(target.shape)}; `{name}` of shape {tuple(like.shape)} needs {tuple(shape)}."
        )
    if target.device != like.device:
        raise ValueError(f"`target` is on {target.device} but `{name}` on {like.device}; move it there.")
    if vocab_size < 1:
        raise ValueError("The vocabulary is empty; there must be at least one class.")


def check_labels_on_cpu(target: torch.Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raises ValueError for a label outside [0, vocab_size); only on the CPU, where looking is free."""
    if target.device.type != "cpu" or target.numel() == 0 or torch.compiler.is_compiling():
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab_size))
    if bool(wrong.any()):
        labels = target[wrong]
        worst = int(labels.max()) if int(labels.max()) >= vocab_size else int(labels.min())
        raise ValueError(
            f"`target` holds the label {worst}, outside [0, {vocab_size}) and not ignore_index={ignore_index} "
            f"({int(wrong.sum())} such labels); check that the tokenizer and the model have the same vocabulary."
        )


def checked_class_weights(weights: torch.Tensor | None, vocab_size: int, like: torch.Tensor) -> torch.Tensor | None:
    """`weights` as a contiguous tensor of the computing dtype.

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
    return weights.detach().to(compute_dtype(like)).contiguous()


@torch.no_grad()
def inverse_normalizer(
    target: torch.Tensor,
    vocab_size: int,
    ignore_index: int,
    reduction: str,
    num_items: int | float | torch.Tensor | None,
    class_weights: torch.Tensor | None,
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
        valid = target != ignore_index
        if class_weights is None:
            total = valid.sum().to(dtype)
        else:
            total = torch.where(valid, class_weights[target.clamp(0, vocab_size - 1)], 0.0).sum()
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


def check_linear(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, logits_memory: int
) -> None:
    """Raises ValueError unless hidden states, head, bias and target fit each other in shape, dtype and device."""
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"`hidden` of shape {tuple(hidden.shape)} and `weight` of shape {tuple(weight.shape)} do not fit; "
            "they must be (..., H) and (V, H), with H at least 1."
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"`hidden` has dtype {hidden.dtype} and `weight` {weight.dtype}; both must be the same floating dtype, "
            "so cast one (under autocast, both) before the call."
        )
    if hidden.device != weight.device:
        raise ValueError(f"`hidden` is on {hidden.device} but `weight` on {weight.device}; move one of them.")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise ValueError(
            f"`bias` has shape {tuple(bias.shape)} and dtype {bias.dtype}; it must be floating of ({weight.shape[0]},)."
        )
    if bias is not None and bias.device != hidden.device:
        raise ValueError(f"`bias` is on {bias.device} but `hidden` on {hidden.device}; move one of them.")
    if logits_memory < 1:
        raise ValueError(f"`logits_memory` is {logits_memory}; it must be at least 1 byte.")
    check_target(target, hidden.shape[:-1], weight.shape[0], hidden, "hidden")
