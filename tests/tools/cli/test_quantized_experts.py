"""`load_in_4bit` of a recipe for a mixture of experts: trains, resumes, loads again, or is refused."""

import json

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from liger_trainer.patching.moe.quantized_experts import four_bits
from liger_trainer.recipe import load_recipe
from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.run import train_recipe
from tests.quantised import library
from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import tokenizer

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(autouse=True)
def installed():
    library()


@pytest.fixture
def folder(tmp_path):
    fields = {"hidden_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    TINY_MODELS["qwen3_moe"](output_router_logits=False, vocab_size=128, **fields).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text(
        "".join(json.dumps({"text": "one two three four"}) + "\n" for _ in range(16))
    )
    return tmp_path


def run(folder, **more):
    values = {
        "trainer": "sft",
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "rows"),
        "output_dir": str(folder / "run"),
        "dtype": "float32",
        "load_in_4bit": True,
        "use_bnb_nested_quant": True,
        "use_peft": True,
        "lora_r": 4,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_target_parameters": EXPERTS,
        "max_length": 16,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": True,
        "learning_rate": 0.01,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        **more,
    }
    source = folder / "mine.yaml"
    source.write_text(yaml.safe_dump(values))
    return train_recipe(load_recipe(source, []))[0]


@pytest.mark.parametrize("trainer", ["sft", "causal_lm"])
def test_trains_in_4_bits(folder, trainer):
    trained = run(folder, trainer=trainer)
    model = trained.model
    experts = [module for module in model.modules() if four_bits(module)]
    assert len(experts) == model.config.num_hidden_layers
    assert not any(parameter.dim() == 3 for parameter in model.parameters())
    kernels = {row.kernel for row in trained.kernel_report}
    assert "moe_experts (adapters)" in kernels
    losses = [entry["loss"] for entry in trained.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), folder / "run")
    saved = {name: value for name, value in loaded.state_dict().items() if "lora_" in name}
    here = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    assert saved.keys() == here.keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, here[name].float())


def test_resumes_to_the_same_weights(folder):
    """As exact as bf16, to which TRL casts adapters on 4 bits; PEFT loads those of a checkpoint in fp32."""
    whole = run(folder)
    wanted = {name: value.clone() for name, value in whole.model.state_dict().items() if "lora_" in name}
    again = run(folder, resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    assert again.state.global_step == 4
    for name, value in wanted.items():
        torch.testing.assert_close(again.model.state_dict()[name].float(), value.float(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_template_path": "qwen3_training"}, "`chat_template_path` is .*, but tokens that it adds would not be"),
        ({"trainer": "dpo"}, "has experts, which train in 4 bits with `trainer` sft and causal_lm, not with dpo"),
        (
            {"use_liger_kernel": False},
            "the adapters on Qwen3MoeExperts in few bits run only in our operator",
        ),
        (
            {"liger_kernel_config": {"lora": False}},
            "the adapters on Qwen3MoeExperts in few bits run only in our operator",
        ),
    ],
)
def test_refused(folder, changes, message):
    with pytest.raises(RecipeError, match=message):
        run(folder, **changes)


def test_a_launch_that_splits_the_model_is_refused(folder, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    from liger_trainer.recipe.experts import check_loading_in_4_bits

    with pytest.raises(RecipeError, match="the launch splits the model with DeepSpeed; launch it on one GPU"):
        check_loading_in_4_bits(folder, "sft", TINY_MODELS["qwen3_moe"]().config)
