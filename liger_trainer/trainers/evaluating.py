"""The loss of an evaluation: the mean over the batches whose loss is finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from liger_trainer.callbacks.batch_tokens import first_label

logger = logging.getLogger("liger_trainer")


class EvaluatingMixin(Trainer):
    """Comes before a Trainer: leaves batches without a finite loss, such as one without labels, out of the mean."""

    _without_loss: torch.Tensor | int = 0  # batches of this evaluation, counted on the device
    _evaluated = 0

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates; see [`~transformers.Trainer.evaluation_loop`]."""
        self._without_loss, self._evaluated = 0, 0
        filters = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = True  # leaves them out, unless there are no others
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter = filters
        if left_out := int(self._without_loss):
            logger.warning(
                "%s of the %s batches evaluated here have no finite loss, so the mean is over the others: all of "
                "their labels are -100, or the model's numbers overflow.",
                *(left_out, self._evaluated),
            )
        return output

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """One batch; see [`~transformers.Trainer.prediction_step`]. The loss of a batch without labels is NaN."""
        labelled = _labelled(inputs, self.model)
        loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None:
            if labelled is not None:
                loss = loss.masked_fill(labelled.logical_not().to(loss.device), math.nan)
            self._evaluated += 1
            self._without_loss = self._without_loss + loss.isfinite().all().logical_not()
        return loss, *rest


def _labelled(inputs: Any, model: Any) -> torch.Tensor | None:
    """Whether any token of a batch has a label; None if the labels are not those of its tokens."""
    first = first_label(model)
    if not isinstance(inputs, Mapping) or first is None:
        return None
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if not isinstance(ids, torch.Tensor) or not isinstance(labels, torch.Tensor) or ids.shape != labels.shape:
        return None
    return labels[:, first:].ne(-100).any()
