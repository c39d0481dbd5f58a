"""RMSNorm and gated activations that cast their results to fp8: the bits of a cast of its own, and compilation."""

import pytest
import torch

from liger_trainer.kernels.activation import GatedActivation
from liger_trainer.kernels.fp8 import shared_cast
from liger_trainer.kernels.fp8.row_cast import cast_rows
from liger_trainer.kernels.mlp import gated_activation as gated
from liger_trainer.kernels.mlp.glu import swiglu_down
from liger_trainer.kernels.norms import rms_norm as norms
from tests.accuracy import run
from tests.accuracy import seeded_randn as randn
from tests.aot import compile_launch, recorded_launches

BF16 = {"dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def nothing_shared():
    shared_cast.drop()
    yield
    shared_cast.drop()


def assert_same_bits(cast, rows):
    for mine, theirs in zip(cast, cast_rows(rows), strict=True):
        assert mine.is_contiguous()
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def spoilt(x):
    """With a row of zeros, and two that are not finite."""
    x[..., 1, :] = 0
    x[..., 2, 5], x[..., 3, 7] = float("inf"), float("nan")
    return x


@pytest.mark.kernel
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("casting", "offset"), [("llama", 0.0), ("gemma", 1.0), ("olmo2", 0.0), ("none", 0.0)])
@pytest.mark.parametrize("shape", [(2, 5, 80), (4, 2064)])
def test_a_norm_casts_its_result(shape, casting, offset, residual, device):
    x, weight = spoilt(randn(*shape, device=device, scale=3.0, **BF16)), randn(shape[-1], device=device, **BF16)
    other = randn(*shape, seed=1, device=device, **BF16) if residual else None
    y, total, rstd = norms.launch_forward(x, other, weight, 1e-6, offset, casting, fp8=True)
    assert_same_bits(shared_cast.shared(y), y.view(-1, shape[-1]))
    plain = norms.launch_forward(x, other, weight, 1e-6, offset, casting)
    for mine, theirs in zip((y, total, rstd), plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernel
def test_the_layers_after_a_norm_get_its_cast(device):
    """Through autograd, and with its gradients."""
    x, weight = randn(2, 5, 80, device=device, **BF16), randn(80, device=device, **BF16)
    y = norms.rms_norm(x.requires_grad_(), weight, fp8=True)
    assert_same_bits(shared_cast.shared(y), y.detach().view(10, 80))
    ours, upstream = run(norms.rms_norm, (x, weight), fp8=True)
    plain, _ = run(norms.rms_norm, (x, weight), upstream)
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.kernel
def test_what_no_layer_could_use_is_not_cast(device):
    x, weight = randn(4, 80, device=device, **BF16), randn(80, device=device, **BF16)
    for y in (
        norms.rms_norm(x, weight),
        norms.rms_norm(x.float(), weight, fp8=True),
        norms.rms_norm(x, weight.float(), fp8=True),  # whose result is in fp32
        norms.rms_norm(randn(80, 4, device=device, **BF16).view(8, 10, 4).transpose(0, 1), weight[:4], fp8=True),
    ):
        assert shared_cast.shared(y) is None
    with torch.inference_mode():
        norms.rms_norm(x, weight, fp8="rowwise_gw_hp")
    assert shared_cast._last is None


@pytest.mark.kernel
@pytest.mark.parametrize("cols", [40, 4112])
@pytest.mark.parametrize(
    ("activation", "options", "fused", "interleaved"),
    [
        ("silu", {}, False, False),
        ("silu", {"gate_multiplier": 1.5, "down_multiplier": 0.3}, True, False),
        ("silu", {"limit": 1.0, "gate_multiplier": 1.702, "up_offset": 1.0}, True, True),
        ("silu", {"limit": 1.0}, False, False),
        ("gelu_tanh", {}, False, False),
        ("gelu", {}, True, False),
    ],
)
def test_a_gated_activation_casts_its_result(activation, options, fused, interleaved, cols, device):
    gate = spoilt(randn(2, 5, cols * (1 + fused), device=device, scale=3.0, **BF16))
    up = None if fused else spoilt(randn(2, 5, cols, seed=1, device=device, **BF16).flip(1))
    form = GatedActivation.of(activation, **options, interleaved=interleaved)
    h = gated.empty_h(gate, up)
    gated.launch_forward(gate, up, h, form)
    assert_same_bits(gated.cast_of_h(gate, up, form), gated.rows_of(h))


@pytest.mark.kernel
def test_columns_beyond_a_row_do_not_scale_it(device):
    """Where a limit below 0 clamps them, though they were loaded as zeros."""
    gate = torch.full((2, 40), -20.0, device=device, **BF16)
    arguments, form = (gate, gate.clone()), GatedActivation.of("silu", limit=-1.0)
    h = gated.empty_h(*arguments)
    gated.launch_forward(*arguments, h, form)
    assert_same_bits(gated.cast_of_h(*arguments, form), h)


@pytest.mark.kernel
def test_a_down_projection_casts_in_its_activation(device, monkeypatch):
    gate, up = (randn(2, 5, 48, seed=seed, device=device, **BF16) for seed in (4, 5))
    weight = randn(32, 48, device=device, **BF16)
    shared_cast.cast_input(gate, keep=True)
    swiglu_down(gate, up, weight, fp8="rowwise_gw_hp")
    assert shared_cast._last is None
    ours, upstream = run(swiglu_down, (gate, up, weight), fp8="rowwise_gw_hp")
    monkeypatch.setattr(gated, "_LONGEST_CAST", 0)
    separate, _ = run(swiglu_down, (gate, up, weight), upstream, fp8="rowwise_gw_hp")
    for mine, theirs in zip(ours, separate, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_compiles_ahead_of_time(target):
    x, weight = torch.zeros(64, 4096, **BF16), torch.zeros(4096, **BF16)
    with recorded_launches() as launches:
        norms.launch_forward(x, None, weight, 1e-6, 0.0, "llama", fp8=True)
        gated.cast_of_h(x[:, :2560], x[:, :2560], GatedActivation.of("silu"))
    assert len(launches) == 2
    for launch in launches:
        assert "cvt.rn.satfinite.e4m3x2" in compile_launch(launch, target).asm["ptx"]
