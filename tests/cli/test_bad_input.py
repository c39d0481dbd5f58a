"""What the user got wrong is told in one message with exit code 2, and what is in the output folder stays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from liger_trainer.cli import main
from liger_trainer.recipe.file import RecipeError
from liger_trainer.trainers.checkpoints.whole import complete_checkpoints

ROOT = Path(__file__).parents[2]
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a small valid recipe with changes (None removes a key) and gives its path."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def write(**changes):
        values = {
            "trainer": "causal_lm",
            "model_config": TINY,
            "tokenizer_vocab_size": 300,
            "data_files": "data.jsonl",
            "max_length": 16,
            "max_steps": 2,
            "use_cpu": True,
            "output_dir": "run",
            "report_to": "none",
            "save_strategy": "no",
            "loss_curve": False,
            **changes,
        }
        Path("data.jsonl").write_text("".join(json.dumps({"text": f"row {i} " * 9}) + "\n" for i in range(40)))
        lines = (f"{key}: {json.dumps(value)}\n" for key, value in values.items() if value is not None)
        path = tmp_path / "mine.yaml"
        path.write_text("".join(lines))
        return str(path)

    return write


def refused(capsys, *arguments):
    assert main(["train", *arguments]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    last = message.rstrip().splitlines()[-1]
    assert last.startswith("liger-trainer: ")
    return last


def test_the_valid_recipe_trains(recipe):
    assert main(["train", recipe()]) == 0
    assert Path("run/model.safetensors").is_file()


def test_misspelt_key(recipe, capsys):
    assert "unknown key `max_stepz`" in refused(capsys, recipe(max_stepz=3))


def test_missing_recipe(capsys):
    assert "No recipe file 'nope.yaml'" in refused(capsys, "nope.yaml")


def test_missing_data_file(recipe, capsys):
    assert "there is no file 'other.jsonl'" in refused(capsys, recipe(data_files="other.jsonl"))


def test_unknown_kind_of_data_file(recipe, capsys):
    Path("data.xml").write_text("<a/>")
    assert "give files of one kind: .json, .jsonl" in refused(capsys, recipe(data_files="data.xml"))


def test_broken_data_file(recipe, capsys):
    Path("broken.jsonl").write_text('{"text": "a"\n{{{')
    assert "['broken.jsonl'] cannot be read" in refused(capsys, recipe(data_files="broken.jsonl"))


def test_empty_data_file(recipe, capsys):
    Path("empty.jsonl").touch()
    assert "`data_files`: 'empty.jsonl' is empty." in refused(capsys, recipe(data_files="empty.jsonl"))


def rows(*values):
    Path("rows.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    return "rows.jsonl"


def test_columns_that_hold_something_else(recipe, capsys):
    file = recipe(data_files=rows({"text": "a"}, {"text": None}))
    assert "The column `text` is null in 1 rows" in refused(capsys, file)
    file = recipe(data_files=rows({"text": 5}))
    assert "The column `text` holds int, such as '5' in row 0, not text." in refused(capsys, file)
    file = recipe(trainer="sft", data_files=rows({"messages": "hello"}))
    assert "The column `messages` holds str, such as 'hello' in row 0, not a list of turns" in refused(capsys, file)


def test_labels_beyond_the_vocabulary(recipe, capsys):
    assert main(["train", recipe(output_dir="first")]) == 0
    ids = rows(*[{"input_ids": [5, 6, 9000], "labels": [5, 6, 9000]}] * 8)
    file = recipe(trainer="sft", data_files=ids, tokenizer_name_or_path="first", tokenizer_vocab_size=None)
    assert "`labels` holds 9000, and the model's vocabulary has 300 entries" in refused(capsys, file)


def test_missing_column(recipe, capsys):
    message = refused(capsys, recipe(dataset_text_field="body"))
    assert "has the columns text" in message
    assert "`trainer: causal_lm` needs `body`" in message


def test_missing_column_for_sft(recipe, capsys):
    Path("rows.jsonl").write_text('{"question": "a"}\n')
    message = refused(capsys, recipe(trainer="sft", bf16=False, data_files="rows.jsonl"))
    assert "`messages` or `conversations` or `prompt` and `completion`" in message


def test_no_data_and_two_sources(recipe, capsys):
    assert "says nothing about data" in refused(capsys, recipe(data_files=None))
    assert "exactly one of" in refused(capsys, recipe(dataset_name="pydoc_topics"))


def test_dataset_that_is_not_there(recipe, capsys):
    message = refused(capsys, recipe(data_files=None, dataset_name="nobody/nothing"))
    assert "'nobody/nothing' cannot be loaded" in message


def test_nothing_to_evaluate_on(recipe, capsys):
    assert "there is no data for it" in refused(capsys, recipe(eval_strategy="steps", eval_steps=1))


def test_model_that_is_not_there(recipe, capsys):
    message = refused(capsys, recipe(model_config=None, model_name_or_path="nobody/nothing"))
    assert "'nobody/nothing' cannot be loaded" in message
    assert "HF_TOKEN" in message


def test_model_folder_that_is_not_there_or_holds_none(recipe, capsys):
    assert "there is no folder './nope'" in refused(capsys, recipe(model_config=None, model_name_or_path="./nope"))
    Path("folder").mkdir()
    message = refused(capsys, recipe(model_config=None, model_name_or_path="folder"))
    assert "the folder 'folder' holds no config.json" in message


def test_two_models_and_none(recipe, capsys):
    assert "not both" in refused(capsys, recipe(model_name_or_path="nobody/nothing"))
    assert "not neither" in refused(capsys, recipe(model_config=None))


def test_unknown_model_type(recipe, capsys):
    assert "`model_config`" in refused(capsys, recipe(model_config={"model_type": "lama"}))


def test_no_tokenizer(recipe, capsys):
    assert "names no tokenizer" in refused(capsys, recipe(tokenizer_vocab_size=None))


def test_vocabulary_too_small_for_bytes(recipe, capsys):
    assert "must be at least 261" in refused(capsys, recipe(tokenizer_vocab_size=100))


def test_more_tokens_than_the_model_has_rows(recipe, capsys):
    message = refused(capsys, recipe(model_config={**TINY, "vocab_size": 128}))
    assert "the model's embedding has 128 rows" in message


def test_text_shorter_than_a_block(recipe, capsys):
    assert "shorter than one block" in refused(capsys, recipe(max_length=100_000))


def test_debug_shows_the_traceback(recipe):
    with pytest.raises(RecipeError, match="there is no file"):
        main(["train", recipe(data_files="other.jsonl"), "--debug"])


def test_output_folder_of_the_user_is_not_touched(recipe, capsys):
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    message = refused(capsys, recipe())
    assert "'run' is not empty" in message
    assert "--resume_from_checkpoint true" in message
    assert [path.name for path in Path("run").iterdir()] == ["notes.txt"]


def test_output_folder_that_cannot_be_written(recipe, capsys, monkeypatch):
    assert "'data.jsonl', which is a file" in refused(capsys, recipe(output_dir="data.jsonl"))
    assert "'data.jsonl/run' cannot be created" in refused(capsys, recipe(output_dir="data.jsonl/run"))
    monkeypatch.setattr("os.access", lambda *arguments: False)  # permissions do not bind the administrator
    assert "'run' cannot be written to" in refused(capsys, recipe())


def test_a_full_disk(recipe, tmp_path):
    path = recipe(model_config={**TINY, "hidden_size": 64})  # more bytes than a file may have
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16)); from liger_trainer.cli import main; "
    command = [sys.executable, "-c", f"{limited}raise SystemExit(main({['train', path]!r}))"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 2, result.stderr[-2000:]
    last = result.stderr.rstrip().splitlines()[-1]
    assert last.startswith("liger-trainer: Writing failed: ")
    assert "`output_dir`" in last


def test_overwriting_deletes_only_checkpoints(recipe):
    for name in ("checkpoint-7", "checkpoint-mine", "old"):
        Path("run", name).mkdir(parents=True)
        Path("run", name, "file").write_text("x")
    assert main(["train", recipe(overwrite_output_dir=True)]) == 0
    assert not Path("run/checkpoint-7").exists()
    assert Path("run/checkpoint-mine/file").is_file()
    assert Path("run/old/file").is_file()


def test_resuming_from_what_is_no_checkpoint(recipe, capsys):
    assert "is not a checkpoint" in refused(capsys, recipe(), "--resume_from_checkpoint", "run/checkpoint-3")


def test_resuming_before_the_first_checkpoint_starts_at_the_beginning(recipe):
    Path("run").mkdir()
    Path("run/left.txt").write_text("from the killed run")
    assert main(["train", recipe(), "--resume_from_checkpoint", "true"]) == 0
    assert Path("run/model.safetensors").is_file()


def test_an_unfinished_checkpoint_is_passed_over(tmp_path):
    for name, state in (
        ("checkpoint-5", "{}"),
        ("checkpoint-10", None),
        ("checkpoint-15", '{"cut'),
        ("checkpoint-x", "{}"),
    ):
        (tmp_path / name).mkdir()
        if state is not None:
            (tmp_path / name / "trainer_state.json").write_text(state)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-5"]


def test_several_gpus_in_one_process_are_refused(recipe, capsys, monkeypatch):
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    assert "One process sees 2 GPUs" in refused(capsys, recipe())


def test_ctrl_c_says_how_to_go_on(recipe, capsys, monkeypatch):
    def interrupted(self, *arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("transformers.Trainer.train", interrupted)
    assert main(["train", recipe()]) == 130
    assert "interrupted; the same command with `--resume_from_checkpoint true`" in capsys.readouterr().err


def test_the_last_evaluation_is_not_made_twice(recipe):
    options = {"test_split_size": 0.2, "eval_strategy": "steps", "eval_steps": 1}
    assert main(["train", recipe(**options)]) == 0
    state = json.loads(Path("run/trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "eval_loss" in entry] == [1, 2]
    assert "eval_loss" in json.loads(Path("run/all_results.json").read_text())


def test_no_warning_that_the_user_can_do_nothing_about(recipe, recwarn):
    assert main(["train", recipe(trainer="sft", data_files=rows(*[{"text": "one two " * 9}] * 8))]) == 0
    texts = [str(warning.message) for warning in recwarn]
    assert not [text for text in texts if "gradient_checkpointing" in text or "pin_memory" in text]


def test_exit_code_of_the_process(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run(
        [sys.executable, "-m", "liger_trainer", "nope.yaml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("liger-trainer: No recipe file 'nope.yaml'")
