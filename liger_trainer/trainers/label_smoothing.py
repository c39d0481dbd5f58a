"""Label smoothing through the fused head, on the labels that the model itself would compare with its logits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import LABEL_SMOOTHING
from liger_trainer.head.step import current_step, running
from liger_trainer.trainers.same_rows import as_evaluated

if TYPE_CHECKING:
    from transformers.trainer_pt_utils import LabelSmoother
else:
    LabelSmoother, *_ = require(LABEL_SMOOTHING)

logger = logging.getLogger("liger_trainer")


@dataclass
class FusedLabelSmoother(LabelSmoother):
    """`LabelSmoother` as one `cross_entropy`, which the fused head computes without building the logits.

    Both compute ``((1 - e) * sum_i nll_i + e / V * sum_i sum_v -logp_iv) / n`` over the labels that are not ignored,
    with smoothing e, V classes and n items. A batch without labels gives a zero that backpropagates.

    If a batch has `shift_labels`, the next token of each position, those are the labels: where context parallelism
    splits a sequence over processes, the next token of the last position is on another process.
    """

    # Whether the label of position i + 1 is for the logits of position i; None to do as the caller says. The Trainer
    # says it by the name of the model's class, which a subclass need not have, so the model is asked.
    shifts: bool | None = None
    _asked: bool = field(default=False, init=False, repr=False)
    _shifted: torch.Tensor | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, smoother: LabelSmoother, shifts: bool | None) -> FusedLabelSmoother:
        """The same smoothing as that of `smoother`."""
        return cls(smoother.epsilon, smoother.ignore_index, shifts)

    @contextlib.contextmanager
    def of_batch(self, model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Inside, the losses are those of `model` on the batch `inputs`; asks once whether it shifts their labels."""
        if self.shifts is None and not self._asked and isinstance(inputs.get("labels"), torch.Tensor):
            self._asked = True
            self.shifts = shifts_labels(model, inputs, self.ignore_index)
        self._shifted = inputs.get("shift_labels")
        try:
            yield
        finally:
            self._shifted = None

    def __call__(
        self,
        model_output: Any,
        labels: torch.Tensor,
        shift_labels: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """The smoothed loss.

        Args:
            model_output: A model's output with `logits` of shape `(..., V)`.
            labels: Class ids of shape `(...)`, `ignore_index` where there is none.
            shift_labels: Whether position i predicts label i + 1; `shifts` wins unless it is None.
            num_items_in_batch: The normaliser; the number of labels that are not ignored by default.

        Returns:
            The loss, 0-d.
        """
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if self.shifts is not None:
            shift_labels = self.shifts
        if shift_labels and self._shifted is not None:
            labels = self._shifted
        elif shift_labels:
            # Shifting the labels, not the logits, avoids a copy of the latter.
            labels = F.pad(labels, (0, 1), value=self.ignore_index)[..., 1:]
        labels = labels.reshape(-1).to(logits.device)
        loss = F.cross_entropy(
            logits.float().view(-1, logits.size(-1)),
            labels,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.epsilon,
        )
        if num_items_in_batch is None:
            num_items_in_batch = labels.ne(self.ignore_index).sum()
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device).clamp(min=1)


def shifts_labels(model: nn.Module, inputs: Mapping[str, Any], ignore_index: int = -100) -> bool | None:
    """Whether the loss of `model` compares the logits of position i with label i + 1; False for labels of whole rows.

    The model is asked: a label at the first position alone has no logits before it, so that a loss that shifts is the
    same with it and without. This takes two forwards in evaluation mode, and leaves the model as it was.

    Returns:
        None, with a warning, if the model computes no loss from labels.
    """
    labels: torch.Tensor = inputs["labels"]
    if labels.dim() < 2:
        return False
    nothing = torch.full_like(labels, ignore_index)
    first = nothing.clone()
    ids = inputs.get("input_ids")
    # Not the token itself, which may be certain.
    first[:, 0] = ids[:, 0].eq(0) if isinstance(ids, torch.Tensor) and ids.shape == labels.shape else 0
    others = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
    try:
        # No evaluation counts these.
        with as_evaluated(model), running(replace(current_step(), loss_follows=True, observer=None)):
            without, with_first = (_loss(model(**others, labels=labels)) for labels in (nothing, first))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        logger.warning(
            "Whether %s shifts its labels is not known, since it computes no loss from them (%s: %s). Label smoothing "
            "follows the Trainer, which shifts them if transformers' table of causal models has the name of the class.",
            *(type(model).__name__, type(error).__name__, error),
        )
        return None
    return torch.allclose(without, with_first, rtol=1e-3, atol=1e-3, equal_nan=True)


def _loss(outputs: Any) -> torch.Tensor:
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss.detach().float().mean()
