"""The MLP modules against transformers' own, what they check, and when their backward may write over projections."""

from __future__ import annotations

import types

import pytest
import torch
from torch.nn import functional as F
from transformers import FalconH1Config, Phi3Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from liger_trainer import nn
from liger_trainer.compat.hooks import outputs_are_unhooked
from tests.calls import saved_tensors

HIDDEN, INTERMEDIATE = 8, 12
SIZES = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}


def config(**values):
    return types.SimpleNamespace(**{**SIZES, "hidden_act": "silu", **values})


def gradients(function, module, x):
    y = function(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *module.parameters()))]


def randn(*shape):
    return torch.randn(shape, requires_grad=True)


def assert_same(mlp, theirs):
    """Both modules compute and learn the same with the weights of `theirs`."""
    mlp.load_state_dict(theirs.state_dict())
    x = randn(2, 3, HIDDEN)
    torch.testing.assert_close(gradients(mlp, mlp, x), gradients(theirs, theirs, x))


def assert_gated(mlp, act, gate, up, down):
    """`mlp` is ``down(act(gate(x)) * up(x))``."""
    x = randn(3, HIDDEN)
    expected = gradients(lambda x: F.linear(act(F.linear(x, gate)) * F.linear(x, up), down), mlp, x)
    torch.testing.assert_close(gradients(mlp, mlp, x), expected)


def test_phi3():
    assert_same(nn.LigerPhi3SwiGLUMLP(config()), Phi3MLP(Phi3Config(pad_token_id=0, **SIZES)))


@pytest.mark.parametrize("bias", [False, True])
def test_falcon_h1(bias):
    values = {"mlp_multipliers": [0.75, 1.5], "mlp_bias": bias}
    theirs = FalconH1MLP(FalconH1Config(**SIZES, **values))
    assert_same(nn.LigerFalconH1SwiGLUMLP(config(**values)), theirs)
    if bias:
        with pytest.raises(ValueError, match="LigerFalconH1MLP has no biases"):
            nn.LigerFalconH1MLP(config(**values))
    else:
        assert_same(nn.LigerFalconH1MLP(config(**values)), theirs)


def test_swiglus():
    mlp = nn.LigerSwiGLUMLP(config(), intermediate_size=4)
    assert mlp.up_proj.out_features == 4
    assert_gated(mlp, F.silu, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
    mlp = nn.LigerBlockSparseTop2MLP(config())
    assert_gated(mlp, F.silu, mlp.w1.weight, mlp.w3.weight, mlp.w2.weight)
    for cls in (nn.LigerMLP, nn.LigerSwiGLUMLPForMuseGlimmer, nn.LigerTiledSwiGLUMLP, nn.LigerHunyuanV1SwiGLUMLP):
        assert_same(cls(config(hidden_activation="silu")), nn.LigerSwiGLUMLP(config()))


@pytest.mark.parametrize(
    ("values", "approximate"),
    [
        ({"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu"}, "tanh"),
        ({"hidden_activation": None, "hidden_act": "gelu"}, "none"),
        ({"hidden_act": None}, "tanh"),
    ],
)
def test_geglu(values, approximate):
    mlp = nn.LigerGEGLUMLP(config(**values))
    weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    assert_gated(mlp, lambda gate: F.gelu(gate, approximate=approximate), *weights)


@pytest.mark.parametrize(
    ("cls", "act"), [(nn.LigerTiledSwiGLUMLP, "silu"), (nn.LigerTiledGEGLUMLP, "gelu_pytorch_tanh")]
)
def test_tiles_save_their_input_alone(cls, act):
    mlp, x = cls(config(hidden_act=act), 2), randn(2, 3, HIDDEN)
    with saved_tensors() as saved:
        y = mlp(x)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (x, *mlp.parameters())}
    expected = gradients(lambda x: cls.__base__.forward(mlp, x), mlp, x)
    torch.testing.assert_close([y, *torch.autograd.grad(y.square().sum(), (x, *mlp.parameters()))], expected)


def test_gemma4_is_wider_where_keys_are_shared():
    values = {"use_double_wide_mlp": True, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    sizes = [nn.LigerGEGLUMLPForGemma4(config(**values), layer).up_proj.out_features for layer in (None, 1, 2)]
    assert sizes == [INTERMEDIATE, INTERMEDIATE, 2 * INTERMEDIATE]
    assert nn.LigerGEGLUMLPForGemma4(config(), 2).intermediate_size == INTERMEDIATE


def test_activations_are_checked():
    relu = config(hidden_act="relu")
    for name in ("SwiGLUMLP", "MLP", "Phi3SwiGLUMLP", "BlockSparseTop2MLP", "TiledSwiGLUMLP", "TiledGEGLUMLP"):
        with pytest.raises(ValueError, match=rf"`config\.hidden_act` is 'relu'; Liger{name} needs"):
            getattr(nn, f"Liger{name}")(relu)


def test_hooks_of_a_module_and_of_all_modules_are_noticed():
    linear = torch.nn.Linear(2, 2)
    assert outputs_are_unhooked(linear)
    for register in (linear.register_forward_hook, torch.nn.modules.module.register_module_forward_hook):
        handle = register(lambda *_: None)
        assert not outputs_are_unhooked(linear)
        handle.remove()
    assert outputs_are_unhooked(linear)


def test_the_backward_does_not_change_what_a_hook_received():
    mlp, received = nn.LigerSwiGLUMLP(config()), []
    mlp.gate_proj.register_forward_hook(lambda module, inputs, output: received.append(output))
    y = mlp(randn(3, HIDDEN))
    before = received[0].detach().clone()
    y.sum().backward()
    assert torch.equal(received[0], before)


def test_relu_squared():
    x = randn(3, 4)
    torch.testing.assert_close(nn.LigerReLUSquared()(x), F.relu(x) ** 2)
