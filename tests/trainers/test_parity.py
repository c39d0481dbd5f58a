"""DPO, KTO, SFT, GRPO and RLOO against TRL's: every loss type and option, on the numbers in the logs.

GRPO and RLOO train on completions that both draw with equal seeds.
"""

import pytest

from tests.trainers.parity import assert_parity, lora

pytestmark = pytest.mark.filterwarnings("ignore")

DPO_LOSSES = [
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
]

DPO_OPTIONS = {
    "mpo": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "weighting": {"use_weighting": True},
    "ld_alpha": {"ld_alpha": 0.4},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
    "label_smoothing": {"label_smoothing": 0.1},
    "precompute": {"precompute_ref_log_probs": True},
    "precompute_lora": {"precompute_ref_log_probs": True, "peft_config": lora()},
    "sync_ref_model": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6},
    "lora": {"peft_config": lora()},
    "lora_saved_head": {"peft_config": lora("q_proj", modules_to_save=["lm_head"])},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "moe": {"model": "mixtral"},
    "softcap": {"model": "gemma2"},
    "nothing_retained": {"own": {"retain_logits_memory": "0", "logits_memory": 128 * 4 * 7}},
}

KTO_OPTIONS = {
    "kto": {},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
    "weights": {"desirable_weight": 1.5, "undesirable_weight": 0.5},
    "precompute": {"precompute_ref_log_probs": True},
    "lora": {"peft_config": lora()},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "moe": {"model": "mixtral"},
    "softcap": {"model": "gemma2"},
}

SFT_OPTIONS = {
    "dft_lora": {"loss_type": "dft", "peft_config": lora()},
    "label_smoothing_lora": {"label_smoothing_factor": 0.2, "peft_config": lora()},
    "label_smoothing_moe": {"label_smoothing_factor": 0.2, "model": "mixtral"},
    "label_smoothing_evaluation": {"label_smoothing_factor": 0.2, "eval_strategy": "steps", "eval_steps": 1},
    "dft_softcap": {"loss_type": "dft", "model": "gemma2", "data": "completions"},
    "every_second_layer": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    "selective": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
    "selective_tiled": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"selective": True},
        "own": {"liger_kernel_config": {"tiled_mlp": True}},
    },
}

# Two iterations on completions of a policy that the first has changed: the ratios are not 1.
MULTI = {"num_iterations": 2, "steps_per_generation": 2, "max_steps": 4, "learning_rate": 3e-3}

GRPO_LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]

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
    # No step is taken: afterwards each bf16 weight may have another neighbour.
    "fp32_head_of_bf16": {
        "cast_lm_head_to_fp32": True,
        "model_init_kwargs": {"dtype": "bfloat16"},
        "learning_rate": 0.0,
    },
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


@pytest.mark.parametrize("loss_type", DPO_LOSSES)
def test_dpo_losses(loss_type, tmp_path, folders):
    smoothing = {"label_smoothing": 1e-3} if loss_type in ("exo_pair", "robust") else {}
    run("DPO", tmp_path, folders, {"loss_type": [loss_type], **smoothing})


@pytest.mark.parametrize("name", DPO_OPTIONS)
def test_dpo_options(name, tmp_path, folders):
    run("DPO", tmp_path, folders, dict(DPO_OPTIONS[name]))


@pytest.mark.parametrize("name", KTO_OPTIONS)
def test_kto(name, tmp_path, folders):
    run("KTO", tmp_path, folders, dict(KTO_OPTIONS[name]))


@pytest.mark.parametrize("name", SFT_OPTIONS)
def test_sft(name, tmp_path, folders):
    run("SFT", tmp_path, folders, dict(SFT_OPTIONS[name]))


@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_grpo_losses(loss_type, tmp_path, folders):
    stock, _ = run("GRPO", tmp_path, folders, {"loss_type": loss_type, "beta": 0.04, **MULTI})
    assert any(log.get("grad_norm", 0.0) > 0.0 for log in stock.state.log_history)


@pytest.mark.parametrize("name", GRPO_OPTIONS)
def test_grpo_options(name, tmp_path, folders):
    run("GRPO", tmp_path, folders, dict(GRPO_OPTIONS[name]))


@pytest.mark.parametrize("name", RLOO_OPTIONS)
def test_rloo(name, tmp_path, folders):
    run("RLOO", tmp_path, folders, dict(RLOO_OPTIONS[name]))
