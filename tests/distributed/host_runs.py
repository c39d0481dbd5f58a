"""Recipes that are run on several hosts, held where something is to happen to them, and what is left of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer

from liger_trainer.tools.cli import run_recipe_file
from liger_trainer.trainers.trainer import LigerTrainer
from tests.distributed.hosts import Host, run_on
from tests.forked import Done
from tests.tools.cli.runs import EIGHT_STEPS, message_of, write_recipe

TIMEOUT = 30
"""Seconds of ``ddp_timeout``."""
STEPS = {**EIGHT_STEPS, "max_steps": 4, "disable_tqdm": True, "ddp_timeout": TIMEOUT}
RESUMED = ["--resume_from_checkpoint", "true"]

_PLACES = {
    "step": (LigerTrainer, "training_step"),
    "optimizer": (Trainer, "_save_optimizer_and_scheduler"),
    "save": (Trainer, "_save_rng_state"),
}


def written(folder: Path, **values: Any) -> str:
    """The recipe of a run in `folder`, which all hosts see unless `values` name another."""
    return write_recipe(folder / "my.yaml", {**STEPS, "output_dir": str(folder / "run"), **values})


def done_on(hosts: Sequence[Host], *arguments: Any, work: Callable[..., int | None] = run_recipe_file) -> list[Done]:
    """What each host's process has done."""
    return [program.done(TIMEOUT + 120) for program in run_on(hosts, work, *arguments)]


def hold_at(recipe: str, place: str, step: int) -> None:
    """Lets the second process stay at a place of `_PLACES` until the file `go on` is beside the recipe."""
    owner, name = _PLACES[place]
    original = getattr(owner, name)

    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.process_index == 1 and self.state.global_step == step:
            Path(recipe).with_name("here").touch()
            while not Path(recipe).with_name("go on").exists():
                time.sleep(0.01)
        return original(self, *args, **kwargs)

    setattr(owner, name, held)


def held_at(recipe: str, options: list[str], place: str, step: int) -> int:
    """A run that [`hold_at`] holds."""
    hold_at(recipe, place, step)
    return run_recipe_file(recipe, options)


def wait_for(file: Path, limit: float = 120.0) -> None:
    """Waits until `file` is there."""
    until = time.monotonic() + limit
    while not file.exists():
        assert time.monotonic() < until, f"{file} did not come"
        time.sleep(0.01)


def assert_succeeded(results: Sequence[Done]) -> None:
    for result in results:
        assert result.returncode == 0, result.stderr[-3000:]


def assert_ended_with_a_line(result: Done, rank: int, what: str) -> None:
    assert result.returncode == 1, result.stderr[-3000:]
    last = message_of(result.stderr)
    assert last.startswith(f"liger-trainer: rank {rank} on host{rank}: another process has ended, or no longer answers")
    assert what in last
    assert last.endswith("The same command with `--resume_from_checkpoint true` continues from the last checkpoint.")
