"""GRPO and RLOO against TRL's, on completions that both draw with equal seeds."""

import pytest

from tests.trainers.parity import assert_parity, lora

pytestmark = pytest.mark.filterwarnings("ignore")

# Two iterations on completions of a policy that the first has changed: the ratios are not 1.
MULTI = {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 4, "learning_rate": 1e-2}

LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]

GRPO_OPTIONS = {
    "sequence_level": {"importance_sampling_level": "sequence", **MULTI},
    "delta": {"delta": 1.2, **MULTI},
    "beta": {"beta": 0.1},
    "beta_lora": {"beta": 0.1, "peft_config": lora()},
    "lora_saved_head": {"beta": 0.1, "peft_config": lora("q_proj", modules_to_save=["lm_head"])},
    "temperature": {"temperature": 0.7, "beta": 0.1},
    "entropy_bonus": {"entropy_coef": 0.1},
    "entropy_bonus_lora": {"entropy_coef": 0.1, "peft_config": lora()},
    "adaptive_entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "max_steps": 3},
    "entropy_quantile": {"top_entropy_quantile": 0.3},
    "off_policy_mask": {"off_policy_mask_threshold": 0.5, **MULTI},
    "fp32_head": {"cast_lm_head_to_fp32": True, "beta": 0.1},
    "fp32_head_of_bf16": {"cast_lm_head_to_fp32": True, "beta": 0.1, "model_init_kwargs": {"dtype": "bfloat16"}},
    "fp32_tied_head": {"cast_lm_head_to_fp32": True, "model": "gemma2"},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
    "moe": {"model": "mixtral", "router_aux_loss_coef": 0.01},
    "nothing_retained": {"own": {"retain_logits_memory": "0", "logits_memory": 128 * 4 * 7}},
}

RLOO_OPTIONS = {
    "default": {},
    "no_reference": {"beta": 0.0},
    "iterations": {**MULTI},
    "normalized": {"normalize_advantages": True, "reward_clip_range": (-1.0, 1.0)},
    "temperature": {"temperature": 0.7},
    "lora": {"peft_config": lora()},
    "moe": {"model": "mixtral"},
}


def run(kind, tmp_path, folders, case):
    return assert_parity(kind, tmp_path, folders[case.pop("model", "llama")], **case)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_grpo_losses(loss_type, tmp_path, folders):
    stock, _ = run("GRPO", tmp_path, folders, {"loss_type": loss_type, "beta": 0.04, **MULTI})
    assert any(log.get("grad_norm", 0.0) > 0.0 for log in stock.state.log_history)


@pytest.mark.parametrize("name", GRPO_OPTIONS)
def test_grpo_options(name, tmp_path, folders):
    run("GRPO", tmp_path, folders, dict(GRPO_OPTIONS[name]))


@pytest.mark.parametrize("name", RLOO_OPTIONS)
def test_rloo(name, tmp_path, folders):
    run("RLOO", tmp_path, folders, dict(RLOO_OPTIONS[name]))
