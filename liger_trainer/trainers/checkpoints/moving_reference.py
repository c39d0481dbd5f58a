"""The reference model that `sync_ref_model` moves, in a checkpoint; TRL's own holds none.

One that several processes hold in parts (FSDP, DeepSpeed, tensor parallelism) is left out, which is said when a run
resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from liger_trainer.kernels.runtime import is_dtensor

REFERENCE_FILE = "reference.pt"
"""Its state dictionary, in a checkpoint."""


def reference_moves(trainer: Any) -> bool:
    """Whether the reference of `trainer` becomes another one during the training."""
    return bool(getattr(trainer.args, "sync_ref_model", False))


def save_reference(trainer: Any, folder: Path) -> None:
    """Writes the weights of a reference that moves into a checkpoint, next to those of the policy."""
    model = _whole_reference(trainer)
    if model is not None and trainer.args.should_save:
        torch.save(model.state_dict(), folder / REFERENCE_FILE)


def load_reference(trainer: Any, checkpoint: Path) -> None:
    """Gives a reference that moves the weights that it had when the checkpoint was saved, if that holds them."""
    model, file = _whole_reference(trainer), checkpoint / REFERENCE_FILE
    if model is not None and file.is_file():
        model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))


def _whole_reference(trainer: Any) -> Any:
    """The model, if each process has all of it and it moves; else None."""
    if not reference_moves(trainer) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return None
    model = trainer.accelerator.unwrap_model(trainer.ref_model)
    return None if any(map(is_dtensor, model.parameters())) else model
