"""Experts: which are recognised, that loss and all gradients stay the model's, and that nothing is left behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.patching.moe import experts_formula
from tests.patching import comparisons
from tests.tiny_models import COMMON, TINY_MODELS, VOCAB, _build

EXPERTS = {**dict.fromkeys(KERNEL_KEYS, False), "experts": True}
MLPS = {**EXPERTS, "experts": False, "swiglu": True}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1, "attention_chunk_size": 16}


def made(architecture, config, **fields):
    return lambda **more: _build(architecture, config(**{**COMMON, **fields, **more}))


MODELS = {
    "qwen3_moe": (TINY_MODELS["qwen3_moe"], {"moe_experts (silu)": 2}),
    "qwen3_moe, one dense": (
        lambda: TINY_MODELS["qwen3_moe"](mlp_only_layers=[0]),
        {"moe_experts (silu)": 1},
    ),
    "qwen2_moe": (
        made(tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig, **SPARSE, shared_expert_intermediate_size=40),
        {"moe_experts (silu)": 2},
    ),
    "mixtral": (TINY_MODELS["mixtral"], {"moe_experts (silu)": 2}),
    "olmoe": (
        made(tf.OlmoeForCausalLM, tf.OlmoeConfig, num_experts=4, num_experts_per_tok=2),
        {"moe_experts (silu)": 2},
    ),
    "gpt_oss": (
        TINY_MODELS["gpt_oss"],
        {"moe_experts (silu, interleaved, transposed, biases, limit, alpha)": 2},
    ),
    "deepseek_v3": (
        made(
            *(tf.DeepseekV3ForCausalLM, tf.DeepseekV3Config),
            **{**ROUTED, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
        ),
        {"moe_experts (silu)": 1},
    ),
    "glm4_moe": (
        made(tf.Glm4MoeForCausalLM, tf.Glm4MoeConfig, **ROUTED, head_dim=8, first_k_dense_replace=1),
        {"moe_experts (silu)": 1},
    ),
    "nemotron_h": (
        made(
            *(tf.NemotronHForCausalLM, tf.NemotronHConfig),
            **{**ROUTED, "layers_block_type": ["moe", "attention"], "moe_shared_expert_intermediate_size": 24},
        ),
        {"moe_experts (relu_squared, without gate)": 1},
    ),
    "llama4": (
        made(tf.Llama4ForCausalLM, tf.Llama4TextConfig, **LLAMA4, num_local_experts=4, num_experts_per_tok=1),
        {"moe_experts (silu, transposed)": 2, "moe_experts on the chosen inputs": 2},
    ),
    "llama4, two a token": (
        made(tf.Llama4ForCausalLM, tf.Llama4TextConfig, **LLAMA4, num_local_experts=4, num_experts_per_tok=2),
        {"moe_experts (silu, transposed)": 2, "moe_experts on the chosen inputs": 2},
    ),
}
models = pytest.mark.parametrize("name", MODELS)


def batch():
    ids = torch.randint(3, VOCAB - 8, (2, 11), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def loss_and_gradients(model):
    return comparisons.loss_and_gradients(model, batch())


def assert_same(ours, expected):
    comparisons.assert_same(ours, expected, floor=1e-7)


@models
def test_loss_and_gradients_are_those_of_the_models_own_loop(name):
    build, kernels = MODELS[name]
    model = build()
    model.set_experts_implementation("eager")
    expected = loss_and_gradients(model)
    report = apply_liger_kernel(model, EXPERTS)
    assert {row.kernel: row.count for row in report.applied} == kernels
    assert all(row.probe_error <= 1e-5 and not row.reason for row in report.applied)
    assert not any(row.component == "experts" for row in report.left_alone)
    assert_same(loss_and_gradients(model), expected)
    assert revert_liger_kernel(model) == sum(kernels.values())
    again = loss_and_gradients(model)
    assert all(torch.equal(value, again[name]) for name, value in expected.items())


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe", "glm4_moe", "llama4"])
def test_shared_experts_and_dense_layers_are_gated_mlps_and_counted_once(name):
    model = MODELS[name][0]()
    mlps = {type(module).__name__ for module in model.modules() if hasattr(module, "gate_proj")}
    projections = [module for module in model.modules() if "gate_proj" in module._modules]
    report = apply_liger_kernel(model, {**EXPERTS, "swiglu": True})
    rows = [row for row in report if row.component == "swiglu"]
    assert {row.target for row in rows} == mlps
    assert sum(row.count for row in rows) == len(projections) > 0
    assert all(row.kernel == "swiglu" for row in rows)


def test_ours_runs_and_the_switch_turns_it_off(calls_of):
    calls = calls_of(experts_formula, "moe_experts")
    model = TINY_MODELS["qwen3_moe"]()
    apply_liger_kernel(model, EXPERTS)
    calls.clear()
    loss_and_gradients(model)
    assert len(calls) == 2
    (row,) = (r for r in apply_liger_kernel(model, {**EXPERTS, "experts": False}) if r.component == "experts")
    assert (row.applied, row.count, row.reason) == (False, 2, "switched off in liger_kernel_config")
    loss_and_gradients(model)
    assert len(calls) == 2


@pytest.mark.parametrize(("name", "block"), [("qwen3_moe", "mlp"), ("llama4", "feed_forward")])
def test_a_block_compiles_to_one_graph(name, block):
    torch.compiler.reset()
    model, x = MODELS[name][0](), torch.randn(2, 5, 32, requires_grad=True)
    apply_liger_kernel(model, EXPERTS)
    block = getattr(model.model.layers[0], block)
    results = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        out = run(x)
        out = out[0] if isinstance(out, tuple) else out
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, *block.experts.parameters()))])
    torch.testing.assert_close(*results)


def test_generation_steps_are_those_that_transformers_chooses_for_them(monkeypatch):
    model = TINY_MODELS["qwen3_moe"]().eval()
    apply_liger_kernel(model, EXPERTS)
    with torch.no_grad():
        ours = model(batch()["input_ids"]).logits
        monkeypatch.setattr(experts_formula, "moe_experts", None)
        model.set_experts_implementation("batched_mm")
        torch.testing.assert_close(model(batch()["input_ids"]).logits, ours)


def test_nothing_of_ours_in_config_checkpoint_pickle_and_copy(tmp_path):
    model = TINY_MODELS["qwen3_moe"]()
    expected = loss_and_gradients(model)
    apply_liger_kernel(model, EXPERTS)
    assert model.config._experts_implementation != "liger_trainer"
    assert "liger_trainer" not in str(model.config.to_dict())
    model.save_pretrained(tmp_path)
    assert "liger_trainer" not in (tmp_path / "config.json").read_text()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stock.config._experts_implementation == model.config._experts_implementation
    assert_same(loss_and_gradients(stock), expected)
    unpickled = pickle.loads(pickle.dumps(model.model.layers[0].mlp.experts))
    assert type(unpickled.config) is type(model.config)
    copied = copy.deepcopy(model)
    assert revert_liger_kernel(copied) == 2
    assert copied.model.layers[0].mlp.experts.config is copied.config
    assert revert_liger_kernel(model) == 2
    assert model.model.layers[0].mlp.experts.config is model.config


def test_experts_of_a_text_model_inside_another():
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = tf.Qwen3VLMoeConfig(
        text_config={**COMMON, **SPARSE, "head_dim": 8, "rope_parameters": rope}, vision_config=vision
    )
    model = _build(tf.Qwen3VLMoeForConditionalGeneration, config)
    expected = loss_and_gradients(model)
    (row,) = apply_liger_kernel(model, EXPERTS).applied
    assert (row.target, row.count) == ("Qwen3VLMoeTextExperts", 2)
    assert_same(loss_and_gradients(model), expected)
    assert "liger_trainer" not in str(model.config.to_dict())


@pytest.mark.parametrize("order", ["before", "after"])
def test_peft_adapters_on_parameters(order):
    model = TINY_MODELS["qwen3_moe"]()
    lora = LoraConfig(
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    if order == "before":
        apply_liger_kernel(model, EXPERTS)
    model = get_peft_model(model, lora)
    if order == "after":
        assert apply_liger_kernel(model, EXPERTS).applied
    ours = loss_and_gradients(model)
    revert_liger_kernel(model)
    assert_same(ours, loss_and_gradients(model))
    assert all("lora_" in name for name in ours if name != "loss")
    assert sum("experts" in name for name in ours) == 8


def test_chosen_by_name_without_a_proof_is_an_error():
    model = TINY_MODELS["qwen3_moe"]()
    model.set_experts_implementation("liger_trainer")
    with pytest.raises(ValueError, match="apply_liger_kernel"):
        model(**batch())
    apply_liger_kernel(model, EXPERTS, strict=True)
    ours = loss_and_gradients(model)
    assert_same(ours, loss_and_gradients(TINY_MODELS["qwen3_moe"](experts_implementation="eager")))
