"""Log-probability of every target token under an LM head, with the logits one chunk of tokens at a time.

For hidden states X `(N, H)`, head W `(V, H)` and labels t, with z the transformed logits (`logit_rows`):

    log_probs[n] = z[n, t[n]] - lse[n]          entropy[n] = lse[n] - sum_c p[n, c] * z[n, c]
    dz[n, c]     = g[n] * ([c == t[n]] - p[n, c]) - e[n] * p[n, c] * (log p[n, c] + entropy[n])

for upstream gradients g of the log-probabilities and e of the entropies, which any loss may give: supervised,
preference or policy. They are known only in the backward, which is exact in the cheapest of three ways:

    retained    the logits of the last tokens, as many as a budget in bytes holds, stay in memory until the backward:
                3 matmuls in all for these tokens
    recomputed  the logits of the other tokens are computed again in the backward, one chunk at a time: 4 matmuls
    frozen head the gradient of each log-probability with respect to its hidden state, (N, H) in fp32, is computed in
                the forward and multiplied by the upstream gradient in the backward: 2 matmuls

The forward runs the tokens that are not retained first, in the memory that the retained logits fill last. The backward
(`linear_log_probs_gradients`) runs the retained ones first, and then the others in their memory. So with equal budgets
for a chunk and for retained logits, retaining costs nothing at the peak. For a loss that is expected to weigh all
tokens alike, the gradients are those of the summed loss, computed in the forward (`log_probs_with_gradients`).

Bytes moved besides the matmuls' own, b bytes an element: N*V*b for the statistics and 2*N*V*b for the gradient, and
2*V*H*b for every chunk after the first, to accumulate dW. Saved for backward: the inputs, two to three fp32 numbers a
token, and the retained logits or the (N, H) gradient in fp32.

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from liger_trainer.kernels.head.cross_entropy_kernel import row_statistics_
from liger_trainer.kernels.head.head_chunks import (
    Needs,
    chunk_spans,
    logits_buffer,
    retained_rows,
    saturating_chunk_rows,
)
from liger_trainer.kernels.head.linear_log_probs_gradients import HeadRows, attach_gradients, log_probs_with_gradients
from liger_trainer.kernels.head.log_probs import (
    LOG_PROBS_OUTPUTS,
    LogProbsOutput,
    log_probs_reference,
    log_probs_with_outputs,
)
from liger_trainer.kernels.head.loss_options import (
    LossOptions,
    check_labels_on_cpu,
    check_linear,
    check_options,
    check_outputs,
    check_retain_memory,
    compute_dtype,
)
from liger_trainer.kernels.head.token_statistics import ExtraStats, RowStats, Shard
from liger_trainer.kernels.matmul import fp32_reductions, matmul_into
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast

_T = torch.Tensor
_Statistics = tuple[_T, _T, _T, _T, _T, _T, _T, _T]  # all but `loss` of `RowStats`, `ExtraStats`, logits, dnll/dhidden


def forward_logits(
    hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, retain: int, retained: list[torch.Tensor]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields (start, stop, logits) of every chunk of tokens; the last `retain` tokens come last, as one chunk.

    Appends the memory of their logits to `retained`.
    """
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    others = tokens - retain
    rows = saturating_chunk_rows(hidden, weight, logits_memory, weight_gradient=False)
    buffer = logits_buffer(hidden, weight, max(retain, min(rows, others)))
    for start, stop in chunk_spans(0, others, rows):
        yield start, stop, torch.mm(hidden[start:stop], weight.t(), out=buffer[: stop - start, :vocab_size])
    if buffer.shape[0] != retain:
        del buffer
        buffer = logits_buffer(hidden, weight, retain)
    retained.append(buffer)
    if retain:
        yield others, tokens, torch.mm(hidden[others:], weight.t(), out=buffer[:, :vocab_size])


@operator("liger_trainer::linear_log_probs_rows")
def _rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: LossOptions,
    logits_memory: int,
    retain: int,
    entropy: bool,
    predicted: bool,
    mean_logit: bool,
    sum_squared_probs: bool,
    unit_gradient: bool,
) -> _Statistics:
    """nll, lse, entropy and predicted of `RowStats`, `ExtraStats`, the retained logits and dnll/dhidden."""
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    extra = ExtraStats.allocate(hidden, target.numel(), mean_logit, sum_squared_probs)
    gradient = _allocate_unit_gradient(hidden, unit_gradient)
    check_labels_on_cpu(target, weight.shape[0], options.ignore_index)
    one = stats.loss.new_ones(()) if gradient.numel() else None
    retained: list[torch.Tensor] = []
    with fp32_reductions(weight):
        for start, stop, logits in forward_logits(hidden, weight, logits_memory, retain, retained):
            labels, found, more = target[start:stop], stats.rows(start, stop), extra.rows(start, stop)
            row_statistics_(logits, labels, found, options, bias, None, one, logits.stride(0), extra=more)
            if one is not None:
                matmul_into(gradient[start:stop], logits, weight)
    return stats.nll, stats.lse, stats.entropy, stats.predicted, *extra, retained[0], gradient


def _allocate_unit_gradient(hidden: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Memory for dnll/dhidden. Not in the dtype of `hidden`: its product with the upstream gradient is rounded too."""
    return torch.empty_like(hidden, dtype=compute_dtype(hidden)) if wanted else hidden.new_empty(0)


@_rows.register_fake
def _(
    hidden, weight, target, bias, options, logits_memory, retain, entropy, predicted, mean_logit, sum_squared_probs,
    unit_gradient,
):  # fmt: skip
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    extra = ExtraStats.allocate(hidden, target.numel(), mean_logit, sum_squared_probs)
    gradient = _allocate_unit_gradient(hidden, unit_gradient)
    return (*stats[1:], *extra, logits_buffer(hidden, weight, retain), gradient)


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

    The backward is exact and takes the cheapest way: three matmuls in all for tokens whose logits were retained, four
    for the others. If only `hidden` needs a gradient there are two, the second in the forward; but a gradient of the
    entropy then recomputes the logits.

    Args:
        hidden: `(..., H)` of fp16, bf16, fp32 or float64.
        weight: `(V, H)` of the dtype of `hidden`; under autocast as in `linear_cross_entropy`; a copy in another
            dtype is saved for backward.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the token's outputs NaN.
        bias: `(V,)`, floating.
        ignore_index: Tokens with this label give 0 and no gradient.
        temperature: Divides the logits after the soft-cap, more than 0.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        outputs: Names among "entropy", "top1", "mean_logit" and "sum_squared_probs".
        logits_memory: Bytes for the chunk of logits, 512 MiB by default. Half-precision weight gradients of more than
            8 chunks are summed in fp32 (not on NVIDIA GPUs from Hopper on, which need no fp32 sum); if a larger buffer
            costs less memory than that sum, the buffer exceeds this.
        retain_memory: Bytes of logits retained for the backward: 2 * N * V bytes in half precision retain all of them
            and are fastest, 0 retains none. By default one chunk, whose memory forward and backward need anyway.
        expected_grad: For a loss that weighs all tokens alike: the upstream gradient to expect for the sum of the
            negative log-probabilities, a number or a 0-d tensor; None (the default) for any other loss. The gradients
            are then computed in the forward, in three matmuls and without retained logits. The backward is exact for
            every upstream gradient: if it is the same for all tokens, the gradients are ready; if it is not, or the
            entropies have one, the logits are recomputed. The gradient of a sum is known to be the same for all tokens;
            for any other, the host waits for the device to find out. Not used with "mean_logit" and
            "sum_squared_probs", nor under `torch.compile`.

    Returns:
        fp32 log-probabilities (float64 for float64 inputs) shaped as `target`; with `outputs` a `LogProbsOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    options = LossOptions(ignore_index, 0.0, 0.0, softcap, logit_scale, temperature)
    check_options(options, "none", None, ())
    check_outputs(outputs, LOG_PROBS_OUTPUTS)
    hidden, weight, bias = as_autocast(hidden), as_autocast(weight), as_autocast(bias)
    check_linear(hidden, weight, target, bias, logits_memory)
    check_retain_memory(retain_memory)
    flat, labels = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    needs = Needs.of(hidden, weight, bias)
    asked = ("entropy" in outputs, "top1" in outputs, "mean_logit" in outputs, "sum_squared_probs" in outputs)
    in_forward = any(needs) and not any(asked[2:]) and target.numel() > 0 and not torch.compiler.is_compiling()
    if expected_grad is not None and in_forward:
        chosen, entropy, predicted = log_probs_with_gradients(
            flat, weight, labels, bias, options, logits_memory, *asked[:2], needs, expected_grad
        )
        unused = flat.new_empty(0)
        return log_probs_with_outputs(
            chosen, entropy, predicted, unused, unused, labels, ignore_index, outputs, target.shape
        )
    frozen_head = needs == (True, False, False)
    retain = retained_rows(flat, weight, logits_memory, retain_memory) if any(needs) and not frozen_head else 0
    with torch.no_grad():
        nll, lse, entropy, predicted, mean_logit, squares, retained, unit_gradient = _rows(
            flat, weight, labels, bias, options, logits_memory, retain, *asked, frozen_head
        )
    if any(needs):
        rows = HeadRows(flat, weight, labels, bias, nll, lse, entropy, retained)
        nll, entropy = attach_gradients(nll, unit_gradient, rows, options, logits_memory, Shard(0, weight.shape[0]), "")
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
    """`linear_log_probs` in plain torch: all logits at once; autograd differentiates it any number of times."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return log_probs_reference(logits, target, ignore_index, temperature, softcap, logit_scale, outputs)
