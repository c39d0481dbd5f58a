"""Every norm with its reference and random arguments, for the tests that all of them must pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from liger_trainer import functional
from liger_trainer.kernels.norms import gated_rms_norm, layer_norm, rms_norm
from liger_trainer.liger.operators import (
    dyt,
    fused_add_norms,
    group_norm,
    modulated_rms_norm,
    poly_norm,
)


@dataclasses.dataclass(frozen=True)
class NormCase:
    """A norm as a function of tensors only, and its arguments for an input of some shape.

    Args:
        function: The public function.
        reference: The same in plain torch.
        parameters: Shapes of the arguments after `x`, as a function of its shape.
        channel_dim: The dimension of `x` that the parameters lie along.
    """

    function: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    reference: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    parameters: Callable[[tuple[int, ...]], list[tuple[int, ...]]]
    channel_dim: int = -1

    def arguments(
        self, shape: tuple[int, ...], device: str, dtype: torch.dtype, parameter_dtype: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Random arguments for an `x` of `shape`; a residual has the dtype of `x`, parameters may have their own."""
        arguments = [torch.randn(shape, device=device) * 1.5 + 0.5]
        arguments += [torch.randn(size, device=device) for size in self.parameters(shape)]
        dtypes = [dtype if a.shape == shape else parameter_dtype or dtype for a in arguments]
        return [argument.to(kind) for argument, kind in zip(arguments, dtypes)]


def _groups(shape: tuple[int, ...]) -> int:
    """A number of groups that divides the channels of `shape`."""
    return next(groups for groups in (4, 3, 2, 1) if shape[1] % groups == 0)


def _group_size(size: int) -> int:
    """The size of groups of a row of `size`: four or fewer of them."""
    return size // next(groups for groups in (4, 3, 2, 1) if size % groups == 0)


def _in_groups(function: Callable[..., torch.Tensor], *options: object, **named: object) -> Callable[..., torch.Tensor]:
    """`function` of a norm's tensors and epsilon, with groups and more options after them."""
    return lambda x, *rest: function(x, *rest, 1e-5, _group_size(x.shape[-1]), *options, **named)


NORMS = {
    "rms_norm": NormCase(functional.rms_norm, rms_norm.rms_norm_reference, lambda s: [s[-1:]]),
    "fused_add_rms_norm": NormCase(
        functional.fused_add_rms_norm, fused_add_norms.fused_add_rms_norm_reference, lambda s: [s, s[-1:]]
    ),
    "layer_norm": NormCase(functional.layer_norm, layer_norm.layer_norm_reference, lambda s: [s[-1:], s[-1:]]),
    "layer_norm of groups": NormCase(
        _in_groups(functional.layer_norm),
        _in_groups(layer_norm.layer_norm_reference),
        lambda s: [s[-1:], s[-1:]],
    ),
    "gated_rms_norm": NormCase(
        functional.gated_rms_norm, gated_rms_norm.gated_rms_norm_reference, lambda s: [s, s[-1:]]
    ),
    "gated_rms_norm of groups": NormCase(
        _in_groups(functional.gated_rms_norm, gate_first=True),
        _in_groups(gated_rms_norm.gated_rms_norm_reference, gate_first=True),
        lambda s: [s, s[-1:]],
    ),
    "fused_add_layer_norm": NormCase(
        functional.fused_add_layer_norm,
        fused_add_norms.fused_add_layer_norm_reference,
        lambda s: [s, s[-1:], s[-1:]],
    ),
    "modulated_rms_norm": NormCase(
        functional.modulated_rms_norm,
        modulated_rms_norm.modulated_rms_norm_reference,
        lambda s: [s[-1:], (s[0], s[-1]), (s[0], s[-1])],
    ),
    "modulated_rms_norm of tokens": NormCase(
        functional.modulated_rms_norm,
        modulated_rms_norm.modulated_rms_norm_reference,
        lambda s: [s[-1:], s, s],
    ),
    "group_norm": NormCase(
        lambda x, weight, bias: functional.group_norm(x, _groups(x.shape), weight, bias),
        lambda x, weight, bias: group_norm.group_norm_reference(x, _groups(x.shape), weight, bias),
        lambda s: [s[1:2], s[1:2]],
        channel_dim=1,
    ),
    "poly_norm": NormCase(functional.poly_norm, poly_norm.poly_norm_reference, lambda s: [(3,), (1,)]),
    "dyt": NormCase(functional.dyt, dyt.dyt_reference, lambda s: [(1,), s[-1:], s[-1:]]),
}


def outputs_and_gradients(
    function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    leaves: Sequence[torch.Tensor],
    upstream: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The outputs of `function` of `leaves`, and the gradients of these for the `upstream` gradients."""
    outputs = as_tuple(function(*leaves))
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


def as_tuple(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The outputs of a norm that has one or two."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def weight_gradient_errors(add: bool, rows: int, hidden_size: int, device: str) -> tuple[float, float]:
    """How far RMSNorm's bf16 weight gradient is from float64's of the same numbers, in units of bf16: ours and eager's.

    Half a unit is what rounding once costs. What fp32 loses in a sum of `rows` terms is taken off: it shows where they
    cancel to almost 0.

    Args:
        add: Whether the norm is of the sum of two tensors, as it was rounded to bf16.
        rows: Rows of the input.
        hidden_size: Their size.
        device: Where it runs.
    """
    x, residual, dy = torch.randn(3, rows, hidden_size, device=device).bfloat16()
    weight = torch.randn(hidden_size, device=device).bfloat16().requires_grad_()
    normed = (x + residual if add else x).double()
    terms = dy.double() * normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-6)
    exact, lost = terms.sum(0), 2**-20 * terms.abs().sum(0)
    unit = torch.exp2(exact.abs().log2().floor() - 7)
    results = []
    for name in ("function", "reference"):
        call = getattr(NORMS["fused_add_rms_norm" if add else "rms_norm"], name)
        y = call(x, residual, weight)[0] if add else call(x, weight)
        (gradient,) = torch.autograd.grad(y, weight, dy)
        results.append(float((((gradient.double() - exact).abs() - lost) / unit).max()))
    return results[0], results[1]
