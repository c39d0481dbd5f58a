"""Modules of hybrids: each is its function with its own parameters, and takes the state of what models write."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from liger_trainer import functional, nn
from liger_trainer.functional import documents_of


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, {"activation": "silu"}, {"residual": True}])
def test_a_short_convolution_is_that_of_torch(bias, options):
    theirs = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3, bias=bias)
    ours = nn.LigerShortConv(6, 4, bias, **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 6, requires_grad=True)
    expected = theirs(x.mT)[..., :7].mT
    expected = torch.nn.functional.silu(expected) if "activation" in options else expected
    expected = expected + x if "residual" in options else expected
    dy = torch.randn_like(expected)
    torch.testing.assert_close(ours(x), expected)
    theirs_too = torch.autograd.grad(expected, (x, *theirs.parameters()), dy)
    torch.testing.assert_close(torch.autograd.grad(ours(x), (x, *ours.parameters()), dy), theirs_too)


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_convolution_is_its_function(bias):
    module = nn.LigerGatedShortConv(6, 3, bias)
    assert ("bias" in module.state_dict()) is bias
    before, after, x = torch.randn(3, 2, 7, 6)
    expected = after * nn.LigerShortConv.forward(_plain(module), before * x)
    torch.testing.assert_close(module(torch.cat([before, after, x], -1)), expected)


def _plain(module):
    plain = nn.LigerShortConv(module.in_channels, module.kernel_size[0], module.bias is not None)
    plain.load_state_dict(module.state_dict())
    return plain


@pytest.mark.parametrize(("module", "channels"), [(nn.LigerShortConv(6, 4), 6), (nn.LigerGatedShortConv(6, 4), 18)])
def test_documents_are_computed_alone(module, channels):
    x = torch.randn(1, 9, channels)
    alone = torch.cat([module(x[:, :4]), module(x[:, 4:])], 1)
    assert torch.equal(module(x, documents_of([4, 5])), alone)
    assert not torch.equal(module(x), alone)


def test_a_norm_with_a_gate():
    theirs, ours = Qwen3_5RMSNormGated(8, eps=1e-5), nn.LigerGatedRMSNorm(8, eps=1e-5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    theirs.weight.data.normal_()
    ours.load_state_dict(theirs.state_dict())
    x, gate = torch.randn(2, 3, 8)
    torch.testing.assert_close(ours(x, gate), theirs(x, gate))
    options = {"group_size": 4, "activation": "sigmoid", "gate_first": True}
    other = nn.LigerGatedRMSNorm(8, 1e-5, **options, casting_mode="gemma")
    other.load_state_dict(theirs.state_dict())
    expected = functional.gated_rms_norm(x, gate, other.weight, 1e-5, **options, casting="gemma")
    assert torch.equal(other(x, gate), expected)
    assert not torch.allclose(expected, ours(x, gate))
    assert "group_size=4, activation=sigmoid, gate_first=True, casting=gemma" in repr(other)
    assert "activation=silu, residual=True" in repr(nn.LigerShortConv(6, 4, activation="silu", residual=True))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.LigerShortConv(6, 1), "`kernel_size` is 1; it must be from 2 to 8"),
        (lambda: nn.LigerGatedShortConv(6, 9), "`kernel_size` is 9; it must be from 2 to 8"),
        (lambda: nn.LigerShortConv(6, 4, activation="gelu"), "`activation` is 'gelu'; it must be None or \"silu\""),
        (lambda: nn.LigerGatedRMSNorm(6, activation="gelu"), "`activation` is 'gelu'; it must be 'silu' or 'sigmoid'"),
        (lambda: nn.LigerGatedRMSNorm(6, casting_mode="none"), "`casting_mode` is 'none'; it must be "),
        (lambda: nn.LigerGatedRMSNorm(6, group_size=4), "`group_size` is 4; it must divide `hidden_size`, 6"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()
