"""The norms' modules, with Liger's call signatures, against plain torch."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn import functional as F

from liger_trainer import nn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def defaults(cls) -> dict[str, object]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters}


REQUIRED = inspect.Parameter.empty
GEMMA = {"eps": 1e-6, "offset": 1.0, "casting_mode": "gemma", "init_fn": "zeros", "in_place": True, "row_mode": None}
LLAMA = {"eps": 1e-6, "offset": 0.0, "casting_mode": "llama", "init_fn": "ones", "in_place": False, "row_mode": None}
PLAIN = {key: value for key, value in LLAMA.items() if key != "row_mode"}
SIGNATURES = {
    "LigerFusedAddRMSNorm": {"hidden_size": REQUIRED, **PLAIN},
    "LigerModulatedRMSNorm": {"hidden_size": REQUIRED, **PLAIN, "in_place": True, "elementwise_affine": True},
    "LigerGroupNorm": {
        **{"num_channels": REQUIRED, "num_groups": REQUIRED},
        **{"eps": 1e-6, "bias": False, "init_fn": "ones"},
    },
    "LigerPolyNorm": {"eps": 1e-6, "in_place": True},
    "LigerDyT": {"hidden_size": REQUIRED, "beta": True, "init_alpha": 0.5},
    "LigerRMSNormForGemma": {"hidden_size": REQUIRED, **GEMMA},
    "LigerRMSNormForGemma2": {"hidden_size": REQUIRED, **GEMMA},
    "LigerRMSNormForGemma3": {
        "dim": REQUIRED,
        **{key: value for key, value in GEMMA.items() if key != "row_mode"},
        "in_place": False,
    },
    "LigerRMSNormForGemma4": {"dim": REQUIRED, **PLAIN, "casting_mode": "gemma", "with_scale": True},
    "LigerRMSNormForOlmo2": {"hidden_size": REQUIRED, **LLAMA},
    "LigerRMSNormForGlm4": {"hidden_size": REQUIRED, **LLAMA},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_ligers(name):
    ours = defaults(getattr(nn, name))
    assert list(ours.items()) == list(SIGNATURES[name].items())


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("LigerRMSNormForGemma", "gemma.GemmaRMSNorm"),
        ("LigerRMSNormForGemma2", "gemma2.Gemma2RMSNorm"),
        ("LigerRMSNormForGemma3", "gemma3.Gemma3RMSNorm"),
        ("LigerRMSNormForGemma4", "gemma4.Gemma4RMSNorm"),
        ("LigerRMSNormForQwen3Next", "qwen3_next.Qwen3NextRMSNorm"),
        ("LigerRMSNormForOlmo2", "olmo2.Olmo2RMSNorm"),
        ("LigerRMSNormForGlm4", "glm4.Glm4RMSNorm"),
    ],
)
def test_families_have_the_values_of_transformers(name, family):
    package, class_name = family.split(".")
    module = __import__(f"transformers.models.{package}.modeling_{package}", fromlist=[class_name])
    theirs, ours = getattr(module, class_name)(8, eps=1e-6), getattr(nn, name)(8)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())  # initial weights too
    theirs.weight.data.normal_()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", ["LigerRMSNormForGemma4", "LigerRMSNormForMuseGlimmer"])
def test_a_norm_without_scale(name):
    norm = getattr(nn, name)(8, with_scale=False)
    assert not norm.state_dict()
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), None, 1e-6))


def test_muse_glimmers_norm_without_scale_needs_no_size():
    x = torch.randn(3, 8)
    torch.testing.assert_close(nn.LigerRMSNormForMuseGlimmer(with_scale=False)(x), F.rms_norm(x, (8,), None, 1e-6))
    with pytest.raises(ValueError, match=r"`dim`.*with_scale"):
        nn.LigerRMSNormForMuseGlimmer()


def test_fused_add_rms_norm():
    norm = nn.LigerFusedAddRMSNorm(8, eps=1e-5, offset=1.0, casting_mode="gemma", init_fn="zeros")
    norm.weight.data.normal_()
    x, residual = torch.randn(2, 3, 8)
    y, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, F.rms_norm(total, (8,), norm.weight + 1, 1e-5))


@pytest.mark.parametrize("elementwise_affine", [True, False])
def test_modulated_rms_norm(elementwise_affine):
    norm = nn.LigerModulatedRMSNorm(8, elementwise_affine=elementwise_affine)
    assert (norm.weight is not None) == elementwise_affine
    x = torch.randn(2, 3, 8)
    scale, shift = torch.randn(2, 2, 8)
    plain = F.rms_norm(x, (8,), None, 1e-6) * (1 + scale[:, None])
    torch.testing.assert_close(norm(x, scale), plain)
    torch.testing.assert_close(norm(x, scale, shift), plain + shift[:, None])


def test_group_norm():
    norm = nn.LigerGroupNorm(6, 3, eps=1e-5, bias=True)
    assert norm.bias.any()
    assert not nn.LigerGroupNorm(6, 3).bias.any()
    assert not nn.LigerGroupNorm(6, 3, init_fn="zeros").weight.any()
    x = torch.randn(2, 6, 4, 4)
    torch.testing.assert_close(norm(x), F.group_norm(x, 3, norm.weight, norm.bias, 1e-5))
    assert repr(norm) == "LigerGroupNorm(6, num_groups=3, eps=1e-05)"
    with pytest.raises(ValueError, match="`num_groups` is 4, which does not divide `num_channels`, 6"):
        nn.LigerGroupNorm(6, 4)


def test_poly_norm_starts_as_the_mean_of_the_powers_plus_one():
    x = torch.randn(3, 8)
    powers = [F.rms_norm(x**power, (8,), None, 1e-6) for power in (1, 2, 3)]
    torch.testing.assert_close(nn.LigerPolyNorm()(x), sum(powers) / 3 + 1)


@pytest.mark.parametrize("beta", [True, False])
def test_dyt(beta):
    layer = nn.LigerDyT(8, beta=beta, init_alpha=0.25)
    assert set(layer.state_dict()) == {"alpha", "gamma"} | ({"beta"} if beta else set())
    layer.gamma.data.normal_()
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), torch.tanh(x / 4) * layer.gamma)
    assert repr(layer) == f"LigerDyT(8, init_alpha=0.25, beta={beta})"
