"""KL divergence, generalised JSD and total variation distance of distributions that are given.

With x and y a row of the student's and of the teacher's distribution, as log-probabilities or probabilities, the row's
divergence is the sum over the classes of

    kl        y * (log(max(y, eps)) - x)          x log-probs, y probs          d/dx = -y
    kl_log    exp(y) * (y - x)                    both log-probs                d/dx = -exp(y)
    jsd       beta * P * (y - log M) + (1 - beta) * Q * (x - log M)             d/dx = (1 - beta) * Q * (x - log M)
              with P = exp(y), Q = exp(x), M = beta * P + (1 - beta) * Q; beta 0 is KL(P || Q), beta 1 KL(Q || P)
    tvd       |x - y| / 2                         both probs                    d/dx = sign(x - y) / 2, 0 at a tie

and only x gets a gradient. A class of probability 0 in both contributes 0, as lim p*log(p) does.

A loss, of reduction "sum", "mean" or "batchmean", makes its gradient in the forward, for the upstream gradient that is
expected, 1 unless the caller says otherwise. In the backward each row's program compares the two, on the device. It
multiplies the gradient where one is 2**k times the other, as with gradients that are accumulated over 2**k steps, and
makes it anew where they differ otherwise, or in fp16, so it is rounded once whatever comes. Bytes moved for (N, V) of b
bytes: 3*N*V*b in all, 5 where it is multiplied, 6 where it is made anew (5 for KL, whose gradient does not need x); 5
(4) where none is expected, in compiled graphs, and with reduction "none". Saved: the inputs and the gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import refuse_double_backward
from liger_trainer.kernels.head.elementwise_divergence_kernel import launch
from liger_trainer.kernels.head.elementwise_divergence_reference import elements_reference, row_scale
from liger_trainer.kernels.head.logit_rows import row_view
from liger_trainer.kernels.head.loss_checks import check_tokens
from liger_trainer.kernels.runtime import graph_is_kept, use_triton

_ARGUMENTS = "Tensor x, Tensor y, Tensor? labels, str divergence, float beta, float eps, int ignore_index"


def _empty(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@torch.library.custom_op("liger_trainer::divergence_elements", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _elements(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The summands in fp32, shaped as `x`."""
    out = _empty(x, torch.float32)
    launch(x, *rest, out=out)
    return out


@_elements.register_fake
def _(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _empty(x, torch.float32)


@torch.library.custom_op(
    "liger_trainer::divergence_loss",
    mutates_args=(),
    schema=f"(Tensor scale, Tensor? expected, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
def _loss(
    scale: torch.Tensor, expected: torch.Tensor | None, x: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fp32 sum of all summands times `scale`, and its gradient times `expected`; empty without one."""
    sums = x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)
    if expected is None:
        launch(x, *rest, sums=sums)
        return sums.sum() * scale, x.new_empty(0)
    gradient = _empty(x, x.dtype)
    launch(x, *rest, sums=sums, out=gradient, grad=expected, scale=scale)
    return sums.sum() * scale, gradient


@_loss.register_fake
def _(scale: torch.Tensor, expected: torch.Tensor | None, x: torch.Tensor, *rest: Any) -> Any:
    return x.new_empty((), dtype=torch.float32), x.new_empty(0) if expected is None else _empty(x, x.dtype)


@torch.library.custom_op(
    "liger_trainer::divergence_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? scale, {_ARGUMENTS}) -> Tensor",
)
def _backward(grad: torch.Tensor, scale: torch.Tensor | None, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The gradient of `x`, contiguous, for that of `_elements`, or with `scale` for that of `_loss`."""
    out = _empty(x, x.dtype)
    launch(x, *rest, out=out, grad=grad.contiguous(), scale=scale)
    return out


@_backward.register_fake
def _(grad: torch.Tensor, scale: torch.Tensor | None, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return _empty(x, x.dtype)


@torch.library.custom_op(
    "liger_trainer::divergence_correct_",
    mutates_args={"gradient"},
    schema=f"(Tensor(a!) gradient, Tensor grad, Tensor expected, Tensor scale, {_ARGUMENTS}) -> ()",
)
def _correct_(gradient: torch.Tensor, grad: torch.Tensor, expected: torch.Tensor, *rest: Any) -> None:
    """Makes the `gradient` of `_loss`, which is that for `expected`, the one for `grad`."""
    scale, *arguments = rest
    launch(*arguments, out=gradient, grad=grad, scale=scale, expected=expected)


@_correct_.register_fake
def _(gradient: torch.Tensor, grad: torch.Tensor, expected: torch.Tensor, *rest: Any) -> None:
    return None


def _setup_elements(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _elements_autograd(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    missing = (None,) * 6
    if grad is None:
        return (None, *missing)
    refuse_double_backward(_FUNCTIONS)
    return (_backward(grad, None, *ctx.saved_tensors, *ctx.options), *missing)


def _setup_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs[:5], output[1])
    ctx.options = inputs[5:]


def _loss_autograd(ctx: Any, grad: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    gradient = None
    if grad is not None:
        refuse_double_backward(_FUNCTIONS)
        scale, expected, x, y, labels, gradient = ctx.saved_tensors
        if expected is None or graph_is_kept() or type(grad) is not torch.Tensor:  # the last: while it is traced
            gradient = _backward(grad, scale, x, y, labels, *ctx.options)
        else:
            gradient = gradient.detach()
            _correct_(gradient, grad, expected, scale, x, y, labels, *ctx.options)
    return (None, None, gradient, *(None,) * 6)


_FUNCTIONS = "kl_div, jsd and tvd"
_elements.register_autograd(_elements_autograd, setup_context=_setup_elements)
_loss.register_autograd(_loss_autograd, setup_context=_setup_loss)


@torch.no_grad()
def _expected(x: torch.Tensor, scale: torch.Tensor, expected_grad: float | torch.Tensor | None) -> torch.Tensor | None:
    """`expected_grad` as a 0-d tensor beside `scale`; None where no gradient is to be made in the forward."""
    if expected_grad is None or not x.requires_grad or torch.compiler.is_compiling():
        return None
    return torch.ones_like(scale) * expected_grad


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
    expected_grad: float | torch.Tensor | None,
) -> torch.Tensor:
    """Checks, and runs the kernel or the reference."""
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
    options = (divergence, beta, eps, ignore_index)
    in_kernel = use_triton(x) and use_triton(y)
    arguments = (row_view(x), row_view(y.detach()), flat, *options) if in_kernel else (x, y, flat, *options)
    if reduction == "none":
        return (_elements if in_kernel else elements_reference)(*arguments).view(x.shape)
    scale = row_scale(x, flat, reduction, ignore_index)
    if not in_kernel:
        return elements_reference(*arguments).sum() * scale
    needed = expected_grad if torch.is_grad_enabled() else None
    return _loss(scale, _expected(x, scale, needed), *arguments)[0]


def kl_div(
    y_pred: torch.Tensor,
    y_true: torch.Tensor,
    reduction: str = "batchmean",
    log_target: bool = False,
    eps: float = 1e-10,
    labels: torch.Tensor | None = None,
    ignore_index: int = -100,
    expected_grad: float | torch.Tensor | None = 1.0,
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
        expected_grad: The upstream gradient to expect in the backward, a number or a 0-d tensor, such as the weight of
            this loss in a sum. For it the forward makes the gradient; where another one comes, the backward multiplies
            it if that is exact, or makes it anew. None leaves it to the backward. Not used by reduction "none".

    Returns:
        The fp32 loss (float64 for float64 inputs).

    Raises:
        ValueError: For a shape, dtype, device or reduction that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    kind = "kl_log" if log_target else "kl"
    names = ("y_pred", "y_true")
    return _divergence(names, y_pred, y_true, labels, reduction, kind, 0.0, eps, ignore_index, expected_grad)


def jsd(
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    labels: torch.Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "batchmean",
    expected_grad: float | torch.Tensor | None = 1.0,
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
        expected_grad: As in `kl_div`.

    Returns:
        The fp32 loss (float64 for float64 inputs).

    Raises:
        ValueError: For a shape, dtype, device or option that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"`beta` is {beta}; it must lie in [0, 1].")
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    names = ("log_q", "log_p")
    return _divergence(names, log_q, log_p, labels, reduction, kind, beta, 0.0, ignore_index, expected_grad)


def tvd(
    p: torch.Tensor,
    q: torch.Tensor,
    labels: torch.Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    expected_grad: float | torch.Tensor | None = 1.0,
) -> torch.Tensor:
    """Total variation distance of probabilities, half the sum of ``|p - q|``; the gradient is 0 where they are equal.

    Args:
        p: `(..., V)` probabilities of fp16, bf16 or fp32 (float64 runs the reference).
        q: `(..., V)` probabilities, of any floating dtype, no gradient.
        labels: `(...)` of int64 or int32; rows of label `ignore_index` do not count.
        reduction: As in `kl_div`.
        ignore_index: See `labels`.
        expected_grad: As in `kl_div`.

    Returns:
        The fp32 loss (float64 for float64 inputs).

    Raises:
        ValueError: For a shape, dtype, device or reduction that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    return _divergence(("p", "q"), p, q, labels, reduction, "tvd", 0.0, 0.0, ignore_index, expected_grad)
