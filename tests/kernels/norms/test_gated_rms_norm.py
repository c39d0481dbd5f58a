"""RMSNorm with a gate, and LayerNorm of heads: the bits of the models' own modules, every option, what is saved."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.lara_mini.modeling_lara_mini import LaraMiniRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from liger_trainer.functional import gated_rms_norm, layer_norm
from liger_trainer.kernels import rows as launch
from liger_trainer.kernels.norms import gated_rms_norm as module
from liger_trainer.kernels.norms.gated_rms_norm import ACTIVATIONS, CASTINGS, gated_rms_norm_reference
from liger_trainer.kernels.rows import NormConfig
from tests.accuracy import assert_as_accurate, result_and_gradients

MODELS = {  # the module for rows of 48, and its options here
    "mamba2": (lambda: MambaRMSNormGated(48, 48), (None, "silu", True, "llama")),
    "mamba2 in groups": (lambda: MambaRMSNormGated(48, 16), (16, "silu", True, "llama")),
    "qwen3_next": (lambda: Qwen3NextRMSNormGated(48), (None, "silu", False, "llama")),
    "lara_mini": (lambda: LaraMiniRMSNormGated(48), (None, "silu", False, "gemma")),
    "kimi_linear": (lambda: KimiLinearRMSNormGated(48), (None, "sigmoid", False, "gemma")),
    "falcon_h1": (lambda: FalconH1RMSNormGated(48, n_groups=3), (16, "silu", False, "gemma")),
    "falcon_h1, gate first": (
        lambda: FalconH1RMSNormGated(48, n_groups=3, norm_before_gate=False),
        (16, "silu", True, "gemma"),
    ),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [*itertools.product((None, 20), ACTIVATIONS, (False, True), CASTINGS)]


def tensors(shape, device, dtype, weight_dtype=None):
    x, gate = torch.randn(2, *shape, device=device).to(dtype) * 1.5
    return x, gate, torch.randn(shape[-1], device=device).to(weight_dtype or dtype)


@pytest.mark.parametrize("weight_dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_reference_has_the_bits_of_the_models_module(name, dtype, weight_dtype):
    build, options = MODELS[name]
    norm = build()
    x, gate, weight = tensors((2, 5, 48), "cpu", dtype, weight_dtype)
    norm.weight.data = weight
    expected = norm(x, gate)
    got = gated_rms_norm_reference(x, gate, weight, 1e-6, *options)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("programs_per_sm", [1, 40])
def test_every_option_is_as_accurate_as_eager(device, monkeypatch, options, dtype, programs_per_sm):
    # One program for all tiles of a group, or one for each.
    config = NormConfig(rows=2, num_warps=4, num_stages=2, programs_per_sm=programs_per_sm)
    monkeypatch.setattr(launch, "num_sms", lambda device: 1)
    monkeypatch.setattr(module, "backward_config", lambda group_size: config)
    given = tensors((3, 7, 60), device, dtype)
    assert_as_accurate(
        lambda *each: gated_rms_norm(*each, 1e-5, *options),
        lambda *each: gated_rms_norm_reference(*each, 1e-5, *options),
        given,
    )


@pytest.mark.kernel
@pytest.mark.parametrize("gate_first", [False, True])
def test_gates_of_any_size(device, gate_first):
    x, _, weight = tensors((1, 8, 32), device, torch.float32)
    gate = torch.tensor([0.0, -0.0, 1e-30, 88.0, -88.0, -104.0, 300.0, -1e4], device=device).view(1, 8, 1).expand_as(x)
    dy = torch.randn_like(x)
    for activation in ACTIVATIONS:
        options = 1e-6, None, activation, gate_first, "gemma"
        ours = result_and_gradients(lambda *each, o=options: gated_rms_norm(*each, *o), dy, x, gate, weight)
        exact = [each.double() for each in (x, gate, weight)]
        theirs = result_and_gradients(lambda *each, o=options: gated_rms_norm_reference(*each, *o), dy.double(), *exact)
        for mine, right in zip(ours, theirs):
            torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.kernel
def test_a_part_of_a_projection_is_read_where_it_lies(device, monkeypatch):
    """As a mixer passes its gate; only the rows of the weight's gradient are new."""
    projection = torch.randn(2, 5, 3 * 48, device=device)
    x, gate, _ = projection.split(48, -1)
    copies = []
    as_rows = module.as_rows
    monkeypatch.setattr(
        module, "as_rows", lambda each, order: copies.append((each, rows := as_rows(each, order))) or rows
    )
    weight = torch.randn(48, device=device)
    y = gated_rms_norm(x, gate, weight, 1e-6, 16, gate_first=True)
    torch.testing.assert_close(y, gated_rms_norm_reference(x, gate, weight, 1e-6, 16, gate_first=True))
    assert len(copies) == 2
    assert all(each.data_ptr() == rows.data_ptr() for each, rows in copies)


@pytest.mark.kernel
def test_what_is_saved(device):
    saved = []
    x, gate, weight = (each.requires_grad_() for each in tensors((4, 6, 64), device, torch.bfloat16))

    def bytes_of(function):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            function(x, gate, weight)
        return sum({each.data_ptr(): each.nbytes for each in saved}.values())

    ours, eager = bytes_of(gated_rms_norm), bytes_of(gated_rms_norm_reference)
    assert ours == x.nbytes + gate.nbytes + weight.nbytes + 4 * 24  # the root of each row
    assert eager > 3.8 * ours


# ---------------------------------------------------------------------------------------------------------------------
# LayerNorm of heads
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64,), (4, 16)], ids=str)
def test_layer_norm_reference_is_coheres(dtype, shape):
    norm = CohereLayerNorm(shape).to(dtype)
    norm.weight.data = torch.randn(shape).to(dtype)
    x = torch.randn(200, 5, *shape).to(dtype)
    flat = x.flatten(2)
    groups = 16 if len(shape) == 2 else None
    got = layer_norm(flat, norm.weight.flatten(), None, 1e-5, groups, dtype).view_as(x)
    expected = norm(x)
    exact = CohereLayerNorm.forward(norm.double(), x.double())
    assert got.dtype == expected.dtype == dtype
    assert (got - exact).norm() <= 1.01 * (expected - exact).norm() + 1e-7 * exact.norm()


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("programs_per_sm", [1, 40])
def test_layer_norm_of_heads_is_as_accurate_as_eager(device, monkeypatch, dtype, programs_per_sm):
    config = NormConfig(rows=2, num_warps=4, num_stages=2, programs_per_sm=programs_per_sm)
    monkeypatch.setattr(launch, "num_sms", lambda device: 1)
    monkeypatch.setattr("liger_trainer.kernels.norms.layer_norm.backward_config", lambda group_size: config)

    def by_head(x, weight, bias):
        heads, compute = x.unflatten(-1, (3, 20)), torch.promote_types(x.dtype, torch.float32)
        normed = F.layer_norm(heads.to(compute), (20,), eps=1e-5)
        return (normed * weight.view(3, 20) + bias.view(3, 20)).flatten(-2).to(x.dtype)

    given = [each.to(dtype) for each in (torch.randn(2, 7, 60), *torch.randn(2, 60))]
    given = [each.to(device) for each in given]
    assert_as_accurate(lambda *each: layer_norm(*each, 1e-5, 20), by_head, given)


@pytest.mark.kernel
def test_the_dtype_of_a_result_may_be_given(device):
    x, weight = torch.randn(3, 8, device=device).bfloat16(), torch.randn(8, device=device)
    assert layer_norm(x, weight, None, dtype=torch.float32).dtype == torch.float32
    with torch.autocast(device, torch.bfloat16):
        assert layer_norm(x, weight, None, dtype=torch.bfloat16).dtype == torch.bfloat16
