"""`liger-trainer warm`: a recipe's kernels, compiled ahead of its run."""

import json
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
from liger_trainer.recipe.schema import TRAINERS
from liger_trainer.tools.cli import warm
from liger_trainer.tools.cli.warm import counted, take_a_step, warm_recipe
from tests.aot import compiled_for
from tests.tools.cli.runs import TINY, write_recipe

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


def _recipe(folder, trainer, **values):
    more = {"reward_funcs": ["liger_trainer.rewards:accuracy"]} if TRAINERS[trainer].generates else {}
    model = {**TINY, "vocab_size": 600}
    written = {"trainer": trainer, "model_config": model, "dataset_name": "some/data", "kernel_report": False}
    return write_recipe(folder / "mine.yaml", {**written, **more, **values})


@pytest.mark.parametrize("trainer", [name for name, kind in TRAINERS.items() if not kind.generates])
def test_a_step_has_rows_of_the_whole_length(trainer, tmp_path):
    options = [*ON_CPU, "--max_length", "96", "--per_device_train_batch_size", "3"]
    done = take_a_step(warm_recipe(_recipe(tmp_path, trainer), options, tmp_path))
    assert done.state.global_step == 1
    batch = next(iter(done.get_train_dataloader()))
    shapes = {name: tuple(batch[name].shape) for name in batch if name.endswith("input_ids") and "prompt" not in name}
    assert {*shapes.values()} == {(6 if trainer in ("dpo", "reward") else 3, 96)}


@pytest.mark.parametrize("trainer", [name for name, kind in TRAINERS.items() if kind.generates])
def test_a_step_answers_a_whole_batch(trainer, tmp_path):
    recipe = _recipe(tmp_path, trainer, per_device_train_batch_size=3, num_generations=3)
    done = take_a_step(warm_recipe(recipe, ON_CPU, tmp_path))
    assert (done.state.global_step, done.args.per_device_train_batch_size) == (1, 3)


@pytest.mark.parametrize("trainer", ["sft", "reward"])
def test_rows_without_a_limit_have_a_length_too(trainer, tmp_path):
    options = [*ON_CPU, "--max_length", "null", "--per_device_train_batch_size", "2"]
    done = take_a_step(warm_recipe(_recipe(tmp_path, trainer), options, tmp_path))
    assert next(iter(done.get_train_dataloader()))["input_ids"].shape[1] == 1024


def test_keys_for_the_recipes_own_model_and_data_are_left_out(tmp_path):
    """On the command line as in the file."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    own = {
        "model_name_or_path": str(tmp_path / "model"),
        "columns": {"prompt": "question"},
        "prompt_template": "{question}!",
        "dataset_text_field": "words",
        "dataset_name": "some/data",
        "tokenizer_name_or_path": "some/tokenizer",
        "eos_token": "<|end|>",
        "report_to": "wandb",
        "push_to_hub": True,
    }
    options = [word for name, value in own.items() for word in (f"--{name}", _text(value))]
    recipe = write_recipe(tmp_path / "other.yaml", {"trainer": "sft", "model_name_or_path": "some/model"})
    found = [warm_recipe(recipe, [*ON_CPU, *options, "--max_length", "48"], tmp_path)]
    found.append(warm_recipe(_recipe(tmp_path, "sft", **own, model_config=None, max_length=48), ON_CPU, tmp_path))
    for each in found:
        assert (each.model.model_name_or_path, each.recipe.model_config["hidden_size"]) == (None, TINY["hidden_size"])
        assert (each.training.push_to_hub, each.training.report_to) == (False, [])
        assert each.training.max_length == 48
    assert take_a_step(found[0]).state.global_step == 1


def _text(value):
    return value if isinstance(value, str) else json.dumps(value)


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
