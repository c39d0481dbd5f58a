"""What `accelerate launch` runs on every process to train adapters on a packed checkpoint, to save and to resume.

    accelerate launch ... -m tests.distributed.accelerate_packed FOLDER save|resume CASE...

`save` trains without an interruption, which writes `CASE`, and from the checkpoint in the middle; `resume` does that
alone. With W processes a resumed training writes `CASE.W`. The checkpoints lie in FOLDER's neighbour `models`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig

from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.packed.loading import is_packed
from tests.distributed.accelerate_cases import BATCH, Case, collate, rows_of
from tests.distributed.accelerate_worker import ARGUMENTS, Found, save_and_resume, weights_of

MIDDLE = 2
CASES = {
    "fp8 blocks": ("fp8 blocks", "FULL_STATE_DICT", "no"),
    "nvfp4 in shards": ("nvfp4", "SHARDED_STATE_DICT", "no"),
    "experts": ("experts", "FULL_STATE_DICT", "no"),
    "experts in bf16": ("experts", "SHARDED_STATE_DICT", "bf16"),
}
"""Case → the checkpoint, how FSDP writes what is saved, and the mixed precision."""
ADAPTERS = {
    "linear layers": {"target_modules": "all-linear"},
    "experts": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


def _train(name: str, folder: Path, resumes: bool) -> Found:
    model, os.environ["FSDP_STATE_DICT_TYPE"], os.environ["ACCELERATE_MIXED_PRECISION"] = CASES[name]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    output = folder / name
    optim = {"optim": "adamw_torch", "adam_epsilon": 1e-2, "lr_scheduler_type": "linear"}
    args = LigerSFTConfig(
        **ARGUMENTS | optim | {"save_strategy": "steps", "save_steps": MIDDLE},
        output_dir=str(output / f"resumed by {world}" if resumes else output),
        per_device_train_batch_size=BATCH // world,
        dataset_kwargs={"skip_prepare_dataset": True},
        model_init_kwargs={"dtype": "float32", "device_map": None},
        router_aux_loss_coef=0.0,  # which is of the experts that a process's own tokens take
        kernel_report=False,
    )
    torch.manual_seed(7)
    adapters = ADAPTERS["experts" if model == "experts" else "linear layers"]
    rows = [{key: value.tolist() for key, value in row.items()} for row in rows_of(Case("sft"), alone=True)]
    trainer = LigerSFTTrainer(
        str(folder.parent / "models" / model),
        args,
        train_dataset=Dataset.from_list(rows),
        data_collator=collate,
        peft_config=LoraConfig(r=4, init_lora_weights=False, lora_dropout=0.0, **adapters),
    )
    assert is_packed(trainer.model)  # `packed_base` is "auto"
    trainer.train(resume_from_checkpoint=str(output / f"checkpoint-{MIDDLE}") if resumes else None)
    if not resumes:
        trainer.save_model(str(output / "final"))
    found = {name: [log[name] for log in trainer.state.log_history if name in log] for name in ("loss", "grad_norm")}
    codes = {name: each for name, each in trainer.model.named_parameters() if name.endswith("codes")}
    assert codes
    found["kinds"] = sorted({f"{type(each).__name__} {each.dtype}" for each in codes.values()})
    found["share"] = sum(_own(each).numel() for each in codes.values()) / sum(each.numel() for each in codes.values())
    return found, weights_of(trainer)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main(*arguments: str) -> None:
    """Trains cases."""
    save_and_resume(_train, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
