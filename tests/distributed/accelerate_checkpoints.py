"""What `accelerate launch` runs on every process to save and to resume.

    accelerate launch ... -m tests.distributed.accelerate_checkpoints FOLDER save|resume CASE...

`save` trains with the stock trainer and with ours, which keep checkpoints on the way and the model at the end, and
resumes ours from the middle, in some cases the stock one's too. `resume` resumes ours alone, with whatever number of
processes there is now: W of them write `CASE.KIND.W.json`, an uninterrupted training `CASE.KIND.json`. Every training
has a folder of its own, `CASE/KIND` or `CASE/KIND.W`.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.distributed.accelerate_cases import Case
from tests.distributed.accelerate_worker import Found, build_trainer, prepare_process, reported, weights_of

STEPS, MIDDLE = 4, 2
IN_SHARDS = "full, in shards"
SAVED: dict[str, tuple[str, str]] = {
    "full": ("full", "FULL_STATE_DICT"),
    "lora with head": ("lora with head", "FULL_STATE_DICT"),
    IN_SHARDS: ("full", "SHARDED_STATE_DICT"),
}
"""Case → what trains, and how FSDP writes it."""
STOCK_RESUMES = ("lora with head", IN_SHARDS)
"""Where a sharded mode may lose a part, with the stock trainer too."""
ARGUMENTS: dict[str, Any] = {
    # With a large epsilon a step is a smooth function of the gradient, and rounding stays small.
    "max_steps": STEPS, "save_strategy": "steps", "save_steps": MIDDLE, "optim": "adamw_torch", "adam_epsilon": 1e-2,
    "lr_scheduler_type": "linear",
}  # fmt: skip


def _trainer(name: str, ours: bool, folder: Path, output: str) -> Any:
    parameters, os.environ["FSDP_STATE_DICT_TYPE"] = SAVED[name]
    case = Case("sft", parameters) if ours else Case("trainer", parameters)
    return build_trainer(case, ours, folder, output_dir=str(folder / name / output), **ARGUMENTS)


def _train(name: str, kind: str, folder: Path, world: str | None = None) -> Found:
    """One training; with `world`, of that many processes, one that goes on from the checkpoint in the middle."""
    trainer = _trainer(name, kind == "ours", folder, kind if world is None else f"{kind}.{world}")
    checkpoint = folder / name / kind / f"checkpoint-{MIDDLE}"
    trainer.train(resume_from_checkpoint=None if world is None else str(checkpoint))
    if world is None:
        trainer.save_model(f"{trainer.args.output_dir}/final")
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return {"loss": [losses[step] for step in range(1, STEPS + 1)]}, weights_of(trainer)


def main(folder: str, what: str, *names: str) -> None:
    """Saves or resumes the cases `names`."""
    prepare_process()
    world = os.environ.get("WORLD_SIZE", "1")
    for name in names:
        for kind in ("stock", "ours"):
            path, train = Path(folder, f"{name}.{kind}"), functools.partial(_train, name, kind, Path(folder))
            if what == "save":
                reported(path, train)
            if kind == "ours" or (name in STOCK_RESUMES and what == "save"):
                reported(Path(f"{path}.{world}"), functools.partial(train, world))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
