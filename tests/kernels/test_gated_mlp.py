"""SwiGLU's and GeGLU's references against transformers, their checks, and their kernels compiled for every GPU."""

import pytest
import torch
from torch.nn import functional as F
from transformers import FalconH1Config, GemmaConfig, GptOssConfig, LlamaConfig, Phi3Config
from transformers.activations import ACT2FN
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from liger_trainer.kernels.mlp import gated_activation as operators
from liger_trainer.kernels.mlp.geglu import geglu, geglu_fused, geglu_fused_reference, geglu_reference
from liger_trainer.kernels.mlp.swiglu import swiglu, swiglu_fused, swiglu_fused_reference, swiglu_reference
from liger_trainer.kernels.parity.clamped_swiglu import clamped_swiglu
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


def test_multipliers_are_falcon_h1s():
    config = FalconH1Config(hidden_size=8, intermediate_size=24, mlp_multipliers=[0.75, 1.5], mlp_bias=False)
    mlp, x = FalconH1MLP(config), torch.randn(2, 3, 8)
    gate, up, multipliers = mlp.gate_proj(x), mlp.up_proj(x), {"gate_multiplier": 0.75, "down_multiplier": 1.5}
    torch.testing.assert_close(mlp.down_proj(swiglu(gate, up, **multipliers)), mlp(x))
    gate_up = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(swiglu_fused(gate_up, **multipliers), swiglu(gate, up, **multipliers))


def test_clamped_swiglu_is_gpt_oss(device):
    experts = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=24, num_local_experts=1))
    gate_up = 6 * torch.randn(5, 48, device=device)
    ours, theirs = clamped_swiglu(gate_up), experts._apply_gate(gate_up)
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(clamped_swiglu(gate_up, limit=None), theirs)  # so the limit shows


def test_clamped_swiglu_is_deepseek_v4(device):
    gate_up, options = 6 * torch.randn(5, 48, device=device), {"up_offset": 0.0, "interleaved": False}
    gate, up = gate_up.chunk(2, dim=-1)
    right = F.silu(gate.clamp(max=7)) * up.clamp(-7, 7)
    for ours in (clamped_swiglu(gate_up, 1.0, 7.0, **options), swiglu(gate, up, limit=7.0)):
        torch.testing.assert_close(ours, right)


def test_clamped_swiglu_needs_pairs_and_a_positive_alpha():
    with pytest.raises(ValueError, match=r"twice the intermediate size, gate and up in turns"):
        clamped_swiglu(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"`alpha` is 0\.0"):
        clamped_swiglu(torch.zeros(3, 4), alpha=0.0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clamps_and_interleaved_columns_compile_ahead_of_time(target, dtype):
    gate_up, dh = torch.zeros(4, 48, dtype=dtype), torch.zeros(4, 24, dtype=dtype)
    clamped = operators.scalars(1.702, 1 / 1.702, 7.0, 1.0)
    with recorded_launches() as launches:
        operators.gated_activation(gate_up, None, "silu", clamped, True, False)
        operators.gated_activation_backward(dh, gate_up, None, "silu", clamped, True, True, False)
        operators.gated_activation_backward(dh, dh, dh, "silu", clamped, False, True, True)
    assert [launch.arguments["CLAMP"] for launch in launches] == [True] * 3
    assert [launch.arguments["INTERLEAVED"] for launch in launches] == [True, True, False]
    for launch in launches:
        assert compile_launch(launch, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_compiles_ahead_of_time(target, activation):
    gate, up = gate_and_up(torch.bfloat16)
    gate_up = torch.cat((gate, up), dim=-1)
    with recorded_launches() as launches:
        plain = operators.scalars()
        operators.gated_activation(gate, up, activation, plain, False, False)
        operators.gated_activation_backward(gate, gate, up, activation, plain, False, True, True)
        operators.gated_activation_backward(gate, gate, up, activation, plain, False, False, True)
        operators.gated_activation(gate_up.half(), None, activation, plain, False, False)
        fused = (gate.float(), gate_up.float(), None)
        operators.gated_activation_backward(*fused, activation, plain, False, True, False)
    assert [launch.arguments["FLAT"] for launch in launches] == [True, True, True, False, False]
    for launch in launches:
        assert compile_launch(launch, target)


def test_kernels_read_128_bits_at_a_time():
    """A mask or an offset that the compiler cannot see through makes loads 16 bits wide, at a fraction of the speed."""
    shape = (64, 1024)
    gate, up = gate_and_up(torch.bfloat16, shape)
    with recorded_launches() as launches:
        swiglu_scalars = operators.scalars()
        operators.gated_activation(gate, up, "silu", swiglu_scalars, False, False)
        fused = (gate, torch.cat((gate, up), dim=-1), None)
        operators.gated_activation_backward(*fused, "silu", swiglu_scalars, False, True, False)
        operators.gated_activation_backward(*fused, "silu", operators.scalars(limit=7.0), True, True, False)
    for launch, tensors in zip(launches, (3, 5, 5)):
        assembly = compile_launch(launch, "sm_90").asm["ptx"]
        assert assembly.count("ld.global.v4.b32") + assembly.count("st.global.v4.b32") == tensors
