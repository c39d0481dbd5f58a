"""KL divergence, generalised JSD and total variation distance of distributions that are given.

With x and y a row of the student's and of the teacher's distribution, as log-probabilities or probabilities, the row's
divergence is the sum over the classes of

    kl        y * (log(max(y, eps)) - x)          x log-probs, y probs          d/dx = -y
    kl_log    exp(y) * (y - x)                    both log-probs                d/dx = -exp(y)
    jsd       beta * P * (y - log M) + (1 - beta) * Q * (x - log M)             d/dx = (1 - beta) * Q * (x - log M)
              with P = exp(y), Q = exp(x), M = beta * P + (1 - beta) * Q; beta 0 is KL(P || Q), beta 1 KL(Q || P)
    tvd       |x - y| / 2                         both probs                    d/dx = sign(x - y) / 2, 0 at a tie

and only x gets a gradient. A class of probability 0 in both contributes 0, as lim p*log(p) does.

The forward saves its inputs and nothing else; the backward reads them again and writes the gradient, taking the
upstream gradient of each row (or, with reduction "none", of each element) as it goes. Bytes moved for (N, V) of b
bytes: 2*N*V*b forward, 3*N*V*b backward (2 for KL, which does not need x).
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels._autograd import refuse_double_backward
from liger_trainer.kernels._elementwise_divergence_kernel import launch
from liger_trainer.kernels._elementwise_divergence_reference import elements_reference, scaled
from liger_trainer.kernels._logit_rows import row_view
from liger_trainer.kernels._loss_checks import check_tokens
from liger_trainer.kernels.runtime import use_triton

_ARGUMENTS = (
    "Tensor x, Tensor y, Tensor? labels, str divergence, float beta, float eps, int ignore_index, bool elements"
)


@torch.library.custom_op("liger_trainer::elementwise_divergence", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _forward(x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor | None, *options: Any) -> torch.Tensor:
    """fp32 row sums `(N,)`, or the summands `(N, V)`."""
    return launch(x, y, labels, None, _forward_output(x, options[-1]), *options)


def _forward_output(x: torch.Tensor, elements: bool) -> torch.Tensor:
    rows = x.numel() // x.shape[-1]
    return x.new_empty((rows, x.shape[-1]) if elements else rows, dtype=torch.float32)


@_forward.register_fake
def _(x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor | None, *options: Any) -> torch.Tensor:
    return _forward_output(x, options[-1])


@torch.library.custom_op(
    "liger_trainer::elementwise_divergence_backward", mutates_args=(), schema=f"(Tensor grad, {_ARGUMENTS}) -> Tensor"
)
def _backward(
    grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor | None, *options: Any
) -> torch.Tensor:
    """The gradient of `x`, contiguous, for that of the output of `_forward`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return launch(x, y, labels, grad.contiguous(), out, *options)


@_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _autograd(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    missing = (None,) * 7
    if grad is None:
        return (None, *missing)
    refuse_double_backward("kl_div, jsd and tvd")
    return (_backward(grad, *ctx.saved_tensors, *ctx.options), *missing)


_forward.register_autograd(_autograd, setup_context=_setup_context)


def _divergence(
    names: tuple[str, str],
    x: torch.Tensor,
    y: torch.Tensor,
    labels: torch.Tensor | None,
    reduction: str,
    divergence: str,
    beta: float,
    eps: float,
    ignore_index: int,
) -> torch.Tensor:
    """Checks, runs the kernel or the reference, and reduces."""
    if reduction not in ("none", "sum", "mean", "batchmean"):
        raise ValueError(f"`reduction` is {reduction!r}; it must be 'none', 'sum', 'mean' or 'batchmean'.")
    if x.shape != y.shape or x.dim() < 1 or not x.shape[-1]:
        raise ValueError(
            f"`{names[0]}` has shape {tuple(x.shape)} and `{names[1]}` {tuple(y.shape)}; both must be one (..., V) "
            "with V at least 1."
        )
    if x.device != y.device or not x.is_floating_point() or not y.is_floating_point():
        raise ValueError(
            f"`{names[0]}` is of {x.dtype} on {x.device} and `{names[1]}` of {y.dtype} on {y.device}; both must be "
            "floating and on one device."
        )
    check_tokens("labels", labels, x, integer=True)
    flat = None if labels is None else labels.reshape(-1).contiguous()
    elements = reduction == "none"
    options = (divergence, beta, eps, ignore_index, elements)
    if use_triton(x) and use_triton(y):
        values = _forward(row_view(x), row_view(y.detach()), flat, *options)
    else:
        values = elements_reference(x, y, flat, *options)
    if elements:
        return values.view(x.shape)
    return scaled(values, x, flat, reduction, ignore_index)


def kl_div(
    y_pred: torch.Tensor,
    y_true: torch.Tensor,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
    labels: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Kullback-Leibler divergence ``KL(y_true || exp(y_pred))``, as ``torch.nn.functional.kl_div``.

    Args:
        y_pred: `(..., V)` log-probabilities of fp16, bf16 or fp32 (float64 runs the reference).
        y_true: `(..., V)` probabilities, or log-probabilities with `log_target`; any floating dtype, no gradient.
        reduction: "batchmean" (sum over the valid rows divided by their number), "mean" (that divided by V), "sum", or
            "none" (the summands, shaped as `y_pred`).
        log_target: Whether `y_true` holds log-probabilities.
        eps: Lower bound of the probabilities in the logarithm; not used with `log_target`.
        labels: `(...)` of int64 or int32; rows of label `ignore_index` do not count.
        ignore_index: See `labels`.

    Returns:
        The fp32 loss (float64 for float64 inputs).

    Raises:
        ValueError: For a shape, dtype, device or reduction that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    kind = "kl_log" if log_target else "kl"
    return _divergence(("y_pred", "y_true"), y_pred, y_true, labels, reduction, kind, 0.0, eps, ignore_index)


def jsd(
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    labels: torch.Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence of log-probabilities (arXiv 2306.13649).

    ``beta * KL(P || M) + (1 - beta) * KL(Q || M)`` with ``M = beta * P + (1 - beta) * Q``; `beta` 0 stands for
    ``KL(P || Q)`` and 1 for ``KL(Q || P)``.

    Args:
        log_q: `(..., V)` log-probabilities of the student, fp16, bf16 or fp32 (float64 runs the reference).
        log_p: `(..., V)` log-probabilities of the teacher, of any floating dtype, no gradient.
        labels: `(...)` of int64 or int32; rows of label `ignore_index` do not count.
        beta: In [0, 1].
        ignore_index: See `labels`.
        reduction: As in `kl_div`.

    Returns:
        The fp32 loss (float64 for float64 inputs).

    Raises:
        ValueError: For a shape, dtype, device or option that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"`beta` is {beta}; it must lie in [0, 1].")
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    return _divergence(("log_q", "log_p"), log_q, log_p, labels, reduction, kind, beta, 0.0, ignore_index)


def tvd(
    p: torch.Tensor,
    q: torch.Tensor,
    labels: torch.Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """Total variation distance of probabilities, half the sum of ``|p - q|``; the gradient is 0 where they are equal.

    Args:
        p: `(..., V)` probabilities of fp16, bf16 or fp32 (float64 runs the reference).
        q: `(..., V)` probabilities, of any floating dtype, no gradient.
        labels: `(...)` of int64 or int32; rows of label `ignore_index` do not count.
        reduction: As in `kl_div`.
        ignore_index: See `labels`.

    Returns:
        The fp32 loss (float64 for float64 inputs).

    Raises:
        ValueError: For a shape, dtype, device or reduction that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    return _divergence(("p", "q"), p, q, labels, reduction, "tvd", 0.0, 0.0, ignore_index)
