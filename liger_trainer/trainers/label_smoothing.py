"""Label smoothing through the fused head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import LABEL_SMOOTHING

if TYPE_CHECKING:
    from transformers.trainer_pt_utils import LabelSmoother
else:
    LabelSmoother, *_ = require(LABEL_SMOOTHING)


@dataclass
class FusedLabelSmoother(LabelSmoother):
    """`LabelSmoother` as one `cross_entropy`, which the fused head computes without building the logits.

    Both compute ``((1 - e) * sum_i nll_i + e / V * sum_i sum_v -logp_iv) / n`` over the labels that are not ignored,
    with smoothing e, V classes and n items. A batch without labels gives a zero that backpropagates.

    If a batch has `shift_labels`, the next token of each position, those are the labels: where context parallelism
    splits a sequence over processes, the next token of the last position is on another process.
    """

    _shifted: torch.Tensor | None = field(default=None, init=False, repr=False)

    @contextlib.contextmanager
    def of_batch(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Inside, the losses are those of the batch `inputs`."""
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
            shift_labels: Whether position i predicts label i + 1.
            num_items_in_batch: The normaliser; the number of labels that are not ignored by default.

        Returns:
            The loss, 0-d.
        """
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
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
