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
from liger_trainer.recipe.model import check_model, check_packed_base, config_of_values
from liger_trainer.recipe.run import train_recipe
from liger_trainer.tools.planning.inputs import read_inputs
from tests.low_bit import write_mxfp4
from tests.packed.test_modelopt import write_beside
from tests.packed_checkpoints import write_dense, write_latent_mixture, write_mixture
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


DENSE = {"dtype": "bfloat16", "use_peft": True, "max_length": 16, "bf16": False, "use_cpu": True}


@pytest.mark.parametrize(
    ("name", "settings", "changes", "message"),
    [
        (
            None,
            None,
            {"packed_base": True},
            r"`packed_base` is true, but .* is not in few bits: its configuration names",
        ),
        (
            "gptq",
            {"bits": 8},
            {},
            "cannot stay packed: its format is gptq in 8 bits; .* Set `packed_base` to false, or",
        ),
        ("awq", {"version": "gemv"}, {"packed_base": True}, "cannot stay packed: its format is awq gemv in 4 bits; "),
        (
            "fp8 blocks",
            {},
            {"use_dora": True},
            "`use_dora` is true: DoRA reads the base's weights, and those of .* stay ",
        ),
    ],
    ids=["16 bits", "gptq", "awq", "dora"],
)
def test_what_a_configuration_says_is_refused_before_loading(name, settings, changes, message, tmp_path, monkeypatch):
    """By a run and by its plan, from the configuration alone."""
    folder = tmp_path / "model"
    write_dense(folder, name or "fp8 blocks")
    config = json.loads((folder / "config.json").read_text())
    if name is None:
        del config["quantization_config"]
    else:
        config["quantization_config"].update(settings)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()  # it is not read
    values = {"trainer": "sft", "model_name_or_path": str(folder), "dataset_name": str(tmp_path), **DENSE, **changes}
    source = tmp_path / "mine.yaml"
    source.write_text(yaml.safe_dump({**values, "output_dir": str(tmp_path / "run")}))
    for command in (lambda: check_model(load_recipe(source, [])), lambda: read_inputs(str(source), [])):
        with pytest.raises(RecipeError, match=message):
            command()
    if name is not None:  # as transformers loads it
        assert not read_inputs(str(source), ["--packed_base", "false"]).packed


def test_vllm_is_refused_before_loading(tmp_path):
    write_dense(tmp_path / "model", "fp8 blocks")
    values = {"model_name_or_path": str(tmp_path / "model"), "use_peft": True, "use_vllm": True, "packed_base": True}
    config = config_of_values(values, tmp_path)
    with pytest.raises(RecipeError, match="`use_vllm` is true: vLLM gets the adapters merged into the base, and those"):
        check_packed_base(values, config, tmp_path)
    check_packed_base({**values, "packed_base": "auto"}, config, tmp_path)


def test_a_plan_of_a_file_of_modelopt(tmp_path):
    write_beside(tmp_path / "model", "modelopt nvfp4")
    values = {"trainer": "sft", "model_name_or_path": str(tmp_path / "model"), "dataset_name": str(tmp_path), **DENSE}
    source = tmp_path / "mine.yaml"
    source.write_text(yaml.safe_dump({**values, "output_dir": str(tmp_path / "run")}))
    found, plain = (read_inputs(str(source), ["--packed_base", each]) for each in ("auto", "false"))
    assert found.packed
    assert found.run.parameters.layer.bytes < 0.5 * plain.run.parameters.layer.bytes


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
