"""The modules of `liger_trainer.nn`, with Liger's call signatures, against plain torch."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer import functional
from liger_trainer.nn import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerGEGLUMLP,
    LigerLayerNorm,
    LigerMultiTokenAttention,
    LigerRMSNorm,
    LigerSoftmax,
    LigerSparsemax,
    LigerSwiGLUMLP,
    liger_rotary_pos_emb,
)

TOKENS, HIDDEN, VOCAB = 7, 12, 19


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def arguments(cls) -> list[str]:
    return list(inspect.signature(cls.__init__).parameters)[1:]


def test_signatures_are_ligers():
    assert arguments(LigerRMSNorm) == [
        *("hidden_size", "eps", "offset", "casting_mode", "init_fn", "in_place", "row_mode", "elementwise_affine"),
    ]
    assert arguments(LigerLayerNorm) == ["hidden_size", "eps", "bias", "init_fn", "impl", "mode", "backend"]
    losses = [
        *("ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap", "return_z_loss"),
        *("return_token_accuracy", "return_predicted_tokens"),
    ]
    assert arguments(LigerCrossEntropyLoss) == ["weight", *losses]
    fused = ["ce_weight", *losses]
    fused[fused.index("return_token_accuracy") : 0] = []
    fused = [*fused[:7], "accum_dtype", "use_token_scaling", *fused[7:]]
    assert arguments(LigerFusedLinearCrossEntropyLoss) == fused
    forward = inspect.signature(LigerFusedLinearCrossEntropyLoss.forward).parameters
    assert list(forward)[1:] == ["lin_weight", "_input", "target", "bias"]
    convolution = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias"]
    assert arguments(LigerMultiTokenAttention) == [*convolution, "sparse"]
    assert arguments(LigerSparsemax) == ["dim"]
    rotary = inspect.signature(liger_rotary_pos_emb).parameters
    assert list(rotary) == ["q", "k", "cos", "sin", "position_ids", "unsqueeze_dim", "rotary_dim"]


@pytest.mark.parametrize("casting", ["llama", "gemma", "olmo2", "none"])
def test_rms_norm(casting):
    norm = LigerRMSNorm(8, eps=1e-5, offset=1.0, casting_mode=casting, init_fn="zeros", in_place=False, row_mode=True)
    assert not norm.weight.any()
    norm.weight.data.normal_()
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), norm.weight + 1, 1e-5))
    assert repr(norm) == f"LigerRMSNorm(8, eps=1e-05, offset=1.0, casting={casting})"


def test_rms_norm_without_weight():
    norm = LigerRMSNorm(8, elementwise_affine=False)
    assert norm.weight is None
    assert not norm.state_dict()
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), None, 1e-6))


def test_layer_norm():
    norm = LigerLayerNorm(8, eps=1e-5, bias=True, impl="triton")
    assert norm.bias.any()
    assert not LigerLayerNorm(8).bias.any()
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (8,), norm.weight, norm.bias, 1e-5))


def test_bad_arguments():
    with pytest.raises(ValueError, match="`init_fn` is 'randn'"):
        LigerRMSNorm(8, init_fn="randn")
    with pytest.raises(ValueError, match="`casting_mode` is 'bf16'"):
        LigerRMSNorm(8, casting_mode="bf16")
    with pytest.raises(ValueError, match="`init_fn`"):
        LigerLayerNorm(8, init_fn="randn")
    for loss in (LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss):
        with pytest.raises(ValueError, match=r"`label_smoothing` is 1\.5"):
            loss(label_smoothing=1.5)
        with pytest.raises(ValueError, match="`reduction` is 'avg'"):
            loss(reduction="avg")
        with pytest.raises(ValueError, match="`softcap` is 0"):
            loss(softcap=0)


def config(**values):
    return types.SimpleNamespace(hidden_size=HIDDEN, intermediate_size=16, **values)


def gated(mlp, act, x):
    return F.linear(act(F.linear(x, mlp.gate_proj.weight)) * F.linear(x, mlp.up_proj.weight), mlp.down_proj.weight)


def test_swiglu_mlp():
    mlp = LigerSwiGLUMLP(config(hidden_act="silu"))
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(mlp(x), gated(mlp, F.silu, x))
    assert LigerSwiGLUMLP(config(hidden_act="silu"), intermediate_size=4).up_proj.out_features == 4
    with pytest.raises(ValueError, match=r"`config\.hidden_act` is 'relu'"):
        LigerSwiGLUMLP(config(hidden_act="relu"))


@pytest.mark.parametrize(
    ("values", "approximate"),
    [
        ({"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu"}, "tanh"),
        ({"hidden_activation": None, "hidden_act": "gelu"}, "none"),
        ({}, "tanh"),
    ],
)
def test_geglu_mlp(values, approximate):
    mlp = LigerGEGLUMLP(config(**values))
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(mlp(x), gated(mlp, lambda gate: F.gelu(gate, approximate=approximate), x))


def head():
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    bias = torch.randn(VOCAB, requires_grad=True)
    target = torch.randint(VOCAB, (TOKENS,))
    target[[1, 4]] = -100
    return hidden, weight, bias, target


def gradients(loss, *tensors):
    return torch.autograd.grad(loss.sum(), tensors)


def both(options):
    """(loss of the logits, loss of the head) as functions of hidden, weight, target, bias."""
    named = dict(options)
    fused = LigerFusedLinearCrossEntropyLoss(ce_weight=named.pop("weight", None), **named)
    plain = LigerCrossEntropyLoss(**options)
    return {
        "logits": lambda hidden, weight, target, bias: plain(F.linear(hidden, weight, bias), target),
        "fused": lambda hidden, weight, target, bias: fused(weight, hidden, target, bias),
    }


@pytest.mark.parametrize("kind", ["logits", "fused"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_equal_torch(kind, reduction, weighted):
    options = {"reduction": reduction, "label_smoothing": 0.1, "weight": torch.rand(VOCAB) if weighted else None}
    hidden, weight, bias, target = head()
    loss = both(options)[kind](hidden, weight, target, bias)
    expected = F.cross_entropy(F.linear(hidden, weight, bias), target, **options)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, hidden, weight, bias), gradients(expected, hidden, weight, bias))


@pytest.mark.parametrize("kind", ["logits", "fused"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_softcap_z_loss_and_outputs(kind, reduction):
    options = {"reduction": reduction, "softcap": 5.0, "lse_square_scale": 0.01}
    hidden, weight, bias, target = head()
    flags = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    output = both(options | flags)[kind](hidden, weight, target, bias)
    logits = 5.0 * torch.tanh(F.linear(hidden, weight, bias) / 5.0)
    valid = target != -100
    z_loss = torch.where(valid, 0.01 * logits.logsumexp(-1) ** 2, 0)
    nll = F.cross_entropy(logits, target, reduction="none")
    right = (logits.argmax(-1) == target).float()
    if reduction != "none":
        divisor = valid.sum() if reduction == "mean" else 1
        z_loss, nll, right = z_loss.sum() / divisor, nll.sum() / divisor, right.sum() / valid.sum()
    assert isinstance(output, functional.CrossEntropyOutput)
    torch.testing.assert_close(output.z_loss, z_loss)
    torch.testing.assert_close(output.loss, nll + z_loss)
    torch.testing.assert_close(output.token_accuracy, right)
    assert torch.equal(output.predicted_tokens[valid], logits.argmax(-1)[valid])
    only = both(options | {"return_token_accuracy": True})[kind](hidden, weight, target, bias)
    assert only.z_loss is None
    assert only.predicted_tokens is None
    torch.testing.assert_close(only.token_accuracy, right)


@pytest.mark.parametrize("kind", ["logits", "fused"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_z_loss_beside_class_weights(kind, label_smoothing):
    """As Liger's: the cross entropy is divided by the sum of the weights, the z-loss, which has none, by the tokens."""
    class_weights = 3.0 * torch.rand(VOCAB)
    options = {"weight": class_weights, "lse_square_scale": 0.1, "label_smoothing": label_smoothing}
    hidden, weight, bias, target = head()
    output = both(options | {"return_z_loss": True})[kind](hidden, weight, target, bias)
    logits = F.linear(hidden, weight, bias)
    z_loss = 0.1 * logits.logsumexp(-1)[target != -100].square().mean()
    expected = z_loss + F.cross_entropy(logits, target, class_weights, label_smoothing=label_smoothing)
    torch.testing.assert_close(output.z_loss, z_loss)
    torch.testing.assert_close(output.loss, expected)
    ours = gradients(output.loss, hidden, weight, bias)
    torch.testing.assert_close(ours, gradients(expected, hidden, weight, bias))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_token_scaling(reduction, weighted):
    class_weights = torch.rand(VOCAB) if weighted else None
    loss_module = LigerFusedLinearCrossEntropyLoss(
        class_weights, reduction=reduction, lse_square_scale=0.01, use_token_scaling=True, return_z_loss=True
    )
    hidden, weight, bias, target = head()
    output = loss_module(weight, hidden, target, bias)
    logits = F.linear(hidden, weight, bias)
    valid = target != -100
    probability = logits.softmax(-1).gather(1, target.where(valid, 0)[:, None])[:, 0].detach()
    z_loss = torch.where(valid, 0.01 * logits.logsumexp(-1) ** 2, 0) * probability
    nll = F.cross_entropy(logits, target, weight=class_weights, reduction="none") * probability
    if reduction != "none":
        counted = valid.float() if class_weights is None else class_weights[target.where(valid, 0)] * valid
        divisors = (valid.sum(), counted.sum()) if reduction == "mean" else (1, 1)
        z_loss, nll = z_loss.sum() / divisors[0], nll.sum() / divisors[1]
    torch.testing.assert_close(output.loss, nll + z_loss)
    torch.testing.assert_close(output.z_loss, z_loss)
    ours = gradients(output.loss, hidden, weight, bias)
    torch.testing.assert_close(ours, gradients(nll + z_loss, hidden, weight, bias))


def test_token_scaling_with_nothing_to_learn():
    hidden, weight, _, target = head()
    target.fill_(-100)
    loss = LigerFusedLinearCrossEntropyLoss(use_token_scaling=True)(weight, hidden, target)
    assert loss.item() == 0.0
    assert not any(gradient.any() for gradient in gradients(loss, hidden, weight))


def test_loss_is_float32_and_a_module():
    hidden, weight, _, target = head()
    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)(weight.bfloat16(), hidden.bfloat16(), target)
    assert loss.dtype == torch.float32
    assert isinstance(LigerCrossEntropyLoss(), nn.Module)
    assert not list(LigerCrossEntropyLoss(weight=torch.rand(VOCAB)).parameters())


def test_rotary():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    angles = torch.randn(1, 5, 4)
    cos, sin = angles.cos(), angles.sin()
    full = liger_rotary_pos_emb(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), torch.arange(5))
    torch.testing.assert_close(full, functional.rope(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)))
    torch.testing.assert_close(liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=8), full)
    torch.testing.assert_close(liger_rotary_pos_emb(q, k, cos[0], sin[0], rotary_dim=8), full)
    partial = liger_rotary_pos_emb(q, k, cos, sin)
    torch.testing.assert_close(partial[0][..., 4:], q[..., 4:])
    swapped = liger_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(swapped[0].transpose(1, 2), partial[0])
    with pytest.raises(ValueError, match="`rotary_dim` is 6"):
        liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=6)


def test_softmax_and_sparsemax():
    x = torch.randn(3, 5, 4)
    assert torch.equal(LigerSoftmax()(x), functional.softmax(x))
    assert torch.equal(LigerSparsemax(dim=1)(x), functional.sparsemax(x, dim=1))
    assert "dim=1" in repr(LigerSparsemax(dim=1))


@pytest.mark.parametrize("sparse", [False, True])
def test_multi_token_attention(sparse):
    module = LigerMultiTokenAttention(4, 6, (3, 5), padding=(1, 2), groups=2, sparse=sparse)
    assert module.weight.shape == (6, 2, 3, 5)
    assert not module.bias.any()
    module.bias.data.normal_()
    scores = torch.randn(2, 4, 9, 9)
    expected = functional.multi_token_attention(
        scores, module.weight, module.bias, padding=(1, 2), groups=2, sparse=sparse
    )
    assert torch.equal(module(scores), expected)
    assert expected.shape == (2, 6, 9, 9)
    assert LigerMultiTokenAttention(1, 1, 1, bias=False).bias is None
    assert f"sparse={sparse}" in repr(module)
    with pytest.raises(ValueError, match="`groups` is 3"):
        LigerMultiTokenAttention(4, 6, 3, groups=3)
