"""`liger-trainer warm`: a recipe's kernels, compiled ahead of its run."""

import os
import tempfile

import pytest
import torch
from transformers import AutoConfig

from liger_trainer import functional as ops
from liger_trainer.cli import main
from liger_trainer.kernels import runtime
from liger_trainer.recipe.known_models import PUBLISHED
from liger_trainer.recipe.load import load_recipe
from liger_trainer.tools.cli import warm
from liger_trainer.tools.cli.warm import counted, take_a_step, warm_recipe
from tests.aot import compiled_for

ON_CPU = ["--use_cpu", "true", "--bf16", "false", "--dtype", "float32"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_is_refused_in_one_line(capsys, monkeypatch):
    def refusal() -> str:
        assert main(["warm", "quickstart"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    assert "there is none here (`liger-trainer doctor` says why)" in refusal()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"  # one process would else train on both
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    assert "TRITON_INTERPRET=1 interprets them; unset it" in refusal()
    monkeypatch.setattr(runtime, "HAS_TRITON", False)
    assert "triton is not installed here" in refusal()


def test_a_mistake_in_the_recipe_is_said_on_any_machine(capsys):
    assert main(["warm", "quickstart", "--cuda_graphs", "perhaps"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cuda_graphs" in line
    assert main(["warm", "nothing.yaml"]) == 2
    assert "nothing.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama3_8b_sft", 2),
        ("qwen3_8b_sft_lora", 2),
        ("gemma3_4b_dpo_qlora", 3),
        ("qwen3_5_9b_sft", 3),
        ("qwen3_30b_a3b_grpo_lora", 2),
    ],
)
def test_sizes_and_batch_are_the_recipes_and_layers_are_few(name, layers, tmp_path):
    options = [*ON_CPU, "--load_in_4bit", "false"]
    own, recipe = load_recipe(name, options), warm_recipe(name, options, tmp_path)
    theirs = AutoConfig.for_model(**PUBLISHED[own.model.model_name_or_path]).get_text_config()
    config = AutoConfig.for_model(**recipe.recipe.model_config).get_text_config()
    for size in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "num_experts"):
        assert getattr(config, size, None) == getattr(theirs, size, None)
    assert config.num_hidden_layers == layers
    assert {*getattr(config, "layer_types", ())} == {*getattr(theirs, "layer_types", ())}
    assert recipe.model.model_name_or_path is None
    assert recipe.get("max_length") == own.get("max_length")
    if "grpo" not in name:
        assert recipe.training.per_device_train_batch_size == own.training.per_device_train_batch_size
    assert recipe.model.use_peft == own.model.use_peft
    assert (recipe.training.max_steps, recipe.training.save_strategy) == (1, "no")


@pytest.mark.parametrize("trainer", ["quickstart", "quickstart_dpo"])
def test_a_step_has_rows_of_the_whole_length(trainer, tmp_path):
    options = [*ON_CPU, "--max_length", "96", "--per_device_train_batch_size", "2"]
    done = take_a_step(warm_recipe(trainer, options, tmp_path))
    assert done.state.global_step == 1
    ids = next(iter(done.get_train_dataloader()))["input_ids"]
    assert ids.shape == (2 if trainer == "quickstart" else 4, 96)


def test_it_says_how_many_and_where_and_leaves_nothing_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(warm, "_check_device", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache/of/triton")
    assert main(["warm", "quickstart", *ON_CPU, "--max_length", "32", "--per_device_train_batch_size", "2"]) == 0
    assert "0 kernels compiled, 0 found, in " in capsys.readouterr().out.splitlines()[-1]
    assert not [*tmp_path.glob("liger-trainer-warm-*")]


@pytest.mark.skipif(runtime.INTERPRETED, reason="Triton's interpreter compiles nothing")
def test_kernels_are_counted_as_compiled_and_then_as_found(tmp_path):
    def norm():
        ops.rms_norm(torch.ones(4, 64), torch.ones(64), 1e-6)

    for kind in ("compiled", "found"):
        with compiled_for("sm_90", tmp_path), counted() as count:  # another process, as far as Triton knows
            norm()
            norm()
            assert warm._cache() == str(tmp_path)
        assert count == {kind: 1}
