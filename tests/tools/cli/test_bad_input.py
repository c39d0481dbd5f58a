"""A mistake of the user ends in one message with exit code 2, and the files in the output folder stay."""

import os
import resource
import signal
from pathlib import Path

import pytest

from liger_trainer.recipe.file import RecipeError
from liger_trainer.tools.cli import main, run_recipe_file
from liger_trainer.trainers.checkpoints.whole import complete_checkpoints
from tests import forked
from tests.tools.cli.runs import TINY, message_of, refused, rows, state

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "test_split_size": 0.2}


def test_misspelt_key(recipe, capsys):
    assert "unknown key `max_stepz`" in refused(capsys, recipe(max_stepz=3))


def test_missing_recipe(capsys):
    assert "No recipe file 'nope.yaml'" in refused(capsys, "nope.yaml")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_files": None}, "says nothing about data"),
        ({"dataset_name": "pydoc_topics"}, "exactly one of"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "there is no data for it"),
        ({"model_config": None, "model_name_or_path": "./nope"}, "there is no folder './nope'"),
        ({"model_config": None, "model_name_or_path": "."}, "the folder '.' holds no config.json"),
        ({"model_name_or_path": "nobody/nothing"}, "not both"),
        ({"model_config": None}, "not neither"),
        ({"model_config": {"model_type": "lama"}}, "`model_config`"),
        (
            {"cuda_graphs": True, "model_config": None, "model_name_or_path": "./nope"},
            "`cuda_graphs` is true, but training is on cpu, which has no CUDA graphs. Set it to 'auto' or to false.",
        ),
        ({"tokenizer_vocab_size": None}, "names no tokenizer"),
        ({"tokenizer_vocab_size": 100}, "must be at least 261"),
        ({"model_config": {**TINY, "vocab_size": 128}}, "the model's embedding has 128 rows"),
        ({"max_length": 100_000}, "shorter than one block"),
        ({"output_dir": "data.jsonl"}, "'data.jsonl', which is a file"),
        ({"output_dir": "data.jsonl/run"}, "'data.jsonl/run' cannot be created"),
        ({"output_dir": "x" * 300}, "cannot be created: File name too long; give another one."),
        ({"output_dir": "a\0b"}, "cannot be created: embedded null byte; give another one."),
        ({"optim_args": "beta1"}, "`optim_args` is 'beta1'; it must be pairs such as 'beta1=0.9, beta2=0.95'."),
        ({"optim": "adam"}, "`optim` is 'adam'; it must be one of 'liger_adamw', 'adamw_torch', "),
        (
            {"optim": "liger_adamw", "optim_args": "states=4bit"},
            "`optim_args` is 'states=4bit': `states` is '4bit'; it",
        ),
        ({"optim": "schedule_free_adamw"}, "You need to install `schedulefree`"),
        ({"optim": "grokadamw"}, "Please install grokadamw"),
        (
            {"per_device_train_batch_size": 10**6, "dataloader_drop_last": True},
            "`per_device_train_batch_size` is 1000000, and `dataloader_drop_last` true.",
        ),
        ({"load_best_model_at_end": True, "save_strategy": "steps"}, "Save strategy: SaveStrategy.STEPS"),
        (
            {**EVALUATED, "save_strategy": "best", "metric_for_best_model": "nope"},
            "mine.yaml: The `metric_for_best_model` training argument is set to 'eval_nope', which is not",
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr"},
            "`lr_scheduler_type: cosine_with_min_lr` cannot be used with `lr_scheduler_kwargs` None: "
            "One of min_lr or min_lr_rate should be set",
        ),
        (
            {"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"min_lr": 0.5}},
            "`lr_scheduler_type: cosine` cannot be used with `lr_scheduler_kwargs` {'min_lr': 0.5}: "
            "get_cosine_schedule_with_warmup() got an unexpected keyword argument 'min_lr'.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_keys_and_values_that_are_refused(recipe, capsys, changes, words):
    assert words in refused(capsys, recipe(**changes))
    assert not Path("run/model.safetensors").exists()


def test_values_out_of_range(recipe, capsys):
    for key, value, allowed in (
        ("seed", -1, "from 0 to 4294967295"),
        ("data_seed", -1, "from 0 to 4294967295"),
        ("adam_epsilon", -1.0, "0 or more"),
        ("neftune_noise_alpha", -3.0, "0 or more"),
        ("dataloader_num_workers", -1, "0 or more"),
        ("adam_beta1", 2.0, "0 or more and below 1"),
        ("label_smoothing_factor", 2.0, "from 0 to 1"),
        ("max_length", 1, "2 or more"),
        *(("test_split_size", share, "a fraction of the data, 0 or more and below 1") for share in (1.0, -0.5, 5.0)),
    ):
        assert f"`{key}` is {value}; it must be {allowed}." in refused(capsys, recipe(**{key: value}))


def test_schedules_that_need_no_options(recipe):
    for kind in ("linear", "constant", "inverse_sqrt", "reduce_lr_on_plateau", "polynomial"):
        changes = {"lr_scheduler_type": kind, "max_steps": 1, "overwrite_output_dir": True}
        assert main(["train", recipe(**EVALUATED, **changes)]) == 0


def test_a_key_that_is_a_list(recipe, capsys):
    path = Path(recipe())
    path.write_text(f"{path.read_text()}? [a, b]\n: 3\n")
    assert ", column 3: while constructing a mapping, found unhashable key." in refused(capsys, str(path))


@pytest.mark.parametrize("spelling", [{"fsdp": True}, {"fsdp": "full_shard"}, {"fsdp": ["full_shard"]}])
def test_fsdp_as_transformers_spells_it(recipe, capsys, monkeypatch, spelling):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # transformers passes it to accelerate there
    words = "Using fsdp only works in distributed training."
    assert words in refused(capsys, recipe(**spelling))
    assert words in refused(capsys, recipe(), "--fsdp", "true")


def test_fsdp_switched_off(recipe):
    assert main(["train", recipe(fsdp=False)]) == 0


def test_strict_kernels_name_those_that_are_missing(recipe, capsys):
    asked = {"experts": True, "layer_norm": True}
    message = refused(capsys, recipe(strict_kernels=True, liger_kernel_config=asked))
    assert "experts: the model has nothing of the kind; layer_norm: the model has nothing of the kind. " in message
    assert message.endswith(
        "Switch them off in `liger_kernel_config`, or `strict` (in training arguments `strict_kernels`)."
    )


def test_logits_memory_without_a_unit(recipe, capsys):
    message = refused(capsys, recipe(logits_memory=1))
    assert "`logits_memory` is 1 bytes, but the logits of one token are 300 numbers of 2 bytes or more." in message
    assert main(["plan", recipe(logits_memory=1), "--gpus", "1"]) == 2
    assert "`logits_memory` is 1 bytes" in capsys.readouterr().err
    assert main(["train", recipe(logits_memory=2 * 300)]) == 0


def test_debug_shows_the_traceback(recipe):
    with pytest.raises(RecipeError, match="there is no file"):
        main(["train", recipe(data_files="other.jsonl"), "--debug"])


def test_files_of_the_user_in_the_output_folder_stay(recipe, capsys):
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    message = refused(capsys, recipe())
    assert "'run' is not empty" in message
    assert "--resume_from_checkpoint true" in message
    assert [path.name for path in Path("run").iterdir()] == ["notes.txt"]


def test_an_output_folder_that_cannot_be_written_to(recipe, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda *arguments: False)  # permissions do not bind the administrator
    assert "'run' cannot be written to" in refused(capsys, recipe())


def with_little_room(path):
    """Trains where a file may have 64 KiB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    return run_recipe_file(path, [])


def test_a_full_disk(recipe, tmp_path):
    done = forked.run(with_little_room, recipe(model_config={**TINY, "hidden_size": 64}), cwd=tmp_path)
    assert done.returncode == 2, done.stderr[-2000:]
    message = message_of(done.stderr)
    assert message.startswith("liger-trainer: Writing failed: ")
    assert "`output_dir`" in message


def test_overwriting_deletes_only_checkpoints(recipe):
    for name in ("checkpoint-7", "checkpoint-mine", "old"):
        Path("run", name).mkdir(parents=True)
        Path("run", name, "file").write_text("x")
    assert main(["train", recipe(overwrite_output_dir=True)]) == 0
    assert not Path("run/checkpoint-7").exists()
    assert Path("run/checkpoint-mine/file").is_file()
    assert Path("run/old/file").is_file()


def test_resuming_from_a_folder_that_is_not_a_checkpoint(recipe, capsys):
    assert "is not a checkpoint" in refused(capsys, recipe(), "--resume_from_checkpoint", "run/checkpoint-3")


def test_resuming_before_the_first_checkpoint_starts_at_the_beginning(recipe):
    Path("run").mkdir()
    Path("run/left.txt").write_text("from the killed run")
    assert main(["train", recipe(), "--resume_from_checkpoint", "true"]) == 0
    assert Path("run/model.safetensors").is_file()


def test_an_unfinished_checkpoint_is_passed_over(tmp_path):
    states = {"checkpoint-5": "{}", "checkpoint-10": None, "checkpoint-15": '{"cut', "checkpoint-x": "{}"}
    for name, text in states.items():
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "trainer_state.json").write_text(text)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-5"]


def test_several_gpus_in_one_process_are_refused(recipe, capsys, monkeypatch):
    from transformers import TrainingArguments

    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    assert "One process sees 2 GPUs" in refused(capsys, recipe())


def test_ctrl_c_says_how_to_continue(recipe, capsys, monkeypatch):
    def interrupted(self, *arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("liger_trainer.recipe.run.run_recipe", interrupted)
    assert main(["train", recipe()]) == 130
    assert "liger-trainer: interrupted, before the first checkpoint.\n" in capsys.readouterr().err
    monkeypatch.setattr("liger_trainer.trainers.checkpoints.whole.complete_checkpoints", lambda folder: [folder])
    assert main(["train", recipe()]) == 130
    assert "interrupted; the same command with `--resume_from_checkpoint true`" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["train", "quickstart"], ["inspect", "no_model"]])
def test_ctrl_c_while_libraries_load_is_one_line(command, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("liger_trainer.tools.cli.doctor.unmet_requirement", interrupted)
    assert main(command) == 130
    assert capsys.readouterr().err == "\nliger-trainer: interrupted.\n"


def test_the_last_evaluation_runs_once(recipe):
    assert main(["train", recipe(**EVALUATED)]) == 0
    assert [entry["step"] for entry in state("run")["log_history"] if "eval_loss" in entry] == [1, 2]
    assert "eval_loss" in Path("run/all_results.json").read_text()


@pytest.mark.parametrize("data_seed", [0, None])
def test_data_seed_draws_the_rows_for_the_evaluation(recipe, monkeypatch, data_seed):
    from datasets import Dataset

    seeds, split = [], Dataset.train_test_split
    monkeypatch.setattr(
        Dataset, "train_test_split", lambda *a, seed, **k: seeds.append(seed) or split(*a, seed=seed, **k)
    )
    assert main(["train", recipe(seed=3, data_seed=data_seed, max_steps=1, **EVALUATED)]) == 0
    assert seeds == [3 if data_seed is None else 0]


def test_no_warning_that_the_user_can_do_nothing_about(recipe, recwarn):
    assert main(["train", recipe(trainer="sft", data_files=rows(*[{"text": "one two " * 9}] * 8))]) == 0
    texts = [str(warning.message) for warning in recwarn]
    assert not [text for text in texts if "gradient_checkpointing" in text or "pin_memory" in text]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lr": 1e-4}, "unknown key `lr` for `trainer: causal_lm`; it is `learning_rate` here."),
        ({"base_model": "x"}, "unknown key `base_model` for `trainer: causal_lm`; it is `model_name_or_path` here."),
        ({"beta": 0.1}, "unknown key `beta` for `trainer: causal_lm`; `beta` is a key of `trainer: dpo`."),
        ({"pref_beta": 0.1}, "`beta` is a key of `trainer: dpo`."),
        ({"zzz": 1}, "unknown key `zzz` for `trainer: causal_lm`; `liger-trainer keys causal_lm` lists the keys."),
        (
            {"batch_size": 1, "max_stepz": 3, "zzz": 1},
            "unknown keys for `trainer: causal_lm`: `batch_size` (it is `per_device_train_batch_size` here), "
            "`max_stepz` (did you mean `max_steps`?), `zzz`.",
        ),
    ],
)
def test_unknown_keys_are_all_said_at_once_with_their_names_here(recipe, capsys, keys, words):
    assert words in refused(capsys, recipe(**keys))


def test_unknown_options_are_all_said_at_once(recipe, capsys):
    message = refused(capsys, recipe(), "--lr", "1", "--epochs", "2")
    assert "On the command line: unknown keys" in message
    assert "`lr` (it is `learning_rate` here), `epochs` (it is `num_train_epochs` here)" in message


def test_every_synonym_is_that_of_a_key():
    from liger_trainer.recipe.checks import SYNONYMS, _keys_of
    from liger_trainer.recipe.schema import TRAINERS

    keys = set().union(*map(_keys_of, TRAINERS))
    assert {*SYNONYMS.values()} <= keys
    assert not {*SYNONYMS} & keys


def test_a_list_of_files_as_json(recipe, tmp_path):
    (tmp_path / "more.jsonl").write_text('{"text": "and more of it"}\n')
    assert main(["train", recipe(), "--data_files", '["data.jsonl", "more.jsonl"]']) == 0


def test_a_file_as_the_name_of_a_dataset(recipe, capsys):
    message = refused(capsys, recipe(data_files=None, dataset_name="data.jsonl"))
    assert "`dataset_name` is 'data.jsonl', which is a file: name it in `data_files`." in message
