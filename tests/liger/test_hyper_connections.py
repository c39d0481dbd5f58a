"""Hyper-connections against loops over tokens and streams, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from liger_trainer.liger.autograd_functions import OPERATIONS
from liger_trainer.liger.functional import liger_mhc_apply, liger_mhc_coeffs, liger_mhc_forward
from liger_trainer.liger.hyper_connections import LigerMHC
from tests.liger.test_functions import agree, draw

N, HIDDEN, LOGITS = 3, 4, 3 * 3 + 2 * 3
X = draw(2, 5, N, HIDDEN)
PARAMETERS = (
    draw(N * HIDDEN, LOGITS),
    draw(LOGITS),
    draw(1).squeeze(),
    torch.tensor(0.5).double(),
    torch.tensor(2.0).double(),
)


def coefficients(x, phi, b, alpha_pre, alpha_post, alpha_res, tmax=20, post_mult=2.0, rms_eps=1e-6, eps=1e-6):
    """One token, (N, HIDDEN), number by number."""
    flat = x.reshape(-1)
    logits = (flat @ phi) / torch.sqrt((flat * flat).sum() / len(flat) + rms_eps)
    pre = torch.stack([1 / (1 + torch.exp(-(alpha_pre * logits[i] + b[i]))) for i in range(N)])
    post = torch.stack([post_mult / (1 + torch.exp(-(alpha_post * logits[N + i] + b[N + i]))) for i in range(N)])
    rows = []
    for i in range(N):
        entries = torch.stack([alpha_res * logits[2 * N + N * i + j] + b[2 * N + N * i + j] for j in range(N)]).exp()
        rows.append(entries / entries.sum() + eps)
    matrix = torch.stack(rows)
    matrix = matrix / (matrix.sum(0) + eps)
    for _ in range(tmax - 1):
        matrix = matrix / (matrix.sum(1)[:, None] + eps)
        matrix = matrix / (matrix.sum(0) + eps)
    return pre, post, matrix


def each_token(function, x, *arguments):
    """The results of one token each, put together."""
    results = [function(token, *arguments) for token in x.flatten(0, -3)]
    return tuple(torch.stack(values).unflatten(0, x.shape[:-2]) for values in zip(*results, strict=True))


def test_coefficients():
    agree(liger_mhc_coeffs, lambda x, *rest: each_token(coefficients, x, *rest), (X, *PARAMETERS))
    apply = OPERATIONS["LigerMHCCoeffsFunction"].apply
    options = (False, 3, 1e-2, 0.25, 1e-3, 1.5)

    def plain(x, *rest):
        pre, post, mixing = each_token(lambda token, *more: coefficients(token, *more, 3, 1.5, 1e-2, 1e-3), x, *rest)
        return pre + 0.25, post, mixing

    agree(lambda x, *rest: apply(x, *rest, *options), plain, (X, *PARAMETERS))


def test_rows_and_columns_sum_to_one():
    _, _, mixing = liger_mhc_coeffs(X, *PARAMETERS, tmax=1000)
    for dimension in (-1, -2):
        torch.testing.assert_close(mixing.sum(dimension), torch.ones(2, 5, N).double(), rtol=0, atol=4e-3)


def test_streams():
    pre, post, mixing, output = draw(2, 5, N), draw(2, 5, N, seed=1), draw(2, 5, N, N), draw(2, 5, HIDDEN)

    def plain_input(x, h):
        return sum(h[..., i, None] * x[..., i, :] for i in range(N))

    def plain_streams(x, f, h_post, h_res):
        mixed = [sum(h_res[..., o, i, None] * x[..., i, :] for i in range(N)) for o in range(N)]
        return torch.stack([mixed[o] + h_post[..., o, None] * f for o in range(N)], -2)

    agree(OPERATIONS["LigerMHCPreFunction"].apply, plain_input, (X, pre))
    agree(OPERATIONS["LigerMHCPostResFunction"].apply, plain_streams, (X, output, post, mixing))
    agree(
        lambda *given: liger_mhc_apply(*given, return_x_in=True),
        lambda x, f, h_pre, h_post, h_res: (plain_streams(x, f, h_post, h_res), plain_input(x, h_pre)),
        (X, output, pre, post, mixing),
    )
    assert torch.equal(
        liger_mhc_apply(X, output, pre, post, mixing),
        liger_mhc_apply(X, output, pre, post, mixing, return_x_in=True)[0],
    )


def test_around_a_layer():
    def plain(x, *rest):
        def token(streams, *parameters):
            pre, post, mixing = coefficients(streams, *parameters)
            return (mixing @ streams + post[:, None] * torch.tanh(pre @ streams), pre, post, mixing)

        return each_token(token, x, *rest)

    def ours(x, *rest):
        streams, coefficients = liger_mhc_forward(x, torch.tanh, *rest, return_coeffs=True)
        return (streams, *coefficients)

    agree(ours, plain, (X, *PARAMETERS))


def test_module():
    module = LigerMHC(torch.nn.Linear(HIDDEN, HIDDEN), hc=N, c=HIDDEN, phi_dtype=torch.float32, tmax=2)
    assert {name: tuple(value.shape) for name, value in module.named_parameters()} == {
        "phi": (N * HIDDEN, LOGITS),
        "b": (LOGITS,),
        "alpha_pre": (),
        "alpha_post": (),
        "alpha_res": (),
        "layer.weight": (HIDDEN, HIDDEN),
        "layer.bias": (HIDDEN,),
    }
    x = X.to(torch.bfloat16)
    result = module(x)
    assert (result.dtype, result.shape) == (torch.bfloat16, x.shape)
    result.float().square().sum().backward()
    assert all(value.grad is not None and math.isfinite(value.grad.sum()) for value in module.parameters())
    exact = module.double()
    pre, post, mixing = each_token(lambda token, *rest: coefficients(token, *rest, 2), X, *list(exact.parameters())[:5])
    layer = exact.layer((pre.unsqueeze(-1) * X).sum(-2))
    torch.testing.assert_close(exact(X), mixing @ X + post.unsqueeze(-1) * layer.unsqueeze(-2))
    assert "hc=3, c=4, tmax=2" in repr(module)


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"`x` has shape \(2, 5, 3, 4\); it must end with \(4, 4\)"):
        LigerMHC(torch.nn.Identity(), hc=4, c=4)(X)
    with pytest.raises(ValueError, match=r"they must be \(12, 15\) and \(15,\)"):
        liger_mhc_coeffs(X, PARAMETERS[0][:, :3], *PARAMETERS[1:])
