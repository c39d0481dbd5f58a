"""A recipe on a packed checkpoint: it stays so under LoRA, resumes, and its adapters load on the dequantised model."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, Mxfp4Config

from liger_trainer.packed.loading import is_packed
from liger_trainer.recipe import load_recipe
from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.run import train_recipe
from tests.low_bit import write_mxfp4
from tests.packed_checkpoints import write_latent_mixture, write_mixture
from tests.trainers.tiny import tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path):
    write_mxfp4(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows").mkdir()
    return tmp_path


def run(folder, **more):
    pairs = {"prompt": "one ", "chosen": "two three", "rejected": "four"}
    row = pairs if more.get("trainer") == "dpo" else {"text": "one two three four"}
    (folder / "rows" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(16)))
    values = {
        "model_name_or_path": str(folder / "model"), "dataset_name": str(folder / "rows"),
        "output_dir": str(folder / "run"), "dtype": "bfloat16", "use_peft": True, "lora_r": 4, "lora_dropout": 0.0,
        "lora_target_modules": ["q_proj", "v_proj"],
        "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "max_length": 16, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1,
        "per_device_train_batch_size": 2, "gradient_checkpointing": True, "learning_rate": 0.01, "bf16": False,
        "use_cpu": True, "report_to": "none", **more,
    }  # fmt: skip
    source = folder / "mine.yaml"
    source.write_text(yaml.safe_dump(values))
    return train_recipe(load_recipe(source, []))[0]


def adapters(model):
    return {name: each.detach().float() for name, each in model.state_dict().items() if "lora_" in name}


@pytest.mark.parametrize("trainer", ["sft", "causal_lm", "dpo"])
def test_trains_packed(folder, trainer):
    trained = run(folder, trainer=trainer)
    assert is_packed(trained.model)
    assert "moe_experts (adapters)" in {row.kernel for row in trained.kernel_report}
    base = AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=Mxfp4Config(dequantize=True))
    loaded = adapters(PeftModel.from_pretrained(base, folder / "run"))
    assert loaded.keys() == adapters(trained.model).keys()
    for name, value in adapters(trained.model).items():
        torch.testing.assert_close(loaded[name], value)
        assert value.any()


def test_the_recipe_of_glm(tmp_path):
    """It trains adapters on every layer of latent attention and on the experts of a checkpoint in the same format."""
    write_latent_mixture(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    row = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}]}
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text((json.dumps(row) + "\n") * 16)
    values = {
        "model_name_or_path": tmp_path / "model", "dataset_name": tmp_path / "rows", "output_dir": tmp_path / "run",
        "max_length": 16, "max_steps": 2, "gradient_accumulation_steps": 1, "bf16": "false", "use_cpu": "true",
        "learning_rate": 0.01, "eval_strategy": "no", "save_strategy": "no",
    }  # fmt: skip
    changes = [str(word) for key, value in values.items() for word in (f"--{key}", value)]
    trained = train_recipe(load_recipe("glm_4_7_flash_fp8_sft_lora", changes))[0]
    assert is_packed(trained.model)
    kernels = {"moe_experts (adapters)", "lora_linear (packed FP8)", "expand_keys, whole queries rotated"}
    assert kernels <= {row.kernel for row in trained.kernel_report}
    trained_b = {name: each for name, each in adapters(trained.model).items() if ".lora_B." in name}
    moved = {name.partition(".lora_B")[0] for name, each in trained_b.items() if each.any()}
    own = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    wanted = {f"{layer}.self_attn.{name}" for layer in (0, 1) for name in own}
    assert {name.partition("layers.")[2] for name in moved} == wanted | {"1.mlp.experts", "1.mlp.experts.base_layer"}


def test_resumes_to_the_same_bits(folder):
    wanted = adapters(run(folder, trainer="sft").model)
    again = run(folder, trainer="sft", resume_from_checkpoint=str(folder / "run" / "checkpoint-2"))
    assert again.state.global_step == 4
    for name, value in adapters(again.model).items():
        assert torch.equal(value, wanted[name]), name


def test_refused(folder):
    for changes, message in (
        ({"packed_base": True, "use_peft": False}, "`packed_base` is true, but `use_peft` is false: such a "),
        ({"liger_kernel_config": {"experts": False}}, "the adapters on GptOssExperts in few bits run only in our oper"),
        ({"packed_base": "yes"}, "`packed_base` is 'yes'; it must be one of 'auto', 'true', 'false'"),
    ):
        with pytest.raises(RecipeError, match=message):
            run(folder, trainer="sft", **changes)


def test_a_packed_weight_that_is_named_as_a_parameter(folder):
    write_mixture(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    with pytest.raises(RecipeError, match=r"keeps it packed: .* layer in .* \(`lora_target_modules`\): 'k_proj'"):
        run(folder, trainer="sft", lora_target_parameters=["experts.down_proj", "k_proj.weight"])
