"""Checkpoints whose tensors differ from the model's: those of converted models, and of models that are split.

transformers saves a mixture of experts as it was published, expert by expert, while the module has the weights of all
experts in one tensor. The Trainer resumes by name: experts, whose names in the checkpoint the model does not have,
would keep the weights that training began with. So where names differ, the weights are loaded as `from_pretrained`
loads them.

A model that `from_pretrained` has split (`DistributedConfig`) is saved whole, and each process loads its own part. All
processes write the state of its optimizer in parts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from liger_trainer.compat.accelerate import WRAPPED_OPTIMIZER
from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import CONVERTED_CHECKPOINTS, SPLIT_OPTIMIZER

require(CONVERTED_CHECKPOINTS)
require(WRAPPED_OPTIMIZER)

OPTIMIZER_FOLDER = "optimizer"
"""The folder, in a checkpoint of a split model, of the optimizer's state (format of `torch.distributed.checkpoint`)."""


class ConvertedCheckpointsMixin(Trainer):
    """Comes before a Trainer: resumes from checkpoints whose names are not the model's, and with a split model."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._reads_as_pretrained(resume_from_checkpoint):
            load_as_pretrained(self.model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        folder = self.state.best_model_checkpoint
        assert folder is not None
        if self._reads_as_pretrained(folder):
            load_as_pretrained(self.model, folder)
        else:
            super()._load_best_model()

    def _reads_as_pretrained(self, folder: str) -> bool:
        model = self.model
        if not isinstance(model, PreTrainedModel) or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return False
        return self.is_distributed_loading_by_transformers or not saved_names(folder) <= model.state_dict().keys()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_optimizer_distributed, _ = require(SPLIT_OPTIMIZER)
        with _with_filled_groups(self.optimizer) as optimizer:
            save_optimizer_distributed(self.model, optimizer, os.path.join(output_dir, OPTIMIZER_FOLDER))
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_distributed_loading_by_transformers:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        _, load_optimizer_distributed = require(SPLIT_OPTIMIZER)
        folder = os.path.join(checkpoint, OPTIMIZER_FOLDER)
        if os.path.isdir(folder):  # otherwise it was saved with `save_only_model`
            with _with_filled_groups(self.optimizer) as optimizer:
                load_optimizer_distributed(self.model, optimizer, folder)
            assert self.lr_scheduler is not None
            self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))


@contextlib.contextmanager
def split_models_resume(args: Any, model: Any) -> Iterator[None]:
    """Around the construction of a Trainer, which would refuse to save the optimizer of a split model.

    The model may be the name from which it is loaded with `args.model_init_kwargs`.
    """
    split = getattr(model, "is_distributed_loading_by_transformers", False)
    if not split and "distributed_config" not in (getattr(args, "model_init_kwargs", None) or {}):
        yield
        return
    asked, args.save_only_model = args.save_only_model, True
    try:
        yield
    finally:
        args.save_only_model = asked


def load_as_pretrained(model: Any, folder: str) -> None:
    """Gives `model` the weights that ``from_pretrained(folder)`` would have.

    While they are loaded, they are in memory twice: the process's part of a split model, any other model on the CPU.
    """
    config = getattr(model.config, "distributed_config", None)
    options = {} if config is None else {"distributed_config": config}
    model.load_state_dict(type(model).from_pretrained(folder, **options).state_dict())


def saved_names(folder: str) -> set[str]:
    """The names of the tensors in a checkpoint; empty if it has no safetensors of a whole model."""
    index, single = Path(folder, SAFE_WEIGHTS_INDEX_NAME), Path(folder, SAFE_WEIGHTS_NAME)
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not single.is_file():
        return set()
    from safetensors import safe_open

    with safe_open(single, "pt") as file:
        return set(file.keys())


@contextlib.contextmanager
def _with_filled_groups(wrapped: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizer inside accelerate's wrapper; inside, without groups that have no parameter.

    The Trainer creates such a group if every parameter has weight decay, as with LoRA, and torch cannot load it.
    """
    optimizer = getattr(wrapped, "optimizer", wrapped)
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield optimizer
    finally:
        filled = iter(optimizer.param_groups)  # loading a state replaces the groups
        optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]
