"""Options of the gated activations: multipliers, limits and the interleaved columns of clamped_swiglu."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import FalconH1Config, GptOssConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from liger_trainer.kernels.mlp import gated_activation as operators
from liger_trainer.kernels.mlp.geglu import geglu, geglu_fused
from liger_trainer.kernels.mlp.swiglu import swiglu, swiglu_fused, swiglu_fused_reference, swiglu_reference
from liger_trainer.kernels.parity.clamped_swiglu import clamped_swiglu, clamped_swiglu_reference
from tests.accuracy import assert_no_worse, in_float64, result_and_gradients, seeded_randn, value_and_gradients
from tests.aot import TARGETS, compile_launch, recorded_launches

SIZES = {"hidden_size": 8, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}


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
    with pytest.raises(ValueError, match=r"twice the intermediate size, gate and up alternating"):
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


SCALED = {"gate_multiplier": 0.75, "down_multiplier": 1.5}

# One input each: a fused projection.
VARIANTS = {
    "multipliers": (partial(swiglu_fused, **SCALED), partial(swiglu_fused_reference, **SCALED)),
    "limit": (partial(swiglu_fused, limit=2.0), partial(swiglu_fused_reference, limit=2.0)),
    "gpt_oss": (partial(clamped_swiglu, limit=2.0), partial(clamped_swiglu_reference, limit=2.0)),
    "halves": (
        partial(clamped_swiglu, alpha=1.0, up_offset=0.0, interleaved=False),
        partial(clamped_swiglu_reference, alpha=1.0, up_offset=0.0, interleaved=False),
    ),
    "no_limit": (partial(clamped_swiglu, limit=None), partial(clamped_swiglu_reference, limit=None)),
}

variants = pytest.mark.parametrize("variant", VARIANTS)

randn = partial(seeded_randn, scale=3.0)


@pytest.mark.kernel
@variants
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 34), (2,), (2, 2100)])
def test_float32_equals_float64(variant, shape, device):
    function, reference = VARIANTS[variant]
    gate_up = randn(*shape, device=device).requires_grad_()
    for ours, right in zip(value_and_gradients(function, gate_up), in_float64(reference, gate_up)):
        torch.testing.assert_close(ours.double(), right, rtol=3e-6, atol=3e-5)


@pytest.mark.kernel
@variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(variant, dtype, device):
    function, reference = VARIANTS[variant]
    gate_up = randn(8, 2060, dtype=dtype, device=device).requires_grad_()
    ours, theirs = value_and_gradients(function, gate_up), value_and_gradients(reference, gate_up)
    assert_no_worse(ours, theirs, in_float64(reference, gate_up))


@pytest.mark.kernel
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 700),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(["contiguous", "rows apart", "columns apart", "transposed"]),
    multiplier=st.floats(0.1, 4.0),
    limit=st.one_of(st.none(), st.floats(0.5, 8.0)),
    interleaved=st.booleans(),
    up_offset=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=15, deadline=None)
def test_any_shape_layout_and_option(rows, width, dtype, layout, multiplier, limit, interleaved, up_offset):
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    base = randn(rows, 3, 2 * width, dtype=dtype, device=device)
    gate_up = {
        "contiguous": lambda: base,
        "rows apart": lambda: torch.cat((base, base), -1)[..., 2 * width :],
        "columns apart": lambda: torch.stack((base, base), -1)[..., 0],
        "transposed": lambda: base.transpose(0, 1),
    }[layout]().requires_grad_()
    options = {"alpha": multiplier, "limit": limit, "up_offset": up_offset, "interleaved": interleaved}
    ours = value_and_gradients(partial(clamped_swiglu, **options), gate_up)
    exact = in_float64(partial(clamped_swiglu_reference, **options), gate_up)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]
    for mine, right in zip(ours, exact):
        assert mine.shape == right.shape
        assert (mine - right).norm() <= tolerance * right.norm() + 1e-6


@pytest.mark.kernel
def test_the_gradient_stops_where_something_is_clamped(device):
    gate_up = torch.tensor([[2.0, 2.0, 2.1, -2.1, -5.0, 0.5]], device=device).requires_grad_()
    function, reference = VARIANTS["gpt_oss"]
    ours, right = (value_and_gradients(f, gate_up)[1] for f in (function, reference))
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)
    assert (ours == 0).tolist() == [[False, False, True, True, False, False]]  # the limit itself is inside


@pytest.mark.kernel
def test_nan_is_not_clamped_away(device):
    gate_up = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]], device=device)
    assert clamped_swiglu(gate_up).isnan().all()


@pytest.mark.kernel
@variants
def test_inplace_backward(variant, device):
    function, _ = VARIANTS[variant]
    x = randn(3, 20, device=device).requires_grad_()

    def loss(inplace):
        return function(x * 2, inplace_backward=inplace).square().sum()

    (expected,) = torch.autograd.grad(loss(False), x)
    kept = loss(True)
    assert torch.equal(torch.autograd.grad(kept, x, retain_graph=True)[0], expected)
    assert torch.equal(torch.autograd.grad(kept, x)[0], expected)
    gate_up = (x * 2).detach().mT.contiguous().mT.requires_grad_()  # also where the kernel works on a copy
    dh = torch.ones_like(function(gate_up))
    (expected,) = torch.autograd.grad(function(gate_up), gate_up, dh)
    (ours,) = torch.autograd.grad(function(gate_up, inplace_backward=True), gate_up, dh)
    assert torch.equal(ours, expected)
    assert ours.data_ptr() == gate_up.data_ptr()


@pytest.mark.kernel
def test_inplace_backward_refuses_expanded_projections(device):
    gate_up = randn(1, 8, device=device).expand(4, 8)
    for function in (swiglu_fused, geglu_fused, clamped_swiglu):
        with pytest.raises(ValueError, match="over `gate_up`, but it is expanded"):
            function(gate_up, inplace_backward=True)
        function(gate_up)


@pytest.mark.kernel
def test_a_second_derivative_is_refused(device):
    gate_up = randn(2, 8, device=device).requires_grad_()
    gate, up = gate_up.chunk(2, dim=-1)
    for h in (swiglu(gate, up), geglu(gate, up), swiglu_fused(gate_up), clamped_swiglu(gate_up)):
        (gradient,) = torch.autograd.grad(h.sum(), gate_up, create_graph=True)
        with pytest.raises(RuntimeError, match=r"swiglu.* cannot itself be differentiated.*_reference"):
            gradient.sum().backward()


@pytest.mark.kernel
@variants
def test_compiles_fullgraph(variant, device):
    torch.compiler.reset()
    function, _ = VARIANTS[variant]
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if device != "cpu" else "aot_eager")
    gate_up = randn(3, 20, device=device).requires_grad_()
    for ours, right in zip(value_and_gradients(compiled, gate_up), value_and_gradients(function, gate_up)):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def real_randn(*shape, device="cuda", dtype=torch.bfloat16, scale=2.0):
    return scale * torch.randn(shape, device=device, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(8192, 2880), (70_001, 33)])
def test_large_inputs_round_no_worse(dtype, shape, device):
    torch.manual_seed(0)
    x, dy = real_randn(shape[0], 2 * shape[1], dtype=dtype, scale=4.0), real_randn(*shape, dtype=dtype)
    eager, exact = (
        result_and_gradients(clamped_swiglu_reference, dy, x),
        result_and_gradients(clamped_swiglu_reference, dy.double(), x.double()),
    )
    slack = 1.1 if dtype != torch.float32 else 6  # fast exp and division
    assert_no_worse(result_and_gradients(clamped_swiglu, dy, x), eager, exact, slack)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [SCALED, {"limit": 2.0}])
def test_options_of_swiglu_round_no_worse(options, device):
    torch.manual_seed(0)
    dy, gate, up = (real_randn(4096, 3072) for _ in range(3))
    eager = result_and_gradients(partial(swiglu_reference, **options), dy, gate, up)
    exact = result_and_gradients(partial(swiglu_reference, **options), dy.double(), gate.double(), up.double())
    assert_no_worse(result_and_gradients(partial(swiglu, **options), dy, gate, up), eager, exact)


@pytest.mark.gpu
def test_more_than_2_to_31_elements(device):
    x, dy = real_randn(2**16 + 1, 2 * (2**15 + 8)), real_randn(2**16 + 1, 2**15 + 8)
    ours = result_and_gradients(clamped_swiglu, dy, x)
    eager, exact = (
        result_and_gradients(clamped_swiglu_reference, dy[-64:], x[-64:]),
        result_and_gradients(clamped_swiglu_reference, dy[-64:].double(), x[-64:].double()),
    )
    for mine, theirs, right in zip(ours, eager, exact):
        assert (mine[-64:] - right).norm() <= 1.1 * (theirs - right).norm()
