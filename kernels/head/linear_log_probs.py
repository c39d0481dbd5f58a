"""Log-probability of every target token under an LM head, with the logits one chunk of tokens at a time.

For hidden states X `(N, H)`, head W `(V, H)` and labels t, with z the transformed logits (`_cross_entropy_options`):

    log_probs[n] = z[n, t[n]] - lse[n]          entropy[n] = lse[n] - sum_c p[n, c] * z[n, c]
    dz[n, c]     = g[n] * ([c == t[n]] - p[n, c]) - e[n] * p[n, c] * (log p[n, c] + entropy[n])

for upstream gradients g of the log-probabilities and e of the entropies, which any loss may give: supervised,
preference or policy. Its backward is exact in the cheapest of the three ways of `_linear_rows`: logits kept up to a
budget, recomputed beyond it, or, for a frozen head, a gradient of size (N, H) made in the forward. For a loss that is
expected to weigh all tokens alike the gradients are those of the summed loss, made in the forward
(`_linear_expected_gradient`).

Bytes moved besides the matmuls' own, b bytes an element: N*V*b for the statistics and 2*N*V*b for the gradient, and
2*V*H*b for every chunk after the first, to accumulate dW. Saved for the backward are the inputs, two to three fp32
numbers a token, and the kept logits or the (N, H) gradient in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autocast import head_as_autocast
from liger_trainer.kernels.head.cross_entropy_options import (
    OPTIONS_SCHEMA,
    ExtraStats,
    RowOptions,
    RowStats,
    check_options,
    compute_dtype,
)
from liger_trainer.kernels.head.head_chunks import Needs
from liger_trainer.kernels.head.linear_expected_gradient import log_probs_with_gradients
from liger_trainer.kernels.head.linear_row_gradients import attach_gradients
from liger_trainer.kernels.head.linear_rows import (
    allocate_kept,
    kept_rows,
    linear_statistics_,
)
from liger_trainer.kernels.head.log_probs import (
    LOG_PROBS_OUTPUTS,
    LogProbsOutput,
    log_probs_reference,
    log_probs_with_outputs,
)
from liger_trainer.kernels.head.loss_checks import check_linear, check_outputs
from liger_trainer.kernels.head.matmul_precision import fp32_reductions


@torch.library.custom_op(
    "liger_trainer::linear_log_probs_rows",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, {OPTIONS_SCHEMA}, int logits_memory, "
    "SymInt keep, bool entropy, bool predicted, bool mean_logit, bool sum_squared_probs, bool unit_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _rows(hidden: Any, weight: Any, target: Any, bias: Any, *rest: Any) -> Any:
    """nll, lse, entropy and predicted of `RowStats`, both of `ExtraStats`, the kept logits and dnll/dhidden."""
    stats, extra, unit_gradient = _allocate_rows(hidden, target, *rest[8:])
    with fp32_reductions(weight):
        kept = linear_statistics_(
            hidden, weight, target, bias, RowOptions(*rest[:6]), rest[6], rest[7], stats, extra, unit_gradient
        )
    return (*stats[1:], *extra, kept, unit_gradient)


def _allocate_rows(
    hidden: torch.Tensor,
    target: torch.Tensor,
    entropy: bool,
    predicted: bool,
    mean_logit: bool,
    sum_squared_probs: bool,
    unit_gradient: bool,
) -> tuple[RowStats, ExtraStats, torch.Tensor]:
    tokens = target.numel()
    return (
        RowStats.allocate(hidden, tokens, entropy, predicted),
        ExtraStats.allocate(hidden, tokens, mean_logit, sum_squared_probs),
        # Not in the dtype of `hidden`: the product with the upstream gradient would be rounded a second time.
        torch.empty_like(hidden, dtype=compute_dtype(hidden)) if unit_gradient else hidden.new_empty(0),
    )


@_rows.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Any, *rest: Any) -> Any:
    stats, extra, unit_gradient = _allocate_rows(hidden, target, *rest[8:])
    return (*stats[1:], *extra, allocate_kept(hidden, weight, rest[7]), unit_gradient)


def check_retain_memory(retain_memory: int | None) -> None:
    """Raises ValueError for a negative budget."""
    if retain_memory is not None and retain_memory < 0:
        raise ValueError(f"`retain_memory` is {retain_memory}; it must be 0 bytes or more, or None.")


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
    logits_memory: int = 512 * 2**20,
    retain_memory: int | None = None,
    expected_grad: float | torch.Tensor | None = None,
) -> torch.Tensor | LogProbsOutput:
    """Log-probability of each target under ``softmax(transform(hidden @ weight.T + bias))``, one chunk at a time.

    The logits are transformed to ``softcap * tanh(x * logit_scale / softcap) / temperature`` (without `softcap`:
    ``x * logit_scale / temperature``). They are rounded to the dtype of `hidden`, as ``nn.Linear`` rounds them, and
    everything after that is fp32. Log-probabilities and entropies are differentiable, with any upstream gradient;
    double backward is an error.

    The backward is exact and takes the cheapest way: logits that were kept give it three matmuls in all, recomputed
    ones four. Where only `hidden` needs a gradient it takes two, the second in the forward; but a gradient of the
    entropy then recomputes the logits.

    Args:
        hidden: `(..., H)` of fp16, bf16, fp32 or float64.
        weight: `(V, H)` of the dtype of `hidden`; under autocast as in `linear_cross_entropy`, with the copy of another
            dtype kept for the backward.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the token's outputs NaN.
        bias: `(V,)`, floating.
        ignore_index: Tokens with this label give 0 and no gradient.
        temperature: Divides the logits after the soft-cap, more than 0.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        outputs: Names among "entropy", "top1", "mean_logit" and "sum_squared_probs".
        logits_memory: Bytes for the chunk of logits, 512 MiB by default. Half-precision weight gradients of more than
            8 chunks are summed in fp32, but on NVIDIA GPUs from Hopper on; where a bigger buffer is cheaper than that
            sum, the buffer exceeds this.
        retain_memory: Bytes of logits kept for the backward: 2 * N * V bytes in half precision keep all of them and
            are fastest, 0 keeps none. By default one chunk, whose memory the forward and the backward need anyway.
        expected_grad: For a loss that weighs all tokens alike: the upstream gradient to expect for the sum of the
            negative log-probabilities, a number or a 0-d tensor; None (the default) for any other loss. The gradients
            are then computed in the forward, in three matmuls and without kept logits. The backward is exact for every
            upstream gradient: if it is the same for all tokens, the gradients are ready; if it is not, or the entropies
            have one, the logits are recomputed. The gradient of a sum is known to be the same for all tokens; for any
            other, the host waits for the device to find out. Not used with "mean_logit" and "sum_squared_probs", nor
            under `torch.compile`.

    Returns:
        fp32 log-probabilities (float64 for float64 inputs) shaped as `target`; with `outputs` a `LogProbsOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    options = RowOptions(ignore_index, 0.0, 0.0, softcap, logit_scale, temperature)
    check_options(options, "none", None, ())
    check_outputs(outputs, LOG_PROBS_OUTPUTS)
    hidden, weight, bias = head_as_autocast(hidden, weight, bias)
    check_linear(hidden, weight, target, bias, logits_memory)
    check_retain_memory(retain_memory)
    flat, labels = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    grad_enabled = torch.is_grad_enabled()
    needs = Needs(*(grad_enabled and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)))
    asked = ("entropy" in outputs, "top1" in outputs, "mean_logit" in outputs, "sum_squared_probs" in outputs)
    is_known = expected_grad is not None and target.numel() > 0 and not torch.compiler.is_compiling()
    if is_known and any(needs) and not any(asked[2:]):
        chosen, entropy, predicted = log_probs_with_gradients(
            flat, weight, labels, bias, options, logits_memory, *asked[:2], needs, expected_grad
        )
        unused = flat.new_empty(0)
        return log_probs_with_outputs(
            chosen, entropy, predicted, unused, unused, labels, ignore_index, outputs, target.shape
        )
    frozen_head = needs == (True, False, False)
    keep = kept_rows(flat, weight, logits_memory, retain_memory) if any(needs) and not frozen_head else 0
    with torch.no_grad():
        nll, lse, entropy, predicted, mean_logit, squares, kept, unit_gradient = _rows(
            flat, weight, labels, bias, *options, logits_memory, keep, *asked, frozen_head
        )
    if any(needs):
        nll, entropy = attach_gradients(
            nll, unit_gradient, flat, weight, labels, bias, nll, lse, entropy, kept, *options, logits_memory,
            0, weight.shape[0], "",
        )  # fmt: skip
    return log_probs_with_outputs(
        0.0 - nll, entropy, predicted, mean_logit, squares, labels, ignore_index, outputs, target.shape
    )


def linear_log_probs_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
) -> torch.Tensor | LogProbsOutput:
    """`linear_log_probs` in plain torch: all logits at once, differentiated by autograd as often as wanted."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return log_probs_reference(logits, target, ignore_index, temperature, softcap, logit_scale, outputs)
