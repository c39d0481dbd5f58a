"""What `accelerate launch` runs on every process to train with `LigerAdamW`, to save and to resume.

    accelerate launch ... -m tests.distributed.accelerate_optim FOLDER save|resume CASE...

`save` trains without an interruption, which writes `CASE`, and from the checkpoint in the middle; `resume` does that
alone. With W processes a resumed training writes `CASE.W`. All processes have the same rows, so their number changes
no bit of a gradient.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from liger_trainer import LigerTrainer, LigerTrainingArguments
from liger_trainer.optim import LigerAdamW
from tests.distributed.accelerate_worker import ARGUMENTS, Found, save_and_resume
from tests.trainers.tiny import llama, token_rows

STEPS, MIDDLE = 4, 2
CASES = {
    "whole": ("FULL_STATE_DICT", "no"),
    "in shards": ("SHARDED_STATE_DICT", "no"),
    "fp32": ("SHARDED_STATE_DICT", "bf16"),
}
"""Case → how FSDP writes it, and the mixed precision, for which accelerate makes the weights fp32."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of the gathered tensor."""
    tensor = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return tensor.contiguous().view(torch.uint8).clone() if tensor.ndim else tensor.clone()


def _train(name: str, folder: Path, resumes: bool) -> Found:
    os.environ["FSDP_STATE_DICT_TYPE"], os.environ["ACCELERATE_MIXED_PRECISION"] = CASES[name]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    output = folder / name
    optim = {"optim": "liger_adamw", "learning_rate": 1e-4}
    args = LigerTrainingArguments(
        **ARGUMENTS | optim | {"max_steps": STEPS, "save_strategy": "steps", "save_steps": MIDDLE},
        output_dir=str(output / f"resumed by {world}" if resumes else output),
        per_device_train_batch_size=1,
        kernel_report=False,
    )
    model = llama(hidden_size=256, intermediate_size=256, num_hidden_layers=2).bfloat16()
    rows = [row for row in token_rows(8) for _ in range(world)]
    trainer = LigerTrainer(model, args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{MIDDLE}") if resumes else None)
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is LigerAdamW
    found = {}
    for path, parameter in trainer.model.named_parameters():
        found |= {f"{path}, {key}": bits(value) for key, value in optimizer.state[parameter].items()}
        found[path] = bits(parameter)
    losses = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    kinds = {f"{type(each).__name__} {each.dtype}" for each in trainer.model.parameters()}
    return {"loss": [losses[step] for step in range(1, STEPS + 1)], "kinds": sorted(kinds)}, found


def main(*arguments: str) -> None:
    """Trains cases."""
    save_and_resume(_train, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
