"""Log-probability of every target token under given logits, with statistics of its distribution.

This is `linear_log_probs` without the head, for logits that another module has computed. The formulas are those of
`linear_log_probs`, the kernel is that of cross entropy (`cross_entropy_kernel`).

Bytes moved for (N, V) logits of b bytes: N*V*b forward, 2*N*V*b backward. Saved for backward: the logits and two to
three fp32 numbers a token. The backward writes the gradient, N*V*b, to memory of its own.

Shapes: N tokens, V vocabulary; logits (N, V), or (B, S, V) of B sequences of S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_double_backward
from liger_trainer.kernels.head.cross_entropy import logits_gradient
from liger_trainer.kernels.head.cross_entropy_rows import row_statistics_, transformed_logits
from liger_trainer.kernels.head.logit_rows import row_view
from liger_trainer.kernels.head.loss_options import LossOptions, check_logits, check_options, check_outputs
from liger_trainer.kernels.head.token_statistics import (
    LOG_PROBS_OUTPUTS,
    ExtraStats,
    LogProbsOutput,
    RowStats,
    Shard,
    check_labels_on_cpu,
    log_probs_with_outputs,
)
from liger_trainer.kernels.operator import operator

_T = torch.Tensor
_Statistics = tuple[_T, _T, _T, _T, _T, _T]  # nll, entropy, lse and predicted of `RowStats`, and `ExtraStats`


@operator("liger_trainer::log_probs_rows")
def _rows(
    logits: torch.Tensor,
    target: torch.Tensor,
    options: LossOptions,
    entropy: bool,
    predicted: bool,
    mean_logit: bool,
    sum_squared_probs: bool,
) -> _Statistics:
    """The statistics of every token, each `(N,)`, or empty if not asked for."""
    stats = RowStats.allocate(logits, target.numel(), entropy, predicted)
    extra = ExtraStats.allocate(logits, target.numel(), mean_logit, sum_squared_probs)
    row_statistics_(logits, target, stats, options, extra=extra)
    return stats.nll, stats.entropy, stats.lse, stats.predicted, *extra


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Statistics) -> None:
    logits, target, ctx.options, _entropy, _predicted, _mean_logit, _sum_squared_probs = inputs
    nll, entropy, lse, *_ = output
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(logits, target, nll, lse, entropy)


def _backward_of_rows(
    ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None, *_: None
) -> tuple[torch.Tensor | None, ...]:
    given = grad if grad is not None else grad_entropy
    assert given is not None
    refuse_double_backward("log_probs")
    grad = torch.zeros((), dtype=given.dtype, device=given.device).expand_as(given) if grad is None else grad
    logits, *others = ctx.saved_tensors
    gradient = logits_gradient(grad, grad_entropy, logits, *others, None, ctx.options, Shard(0, logits.shape[-1]))
    return input_gradients(ctx, gradient)


_rows.register_autograd(_backward_of_rows, setup_context=_setup_context)


def log_probs(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
) -> torch.Tensor | LogProbsOutput:
    """Log-probability of each target under ``softmax(transform(logits))``, as `linear_log_probs` of a head gives it.

    The logits are transformed to ``softcap * tanh(x * logit_scale / softcap) / temperature`` (without `softcap`:
    ``x * logit_scale / temperature``), in fp32. Log-probabilities and entropies are differentiable, with any upstream
    gradient; double backward is an error.

    Args:
        logits: `(..., V)` of fp16, bf16, fp32 or float64; not overwritten.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the token's outputs NaN.
        ignore_index: Tokens with this label give 0 and no gradient, and their logits are not read.
        temperature: Divides the logits after the soft-cap, more than 0.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        outputs: Names among "entropy", "top1", "mean_logit" and "sum_squared_probs".

    Returns:
        fp32 log-probabilities (float64 for float64 logits) shaped as `target`; with `outputs` a `LogProbsOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    options = LossOptions(ignore_index, 0.0, 0.0, softcap, logit_scale, temperature)
    check_options(options, "none", None, ())
    check_outputs(outputs, LOG_PROBS_OUTPUTS)
    check_logits(logits, target)
    check_labels_on_cpu(target, logits.shape[-1], ignore_index)
    labels = target.reshape(-1).contiguous()
    asked = ("entropy" in outputs, "top1" in outputs, "mean_logit" in outputs, "sum_squared_probs" in outputs)
    nll, entropy, _, predicted, mean_logit, squares = _rows(row_view(logits), labels, options, *asked)
    return log_probs_with_outputs(
        0.0 - nll, entropy, predicted, mean_logit, squares, labels, ignore_index, outputs, target.shape
    )


def log_probs_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
) -> torch.Tensor | LogProbsOutput:
    """`log_probs` in plain torch; autograd differentiates it any number of times."""
    options = LossOptions(ignore_index, 0.0, 0.0, softcap, logit_scale, temperature)
    z = transformed_logits(logits.to(torch.promote_types(logits.dtype, torch.float32)), options)
    all_log_probs = z.log_softmax(-1)
    valid = target != ignore_index
    label = torch.where(valid, target, 0).long().unsqueeze(-1)
    chosen = torch.where(valid, all_log_probs.gather(-1, label).squeeze(-1), 0.0)
    if not outputs:
        return chosen
    # p * log p is 0 where p is 0, but its derivative would be NaN there.
    entropy = -(all_log_probs.exp() * all_log_probs.clamp(min=torch.finfo(z.dtype).min)).sum(-1)
    values = {
        "entropy": entropy,
        "top1": z.argmax(-1) == label.squeeze(-1),
        "mean_logit": z.detach().mean(-1),
        "sum_squared_probs": (2.0 * all_log_probs.detach()).logsumexp(-1),
    }
    asked = {name: values[name] for name in outputs}
    return LogProbsOutput(chosen, **{name: value.masked_fill(~valid, 0) for name, value in asked.items()})
