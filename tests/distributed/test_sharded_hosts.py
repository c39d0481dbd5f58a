"""FSDP2 over several hosts with checkpoints in shards: another number of hosts goes on from what is left of a run.

A host dies in a save, and the run goes on with one host more or less. The global batch stays, so the losses are those
of one run. The first of them is trained from the very state that the checkpoint holds, whose parts no host has alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM, TrainerCallback

from liger_trainer.tools.cli import run_recipe_file
from liger_trainer.trainers.trainer import LigerTrainer
from tests.distributed.accelerate_launch import environment_of
from tests.distributed.accelerate_optim import bits
from tests.distributed.accelerate_worker import shard_on_cpu
from tests.distributed.host_runs import (
    RESUMED,
    TIMEOUT,
    assert_ended_with_a_line,
    assert_succeeded,
    done_on,
    hold_at,
    wait_for,
    written,
)
from tests.distributed.hosts import DISK, joined, run_on, why_not
from tests.forked import torchrun
from tests.tools.cli.runs import MODEL, checkpoints, logged, message_of

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no hosts can be made here: {why_not()}")

ROWS = 6
"""Of a step, over all hosts."""
KINDS = {"fp32": ("adamw_torch", torch.float32, 1e-5), "8bit": ("liger_adamw", torch.bfloat16, 5e-3)}
"""Optimizer, dtype of the weights, and how far, relatively, losses may be from those of another number of hosts."""


def recipe_of(folder: Path, kind: str, **values: Any) -> str:
    sizes = {**MODEL, "hidden_size": 256, "intermediate_size": 256}  # blocks of 256 have 8 bits
    return written(folder, model_config=sizes, optim=KINDS[kind][0], use_cpu=None, **values)


class Noted(TrainerCallback):
    """Writes the weights and the optimizer's state with which the training begins."""

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):  # type: ignore[no-untyped-def]
        found = {}
        for name, parameter in model.named_parameters():
            found[name] = bits(parameter)
            found |= {f"{name}, {key}": bits(value) for key, value in optimizer.optimizer.state[parameter].items()}
        if args.process_index == 0:
            torch.save(found, f"{args.output_dir}.pt")


def sharded(recipe: str, options: list[str], kind: str, held: bool = False) -> int:
    """A run under FSDP2, on as many processes as there are."""
    flags = ["--config_file", "configs/accelerate/fsdp2.yaml", "--mixed_precision", "no", "--num_processes", "2"]
    os.environ.update(environment_of([*flags, "--fsdp_state_dict_type", "SHARDED_STATE_DICT", "my.py"]))
    shard_on_cpu()
    if held:
        hold_at(recipe, "optimizer", step=4)
    init = LigerTrainer.__init__

    def noting(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        init(self, model.to(KINDS[kind][1]), *args, **kwargs)  # recipes train in bf16 on GPUs alone
        self.add_callback(Noted())

    LigerTrainer.__init__ = noting  # type: ignore[method-assign]
    world = int(os.environ["WORLD_SIZE"])
    return run_recipe_file(recipe, ["--per_device_train_batch_size", str(ROWS // world), *options])


@pytest.fixture(scope="module")
def alone(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two processes on one host."""
    folder = tmp_path_factory.mktemp("alone")
    assert_succeeded([torchrun(sharded, recipe_of(folder, kind), [], kind)])
    return folder / "run"


def stored(checkpoint: Path, scratch: Path) -> dict[str, torch.Tensor]:
    """The weights and the optimizer's state in a checkpoint, in the names of [`Noted`]."""
    found = {}
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp_to_torch_save(str(checkpoint / part), str(scratch / part))
    found |= torch.load(scratch / "pytorch_model_fsdp_0")["model"]
    for name, state in torch.load(scratch / "optimizer_0")["optimizer"]["state"].items():
        found |= {f"{name}, {key}": value for key, value in state.items()}
    return {name: bits(value) for name, value in found.items()}


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [("fp32", 3, 2), ("8bit", 2, 3), pytest.param("fp32", 2, 3, marks=pytest.mark.long)],
    scope="module",
)
def test_another_number_of_hosts_goes_on_from_shards(
    kind: str, first: int, then: int, alone: Path, tmp_path: Path
) -> None:
    recipe, run = recipe_of(tmp_path, kind), tmp_path / "run"
    with joined(first, tmp_path) as (hosts, _):
        programs = run_on(hosts, sharded, recipe, [], kind, True)
        wait_for(tmp_path / "here")
        hosts[1].die()
        (tmp_path / "go on").touch()
        for rank in {*range(first)} - {1}:
            assert_ended_with_a_line(programs[rank].done(4 * TIMEOUT), rank, "")
    assert checkpoints(run) == ["checkpoint-2"]
    with joined(then, tmp_path) as (hosts, _):
        assert_succeeded(done_on(hosts, recipe, RESUMED, kind, work=sharded))
    begun, saved = torch.load(f"{run}.pt"), stored(run / "checkpoint-2", tmp_path)
    assert begun.keys() == saved.keys()
    assert not [name for name, value in begun.items() if not torch.equal(value, saved[name])]
    assert any("exp_avg_codes" in name for name in saved) == (kind == "8bit")
    assert [*logged(run)] == [1, 2, 3, 4]
    assert logged(run) == pytest.approx(logged(alone), rel=KINDS[kind][2])
    assert len(list((run / "checkpoint-4").glob("*/*.distcp"))) == 2 * then


@pytest.mark.parametrize("kind", ["fp32"], scope="module")
def test_the_model_is_saved_whole_and_from_a_checkpoint_by_accelerate(kind: str, alone: Path, tmp_path: Path) -> None:
    """The run's last checkpoint is of its last step."""
    model = AutoModelForCausalLM.from_pretrained(alone)
    last = stored(alone / "checkpoint-4", tmp_path)
    assert all(torch.equal(bits(value), last[name]) for name, value in model.named_parameters())
    merge_fsdp_weights(str(alone / "checkpoint-4" / "pytorch_model_fsdp_0"), str(tmp_path / "merged"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == load_file(alone / "model.safetensors").keys()
    assert all(torch.equal(bits(value), last[name]) for name, value in merged.items())


def test_disks_of_their_own_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "fp32", output_dir=str(DISK / "run"))
    with joined(2, tmp_path) as (hosts, _):
        for result in done_on(hosts, recipe, [], "fp32", work=sharded):
            assert result.returncode == 2, result.stderr[-3000:]
            assert message_of(result.stderr).endswith("Give a folder that all hosts share.")
        for result in done_on(hosts, recipe, ["--save_on_each_node", "true"], "fp32", work=sharded):
            assert result.returncode == 2, result.stderr[-3000:]
            assert "`save_on_each_node` is true, but the hosts hold the model together" in message_of(result.stderr)
        assert not any(checkpoints(host.disk / "run") for host in hosts)
