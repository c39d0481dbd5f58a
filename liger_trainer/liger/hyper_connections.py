"""Manifold-constrained hyper-connections (https://arxiv.org/abs/2512.24880) with Liger's names, in plain torch.

A layer runs on a weighted sum of several residual streams, and its output and the streams are mixed into new ones. The
weights depend on the token; those of the streams are made doubly stochastic by Sinkhorn's iteration. No supported model
has them, so there is no kernel. Sums are in float32, whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def liger_mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of a token's streams.

    Args:
        x: The streams, (..., n, hidden).
        phi: Projection, (n * hidden, n * n + 2 * n): to the logits of pre, post and the mixing, in that order.
        b: Bias, (n * n + 2 * n,).
        alpha_pre: Factor of the first n logits before the bias, a scalar.
        alpha_post: Factor of the next n.
        alpha_res: Factor of the others.
        allow_fp32: No effect: every floating dtype is taken.
        tmax: How many times columns are normalised.
        rms_eps: Added to the mean square of a token's streams.
        pre_eps: Added to the first weights.
        sinkhorn_eps: Added to sums of rows and columns.
        post_mult: Factor of the second weights.

    Returns:
        (..., n) of the layer's input, (..., n) of its output and (..., n, n) from stream (last) to stream, in float32.
    """
    streams = x.shape[-2]
    expected = (x.shape[-1] * streams, streams * (streams + 2))
    if phi.shape != expected or b.shape != expected[1:]:
        raise ValueError(
            f"`phi` and `b` have shapes {tuple(phi.shape)} and {tuple(b.shape)}; for `x` of shape {tuple(x.shape)} "
            f"they must be {expected} and {expected[1:]}."
        )
    exact = _exact(x).flatten(-2)
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + rms_eps)
    logits = exact @ phi.to(exact.dtype) * scale
    pre, post, mixing = logits.split((streams, streams, streams**2), -1)
    bias_pre, bias_post, bias_mixing = b.to(exact.dtype).split((streams, streams, streams**2))
    h_pre = torch.sigmoid(pre * alpha_pre + bias_pre) + pre_eps
    h_post = torch.sigmoid(post * alpha_post + bias_post) * post_mult
    h_res = (mixing * alpha_res + bias_mixing).unflatten(-1, (streams, streams)).softmax(-1) + sinkhorn_eps
    h_res = h_res / (h_res.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(tmax - 1):
        h_res = h_res / (h_res.sum(-1, keepdim=True) + sinkhorn_eps)
        h_res = h_res / (h_res.sum(-2, keepdim=True) + sinkhorn_eps)
    return h_pre, h_post, h_res


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """The input of the layer, (..., hidden): the sum of the streams `x`, (..., n, hidden), weighted by (..., n)."""
    return (_exact(x) * h_pre.unsqueeze(-1)).sum(-2).to(x.dtype)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """The new streams, (..., n, hidden): `x` mixed by `h_res`, and `f_out`, (..., hidden), weighted by `h_post`."""
    exact = _exact(x)
    mixed = h_res.to(exact.dtype) @ exact
    return (mixed + h_post.unsqueeze(-1) * f_out.to(exact.dtype).unsqueeze(-2)).to(x.dtype)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The new streams, and with `return_x_in` the input of the layer too."""
    streams = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (streams, liger_mhc_pre(x, h_pre)) if return_x_in else streams


def liger_mhc_forward(
    x: Tensor,
    layer: Callable[[Tensor], Tensor],
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    *,
    allow_fp32: bool = False,
    tmax: int = 20,
    rms_eps: float = 1e-6,
    pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
    return_coeffs: bool = False,
) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The new streams after `layer`, which gets its input in the dtype of its first parameter.

    The other arguments are those of `liger_mhc_coeffs`, whose results come too with `return_coeffs`.
    """
    h_pre, h_post, h_res = liger_mhc_coeffs(
        *(x, phi, b, alpha_pre, alpha_post, alpha_res),
        tmax=tmax,
        rms_eps=rms_eps,
        pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps,
        post_mult=post_mult,
    )
    parameter = next(layer.parameters(), None) if isinstance(layer, nn.Module) else None
    layer_input = liger_mhc_pre(x, h_pre)
    f_out = layer(layer_input if parameter is None else layer_input.to(parameter.dtype))
    streams = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (streams, (h_pre, h_post, h_res)) if return_coeffs else streams


class LigerMHC(nn.Module):
    """A layer between hyper-connected residual streams.

    `layer` goes from (..., c) to (..., c), `hc` is the number of streams, `c` the width of one, and `phi_dtype` the
    dtype of the projection `phi`. The other arguments are those of `liger_mhc_coeffs`.
    """

    def __init__(
        self,
        layer: nn.Module,
        *,
        hc: int,
        c: int,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.hc, self.c = hc, c
        self.tmax, self.allow_fp32 = tmax, allow_fp32
        self.rms_eps, self.pre_eps, self.sinkhorn_eps, self.post_mult = rms_eps, pre_eps, sinkhorn_eps, post_mult
        parameter = next(layer.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        logits = hc * hc + 2 * hc
        self.phi = nn.Parameter(torch.randn(hc * c, logits, dtype=phi_dtype, device=device) * 0.02)
        self.b = nn.Parameter(torch.zeros(logits, dtype=torch.float32, device=device))
        self.alpha_pre = nn.Parameter(torch.ones((), dtype=torch.float32, device=device))
        self.alpha_post = nn.Parameter(torch.ones((), dtype=torch.float32, device=device))
        self.alpha_res = nn.Parameter(torch.ones((), dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """The new streams, (..., hc, c), of `x`, of the same shape."""
        if x.shape[-2:] != (self.hc, self.c):
            raise ValueError(f"`x` has shape {tuple(x.shape)}; it must end with {(self.hc, self.c)}.")
        streams = liger_mhc_forward(
            *(x, self.layer, self.phi, self.b, self.alpha_pre, self.alpha_post, self.alpha_res),
            tmax=self.tmax,
            rms_eps=self.rms_eps,
            pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps,
            post_mult=self.post_mult,
        )
        assert isinstance(streams, Tensor)
        return streams

    def extra_repr(self) -> str:
        """The sizes."""
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
