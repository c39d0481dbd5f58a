"""LM head and cross entropy in one operator: the logits exist one chunk of tokens at a time.

For hidden states X `(N, H)`, head W `(V, H)` and a loss L of the logits ``X @ W.T + bias`` (`_cross_entropy_options`):

    for each chunk of tokens:   Z = X_c @ W.T          into one buffer, rows padded to 64 columns
                                Z = dL/dZ              in place, one kernel (`_cross_entropy_rows`)
                                dX_c = Z @ W           dW += Z.T @ X_c          dbias += sum of the rows of Z, fp32

so the gradients come with the forward, in the three matmuls that are the least possible (two for a frozen head or
frozen hidden states), and the backward has only the upstream gradient to apply (`_rescale`). The forward needs the
normaliser for that, which is counted on the device; nothing is synchronised. `reduction="none"` cannot know its
upstream gradient: it keeps two fp32 numbers a token and recomputes the logits in the backward, one matmul more.

Bytes moved besides the matmuls' own, b bytes an element: 2 to 3 N*V*b for the row kernel and 2*V*H*b for each chunk
after the first, to accumulate dW. Where the buffer holds few tokens, the first chunk has more than these, in the memory
that dW fills later (`_weight_gradient_panels`). Memory: one chunk of logits, dX, dW; saved for backward are dX, dW and
dbias.

Ignored tokens take no elementwise work, but their rows stay in the matmuls: leaving them out takes their count on the
host, and learning it there would stall the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autocast import head_as_autocast
from liger_trainer.kernels.autograd import refuse_double_backward
from liger_trainer.kernels.head.cross_entropy_options import (
    OPTIONS_SCHEMA,
    CrossEntropyOutput,
    RowOptions,
    RowStats,
    check_options,
    checked_class_weights,
    compute_dtype,
    inverse_normalizer,
    with_outputs,
)
from liger_trainer.kernels.head.head_chunks import Needs, allocate_gradients
from liger_trainer.kernels.head.linear_cross_entropy_chunks import run_chunks
from liger_trainer.kernels.head.loss_checks import check_linear
from liger_trainer.kernels.head.rescale import expected_gradient, rescaled_gradients


@torch.library.custom_op(
    "liger_trainer::linear_cross_entropy_forward",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weights, Tensor scale, "
    f"Tensor expected, {OPTIONS_SCHEMA}, int logits_memory, bool entropy, bool predicted, bool hidden_gradient, "
    "bool weight_gradient, bool bias_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def loss_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    scale: torch.Tensor,
    expected: torch.Tensor,
    *rest: Any,
) -> Any:
    """The loss times `scale`, its gradients times `expected`, and nll, lse, entropy and predicted of `RowStats`."""
    *options, logits_memory, entropy, predicted, hidden_gradient, weight_gradient, bias_gradient = rest
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    gradients = run_chunks(
        hidden,
        weight,
        target,
        bias,
        class_weights,
        RowOptions(*options),
        logits_memory,
        stats,
        scale * expected,
        Needs(hidden_gradient, weight_gradient, bias_gradient),
        recompute=False,
    )
    return (stats.loss.sum() * scale, *gradients, *stats[1:])


@loss_and_gradients.register_fake
def _(hidden: Any, weight: Any, target: Any, bias: Any, class_weights: Any, scale: Any, *rest: Any) -> Any:
    *_, entropy, predicted, hidden_gradient, weight_gradient, bias_gradient = rest
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    needs = Needs(hidden_gradient, weight_gradient, bias_gradient)
    return (stats.loss.new_empty(()), *allocate_gradients(hidden, weight, bias, needs), *stats[1:])


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:4], inputs[6])
    ctx.needs = inputs[-3:]


def _forward_backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    d_hidden = d_weight = d_bias = None
    if grad is not None:
        *saved, expected = ctx.saved_tensors
        gradients = [gradient if need else None for gradient, need in zip(saved, ctx.needs)]
        del saved
        d_hidden, d_weight, d_bias = rescaled_gradients(gradients, grad, expected, "linear_cross_entropy")
    return (d_hidden, d_weight, None, d_bias, *(None,) * 15)


loss_and_gradients.register_autograd(_forward_backward, setup_context=_forward_setup)


@torch.library.custom_op(
    "liger_trainer::linear_cross_entropy_rows",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weights, {OPTIONS_SCHEMA}, "
    "int logits_memory, bool entropy, bool predicted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    *rest: Any,
) -> Any:
    """The `RowStats` of every token, without gradients."""
    *options, logits_memory, entropy, predicted = rest
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    run_chunks(
        hidden,
        weight,
        target,
        bias,
        class_weights,
        RowOptions(*options),
        logits_memory,
        stats,
        None,
        Needs(False, False, False),
        recompute=False,
    )
    return tuple(stats)


@_rows.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *rest: Any) -> Any:
    return tuple(RowStats.allocate(hidden, target.numel(), rest[-2], rest[-1]))


@torch.library.custom_op(
    "liger_trainer::linear_cross_entropy_rows_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weights, "
    f"Tensor nll, Tensor lse, {OPTIONS_SCHEMA}, int logits_memory, bool hidden_gradient, bool weight_gradient, "
    "bool bias_gradient) -> (Tensor, Tensor, Tensor)",
)
def _rows_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    nll: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> Any:
    """dX, dW and dbias for the upstream gradients `grad` of the token losses, from recomputed logits."""
    *options, logits_memory, hidden_gradient, weight_gradient, bias_gradient = rest
    return run_chunks(
        hidden,
        weight,
        target,
        bias,
        class_weights,
        RowOptions(*options),
        logits_memory,
        RowStats(lse, nll, lse, lse, lse),
        grad,
        Needs(hidden_gradient, weight_gradient, bias_gradient),
        recompute=True,
    )


@_rows_backward.register_fake
def _(grad: Any, hidden: Any, weight: Any, target: Any, bias: Any, *rest: Any) -> Any:
    return allocate_gradients(hidden, weight, bias, Needs(*rest[-3:]))


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:5], output[1], output[2])
    ctx.options = inputs[5:-2]


def _rows_autograd(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    gradients: list[torch.Tensor | None] = [None, None, None]
    if grad is not None:
        refuse_double_backward("linear_cross_entropy")
        needs = Needs(ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        computed = _rows_backward(grad, *ctx.saved_tensors, *ctx.options, *needs)
        gradients = [gradient if need else None for gradient, need in zip(computed, needs)]
    return (gradients[0], gradients[1], None, gradients[2], *(None,) * 10)


_rows.register_autograd(_rows_autograd, setup_context=_rows_setup)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    class_weights: torch.Tensor | None = None,
    outputs: Sequence[str] = (),
    logits_memory: int = 512 * 2**20,
    expected_grad: float | torch.Tensor | None = None,
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy of ``hidden @ weight.T + bias`` that never holds more than one chunk of the logits.

    Loss and options are those of `cross_entropy`. The logits are rounded to the dtype of `hidden`, as ``nn.Linear``
    rounds them, the loss computed from them in fp32 and the gradients in the forward; double backward is an error.
    (`linear_jsd`, whose gradient is a difference of two nearly equal distributions, keeps its logits in fp32.)

    Args:
        hidden: `(..., H)` of fp16, bf16, fp32 or float64.
        weight: `(V, H)` of the dtype of `hidden`. Under autocast hidden states, weight and bias of any dtype but
            float64 are cast to autocast's, as for ``nn.Linear``; a weight of another dtype is copied at each call.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the loss NaN.
        bias: `(V,)`, floating.
        ignore_index: Tokens with this label give no loss and no gradient.
        reduction: "mean" (over valid tokens; with class weights, as in torch, over their weights), "sum", or "none" (0
            at ignored tokens; the backward then recomputes the logits). Where every token is ignored the loss is 0,
            with zero gradients.
        num_items: Divides the sum of the token losses by this instead, with "mean" and "sum"; a number or a 0-d tensor.
        label_smoothing: In [0, 1].
        z_loss: Factor of ``lse**2`` for each valid token; not weighted by class, and its mean is over the tokens.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap, more than 0.
        class_weights: `(V,)`, floating, not differentiated.
        outputs: Names among "z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll".
        logits_memory: Bytes for the chunk of logits, 512 MiB by default. Half-precision weight gradients of more than
            8 chunks are summed in fp32, but on NVIDIA GPUs from Hopper on; where a bigger buffer is cheaper than that
            sum, the buffer exceeds this.
        expected_grad: The upstream gradient to expect in the backward, a number or a 0-d tensor; default 1. Where it
            comes exactly so, the backward does not touch the gradients; otherwise it passes over them once. Not used
            by reduction "none".

    Returns:
        The fp32 loss (float64 for float64 inputs), 0-d or shaped as `target`; with `outputs` a `CrossEntropyOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_options(options, reduction, num_items, outputs)
    hidden, weight, bias = head_as_autocast(hidden, weight, bias)
    check_linear(hidden, weight, target, bias, logits_memory)
    vocab_size, dtype = weight.shape[0], compute_dtype(hidden)
    average = reduction == "mean" and num_items is None
    class_weights = checked_class_weights(class_weights, vocab_size, hidden, target, ignore_index, average)
    extras = ("entropy" in outputs, "predicted_tokens" in outputs or "token_accuracy" in outputs)
    flat, labels = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    grad_enabled = torch.is_grad_enabled()
    needs = [grad_enabled and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    scale = None
    if reduction != "none":
        scale = inverse_normalizer(labels, ignore_index, reduction, num_items, dtype)
    if scale is None or not any(needs):
        stats = RowStats(*_rows(flat, weight, labels, bias, class_weights, *options, logits_memory, *extras))
        loss = stats.loss.view(target.shape) if scale is None else stats.loss.sum() * scale
        return with_outputs(loss, outputs, stats, target, options, scale)
    normalised = reduction == "mean" or num_items is not None
    expected = expected_gradient(expected_grad, scale, hidden.dtype, normalised)
    loss, _, _, _, *tokens = loss_and_gradients(
        flat, weight, labels, bias, class_weights, scale, expected, *options, logits_memory, *extras, *needs
    )
    return with_outputs(loss, outputs, RowStats(tokens[0], *tokens), target, options, scale)
