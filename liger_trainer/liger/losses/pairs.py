"""The head under every loss of sequences, and of pairs: batches of chosen and then rejected completions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from liger_trainer.functional import linear_log_probs
from liger_trainer.liger.losses.preference_formulas import Pairs
from liger_trainer.liger.nn.losses import OptionsModule
from liger_trainer.liger.operators.linear_grouped_loss import linear_grouped_loss

LOGITS_MEMORY = 2**30


def check_sequences(hidden: torch.Tensor, target: torch.Tensor, hidden_name: str, target_name: str) -> None:
    """Raises ValueError unless there are hidden states `(B, T, H)` and labels `(B, T)` of at least one token."""
    if hidden.dim() != 3 or target.shape != hidden.shape[:2] or not target.numel():
        raise ValueError(
            f"`{hidden_name}` has shape {tuple(hidden.shape)} and `{target_name}` {tuple(target.shape)}; they must be "
            "(batch, tokens, hidden) and (batch, tokens), with at least one token."
        )


def check_shape(name: str, tensor: torch.Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless the argument `name` is None or has one of `shapes`."""
    if tensor is not None and tuple(tensor.shape) not in shapes:
        allowed = " or ".join(map(str, shapes))
        raise ValueError(f"`{name}` has shape {tuple(tensor.shape)}; it must be {allowed}.")


def completion_log_probs(log_probs: torch.Tensor, mask: torch.Tensor, average: bool) -> torch.Tensor:
    """Sums, or means, of `(..., T)` log-probabilities over the tokens in `mask`; 0 for a completion without tokens."""
    total = torch.where(mask, log_probs, 0.0).sum(-1)
    return total / mask.sum(-1).clamp(min=1) if average else total


@torch.no_grad()
def reference_log_probs(
    ref_input: torch.Tensor | None,
    ref_weight: torch.Tensor | None,
    ref_bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    temperature: float = 1.0,
    logits_memory: int = LOGITS_MEMORY,
) -> torch.Tensor:
    """Log-probabilities `(B, T)` of `target` under the reference model's head, without a gradient.

    Raises:
        ValueError: If there are no hidden states or no head, or not of the same tokens.
    """
    if ref_input is None or ref_weight is None:
        raise ValueError(
            "use_ref_model=True needs the reference model's hidden states `ref_input`, (batch, tokens, hidden), and "
            "its head `ref_weight`, (vocab, hidden); give both, or use_ref_model=False."
        )
    check_sequences(ref_input, target, "ref_input", "target")
    result = linear_log_probs(
        *(ref_input, ref_weight, target, ref_bias),
        ignore_index=ignore_index,
        temperature=temperature,
        logits_memory=logits_memory,
    )
    assert isinstance(result, torch.Tensor)
    return result


Result = tuple[torch.Tensor, tuple[torch.Tensor, ...]]
"""A loss, and what its users may want to log."""
PairLosses = Callable[[Pairs], torch.Tensor]
_ALL = slice(None)


def by_pair(tensor: torch.Tensor) -> torch.Tensor:
    """`(2 * pairs, ...)` of all chosen and then all rejected completions as `(pairs, 2, ...)`."""
    return tensor.unflatten(0, (2, -1)).transpose(0, 1)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """What turns log-probabilities `(pairs, 2, T)` of tokens into those of pairs, of all or of `some` of them.

    Attributes:
        mask: `(pairs, 2, T)`, the tokens of the completions.
        nll_mask: `(pairs, T)`, the tokens of the negative log-likelihood.
        ref: `(pairs, 2)`, log-probabilities of the completions under the reference.
        average: Whether those of completions are means over their tokens.
    """

    mask: torch.Tensor
    nll_mask: torch.Tensor
    ref: torch.Tensor
    average: bool

    def pairs(self, log_probs: torch.Tensor, some: slice = _ALL) -> Pairs:
        """The log-probabilities of the completions."""
        mask = self.mask[some]
        lengths = torch.ones_like(mask[..., 0]) if self.average else mask.sum(-1).clamp(min=1)
        policy = completion_log_probs(log_probs, mask, self.average)
        return Pairs(*policy.unbind(-1), *self.ref[some].unbind(-1), *lengths.unbind(-1))

    def nll(self, log_probs: torch.Tensor, some: slice = _ALL) -> torch.Tensor:
        """What `some` pairs add to the mean over the tokens of all of them."""
        return -torch.where(self.nll_mask[some], log_probs[:, 0], 0.0).sum() / self.nll_mask.sum().clamp(min=1)

    def mean_logits(self, mean_logit: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of all chosen and of all rejected completions, 0-d each."""
        total = torch.where(self.mask, mean_logit, 0.0).sum((0, 2))
        return (total / self.mask.sum((0, 2)).clamp(min=1)).unbind()


class PairLoss(OptionsModule):
    """What DPO, ORPO, CPO and SimPO have in common; each is a dataclass of its options, in Liger's order."""

    ignore_index: int
    beta: float
    alpha: float = 1.0
    compute_nll_loss: bool
    average_log_prob: bool
    logits_memory: int

    def _loss(
        self,
        losses: PairLosses,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None,
        nll_target: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
        couples_pairs: bool = False,
    ) -> tuple[torch.Tensor, Pairs, tuple[torch.Tensor, ...]]:
        """The loss, the pairs without gradient, and the first five of the outputs that Liger returns beside the loss.

        The tensors are those of the losses. `losses` gives the loss of each pair, whose mean is taken; `couples_pairs`
        says that it must see all pairs at once.
        """
        check_pairs(hidden, target, nll_target)
        mask = by_pair(target != self.ignore_index)
        pairs, _, length = mask.shape
        labels, nll_mask = target, mask[:, 0]
        if nll_target is not None:
            chosen, nll_mask = self._with_nll_labels(target[:pairs], nll_target[:pairs])
            labels = torch.cat([chosen, target[pairs:]])
        ref = torch.zeros((), device=hidden.device).expand(pairs, 2)
        if reference is not None:
            ref = completion_log_probs(by_pair(reference), mask, self.average_log_prob)
        batch = _Batch(mask, nll_mask, ref, self.average_log_prob)

        def formula(log_probs: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            log_probs, some = log_probs.view(-1, 2, length), slice(start // (2 * length), stop // (2 * length))
            loss = losses(batch.pairs(log_probs, some)).sum() / pairs
            return loss + self.alpha * batch.nll(log_probs, some) if self.compute_nll_loss else loss

        result = linear_grouped_loss(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            labels.reshape(-1),
            formula,
            group=2 * length * (pairs if couples_pairs else 1),
            normalizer=(mask.sum() if self.average_log_prob else mask.new_ones((), dtype=torch.float32) * pairs),
            bias=bias,
            ignore_index=self.ignore_index,
            mean_logit=True,
            logits_memory=self.logits_memory,
            arrange=lambda rows: by_pair(rows.unflatten(0, target.shape)).flatten(0, 2),
        )
        assert result.mean_logit is not None
        with torch.no_grad():
            log_probs = result.log_probs.view(mask.shape)
            seen = batch.pairs(log_probs)
            nll = batch.nll(log_probs) if self.compute_nll_loss else torch.zeros_like(result.loss)
            mean_logits = batch.mean_logits(result.mean_logit.view(mask.shape))
        return result.loss, seen, (seen.chosen, seen.rejected, *mean_logits, nll)

    def _with_nll_labels(self, chosen: torch.Tensor, nll_labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels `(pairs, T)` of the chosen completions with those of `nll_labels` added, and where the latter count.

        Where both have a label it must be the same one, so that a single log-probability serves both. It is an error
        on the CPU where it is not; on an accelerator, as for other wrong labels, the loss is NaN.
        """
        counts = nll_labels != self.ignore_index
        contradicts = counts & (chosen != self.ignore_index) & (chosen != nll_labels)
        if contradicts.device.type == "cpu" and bool(contradicts.any()):
            raise ValueError(
                f"`nll_target` and `target` hold different labels for {int(contradicts.sum())} tokens of chosen "
                "completions; where both count they must be equal, and elsewhere one of them `ignore_index`."
            )
        wrong = -1 if self.ignore_index != -1 else -2
        return torch.where(counts, nll_labels, chosen).masked_fill(contradicts, wrong), counts

    def _rewards(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        return self.beta * pairs.chosen_ratio, self.beta * pairs.rejected_ratio


def check_pairs(hidden: torch.Tensor, target: torch.Tensor, nll_target: Any = None) -> None:
    """Raises ValueError unless there are as many chosen as rejected completions, and labels for them."""
    check_sequences(hidden, target, "_input", "target")
    if len(target) % 2:
        raise ValueError(
            f"`target` has {len(target)} completions; a batch of pairs holds all chosen completions and then, in the "
            "same order, all rejected ones, so their number must be even."
        )
    check_shape("nll_target", nll_target, tuple(target.shape))


def check_label_smoothing(label_smoothing: float) -> None:
    """Raises ValueError outside [0, 1]."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"`label_smoothing` is {label_smoothing}; it must lie in [0, 1].")
