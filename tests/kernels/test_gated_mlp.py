"""SwiGLU's and GeGLU's references against transformers, their checks, and their kernels compiled for every GPU."""

import pytest
import torch
from torch.nn import functional as F
from transformers import GemmaConfig, LlamaConfig, Phi3Config
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from liger_trainer.kernels import gated_activation as operators
from liger_trainer.kernels.geglu import geglu, geglu_fused, geglu_fused_reference, geglu_reference
from liger_trainer.kernels.swiglu import swiglu, swiglu_fused, swiglu_fused_reference, swiglu_reference
from tests.aot import TARGETS, compile_launch, recorded_launches

SIZES = {"hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}


def gate_and_up(dtype=torch.float32, shape=(2, 3, 24)):
    torch.manual_seed(0)
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", swiglu_reference),
        ("gelu_pytorch_tanh", geglu_reference),
        ("gelu", lambda gate, up: geglu_reference(gate, up, "none")),
    ],
)
def test_reference_is_the_models_own(name, function, dtype):
    gate, up = gate_and_up(dtype)
    assert torch.equal(function(gate, up), ACT2FN[name](gate) * up)


@pytest.mark.parametrize(
    ("mlp", "function"),
    [
        (LlamaMLP(LlamaConfig(**SIZES)), swiglu),
        (GemmaMLP(GemmaConfig(hidden_activation="gelu_pytorch_tanh", **SIZES)), geglu),
    ],
    ids=["llama", "gemma"],
)
def test_matches_separate_mlps(mlp, function, device):
    mlp = mlp.to(device)
    x = torch.randn(2, 3, 8, device=device)
    torch.testing.assert_close(mlp.down_proj(function(mlp.gate_proj(x), mlp.up_proj(x))), mlp(x))


def test_matches_phi3s_fused_mlp(device):
    mlp = Phi3MLP(Phi3Config(pad_token_id=0, **SIZES)).to(device)
    x = torch.randn(2, 3, 8, device=device)
    torch.testing.assert_close(mlp.down_proj(swiglu_fused(mlp.gate_up_proj(x))), mlp(x))


def test_fused_references_take_gate_first():
    gate, up = gate_and_up()
    gate_up = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(swiglu_fused_reference(gate_up), F.silu(gate) * up)
    torch.testing.assert_close(geglu_fused_reference(gate_up, "none"), F.gelu(gate) * up)


def test_float64_runs_as_reference(device):
    gate, up = (x.to(device).requires_grad_() for x in gate_and_up(torch.float64, (2, 4)))
    gate_up = torch.cat((gate, up), dim=-1).detach().requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    assert torch.autograd.gradcheck(geglu, (gate, up))
    assert torch.autograd.gradcheck(swiglu_fused, gate_up)
    assert torch.autograd.gradcheck(geglu_fused, (gate_up, "none"))


def test_mixed_dtypes_promote_as_torch_does(device):
    gate, up = (x.to(device) for x in gate_and_up())
    assert swiglu(gate.bfloat16(), up).dtype == torch.float32


def test_errors_name_what_is_wrong(device):
    gate, up = (x.to(device) for x in gate_and_up())
    for function in (swiglu, geglu):
        with pytest.raises(ValueError, match=r"`gate` is \(2, 3, 24\) and `up` is \(2, 3, 23\)"):
            function(gate, up[..., 1:])
        with pytest.raises(ValueError, match="they must have one shape"):
            function(gate, up[0])
        with pytest.raises(ValueError, match="must be on one device"):
            function(gate, up.to("meta"))
        with pytest.raises(ValueError, match=r"`gate` is \(\)"):
            function(gate[0, 0, 0], up[0, 0, 0])
    for function in (swiglu_fused, geglu_fused):
        with pytest.raises(ValueError, match=r"`gate_up` is \(2, 3, 23\).*twice the intermediate size"):
            function(gate[..., 1:])
    for function in (lambda a: geglu(gate, up, a), lambda a: geglu_fused(gate, a)):
        with pytest.raises(ValueError, match="`approximate` is 'erf'; it must be 'tanh' or"):
            function("erf")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_compiles_ahead_of_time(target, activation):
    gate, up = gate_and_up(torch.bfloat16)
    gate_up = torch.cat((gate, up), dim=-1)
    with recorded_launches() as launches:
        operators.gated_activation(gate, up, activation, False)
        operators._gated_activation_backward(gate, gate, up, activation, True, True)
        operators._gated_activation_backward(gate, gate, up, activation, False, True)
        operators.gated_activation_fused(gate_up.half(), activation, False)
        operators._gated_activation_fused_backward(gate.float(), gate_up.float(), activation)
    assert [launch.arguments["FLAT"] for launch in launches] == [True, True, True, False, False]
    for launch in launches:
        assert compile_launch(launch, target)


def test_kernels_read_128_bits_at_a_time():
    """A mask or an offset that the compiler cannot see through makes loads 16 bits wide, at a fraction of the speed."""
    shape = (64, 1024)
    gate, up = gate_and_up(torch.bfloat16, shape)
    with recorded_launches() as launches:
        operators.gated_activation(gate, up, "silu", False)
        operators._gated_activation_fused_backward(gate, torch.cat((gate, up), dim=-1), "silu")
    for launch, tensors in zip(launches, (3, 5)):
        assembly = compile_launch(launch, "sm_90").asm["ptx"]
        assert assembly.count("ld.global.v4.b32") + assembly.count("st.global.v4.b32") == tensors
