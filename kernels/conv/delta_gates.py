"""The gates of a gated delta rule, one of each a head.

    g = -exp(A_log) * softplus(a + dt_bias)        beta = beta_scale * sigmoid(b)

and, with s the sigmoid of a + dt_bias,

    da = -dg * exp(A_log) * s        dt_bias: the sum of da        A_log: the sum of dg * g
    db = dbeta * beta_scale * sigmoid(b) * (1 - sigmoid(b))

Shapes: a, b (batch, tokens, heads); A_log, dt_bias (heads,).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import check_all_dtensors, reference_of, use_triton


def delta_gates(
    a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, *, beta_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gates of a gated delta rule: its log-decays g and its step sizes beta.

    Args:
        a: The decays' projection of shape (batch, tokens, heads) and any floating dtype and strides.
        b: The step sizes' projection of the shape of `a`. Its dtype may differ.
        A_log: Logarithms of the rates of shape (heads,).
        dt_bias: Bias of `a` of shape (heads,).
        beta_scale: What the sigmoid of `b` is multiplied by; 2.0 for a delta rule that may turn its state's sign.

    Returns:
        ``-exp(A_log) * softplus(a + dt_bias)`` in fp32, and ``beta_scale * sigmoid(b)`` in the dtype of `b`, both
        contiguous and of the shape of `a`.

    Raises:
        ValueError: If a shape, dtype or device does not fit `a`.
    """
    _check_arguments(a, b, A_log, dt_bias)
    compute = torch.promote_types(a.dtype, torch.float32)
    g = -A_log.to(compute).exp() * torch.nn.functional.softplus(a.to(compute) + dt_bias.to(compute))
    return g, (b.sigmoid() * beta_scale).contiguous()


def _check_arguments(a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> bool:
    """Checks the arguments of `delta_gates`; whether it runs as a Triton kernel."""
    if a.dim() != 3:
        raise ValueError(f"`a` of delta_gates has shape {tuple(a.shape)}; give (batch, tokens, heads).")
    check_all_dtensors("delta_gates", a, b=b, A_log=A_log, dt_bias=dt_bias)
    for argument, given, shape in (
        ("a", a, a.shape),
        ("b", b, a.shape),
        ("A_log", A_log, a.shape[-1:]),
        ("dt_bias", dt_bias, a.shape[-1:]),
    ):
        if given.shape != shape or not given.is_floating_point() or given.device != a.device:
            raise ValueError(
                f"`{argument}` of delta_gates has shape {tuple(given.shape)}, dtype {given.dtype} and is on "
                f"{given.device}; give a floating point tensor of shape {tuple(shape)} on {a.device}."
            )
    return all(map(use_triton, (a, b, A_log, dt_bias)))


delta_gates_reference = reference_of(delta_gates, "_check_arguments")
