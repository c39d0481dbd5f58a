"""DPO and its variants, ORPO, CPO and SimPO: losses of pairs over a head; KTO of single completions."""

from __future__ import annotations

import dataclasses
import functools

import torch

from liger_trainer.liger.losses.pairs import (
    LOGITS_MEMORY,
    PairLoss,
    Result,
    check_label_smoothing,
    check_pairs,
    check_sequences,
    check_shape,
    completion_log_probs,
    reference_log_probs,
)
from liger_trainer.liger.losses.preference_formulas import (
    COUPLES_PAIRS,
    DPO_LOSSES,
    DPOOptions,
    contrastive,
    kto,
    log_odds,
    odds_ratio,
)
from liger_trainer.liger.nn.losses import OptionsModule
from liger_trainer.liger.operators.linear_grouped_loss import linear_grouped_loss


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedLinearDPOLoss(PairLoss):
    """DPO and its variants over a head, with the logits one chunk of whole pairs at a time.

    The formulas and their papers are in `liger_trainer.liger.losses.preference_formulas`.

    Args:
        ignore_index: Label of tokens that do not count.
        beta: Strength of the pull to the reference; above 0 for "ipo" and "sppo_hard", which divide by it.
        alpha: Factor of the negative log-likelihood of the chosen completions.
        compute_nll_loss: Add that: its mean over the tokens of all chosen completions.
        compiled: No effect.
        use_ref_model: Whether there is a reference; without one its log-probabilities are taken to be 0.
        average_log_prob: Take the mean of a completion's log-probabilities, not their sum. "ipo" and "sigmoid_norm"
            divide by the length once, either way.
        chunk_size: No effect: chunks are planned by memory.
        loss_type: "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
            "aot" (also called "aot_pair"), "aot_unpaired", "apo_zero", "apo_down" or "discopop".
        label_smoothing: Share of wrong labels in "robust" (below 0.5), "exo_pair" (above 0) and the "aot" types.
        discopop_tau: Temperature of the modulation in "discopop".
        logits_memory: Bytes of logits at a time, 1 GiB by default. While one pair's logits fit (all pairs' for the
            "aot" types), a head that is trained costs three matmuls; beyond it four.

    Raises:
        ValueError: For an option out of its range.
    """

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    compute_nll_loss: bool = False
    compiled: bool = True
    use_ref_model: bool = True
    average_log_prob: bool = False
    chunk_size: int = 1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    logits_memory: int = LOGITS_MEMORY

    def __post_init__(self) -> None:
        loss_type, label_smoothing, beta = self.loss_type, self.label_smoothing, self.beta
        if loss_type not in DPO_LOSSES:
            raise ValueError(f"`loss_type` is {loss_type!r}; it must be one of {', '.join(map(repr, DPO_LOSSES))}.")
        check_label_smoothing(label_smoothing)
        if loss_type == "exo_pair" and not 0.0 < label_smoothing < 1.0:
            raise ValueError(
                f"`label_smoothing` is {label_smoothing}; for loss_type='exo_pair' it must lie between 0 and 1, "
                "as its logarithm is taken. The paper uses 1e-3."
            )
        if loss_type == "robust" and label_smoothing >= 0.5:
            raise ValueError(f"`label_smoothing` is {label_smoothing}; for loss_type='robust' it must be below 0.5.")
        if loss_type in ("ipo", "sppo_hard") and not beta > 0.0:
            raise ValueError(f"`beta` is {beta}; loss_type={loss_type!r} divides by it, so it must be above 0.")
        if not self.discopop_tau > 0.0:
            raise ValueError(f"`discopop_tau` is {self.discopop_tau}; it must be above 0.")

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        ref_input: torch.Tensor | None = None,
        ref_weight: torch.Tensor | None = None,
        ref_bias: torch.Tensor | None = None,
        ref_log_probs: torch.Tensor | None = None,
    ) -> Result:
        """The mean loss of pairs that are stacked, all chosen completions and then all rejected ones.

        Args:
            lin_weight: `(vocab, hidden)`.
            _input: `(2 * pairs, tokens, hidden)`, such that a position predicts the token at its place in `target`.
            target: `(2 * pairs, tokens)`.
            bias: `(vocab,)`.
            ref_input: `(2 * pairs, tokens, hidden)` of the reference model, whose hidden size may be another.
            ref_weight: `(vocab, hidden)`, its head, which gets no gradient.
            ref_bias: `(vocab,)`.
            ref_log_probs: `(2 * pairs, tokens)`, the reference's log-probabilities of `target`, instead of those three.

        Returns:
            The loss, and a tuple of tensors without a gradient: log-probabilities of chosen and of rejected
            completions, `(pairs,)` each; means of the logits over the tokens that count, of chosen and of rejected
            completions; the negative log-likelihood, 0 where it is not part of the loss; and the rewards beta * ratio
            of chosen and of rejected completions, `(pairs,)` each.

        Raises:
            ValueError: For a shape or dtype that is not allowed, or where the reference is missing.
        """
        check_pairs(_input, target)
        check_shape("ref_log_probs", ref_log_probs, tuple(target.shape))
        if self.use_ref_model and ref_log_probs is None:
            ref_log_probs = reference_log_probs(
                *(ref_input, ref_weight, ref_bias, target, self.ignore_index), logits_memory=self.logits_memory
            )
        formula, options = DPO_LOSSES[self.loss_type], DPOOptions(self.beta, self.label_smoothing, self.discopop_tau)
        loss, pairs, outputs = self._loss(
            lambda pairs: formula(pairs, options),
            *(_input, lin_weight, target, bias),
            reference=ref_log_probs if self.use_ref_model else None,
            couples_pairs=self.loss_type in COUPLES_PAIRS,
        )
        return loss, (*outputs, *self._rewards(pairs))


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedLinearORPOLoss(PairLoss):
    """ORPO over a head: the odds ratio of log-probabilities per token, and the negative log-likelihood.

    `beta` is the factor of the odds ratio's loss. The other options are those of [`LigerFusedLinearDPOLoss`].
    """

    ignore_index: int = -100
    beta: float = 0.1
    compute_nll_loss: bool = True
    compiled: bool = True
    chunk_size: int = 1
    logits_memory: int = LOGITS_MEMORY
    average_log_prob = True

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
        nll_target: torch.Tensor | None = None,
    ) -> Result:
        """The mean loss of the pairs; the arguments but `nll_target` are those of [`LigerFusedLinearDPOLoss`].

        The first half of `nll_target`, `(2 * pairs, tokens)`, holds the labels of the negative log-likelihood, where
        more tokens count there than in `target`, such as those of the prompt. A token that counts in both must have the
        same label in both.

        Returns:
            The results of DPO, with log-probabilities per token, and after them the mean of log S(log odds ratio) and
            the mean log odds ratio.

        Raises:
            ValueError: For a shape or dtype that is not allowed, or (on the CPU) labels that contradict each other.
        """
        losses = functools.partial(odds_ratio, beta=self.beta)
        loss, pairs, outputs = self._loss(losses, _input, lin_weight, target, bias, nll_target)
        apart = log_odds(pairs.chosen) - log_odds(pairs.rejected)
        return loss, (*outputs, *self._rewards(pairs), -odds_ratio(pairs, 1.0).mean(), apart.mean())


@dataclasses.dataclass(eq=False, repr=False)
class _ContrastiveLoss(PairLoss):
    """Losses of pairs without a reference: `contrastive`."""

    ignore_index: int = -100
    beta: float = 0.1
    alpha: float = 1.0
    label_smoothing: float = 0.0
    compute_nll_loss: bool = True
    compiled: bool = True
    gamma = 0.0  # a field of SimPO's

    def __post_init__(self) -> None:
        check_label_smoothing(self.label_smoothing)

    def forward(
        self, lin_weight: torch.Tensor, _input: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Result:
        """The mean loss of the pairs; arguments, results and errors are those of [`LigerFusedLinearDPOLoss`]."""
        losses = functools.partial(contrastive, beta=self.beta, label_smoothing=self.label_smoothing, gamma=self.gamma)
        loss, pairs, outputs = self._loss(losses, _input, lin_weight, target, bias)
        return loss, (*outputs, *self._rewards(pairs))


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedLinearCPOLoss(_ContrastiveLoss):
    """CPO over a head: DPO without a reference, and the negative log-likelihood.

    `beta` is the factor of the margin, `label_smoothing` the share of pairs whose labels are taken to be the wrong way
    round, in [0, 1]. Other options and errors are those of [`LigerFusedLinearDPOLoss`].
    """

    average_log_prob: bool = False
    chunk_size: int = 1
    logits_memory: int = LOGITS_MEMORY


@dataclasses.dataclass(eq=False, repr=False)
class LigerFusedLinearSimPOLoss(_ContrastiveLoss):
    """SimPO over a head: log-probabilities per token, which must be `gamma` apart, and the negative log-likelihood.

    `gamma` is the target margin, after `beta`; the negative log-likelihood is not in the paper. Other options and
    errors are those of [`LigerFusedLinearCPOLoss`].
    """

    gamma: float = 0.5
    chunk_size: int = 1
    logits_memory: int = LOGITS_MEMORY
    average_log_prob = True


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
