"""A model that TRL calls twice on a batch, for its logits and for their statistics, and that runs once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.trainers.fused_head import fused_output
from liger_trainer.trainers.token_statistics import StatisticsOptions


class OnePassModel:
    """Stands for `model` in one computation of TRL's SFT loss.

    With label smoothing or a `compute_loss_func`, TRL's loss is that of the model's logits, and its metrics come from a
    second forward with the fused head. Here the statistics are taken from the logits of the first.

    Args:
        model: What the trainer calls, with its wrappers.
        text_config: The configuration of the language model inside.
        options: The statistics that TRL has asked for.
    """

    def __init__(self, model: nn.Module, text_config: Any, options: StatisticsOptions) -> None:
        self._model, self._text_config, self._options = model, text_config, options
        self._outputs: Any = None
        self._logits: torch.Tensor | None = None
        self._version: int | None = None

    def __call__(
        self,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's outputs; with `fused_lm_head` those of TRL's fused head."""
        given = {"labels": labels, "shift_labels": shift_labels}
        if not fused_lm_head:
            outputs = self._model(*args, **kwargs, **{key: value for key, value in given.items() if value is not None})
            self._remember(outputs)
            return outputs
        of_labels = labels if shift_labels is None else shift_labels
        if self._logits is None or self._changed or of_labels is None or of_labels.shape != self._logits.shape[:-1]:
            return self._model(*args, fused_lm_head=True, **given, **kwargs)  # virtual tokens of PEFT, for one
        with torch.no_grad():
            return fused_output(
                self._logits, self._outputs, self._text_config, labels, shift_labels, None, self._options
            )

    def _remember(self, outputs: Any) -> None:
        logits = outputs.logits
        self._outputs = outputs
        if isinstance(logits, DeferredLogits):
            # Not a view of them: what a loss function does to its logits in place is not done to these.
            self._logits = logits.derive(logits.meta, detached=True) if logits.recordable else None
        else:
            self._logits, self._version = logits.detach(), logits._version

    @property
    def _changed(self) -> bool:
        return self._version is not None and self._logits is not None and self._logits._version != self._version
