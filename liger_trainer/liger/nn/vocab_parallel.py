"""The loss of a vocabulary that is split over a process group."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from liger_trainer.functional import cross_entropy, vocab_parallel_cross_entropy
from liger_trainer.liger.nn.options import OptionsModule

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclasses.dataclass(eq=False, repr=False)
class LigerVocabParallelCrossEntropy(OptionsModule):
    """Cross entropy of logits whose vocabulary is split over processes.

    See [`liger_trainer.functional.vocab_parallel_cross_entropy`]. The loss is float32, one number a token.

    Args:
        ignore_index: Target that does not count.
        label_smoothing: At least 0 and less than 1.
        reduction: ``"none"``: reducing is the caller's.
        label_smoothing_formula: ``"pytorch"`` spreads the smoothing over all classes, ``"megatron"`` over all but the
            target.
        label_smoothing_mode: ``"global"`` spreads it over the whole vocabulary, ``"partition"`` over the columns of
            each process, whose losses then differ, as in Megatron-LM.

    Raises:
        ValueError: for a value out of range.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "none"
    label_smoothing_formula: str = "pytorch"
    label_smoothing_mode: str = "global"

    def __post_init__(self) -> None:
        formula, mode = self.label_smoothing_formula, self.label_smoothing_mode
        if self.reduction != "none":
            raise ValueError(f"`reduction` is {self.reduction!r}; it must be 'none', as the caller reduces the losses.")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"`label_smoothing` is {self.label_smoothing}; it must be at least 0 and less than 1.")
        if formula not in ("pytorch", "megatron"):
            raise ValueError(f"`label_smoothing_formula` is {formula!r}; it must be 'pytorch' or 'megatron'.")
        if mode not in ("global", "partition"):
            raise ValueError(f"`label_smoothing_mode` is {mode!r}; it must be 'global' or 'partition'.")
        super().__post_init__()

    def forward(
        self, vocab_parallel_logits: torch.Tensor, target: torch.Tensor, tp_group: ProcessGroup | None = None
    ) -> torch.Tensor:
        """The loss of every token, (seq, batch), of the logits (seq, batch, columns of this process).

        Args:
            vocab_parallel_logits: The columns of this process.
            target: Ids of the whole vocabulary, (seq, batch).
            tp_group: The processes; without them the columns are all there are.
        """
        processes = 1 if tp_group is None else tp_group.size()
        smoothing = self.label_smoothing
        if self.label_smoothing_formula == "megatron":
            shards = processes if self.label_smoothing_mode == "global" else 1
            classes = vocab_parallel_logits.shape[-1] * shards
            smoothing = smoothing * classes / (classes - 1)
        if tp_group is None:
            loss = cross_entropy(vocab_parallel_logits, target, self.ignore_index, "none", label_smoothing=smoothing)
        else:
            loss = vocab_parallel_cross_entropy(
                vocab_parallel_logits,
                target,
                tp_group,
                self.ignore_index,
                "none",
                label_smoothing=smoothing,
                smoothing_scope=self.label_smoothing_mode,
            )
        assert isinstance(loss, torch.Tensor)
        return loss
