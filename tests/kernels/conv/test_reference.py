"""The convolutions in plain torch against a loop over tokens, in float64."""

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.functional import delta_gates, delta_inputs, gated_short_conv, short_conv
from liger_trainer.kernels.documents import ROWS, resolved
from tests.kernels.conv.loops import TOKENS, conv_loop, every_kind, in_documents


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_equal_with_gradients(ours, loop, tensors):
    upstream = [torch.randn_like(each) for each in ours]
    for mine, theirs in zip(ours, loop, strict=True):
        torch.testing.assert_close(mine, theirs)
    mine = torch.autograd.grad(ours, tensors, upstream)
    theirs = torch.autograd.grad(loop, tensors, upstream)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("taps", [2, 3, 4, 8])
def test_short_conv(taps, activation, residual):
    documents = every_kind()
    x, weight, bias = randn(1, TOKENS, 3), randn(3, taps), randn(3)
    state = randn(documents.roots, taps - 1, 3)
    ours = short_conv(
        x,
        weight,
        bias,
        activation=activation,
        residual=residual,
        documents=documents,
        initial_state=state,
        final_state=True,
    )
    y, last = conv_loop(x, weight, bias, documents, state)
    y = F.silu(y) if activation else y
    y = (y + x if residual else y) * in_documents(documents, TOKENS)[:, None]
    assert_equal_with_gradients(ours, (y, last), (x, weight, bias, state))


def test_rows_are_documents():
    x, weight = randn(3, 11, 2), randn(2, 4)
    ours = short_conv(x, weight, final_state=True)
    assert_equal_with_gradients(ours, conv_loop(x, weight, None, resolved(ROWS, x)), (x, weight))
    torch.testing.assert_close(ours[0], F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], groups=2).mT)


@pytest.mark.parametrize("taps", [3, 7])
def test_gated_short_conv(taps):
    documents = every_kind()
    bcx, weight, bias = randn(1, TOKENS, 9), randn(3, taps), randn(3)
    before, after, x = bcx.chunk(3, -1)
    expected = after * conv_loop(before * x, weight, bias, documents)[0]
    ours = gated_short_conv(bcx, weight, bias, documents=documents)
    assert_equal_with_gradients((ours,), (expected,), (bcx, weight, bias))


def test_padding_may_hold_nan():
    documents = every_kind()
    bcx, weight = torch.randn(1, TOKENS, 9), torch.randn(3, 4)
    outside = ~in_documents(documents, TOKENS).bool()
    bcx[:, outside] = float("nan")
    bcx.requires_grad_()
    y = gated_short_conv(bcx, weight, documents=documents)
    (dbcx,) = torch.autograd.grad(y.sum(), bcx)
    assert (y[:, outside] == 0).all()
    assert (dbcx[:, outside] == 0).all()
    assert torch.isfinite(y).all()
    assert torch.isfinite(dbcx).all()


def test_delta_inputs():
    documents = every_kind()
    qkv, weight = randn(1, TOKENS, 2 * 2 * 3 + 4 * 5), randn(32, 4)
    u = F.silu(conv_loop(qkv, weight, None, documents)[0])
    q, k = (each.unflatten(-1, (2, 3)) for each in (u[..., :6], u[..., 6:12]))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-3).sqrt() for each in (q, k))
    ours = delta_inputs(qkv, weight, key_heads=2, value_heads=4, key_dim=3, value_dim=5, eps=1e-3, documents=documents)
    assert all(each.is_contiguous() for each in ours)
    assert_equal_with_gradients(ours, (q, k, u[..., 12:].unflatten(-1, (4, 5))), (qkv, weight))


def test_delta_gates():
    a, b, rate, bias = 9 * randn(2, 7, 5), randn(2, 7, 5), randn(5), randn(5)
    ours = delta_gates(a, b, rate, bias, beta_scale=2.0)
    expected = -rate.exp() * (1 + (a + bias).exp()).log(), 2 / (1 + (-b).exp())
    assert_equal_with_gradients(ours, expected, (a, b, rate, bias))


def test_gates_of_half_precision_are_the_models():
    a, b, rate, bias = torch.randn(2, 7, 5), torch.randn(2, 7, 5), torch.randn(5), torch.randn(5)
    a, b, rate, bias = a.bfloat16(), b.bfloat16(), rate.bfloat16(), bias.bfloat16()
    g, beta = delta_gates(a, b, rate, bias)
    assert torch.equal(g, -rate.float().exp() * F.softplus(a.float() + bias))
    assert torch.equal(beta, b.sigmoid())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: short_conv(torch.zeros(4, 6), torch.zeros(6, 4)), "The input of short_conv has shape"),
        (lambda: short_conv(torch.zeros(1, 4, 6), torch.zeros(6, 1)), "`weight` of short_conv has shape"),
        (lambda: short_conv(torch.zeros(1, 4, 6), torch.zeros(6, 9)), "2 to 8 taps"),
        (lambda: short_conv(torch.zeros(1, 4, 6), torch.zeros(5, 4)), "`weight` of short_conv has shape"),
        (lambda: short_conv(torch.zeros(1, 4, 6), torch.zeros(6, 4), torch.zeros(5)), "`bias` of short_conv"),
        (lambda: short_conv(torch.zeros(1, 4, 6), torch.zeros(6, 4).long()), "dtype torch.int64"),
        (lambda: short_conv(torch.zeros(1, 4, 6), torch.zeros(6, 4, device="meta")), "is on meta"),
        (lambda: short_conv(torch.zeros(1, 4, 6), torch.zeros(6, 4), activation="relu"), "`activation` of short_conv"),
        (
            lambda: short_conv(torch.zeros(1, 4, 6), torch.zeros(6, 4), initial_state=torch.zeros(1, 4, 6)),
            "`initial_state` of short_conv has shape",
        ),
        (
            lambda: short_conv(torch.zeros(1, 4, 6), torch.zeros(6, 4), initial_state=torch.zeros(1, 3, 6).long()),
            "`initial_state` of short_conv has dtype torch.int64",
        ),
        (lambda: gated_short_conv(torch.zeros(1, 4, 7), torch.zeros(2, 4)), "`bcx` of gated_short_conv has 7"),
        (
            lambda: delta_inputs(
                torch.zeros(1, 4, 9), torch.zeros(9, 4), key_heads=1, value_heads=1, key_dim=2, value_dim=4
            ),
            "`qkv` of delta_inputs has 9 channels",
        ),
        (lambda: delta_gates(*torch.zeros(2, 4, 6), *torch.zeros(2, 6)), "`a` of delta_gates"),
        (lambda: delta_gates(*torch.zeros(2, 1, 4, 6), *torch.zeros(2, 5)), "`A_log` of delta_gates"),
    ],
)
def test_arguments_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
