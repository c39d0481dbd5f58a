"""What a method of PEFT needs of a training beside gradients: a term of the loss, a call in every step, a file.

A method such as AdaLoRA adds a term to the loss of the model's outputs. TRL's trainers, and label smoothing, compute a
loss of their own, in which that term would be missing. AdaLoRA and AdaMSS also move their budget of ranks between the
layers, in a method that a training loop has to call; no Trainer does. And PEFT's files hold what a model needs to
answer: AdaLoRA's ranks that are not pruned, and of a prompt what its encoder computes. To go on, a training needs more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_trainer.compat.peft import (
    ADDED_TERMS,
    RANK_ALLOCATION,
    TUNERS,
    adds_loss_of_labels,
    adds_to_loss,
    calls_tuner,
)
from liger_trainer.compat.private import available, require
from liger_trainer.compat.transformers import CONVERTED_CHECKPOINTS
from liger_trainer.head.warn_once import warn_once
from liger_trainer.trainers.checkpoints.saved_weights import SavedWeightsMixin

logger = logging.getLogger("liger_trainer")

require(CONVERTED_CHECKPOINTS)

TRAINED_FILE = "trained_adapters.pt"
"""The file, in a checkpoint, of all trained weights of AdaLoRA or of a prompt, and of the importance of ranks."""

_AVERAGES = ("ipt", "exp_avg_ipt", "exp_avg_unc")


class AdapterMethodsMixin(SavedWeightsMixin):
    """Comes before a Trainer: keeps the terms that PEFT adds to the loss, and lets it move its ranks."""

    _has_own_loss = False  # whether the trainer's loss is not that of the model's outputs
    _own_loss_is_of_labels = False  # whether that loss is the labels' cross-entropy too
    _tuner_of_terms: Any = None  # of PEFT, if its terms would be missing in the loss

    def _prepare_adapter_methods(self) -> None:
        """To be called when the model has its final forward."""
        tuner = tuner_of(self.model)
        if tuner is None:
            return
        own_loss = self._has_own_loss or self.label_smoother is not None
        if adds_to_loss(tuner):
            if not calls_tuner(self.model):
                logger.warning(
                    "`task_type` of the adapters is None, for which PEFT leaves out the method's term of the loss. Set "
                    "`task_type='CAUSAL_LM'`."
                )
            elif own_loss and adds_loss_of_labels(tuner) and (not self._own_loss_is_of_labels or self.label_smoother):
                logger.warning(
                    "%s adds a loss of the labels to that of the model, which %s does not train: its term is left out.",
                    *(type(tuner).__name__, "label smoothing" if self.label_smoother else type(self).__name__),
                )
            elif own_loss and self.get_sp_size() == 1:
                self._tuner_of_terms = tuner
        if hasattr(tuner, "update_and_allocate"):
            require(ADDED_TERMS)
            self.add_callback(RankAllocationCallback(tuner))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if _computes_its_file(self.model) and self._holds_whole_model and self.args.should_save:
            torch.save(_trained(self.model), Path(output_dir) / TRAINED_FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_trained(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if not self._load_trained(str(self.state.best_model_checkpoint)):
            super()._load_best_model()

    def _load_trained(self, checkpoint: str) -> bool:
        """Loads what PEFT's own file lacks, if it does and the checkpoint has it."""
        file = Path(checkpoint) / TRAINED_FILE
        if not _computes_its_file(self.model):
            return False
        if not file.is_file():
            if sum(weight.requires_grad for weight in self.model.parameters()) > 1:  # a plain prompt is one, and whole
                logger.warning(
                    "%s has no %s, as from the stock Trainer or a split model: the adapters go on from PEFT's file, "
                    "which lacks part of what was trained.",
                    *(repr(checkpoint), TRAINED_FILE),
                )
            return False
        _restore(self.model, torch.load(file, map_location=self.args.device, weights_only=True))
        return True


def _computes_its_file(model: Any) -> bool:
    """Whether PEFT writes other tensors than it trains, from which a training cannot go on."""
    return isinstance(model, PeftModel) and (model.active_peft_config.is_prompt_learning or _allocates(model))


def tuner_of(model: Any) -> Any:
    """PEFT's module between a PEFT model and the model; None for any other, and for prompt learning.

    For that, `base_model` of a PEFT model is the model itself.
    """
    (base_tuner,) = require(TUNERS)
    tuner = model.base_model if isinstance(model, PeftModel) else None
    return tuner if isinstance(tuner, base_tuner) else None


def _allocates(model: Any) -> bool:
    """Whether it is an AdaLoRA model that is trained."""
    return hasattr(tuner_of(model), "rankallocator") and available(RANK_ALLOCATION)


def _trained(model: Any) -> dict[str, Any]:
    """What the next step of a training depends on."""
    state: dict[str, Any] = {
        "weights": {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    }
    if _allocates(model):
        tuner = model.base_model
        state["averages"] = {name: getattr(tuner.rankallocator, name) for name in _AVERAGES}
        state["rank_pattern"] = tuner.peft_config[tuner.trainable_adapter_name].rank_pattern
    return state


@torch.no_grad()
def _restore(model: Any, state: Mapping[str, Any]) -> None:
    if _allocates(model):
        tuner = model.base_model
        tuner.peft_config[tuner.trainable_adapter_name].rank_pattern = state["rank_pattern"]
        for name, average in state["averages"].items():
            setattr(tuner.rankallocator, name, average)
    for name, weight in state["weights"].items():
        model.get_parameter(name).copy_(weight)


@contextlib.contextmanager
def added_terms(tuner: Any, without_labels: bool) -> Iterator[list[torch.Tensor]]:
    """Inside, what a tuner of PEFT adds to the loss of its model's outputs is put into the list that this gives.

    The loss of the outputs is 0 while the tuner adds to it, so that what it is then is the term, with its own gradient.
    The term is taken from outputs `without_labels`, and so without a loss, too: label smoothing keeps the labels.
    """
    terms: list[torch.Tensor] = []
    held: list[Any] = []  # the loss of the outputs, while the tuner has them
    base = tuner.model
    own, inner = base.__dict__.get("forward"), base.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = inner(*args, **kwargs)
        if not torch.is_grad_enabled() or not hasattr(outputs, "loss"):
            return outputs
        if torch.compiler.is_compiling():
            warn_once("terms", "In a compiled model, what PEFT adds to the loss is not trained. (Said once.)")
        elif outputs.loss is not None or without_labels:
            held.append(outputs.loss)
            outputs.loss = torch.zeros((), device=tuner.device if outputs.loss is None else outputs.loss.device)
        return outputs

    def take(tuner: nn.Module, args: Any, outputs: Any) -> None:
        if held:
            loss, term = held.pop(), outputs.loss
            if term.requires_grad:
                terms.append(term)
            outputs.loss = term if loss is None else loss + term

    hook = tuner.register_forward_hook(take)
    base.forward = forward
    try:
        yield terms
    finally:
        hook.remove()
        if own is None:
            del base.forward
        else:
            base.forward = own


class RankAllocationCallback(TrainerCallback):
    """Calls PEFT's `update_and_allocate` after each step of the optimizer, as its documentation asks of a loop.

    If something else calls it in a step, as a callback that users had to write so far, this does not.
    """

    def __init__(self, tuner: Any) -> None:
        self._tuner = tuner
        self._called_by: str | None = None  # in this step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notices calls of others, and warns of a schedule that is longer than the training."""
        own = type(self._tuner).update_and_allocate

        def update_and_allocate(global_step: int) -> None:
            if self._called_by != "us":
                self._called_by = "others"
                own(self._tuner, global_step)

        self._tuner.update_and_allocate = update_and_allocate
        for config in self._tuner.peft_config.values():
            total = getattr(config, "total_step", None)
            if total is not None and total > state.max_steps and state.is_world_process_zero:
                logger.warning(
                    "`total_step` of the adapters is %s, and the training has %s steps: their ranks do not get down to "
                    "`target_r`. Set `total_step=%s`.",
                    *(total, state.max_steps, state.max_steps),
                )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begins a step, in which nothing was called yet."""
        self._called_by = None

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Moves the ranks, while the gradients are still there."""
        if self._called_by is None:
            type(self._tuner).update_and_allocate(self._tuner, state.global_step)
            self._called_by = "us"

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gives the tuner its own method back."""
        self._tuner.__dict__.pop("update_and_allocate", None)
