"""Adapters on a base in 4 bits are merged into the weights that they were trained on."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from liger_trainer.recipe import load_recipe
from liger_trainer.recipe.run import train_recipe
from liger_trainer.tools.export.merging import distances, merge
from liger_trainer.tools.export.saved_run import find_run
from liger_trainer.trainers.checkpoints.saved_weights import FILE
from tests.quantised import library
from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import tokenizer

WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 64}
IDS = torch.arange(3, 35)[None]


@pytest.fixture(autouse=True)
def installed():
    library()


@torch.no_grad()
def logits(model):
    """Without dropout, which these models have none of; on a CPU, bitsandbytes evaluates in bf16."""
    return model.train()(input_ids=IDS).logits[0].float()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_weights_of_the_training(family, tmp_path):
    more = {"moe_intermediate_size": 64, "output_router_logits": False} if family == "qwen3_moe" else {}
    TINY_MODELS[family](**WHOLE_BLOCKS, **more).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text((json.dumps({"text": "one two three four"}) + "\n") * 16)
    values = {
        "trainer": "causal_lm",
        "model_name_or_path": str(tmp_path / "model"),
        "data_files": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "run"),
        "dtype": "float32",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "use_bnb_nested_quant": True,
        "use_peft": True,
        "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"] if more else None,
        "max_length": 16,
        "max_steps": 2,
        "learning_rate": 0.01,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "eval_strategy": "no",
        "loss_curve": False,
    }
    source = tmp_path / "mine.yaml"
    source.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
    trained = train_recipe(load_recipe(source, []))[0].model
    lines: list[str] = []
    merge(find_run(str(tmp_path / "run")), tmp_path / "merged", say=lines.append)
    assert "the base was quantised for training, and is merged as its dequantised weights" in lines[0]
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert distances(logits(trained), found).max() < 1e-4
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert (checkpoint / FILE).read_text() == (tmp_path / "run" / FILE).read_text()
    (tmp_path / "run" / FILE).unlink()  # as if the base had not been quantised
    merge(find_run(str(tmp_path / "run")), tmp_path / "other", say=lines.append)
    other = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "other"))
    assert distances(logits(trained), other).median() > 0.01


def test_a_base_that_was_published_in_4_bits(tmp_path):
    TINY_MODELS["llama"](**WHOLE_BLOCKS).save_pretrained(tmp_path / "model")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=four_bits)
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "run")
    proof = merge(find_run(str(tmp_path / "run")), tmp_path / "merged", say=lambda line: None)
    assert proof.effect > 1e-3
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    assert distances(logits(adapted), found).median() < 0.02  # the base computes in bf16
