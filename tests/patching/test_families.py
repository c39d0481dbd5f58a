"""Every family: what is patched, that loss and gradients stay the model's, and that everything can be undone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.patching.binding import bound_modules
from liger_trainer.patching.report import MIXERS
from liger_trainer.patching.trial import OF_RECURRENCES
from tests.patching.comparisons import (
    LAYERS,
    apply_unchanged,
    assert_as_near_to_the_truth,
    assert_same,
    image_batch,
    loss_and_gradients,
    relative,
)
from tests.tiny_models import TINY_MODELS, tiny_batch

LLAMA, OLMO2, GEMMA = "rms_norm (casting=llama)", "rms_norm (casting=olmo2)", "rms_norm (casting=gemma, 1 + weight)"
SWIGLU, FUSED, GEGLU = "swiglu", "swiglu on fused gate_up", "geglu (tanh)"
EXPERTS = {"experts": {"moe_experts (silu)"}}
GPT_OSS = {"experts": {"moe_experts (silu, interleaved, transposed, biases, limit, alpha)"}}
SOFTMAX = "topk_softmax_routing"
ROPE = {"rope": {"rope"}}
QK_NORM_ROPE = {"rope": {"rope with the norms of q and k"}}
TEXT = {**ROPE, "rms_norm": {LLAMA}, "swiglu": {SWIGLU}}
GEMMAS = {**ROPE, "rms_norm": {GEMMA}, "geglu": {GEGLU}}
GEMMA3 = {**GEMMAS, **QK_NORM_ROPE}
BALANCED = {"load_balancing_loss": {"router_losses"}}

# Family -> component -> the kernels in the report; None is a row that is left alone.
EXPECTED = {
    "llama": TEXT,
    "qwen2": TEXT,
    "qwen3": {**TEXT, **QK_NORM_ROPE},
    "qwen3_moe": {**QK_NORM_ROPE, "rms_norm": {LLAMA}, "router": {SOFTMAX}, **EXPERTS, **BALANCED},
    "gemma": GEMMAS,
    "gemma2": GEMMAS,
    "gemma3_text": GEMMA3,
    "gemma3": {**GEMMA3, "layer_norm": {"layer_norm"}, "other": {None}},  # its images have an MLP without a gate
    "mistral": TEXT,
    "mixtral": {**ROPE, "rms_norm": {LLAMA}, "router": {SOFTMAX}, **EXPERTS, **BALANCED},
    "phi3": {**TEXT, "swiglu": {FUSED}},
    "granite": TEXT,
    "olmo2": {**TEXT, "rms_norm": {OLMO2}},
    "glm4": {"rope": {"rope (neighbours)"}, "rms_norm": {LLAMA}, "swiglu": {FUSED}},
    "cohere": {"rope": {"rope (neighbours)"}, "layer_norm": {"layer_norm"}, "swiglu": {SWIGLU}},
    "gpt_oss": {"rope": {"rope (half-width tables)"}, "rms_norm": {OLMO2}, "router": {SOFTMAX}, **GPT_OSS, **BALANCED},
    "qwen2_vl": {**TEXT, "layer_norm": {"layer_norm"}, "other": {None}},
    "mllama": {**TEXT, "layer_norm": {"layer_norm"}, "other": {None}},
    "qwen3_5_moe": {
        **{"rope": {"rope", "rope with the norms of q and k"}, "recurrence": {"delta_rule (one decay a head, 4 taps)"}},
        **{"rms_norm": {GEMMA, "rms_norm (casting=llama, silu gate last)"}, "router": {SOFTMAX}, **EXPERTS, **BALANCED},
        **{"layer_norm": {"layer_norm"}, "swiglu": {SWIGLU}, "other": {None}},
    },
    "nemotron_h": {
        **{"recurrence": {"state_space (2 groups)"}, "router": {"grouped_topk_sigmoid_routing"}},
        **{"rms_norm": {OLMO2, "rms_norm (casting=llama, silu gate first, groups of 16)"}},
        **{"experts": {"moe_experts (relu_squared, without gate)"}, "relu_squared": {"relu_squared"}},
    },
    "granitemoehybrid": {
        **{"rms_norm": {LLAMA, "rms_norm (casting=llama, silu gate first)"}, "recurrence": {"state_space (1 group)"}},
        **{**ROPE, "router": {SOFTMAX}, "swiglu": {FUSED}, **EXPERTS, **BALANCED},
    },
    "lfm2": {**TEXT, **QK_NORM_ROPE, "short_conv": {"gated_short_conv (3 taps)"}},
}

families = pytest.mark.parametrize("family", TINY_MODELS)


def expected_kernels(family: str) -> dict[str, set[str | None]]:
    # Mllama's cross attention has the config of its causal attention.
    return EXPECTED[family] | {"attention": {"attention without masks" if family != "mllama" else None}}


def kernels(report) -> dict[str, set[str | None]]:
    found: dict[str, set[str | None]] = {}
    for row in report:
        found.setdefault(row.component, set()).add(row.kernel)
    return found


@families
def test_report(family):
    report = apply_liger_kernel(TINY_MODELS[family](), LAYERS)
    assert kernels(report) == expected_kernels(family)
    for row in report:
        if row.applied:
            assert not row.reason or "images" in row.reason
            assert row.probe_error <= (OF_RECURRENCES.gradients if row.component == "recurrence" else 1e-5)
        else:
            assert row.reason
    assert all(row.component in str(report) for row in report)


def test_every_norm_and_mlp_is_counted():
    rows = {row.component: row.count for row in apply_liger_kernel(TINY_MODELS["gemma3_text"](), LAYERS)}
    assert rows == {"attention": 2, "rope": 2, "rms_norm": 2 * 6 + 1, "geglu": 2}


@families
def test_fp32_loss_and_gradients_equal(family):
    model = TINY_MODELS[family]()
    batch = tiny_batch(family, model)
    apply_unchanged(model, batch, LAYERS)


SCALINGS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
}
VARIANTS = {
    **{
        f"llama with {kind} rope": ("llama", {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}})
        for kind, parameters in SCALINGS.items()
    },
    "llama3, tied": (
        "llama",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ),
    "qwen2.5": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_family(variant):
    family, overrides = VARIANTS[variant]
    model = TINY_MODELS[family](**overrides).train()
    batch = tiny_batch(family, model)
    expected = loss_and_gradients(model, batch)
    assert not apply_liger_kernel(model).left_alone
    got = loss_and_gradients(model, batch)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(value, got[name]) <= 1e-5 or float(value.norm()) < 1e-6, name


@families
def test_bf16_is_as_near_to_the_truth_as_the_model_itself(family):
    model = TINY_MODELS[family]().to(torch.bfloat16)
    assert_as_near_to_the_truth(model, LAYERS, partial(tiny_batch, family))


@families
def test_autocast_as_the_trainer_does(family):
    model = TINY_MODELS[family]()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default, grouped_mm, leaves fp32 weights fp32 under autocast
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    assert_as_near_to_the_truth(model, LAYERS, partial(tiny_batch, family), autocast)


@families
def test_revert_restores_exactly(family):
    """Of the layers and the head together, which a second time change nothing."""
    model = TINY_MODELS[family]().train()
    batch = tiny_batch(family, model)
    before = loss_and_gradients(model, batch)
    overridden = {name for name, module in model.named_modules() if "forward" in module.__dict__}
    report = apply_liger_kernel(model)
    assert "linear_cross_entropy" in {row.component for row in report.applied}
    assert_same(loss_and_gradients(model, batch), before)
    forwards = {id(module): module.forward.__func__ for module in bound_modules(model)}
    assert apply_liger_kernel(model) == report
    assert {id(module): module.forward.__func__ for module in bound_modules(model)} == forwards
    of_modules = [row.count for row in report.applied if row.component not in ("attention", "load_balancing_loss")]
    mixes = any(row.component in MIXERS for row in report.applied)  # then its decoder tells layers of documents
    assert revert_liger_kernel(model) == sum(of_modules) + 1 + mixes  # and the model, for its head
    assert "liger_trainer" not in {
        module.config._attn_implementation for module in model.modules() if hasattr(module, "config")
    }
    assert {name for name, module in model.named_modules() if "forward" in module.__dict__} == overridden
    after = loss_and_gradients(model, batch)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert revert_liger_kernel(model) == 0


@families
def test_generate_equal(family):
    model = TINY_MODELS[family]().eval()
    prompt = tiny_batch(family, model)["input_ids"][:1, :6]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    apply_liger_kernel(model, LAYERS)
    assert torch.equal(model.generate(prompt, **options), expected)


@pytest.mark.parametrize("family", ["gemma3", "qwen2_vl", "mllama"])
def test_vision_inputs(family):
    model = TINY_MODELS[family]()
    generator = torch.Generator().manual_seed(0)
    if family == "qwen2_vl":
        batch = image_batch(model)
        ids = batch["input_ids"]
    elif family == "gemma3":
        ids = torch.tensor([[5, 120, 122, 122, 122, 122, 121, 7, 8]])
        batch = {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator), "token_type_ids": (ids == 122).long()}
    else:
        ids = torch.tensor([[5, 120, 7, 8, 9, 10]])
        batch = {
            "pixel_values": torch.randn(1, 1, 1, 3, 16, 16, generator=generator),
            "aspect_ratio_ids": torch.tensor([[1]]),
            "aspect_ratio_mask": torch.tensor([[[1]]]),
            "cross_attention_mask": torch.ones(1, 6, 1, 1, dtype=torch.long),
        }
    batch |= {"input_ids": ids, "labels": ids.masked_fill(ids >= 120, -100), "attention_mask": torch.ones_like(ids)}
    expected = loss_and_gradients(model, batch)
    apply_liger_kernel(model, LAYERS)
    assert any("vis" in name for name in expected)
    # Biases of keys have no gradient but rounding noise, as a softmax does not see them.
    assert_same(loss_and_gradients(model, batch), expected, floor=1e-6)
