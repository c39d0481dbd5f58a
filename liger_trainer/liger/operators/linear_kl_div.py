"""KL divergence of an LM head from given probabilities, such as cached ones; the operator is in `linear_divergence`.

Shapes: N tokens, H hidden size, V vocabulary; X (N, H), W (V, H), target (N, V).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from liger_trainer.kernels.head.divergence import (
    DivergenceOptions,
    DivergenceOutput,
    common_vocab_size,
)
from liger_trainer.kernels.head.linear_divergence import reduced_divergence, reduced_divergence_reference
from liger_trainer.kernels.head.loss_options import check_head
from liger_trainer.kernels.runtime import as_autocast, reference_of


def linear_kl_div(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    labels: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    num_items: int | torch.Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    eps: float = 1e-10,
    soft_weight: float = 1.0,
    hard_weight: float = 0.0,
    token_weights: torch.Tensor | None = None,
    vocab_size: int | None = None,
    outputs: Sequence[str] = (),
    logits_memory: int = 512 * 2**20,
    expected_grad: float | torch.Tensor | None = None,
) -> torch.Tensor | DivergenceOutput:
    """``KL(target || softmax(z))`` for probabilities `target` and the logits z of an LM head, one chunk at a time.

    A token's divergence is ``sum_c target[c] * (log(max(target[c], eps)) - log_softmax(z / temperature)[c])``; `target`
    is not normalised and gets no gradient. Logits are fp32, as in `linear_jsd`. The gradients are
    computed in the forward, in three matmuls (two for a frozen head); double backward is an error.

    The arguments are those of the student and the options in `linear_jsd`, without the prefix ``student_``, but:

    - `target`: `(..., V)` probabilities, of any floating dtype;
    - `reduction`: "batchmean" (the sum over the valid tokens divided by their number), "mean" (that divided by the
      vocabulary, as in ``torch.nn.KLDivLoss``) or "sum". `num_items` takes the place of the number of valid tokens, or
      of 1;
    - `eps`: Lower bound of the probabilities in the logarithm;
    - `logits_memory`: Bytes for the one chunk of fp32 logits, 512 MiB by default.

    Returns:
        The fp32 0-d loss (float64 for float64 inputs); with `outputs` a `DivergenceOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    hidden, weight, bias = as_autocast(hidden), as_autocast(weight), as_autocast(bias)
    check_head(hidden, weight, bias, "student_")
    if reduction not in ("batchmean", "mean", "sum"):
        raise ValueError(f"`reduction` is {reduction!r}; it must be 'batchmean', 'mean' or 'sum'.")
    if target.dim() < 1 or target.shape[:-1] != hidden.shape[:-1] or not target.is_floating_point():
        raise ValueError(
            f"`target` has shape {tuple(target.shape)} and dtype {target.dtype}; hidden states of shape "
            f"{tuple(hidden.shape)} need floating probabilities of {(*hidden.shape[:-1], weight.shape[0])}."
        )
    if target.device != hidden.device:
        raise ValueError(f"`target` is on {target.device} but `hidden` on {hidden.device}; move it there.")
    vocab_size = common_vocab_size(weight.shape[0], target.shape[-1], vocab_size)
    if reduction == "mean":
        soft_weight, hard_weight = soft_weight / vocab_size, hard_weight / vocab_size
    options = DivergenceOptions(
        "probs_kl", 0.0, temperature, soft_weight, hard_weight, softcap, logit_scale, None, 1.0, eps, ignore_index
    )
    result = reduced_divergence(
        (hidden, weight, bias),
        (target, None, None),
        labels,
        options,
        vocab_size,
        "sum" if reduction == "sum" else "mean",
        num_items,
        token_weights,
        outputs,
        logits_memory,
        expected_grad,
    )
    if reduction == "mean" and isinstance(result, DivergenceOutput):
        result.soft_loss = None if result.soft_loss is None else result.soft_loss / vocab_size
        result.hard_loss = None if result.hard_loss is None else result.hard_loss / vocab_size
    return result


linear_kl_div_reference = reference_of(linear_kl_div, reduced_divergence=reduced_divergence_reference)
