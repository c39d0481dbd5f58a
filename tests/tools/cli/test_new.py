"""`liger-trainer new` writes recipes that fit, and that every other command takes."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from liger_trainer.cli import main
from liger_trainer.recipe.file import read_recipe
from liger_trainer.recipe.model import published_config
from liger_trainer.tools.cli import new
from liger_trainer.tools.diagnosis.sample import read_case
from liger_trainer.tools.planning.inputs import build_on_meta
from tests.tools.cli.test_data import ALPACA, ORCA, SHAREGPT, write
from tests.tools.diagnosis.recipes import model_folder

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def written(name, *arguments):
    assert main(["new", name, *arguments]) == 0
    return read_recipe(Path(name))


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [
        ("Qwen/Qwen3-0.6B", "24GB", {"optim": "liger_adamw", "bf16": False}),
        ("Qwen/Qwen3-4B", "16GB", {"use_peft": True, "learning_rate": "2e-4", "lora_dropout": 0.0}),
        ("Qwen/Qwen3-8B", "16GB", {"load_in_4bit": True, "use_peft": True}),
    ],
)
def test_the_best_way_that_fits(model, size, expected, capsys):
    write("talks.jsonl", SHAREGPT)
    values = written("mine.yaml", "--model", model, "--data", "talks.jsonl", "--goal", "sft", "--gpu_memory", size)
    for key, value in expected.items():
        assert str(values[key]) == str(value) or float(values[key]) == float(value)
    assert values["assistant_only_loss"] is True
    assert "of which it takes" in capsys.readouterr().out
    assert main(["plan", "mine.yaml", "--gpus", "1", "--gpu_memory", size]) == 0


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", {"dtype": "float32", "optim": "adamw_torch_fused"}),
        ("Qwen/Qwen3-0.6B", {"dtype": "float16", "use_peft": True}),
        ("Qwen/Qwen3-8B", {"dtype": "float16", "use_peft": True, "load_in_4bit": True}),
    ],
)
def test_a_card_without_bf16(model, expected, monkeypatch):
    """Asked for, or found here; what is trained is fp32, as the gradient scaler needs it."""
    write("talks.jsonl", SHAREGPT)
    given = ["--model", model, "--data", "talks.jsonl", "--goal", "sft", "--gpu_memory"]
    size = "8GB" if "0.6B" in model else "16GB"
    asked = written("asked.yaml", *given, size, "--fp16")
    monkeypatch.setattr("liger_trainer.configs.flags.emulates_bf16", lambda: True)
    found = written("found.yaml", *given, size)
    for values in (asked, found):
        assert {key: values[key] for key in expected} == expected
        assert (values["fp16"], values["bf16"], values["attn_implementation"]) == (True, False, "sdpa")
        assert "packing" not in values
    assert main(["plan", "asked.yaml", "--gpus", "1", "--gpu_memory", size]) == 0
    assert main(["doctor", "asked.yaml"]) == 0


@pytest.mark.parametrize("fp16", [False, True])
def test_a_checkpoint_in_few_bits_is_not_quantised_again(fp16):
    for model, expected in (("Qwen/Qwen3-8B-FP8", ["full", "LoRA"]), ("Qwen/Qwen3-8B", ["full", "LoRA", "QLoRA"])):
        assert [*new._methods({"model_name_or_path": model, "trainer": "sft"}, fp16)] == expected


@pytest.mark.parametrize(("goal", "row"), [("sft", ALPACA), ("dpo", ORCA), ("kto", {**SHAREGPT, "label": True})])
def test_what_is_written_trains(goal, row):
    write("data.jsonl", row)
    given = ["--model", "Qwen/Qwen3-0.6B", "--data", "data.jsonl", "--goal", goal, "--gpu_memory", "24GB"]
    values = written("mine.yaml", *given)
    assert "assistant_only_loss" not in values
    assert main(["train", "mine.yaml", "--smoke", "--output_dir", "run"]) == 0


def test_prompts_and_rewards(capsys):
    given = ["--model", "Qwen/Qwen3-0.6B", "--data", "openai/gsm8k", "--goal", "grpo", "--gpu_memory", "24GB"]
    values = written("mine.yaml", *given)
    assert values["dataset_name"] == "openai/gsm8k"
    assert values["reward_funcs"] == ["liger_trainer.rewards:accuracy"]
    step = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    assert step % values["num_generations"] == 0
    assert main(["train", "mine.yaml", "--smoke", "--output_dir", "run"]) == 0


@pytest.mark.parametrize(
    ("goal", "data", "expected"),
    [
        ("grpo", "openai/gsm8k", {"dataset_config": "main", "columns": {"prompt": "question", "solution": "answer"}}),
        ("sft", "openai/gsm8k", {"dataset_config": "main", "columns": {"prompt": "question", "completion": "answer"}}),
        ("grpo", "someone/sums", {}),
        ("sft", "someone/talks", {"assistant_only_loss": True}),
    ],
)
def test_data_on_the_hub_that_a_shipped_recipe_reads(goal, data, expected):
    given = ["--model", "Qwen/Qwen3-0.6B", "--data", data, "--goal", goal, "--gpu_memory", "24GB"]
    values = written("mine.yaml", *given)
    keys = ("dataset_config", "columns", "assistant_only_loss")
    assert {key: values[key] for key in keys if key in values} == expected
    assert ("system_prompt" in values) is (goal == "grpo" and bool(expected))


def test_the_column_of_right_answers(capsys):
    given = ["--model", "Qwen/Qwen3-0.6B", "--data", "data.jsonl", "--goal", "grpo", "--gpu_memory", "24GB"]
    for name, columns in (("answer", None), ("response", {"solution": "response"})):
        write("data.jsonl", {"question": "1+1", name: "2"})
        assert written(f"{name}.yaml", *given).get("columns") == columns
    write("data.jsonl", {"question": "1+1"})
    assert main(["new", "mine.yaml", *given]) == 2
    assert "`--data` has the columns question, prompt; `--goal grpo` rewards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("goal", "key", "expected"),
    [("sft", "max_length", 512), ("grpo", "max_completion_length", 256)],
)
def test_no_row_is_longer_than_the_positions_of_the_model(goal, key, expected):
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512,
    ).save_pretrained("model")  # fmt: skip
    given = ["--model", "model", "--data", "openai/gsm8k", "--goal", goal, "--gpu_memory", "24GB"]
    assert written("mine.yaml", *given)[key] == expected


@pytest.mark.parametrize(
    ("model", "size", "packed"),
    [
        ("Qwen/Qwen3.5-9B", "24GB", True),
        ("openai/gpt-oss-20b", "80GB", False),
        ("google/gemma-4-E2B-it", "16GB", True),
        ("Qwen/Qwen3-VL-4B-Instruct", "16GB", True),
    ],
)
def test_newer_models(model, size, packed):
    """Rows are packed where they do not see each other, and adapters are those of the language model."""
    write("talks.jsonl", SHAREGPT)
    given = ["--model", model, "--data", "talks.jsonl", "--goal", "sft", "--gpu_memory", size]
    values = written("mine.yaml", *given)
    assert values.get("packing", False) is packed
    adapted = build_on_meta(read_case("mine.yaml").values, published_config(model))[0]
    names = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert names
    assert not any("visual" in name or "tower" in name for name in names)
    assert main(["train", "mine.yaml", "--smoke", "--output_dir", "run"]) == 0


def test_a_model_without_a_chat_template(caplog):
    model_folder("model", chat_template=None)
    given = ["--model", "model", "--data", write("a.jsonl", ALPACA), "--goal", "sft", "--gpu_memory", "24GB"]
    written("mine.yaml", *given)
    assert "as plain text in Alpaca's words: there is no chat template" in caplog.text
    assert "as a conversation" not in caplog.text


def test_data_with_images():
    picture = {"prompt": [{"role": "user", "content": "What is it?"}], "images": ["cat.png"]}
    Path("cat.png").touch()
    write("seen.jsonl", {**picture, "completion": [{"role": "assistant", "content": "A cat."}]})
    given = ["--data", "seen.jsonl", "--goal", "sft", "--gpu_memory", "24GB"]
    values = written("mine.yaml", "--model", "Qwen/Qwen3-VL-4B-Instruct", *given)
    assert "packing" not in values
    assert main(["new", "other.yaml", "--model", "Qwen/Qwen3-4B", *given]) == 2
    assert not Path("other.yaml").exists()


def test_what_is_missing_is_asked_at_a_terminal(monkeypatch):
    answers = iter(["", "", "sft", "24GB"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    values = written("mine.yaml")
    assert (values["model_name_or_path"], values["dataset_name"]) == ("Qwen/Qwen3-0.6B", "trl-lib/Capybara")


def test_every_comment_is_on_a_key():
    from liger_trainer.recipe.checks import _keys_of

    assert {*new._COMMENTS} <= set().union(*map(_keys_of, new.GOALS))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["there.yaml"], "FILE is 'there.yaml', which is there already"),
        (["mine.txt"], "its name must end in .yaml"),
        (["mine.yaml"], "`--model` is missing, and there is no terminal to ask at"),
        (
            ["mine.yaml", "--model", "Qwen/Qwen3-8B", "--data", "x/y", "--goal", "sft", "--gpu_memory", "4GB"],
            "`--gpu_memory` is 4 GiB, and the least that fits takes",
        ),
        (
            ["mine.yaml", "--model", "Qwen/Qwen3-8B", "--data", "alpaca.jsonl", "--goal", "dpo", "--gpu_memory", "4GB"],
            "`trainer: dpo` needs `chosen` and `rejected`",
        ),
        (
            ["mine.yaml", "--model", "m", "--data", "typo.jsonl", "--goal", "dpo", "--gpu_memory", "4GB"],
            "`--data` is typo.jsonl, which is not here",
        ),
        (
            ["mine.yaml", "--model", "m", "--data", "alpaca.jsonl", "--goal", "sft", "--gpu_memory", "24"],
            "`--gpu_memory`: ",
        ),
        (
            ["mine.yaml", "--model", "Qwen/Qwen3-8B", "--data", "x/y", "z", "--goal", "sft", "--gpu_memory", "4GB"],
            "which is not here; give files",
        ),
    ],
)
def test_mistakes(arguments, words, capsys):
    write("alpaca.jsonl", ALPACA)
    Path("there.yaml").write_text(json.dumps({"trainer": "sft"}))
    assert main(["new", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert Path("there.yaml").read_text() == json.dumps({"trainer": "sft"})
    assert not Path("mine.yaml").exists()
