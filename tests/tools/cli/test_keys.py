"""`liger-trainer keys`, and the default of `output_dir`."""

import dataclasses
from pathlib import Path

import pytest

from liger_trainer.recipe.keys import keys_of
from liger_trainer.recipe.load import load_recipe
from liger_trainer.recipe.schema import TRAINERS, argument_classes
from liger_trainer.tools.cli import main
from tests.tools.cli.runs import message_of


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_key_of_a_recipe_is_listed_with_a_sentence(trainer, capsys):
    assert main(["keys", trainer]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    declared = [field.name for cls in argument_classes(trainer) for field in dataclasses.fields(cls) if field.init]
    assert sorted(listed) == sorted(declared)
    for key in (key for group in keys_of(trainer).values() for key in group):
        assert key.type
        assert key.default
        assert len(key.meaning) > 10, key
        assert ". " not in key.meaning.replace("e.g. ", "").replace("i.e. ", ""), key
    assert listed[0] == "trainer"  # ours first


@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ("sft", "sample_tokens int (48): New tokens for each of them."),
        ("dpo", "learning_rate float (1e-06): The initial learning rate for AdamW."),
        (
            "grpo",
            "non_finite stop|skip|off (stop): At a loss or gradient that is not finite: 'stop' with a checkpoint,",
        ),
        ("sft", "eval_strategy no|steps|epoch (no): When to run evaluation."),
        ("sft", "cuda_graphs auto|true|false (auto): Whether decoder layers run"),
        ("kto", "output_dir str (outputs/RECIPE): The output directory where"),
        ("sft", "bf16_full_eval bool (false): Use full BF16 precision"),
        ("causal_lm", "data_files list[str] (null): Local files to train on,"),
    ],
)
def test_a_line(trainer, line, capsys):
    main(["keys", trainer])
    assert any(" ".join(shown.split()).startswith(line) for shown in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_value_is_listed_once(trainer):
    for key in (key for group in keys_of(trainer).values() for key in group):
        values = key.type.lower().split("|")
        assert len(values) == len({*values}), key


def test_without_a_trainer_the_keys_are_those_of_sft(capsys):
    main(["keys"])
    without = capsys.readouterr().out
    main(["keys", "sft"])
    assert capsys.readouterr().out == without


def test_another_trainer(capsys):
    assert main(["keys", "ppo"]) == 2
    assert "TRAINER is 'ppo'; it must be one of sft, causal_lm," in message_of(capsys.readouterr().err)


def test_the_folder_of_a_run_is_named_after_its_recipe(recipe):
    path = recipe(output_dir=None)
    assert load_recipe(path).training.output_dir == str(Path("outputs/mine"))
    assert load_recipe(path, ["--output_dir", "here"]).training.output_dir == "here"
    assert load_recipe(recipe(output_dir="there")).training.output_dir == "there"
