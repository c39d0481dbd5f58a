"""Multipliers, limits and interleaved columns of the gated activations: values, gradients, layouts, registration."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.mlp.geglu import geglu, geglu_fused
from liger_trainer.kernels.mlp.swiglu import swiglu, swiglu_fused, swiglu_fused_reference
from liger_trainer.kernels.parity.clamped_swiglu import clamped_swiglu, clamped_swiglu_reference
from tests.accuracy import in_float64, seeded_randn, value_and_gradients

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


@variants
@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 34), (2,), (2, 2100)])
def test_float32_equals_float64(variant, shape, device):
    function, reference = VARIANTS[variant]
    gate_up = randn(*shape, device=device).requires_grad_()
    for ours, right in zip(value_and_gradients(function, gate_up), in_float64(reference, gate_up)):
        torch.testing.assert_close(ours.double(), right, rtol=3e-6, atol=3e-5)


@variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(variant, dtype, device):
    function, reference = VARIANTS[variant]
    gate_up = randn(8, 2060, dtype=dtype, device=device).requires_grad_()
    ours, theirs = value_and_gradients(function, gate_up), value_and_gradients(reference, gate_up)
    for mine, eager, right in zip(ours, theirs, in_float64(reference, gate_up)):
        assert mine.dtype == dtype
        assert (mine - right).norm() <= 1.1 * (eager - right).norm()


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


def test_the_gradient_stops_where_something_is_clamped(device):
    gate_up = torch.tensor([[2.0, 2.0, 2.1, -2.1, -5.0, 0.5]], device=device).requires_grad_()
    function, reference = VARIANTS["gpt_oss"]
    ours, right = (value_and_gradients(f, gate_up)[1] for f in (function, reference))
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)
    assert (ours == 0).tolist() == [[False, False, True, True, False, False]]  # the limit itself is inside


def test_nan_is_not_clamped_away(device):
    gate_up = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]], device=device)
    assert clamped_swiglu(gate_up).isnan().all()


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


def test_inplace_backward_refuses_expanded_projections(device):
    gate_up = randn(1, 8, device=device).expand(4, 8)
    for function in (swiglu_fused, geglu_fused, clamped_swiglu):
        with pytest.raises(ValueError, match="over `gate_up`, but it is expanded"):
            function(gate_up, inplace_backward=True)
        function(gate_up)


def test_a_second_derivative_is_refused(device):
    gate_up = randn(2, 8, device=device).requires_grad_()
    gate, up = gate_up.chunk(2, dim=-1)
    for h in (swiglu(gate, up), geglu(gate, up), swiglu_fused(gate_up), clamped_swiglu(gate_up)):
        (gradient,) = torch.autograd.grad(h.sum(), gate_up, create_graph=True)
        with pytest.raises(RuntimeError, match=r"swiglu.* cannot itself be differentiated.*_reference"):
            gradient.sum().backward()


@variants
def test_compiles_fullgraph(variant, device):
    torch.compiler.reset()
    function, _ = VARIANTS[variant]
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if device != "cpu" else "aot_eager")
    gate_up = randn(3, 20, device=device).requires_grad_()
    for ours, right in zip(value_and_gradients(compiled, gate_up), value_and_gradients(function, gate_up)):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)
