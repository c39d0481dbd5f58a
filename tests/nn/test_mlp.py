"""The MLP and embedding modules against transformers' own, and their signatures against Liger's."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import FalconH1Config, Phi3Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from liger_trainer import nn as ours
from liger_trainer.nn import (
    LigerBlockSparseTop2MLP,
    LigerEmbedding,
    LigerFalconH1MLP,
    LigerFalconH1SwiGLUMLP,
    LigerGEGLUMLP,
    LigerGEGLUMLPForGemma4,
    LigerMLP,
    LigerPhi3SwiGLUMLP,
    LigerReLUSquared,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,
    LigerTiledGEGLUMLP,
    LigerTiledSwiGLUMLP,
)

HIDDEN, INTERMEDIATE = 8, 12
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def config(**values):
    return types.SimpleNamespace(**{**SIZES, "hidden_act": "silu", **values})


def gradients(function, module, x):
    y = function(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]


def randn(*shape):
    return torch.randn(shape, requires_grad=True)


def test_signatures_are_ligers():
    expected = {
        "LigerBlockSparseTop2MLP": ["config"],
        "LigerEmbedding": ["num_embeddings", "embedding_dim", "padding_idx"],
        "LigerExperts": ["config"],
        "LigerFalconH1MLP": ["config"],
        "LigerFalconH1SwiGLUMLP": ["config"],
        "LigerGEGLUMLPForGemma4": ["config", "layer_idx"],
        "LigerHunyuanV1SwiGLUMLP": ["config", "layer_idx", "is_shared_mlp"],
        "LigerMLP": ["config"],
        "LigerPhi3SwiGLUMLP": ["config"],
        "LigerQwen3MoeSwiGLUMLP": ["config", "intermediate_size"],
        "LigerSwiGLUMLPForMuseGlimmer": ["config"],
        "LigerTiledGEGLUMLP": ["config", "num_shards"],
        "LigerTiledSwiGLUMLP": ["config", "num_shards"],
    }
    for name, arguments in expected.items():
        assert list(inspect.signature(getattr(ours, name).__init__).parameters)[1:] == arguments, name


def test_phi3():
    theirs = Phi3MLP(Phi3Config(pad_token_id=0, **SIZES))
    mlp, x = LigerPhi3SwiGLUMLP(config()), randn(3, HIDDEN)
    mlp.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(gradients(mlp, mlp, x), gradients(theirs, theirs, x))


@pytest.mark.parametrize("bias", [False, True])
def test_falcon_h1(bias):
    values = {"mlp_multipliers": [0.75, 1.5], "mlp_bias": bias}
    theirs, x = FalconH1MLP(FalconH1Config(**SIZES, **values)), randn(3, HIDDEN)
    for cls in [LigerFalconH1SwiGLUMLP] if bias else [LigerFalconH1SwiGLUMLP, LigerFalconH1MLP]:
        mlp = cls(config(**values))
        mlp.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(gradients(mlp, mlp, x), gradients(theirs, theirs, x))
    if bias:
        with pytest.raises(ValueError, match="LigerFalconH1MLP has no biases"):
            LigerFalconH1MLP(config(**values))


def swiglu_mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def test_mixtral_expert():
    mlp, x = LigerBlockSparseTop2MLP(config()), randn(3, HIDDEN)
    expected = gradients(lambda x: swiglu_mlp(x, mlp.w1.weight, mlp.w3.weight, mlp.w2.weight), mlp, x)
    torch.testing.assert_close(gradients(mlp, mlp, x), expected)


@pytest.mark.parametrize("cls", [LigerMLP, LigerSwiGLUMLPForMuseGlimmer, LigerTiledSwiGLUMLP])
def test_other_swiglus(cls):
    mlp, plain = cls(config(hidden_activation="silu")), LigerSwiGLUMLP(config())
    plain.load_state_dict(mlp.state_dict())
    x = randn(2, 3, HIDDEN)
    torch.testing.assert_close(gradients(mlp, mlp, x), gradients(plain, plain, x))


@pytest.mark.parametrize(("cls", "act"), [(LigerTiledSwiGLUMLP, "silu"), (LigerTiledGEGLUMLP, "gelu_pytorch_tanh")])
def test_tiles_keep_their_input_alone(cls, act):
    mlp, x, saved = cls(config(hidden_act=act), 2), randn(2, 3, HIDDEN), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = mlp(x)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, *mlp.parameters())}
    expected = gradients(lambda x: cls.__base__.forward(mlp, x), mlp, x)
    torch.testing.assert_close([y, *torch.autograd.grad(y.square().sum(), (x, *mlp.parameters()))], expected)


def test_gemma4_is_wider_where_keys_are_shared():
    values = {"use_double_wide_mlp": True, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    sizes = [LigerGEGLUMLPForGemma4(config(**values), layer).up_proj.out_features for layer in (None, 1, 2)]
    assert sizes == [INTERMEDIATE, INTERMEDIATE, 2 * INTERMEDIATE]
    assert LigerGEGLUMLPForGemma4(config(), 2).intermediate_size == INTERMEDIATE


def test_activations_are_checked():
    relu = config(hidden_act="relu")
    for name in ("SwiGLUMLP", "MLP", "Phi3SwiGLUMLP", "BlockSparseTop2MLP", "TiledSwiGLUMLP", "TiledGEGLUMLP"):
        with pytest.raises(ValueError, match=rf"`config\.hidden_act` is 'relu'; Liger{name} needs"):
            getattr(ours, f"Liger{name}")(relu)
    assert LigerGEGLUMLP(config(hidden_act="gelu")).approximate == "none"


def test_a_hook_on_a_projection_sees_values_that_stay():
    mlp, seen, x = LigerSwiGLUMLP(config()), [], randn(3, HIDDEN)
    mlp.gate_proj.register_forward_hook(lambda module, inputs, output: seen.append(output))
    y = mlp(x)
    before = seen[0].detach().clone()
    y.sum().backward()
    assert torch.equal(seen[0], before)


def test_relu_squared():
    x = randn(3, 4)
    torch.testing.assert_close(LigerReLUSquared()(x), F.relu(x) ** 2)


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding(padding_idx):
    table, ids = LigerEmbedding(5, 4, padding_idx), torch.tensor([[0, 2, 2], [1, 0, 4]])
    theirs = nn.Embedding(5, 4, padding_idx, _weight=table.weight.detach().clone())
    if padding_idx is not None:
        assert not table.weight[padding_idx].any()
    for module in (table, theirs):
        module(ids).square().sum().backward()
    torch.testing.assert_close(table.weight.grad, theirs.weight.grad)
    assert repr(table).startswith("LigerEmbedding(5, 4")
