"""CPO and SimPO: losses of pairs over a head, without a reference."""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.losses.pairs import PairLoss, Result, check_label_smoothing
from liger_trainer.losses.preference_formulas import Pairs, contrastive
from liger_trainer.losses.sequences import LOGITS_MEMORY


class _ContrastiveLoss(PairLoss):
    """Losses of pairs without a reference: `contrastive`."""

    gamma = 0.0

    def __init__(self, *arguments: Any, label_smoothing: float, compiled: bool, chunk_size: int) -> None:
        check_label_smoothing(label_smoothing)
        super().__init__(*arguments)
        self.label_smoothing = label_smoothing
        self.compiled = compiled
        self.chunk_size = chunk_size

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> Result:
        """The mean loss of pairs that are stacked, all chosen completions and then all rejected ones.

        Args:
            lin_weight: `(vocab, hidden)`.
            _input: `(2 * pairs, tokens, hidden)`.
            target: `(2 * pairs, tokens)`.
            bias: `(vocab,)`.

        Returns:
            The loss, and a tuple of tensors without a gradient: log-probabilities of chosen and of rejected
            completions, `(pairs,)` each; means of the logits over the tokens that count, of both; the negative
            log-likelihood, 0 where it is not part of the loss; and the rewards of both, `(pairs,)` each.

        Raises:
            ValueError: For a shape or dtype that is not allowed.
        """

        def losses(pairs: Pairs) -> torch.Tensor:
            return contrastive(pairs, self.beta, self.label_smoothing, self.gamma)

        loss, pairs, outputs = self._loss(losses, _input, lin_weight, target, bias)
        return loss, (*outputs, *self._rewards(pairs))


class LigerFusedLinearCPOLoss(_ContrastiveLoss):
    """CPO over a head: DPO without a reference, and the negative log-likelihood.

    Args:
        ignore_index: Label of tokens that do not count.
        beta: Factor of the margin.
        alpha: Factor of the negative log-likelihood of the chosen completions.
        label_smoothing: Share of pairs whose labels are taken to be the wrong way round, in [0, 1].
        compute_nll_loss: Whether the negative log-likelihood is part of the loss.
        compiled: No effect.
        average_log_prob: Take the mean of a completion's log-probabilities, not their sum.
        chunk_size: No effect: chunks are planned by memory.
        logits_memory: Bytes of logits at a time, as for DPO.

    Raises:
        ValueError: For an option out of its range.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        logits_memory: int = LOGITS_MEMORY,
    ) -> None:
        super().__init__(
            *(ignore_index, beta, alpha, compute_nll_loss, average_log_prob, logits_memory),
            label_smoothing=label_smoothing,
            compiled=compiled,
            chunk_size=chunk_size,
        )


class LigerFusedLinearSimPOLoss(_ContrastiveLoss):
    """SimPO over a head: log-probabilities per token, which must be `gamma` apart, and the negative log-likelihood.

    Args:
        ignore_index: Label of tokens that do not count.
        beta: Factor of the margin.
        alpha: Factor of the negative log-likelihood of the chosen completions.
        label_smoothing: Share of pairs whose labels are taken to be the wrong way round, in [0, 1].
        compute_nll_loss: Whether the negative log-likelihood is part of the loss. It is not in the paper.
        compiled: No effect.
        gamma: The target margin, after beta.
        chunk_size: No effect: chunks are planned by memory.
        logits_memory: Bytes of logits at a time, as for DPO.

    Raises:
        ValueError: For an option out of its range.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
        logits_memory: int = LOGITS_MEMORY,
    ) -> None:
        super().__init__(
            *(ignore_index, beta, alpha, compute_nll_loss, True, logits_memory),
            label_smoothing=label_smoothing,
            compiled=compiled,
            chunk_size=chunk_size,
        )
        self.gamma = gamma
