"""KTO over a head: completions that are each desirable or not, without pairs."""

from __future__ import annotations

import dataclasses

import torch

from liger_trainer.liger.losses.pairs import (
    LOGITS_MEMORY,
    check_sequences,
    check_shape,
    completion_log_probs,
    reference_log_probs,
)
from liger_trainer.liger.losses.preference_formulas import kto
from liger_trainer.liger.nn.losses import OptionsModule
from liger_trainer.liger.operators.linear_grouped_loss import linear_grouped_loss


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedLinearKTOLoss(OptionsModule):
    """KTO over a head, with the logits one chunk of whole completions at a time.

    The formula is `liger_trainer.liger.losses.preference_formulas.kto`.

    The options are those of [`LigerFusedLinearDPOLoss`], with single completions in place of pairs.
    """

    ignore_index: int = -100
    beta: float = 0.1
    compiled: bool = True
    use_ref_model: bool = False
    average_log_prob: bool = False
    chunk_size: int = 1
    logits_memory: int = LOGITS_MEMORY

    def forward(
        self,
        _input: torch.Tensor,
        lin_weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        preference_labels: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
        kl: torch.Tensor | None = None,
        ref_log_probs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The mean loss of the completions.

        Their tensors are those of [`LigerFusedLinearDPOLoss`], of `batch` completions that are no pairs.
        `preference_labels`, `(batch,)`, says whether a completion is desirable, and is needed. `kl`, `(batch,)`, `(1,)`
        or 0-d, is an estimate of the divergence from the reference, which gets no gradient; None for 0, which is
        APO-zero of unpaired completions.

        Returns:
            The loss, and a tuple of sums without a gradient, over desirable and over other completions each: of the
            completions' log-probabilities; of all logits of the tokens that count; and of the rewards beta * ratio.

        Raises:
            ValueError: For a shape or dtype that is not allowed, or where labels or reference are missing.
        """
        check_sequences(_input, target, "_input", "target")
        batch, length = target.shape
        if preference_labels is None:
            raise ValueError("`preference_labels` is None; give a bool for each completion, True where desirable.")
        check_shape("preference_labels", preference_labels, (batch,))
        check_shape("kl", kl, (batch,), (1,), ())
        check_shape("ref_log_probs", ref_log_probs, (batch, length))
        mask, desirable = target != self.ignore_index, preference_labels.bool()
        ref = torch.zeros((), device=_input.device).expand(batch)
        if self.use_ref_model:
            if ref_log_probs is None:
                ref_log_probs = reference_log_probs(
                    *(ref_input, ref_weight, ref_bias, target, self.ignore_index), logits_memory=self.logits_memory
                )
            ref = completion_log_probs(ref_log_probs, mask, self.average_log_prob)
        kl = None if kl is None else kl.detach().to(_input.device).expand(batch)

        def formula(log_probs: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            some = slice(start // length, stop // length)
            policy = completion_log_probs(log_probs.view(-1, length), mask[some], self.average_log_prob)
            losses = kto(policy - ref[some], desirable[some], self.beta, None if kl is None else kl[some])
            return losses.sum() / batch

        result = linear_grouped_loss(
            _input.reshape(-1, _input.shape[-1]),
            lin_weight,
            target.reshape(-1),
            formula,
            group=length,
            normalizer=mask.sum() if self.average_log_prob else mask.new_ones((), dtype=torch.float32) * batch,
            bias=bias,
            ignore_index=self.ignore_index,
            mean_logit=True,
            logits_memory=self.logits_memory,
        )
        assert result.mean_logit is not None
        with torch.no_grad():
            policy = completion_log_probs(result.log_probs.view(batch, length), mask, self.average_log_prob)
            logits = result.mean_logit.view(batch, length).sum(-1) * lin_weight.shape[0]
            sums = [
                torch.where(kind, values, 0.0).sum()
                for values in (policy, logits, self.beta * (policy - ref))
                for kind in (desirable, ~desirable)
            ]
        return result.loss, tuple(sums)
