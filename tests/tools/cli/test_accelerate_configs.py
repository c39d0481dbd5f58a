"""The launch files load in accelerate, and `liger-trainer train` makes the right launch command of them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from liger_trainer.recipe.build import check_launch
from liger_trainer.recipe.file import RecipeError, shipped_configs
from liger_trainer.tools.cli import main, train

NAMES = ("single_gpu", "ddp", "fsdp1", "fsdp2", "zero2", "zero3")
TYPES = {"single_gpu": "NO", "ddp": "MULTI_GPU", "fsdp1": "FSDP", "fsdp2": "FSDP"}


def test_all_are_shipped():
    assert sorted(shipped_configs()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_accepts_it(name):
    config = load_config_from_file(str(shipped_configs()[name]))
    assert config.distributed_type == TYPES.get(name, "DEEPSPEED")
    assert config.mixed_precision == "bf16"
    assert config.num_processes == (1 if name == "single_gpu" else 8)
    if name.startswith("fsdp"):
        assert config.fsdp_config["fsdp_version"] == int(name[-1])
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[-1])


@pytest.fixture
def gpus(monkeypatch):
    def see(count):
        monkeypatch.setattr(train, "count_gpus", lambda: count)

    monkeypatch.delenv("RANK", raising=False)
    return see


RECIPE = Path("a.yaml")


@pytest.mark.parametrize("count", [0, 1])
def test_one_device_runs_in_place(gpus, count):
    gpus(count)
    assert train.launch_command(RECIPE, [], None, None) is None


def test_several_gpus_become_one_process_each(gpus):
    gpus(4)
    command = train.launch_command(RECIPE, ["--max_steps", "3"], None, None)
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert command[command.index("--config_file") + 1].endswith("ddp.yaml")
    assert command[command.index("--num_processes") + 1] == "4"
    assert command[-5:] == ["-m", "liger_trainer", "a.yaml", "--max_steps", "3"]


@pytest.mark.parametrize("arguments", [(None, 1), ("single_gpu", None)])
def test_one_process_of_many_gpus_sees_one(gpus, arguments):
    gpus(4)
    command = train.launch_command(RECIPE, [], *arguments)
    assert command[command.index("--config_file") + 1].endswith("single_gpu.yaml")
    assert command[command.index("--gpu_ids") + 1] == "0"


def test_named_config_and_number_of_processes(gpus):
    gpus(4)
    command = train.launch_command(RECIPE, [], "fsdp2", 2)
    assert command[command.index("--config_file") + 1].endswith("fsdp2.yaml")
    assert command[command.index("--num_processes") + 1] == "2"


def test_a_config_of_the_user_keeps_its_own_number(gpus, tmp_path):
    gpus(4)
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: MULTI_GPU\n")
    command = train.launch_command(RECIPE, [], str(own), None)
    assert "--num_processes" not in command


def test_unknown_config_names_the_shipped_ones(gpus):
    gpus(1)
    with pytest.raises(RecipeError, match=r"'fsdp3'.*ddp, fsdp1, fsdp2"):
        train.launch_command(RECIPE, [], "fsdp3", None)


@pytest.mark.parametrize(
    ("count", "options", "expected"), [(2, [], "zero3"), (2, ["--accelerate_config", "ddp"], "ddp"), (0, [], None)]
)
def test_the_configuration_that_a_recipe_names(gpus, monkeypatch, tmp_path, count, options, expected):
    gpus(count)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("trainer: causal_lm\naccelerate_config: zero3\nmodel_config: {model_type: llama}\n")
    launched, run = [], []
    monkeypatch.setattr("os.execv", lambda _, command: launched.append(command) or 0)
    monkeypatch.setattr("liger_trainer.tools.cli.train.run_recipe_file", lambda *given: run.append(given) or 0)
    assert main(["train", str(recipe), *options]) == 0
    assert [Path(command[command.index("--config_file") + 1]).stem for command in launched] == [expected] * (count > 0)
    assert len(run) == (count == 0)


@pytest.mark.parametrize(
    ("name", "is_split", "warns"), [("fsdp2", False, True), ("fsdp2", True, False), ("ddp", False, False)]
)
def test_a_recipe_for_a_split_model_warns_where_it_is_not(caplog, name, is_split, warns):
    recipe = SimpleNamespace(recipe=SimpleNamespace(accelerate_config=name), source="mine.yaml")
    check_launch(recipe, SimpleNamespace(is_fsdp_enabled=is_split, is_deepspeed_enabled=False))
    assert ("mine.yaml is written for `accelerate_config: fsdp2`" in caplog.text) == warns


def test_a_smoke_run_refuses_an_unknown_configuration_too(gpus, tmp_path, capsys):
    gpus(0)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("trainer: causal_lm\naccelerate_config: zero4\nmodel_config: {model_type: llama}\n")
    assert main(["train", str(recipe), "--smoke"]) == 2
    assert "'zero4', which is not a file; shipped are ddp" in capsys.readouterr().err
