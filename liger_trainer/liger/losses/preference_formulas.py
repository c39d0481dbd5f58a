"""The preference losses as functions of log-probabilities of whole completions, each formula once.

With l and r the log-probabilities of a completion under the policy and under the reference, w the chosen completion of
a pair and v the rejected one:

    ratio = l - r                margin = ratio_w - ratio_v                S = logistic function
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid


class Pairs(NamedTuple):
    """What is known of pairs of completions; all fields are `(pairs,)`.

    Attributes:
        chosen: Log-probability of the chosen completion under the policy.
        rejected: Log-probability of the rejected completion.
        ref_chosen: Log-probability of the chosen completion under the reference, 0 without one.
        ref_rejected: The same of the rejected completion.
        chosen_length: How many tokens `chosen` and `ref_chosen` are sums of, at least 1.
        rejected_length: How many tokens `rejected` and `ref_rejected` are sums of, at least 1.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    chosen_length: torch.Tensor
    rejected_length: torch.Tensor

    @property
    def chosen_ratio(self) -> torch.Tensor:
        """Logarithm of the policy's probability over the reference's, of the chosen completions."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> torch.Tensor:
        """That of the rejected completions."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> torch.Tensor:
        """How much more the policy prefers the chosen completion than the reference does."""
        return self.chosen_ratio - self.rejected_ratio

    @property
    def margin_per_token(self) -> torch.Tensor:
        """The margin of ratios that are divided by their lengths."""
        return self.chosen_ratio / self.chosen_length - self.rejected_ratio / self.rejected_length


class DPOOptions(NamedTuple):
    """What the losses of the DPO family depend on besides the pairs; each uses what its formula names.

    Attributes:
        beta: Strength of the pull to the reference.
        label_smoothing: Share of pairs whose labels are taken to be the wrong way round.
        tau: Temperature of DiscoPOP's modulation.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    tau: float = 0.05


def smoothed(logits: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """``-(1 - e) * log S(logits) - e * log S(-logits)``, the cross entropy of preferences of which e are wrong."""
    loss = -(1.0 - label_smoothing) * logsigmoid(logits)
    return loss if label_smoothing == 0.0 else loss - label_smoothing * logsigmoid(-logits)


def sigmoid(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``-log S(beta * margin)``: DPO, arXiv 2305.18290, equation 7."""
    return -logsigmoid(options.beta * pairs.margin)


def sigmoid_norm(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``-log S(beta * margin per token)``: length-normalised DPO, arXiv 2411.15124."""
    return -logsigmoid(options.beta * pairs.margin_per_token)


def hinge(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``max(0, 1 - beta * margin)``: SLiC's loss on DPO's rewards, arXiv 2309.06657."""
    return torch.relu(1.0 - options.beta * pairs.margin)


def ipo(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``(margin per token - 1 / (2 * beta))**2``: arXiv 2310.12036, equation 17."""
    return (pairs.margin_per_token - 0.5 / options.beta).square()


def robust(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``(-(1 - e) * log S(z) + e * log S(-z)) / (1 - 2 e)``, z = beta * margin: arXiv 2403.00409."""
    logits, e = options.beta * pairs.margin, options.label_smoothing
    return (e * logsigmoid(-logits) - (1.0 - e) * logsigmoid(logits)) / (1.0 - 2.0 * e)


def exo_pair(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """KL of (S(z), S(-z)) from (1 - e, e), z = beta * margin: EXO, arXiv 2402.00856, equation 16."""
    logits, e = options.beta * pairs.margin, options.label_smoothing
    won = torch.sigmoid(logits) * (logsigmoid(logits) - math.log1p(-e))
    return won + torch.sigmoid(-logits) * (logsigmoid(-logits) - math.log(e))


def nca_pair(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``-log S(w) - (log S(-w) + log S(-v)) / 2`` of the rewards beta * ratio: NCA, arXiv 2402.05369."""
    chosen, rejected = options.beta * pairs.chosen_ratio, options.beta * pairs.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))


def bco_pair(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``-log S(w) - log S(-v)`` of the rewards beta * ratio: BCO without its shift, arXiv 2404.04656."""
    return -logsigmoid(options.beta * pairs.chosen_ratio) - logsigmoid(-options.beta * pairs.rejected_ratio)


def sppo_hard(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``(ratio_w - 1 / (2 beta))**2 + (ratio_v + 1 / (2 beta))**2``: SPPO with certain labels, arXiv 2405.00675."""
    goal = 0.5 / options.beta
    return (pairs.chosen_ratio - goal).square() + (pairs.rejected_ratio + goal).square()


def aot(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """DPO between quantiles of the batch: the policy's margins and the reference's, each sorted; arXiv 2406.05882."""
    policy = (pairs.chosen - pairs.rejected).sort().values
    reference = (pairs.ref_chosen - pairs.ref_rejected).sort().values
    return smoothed(options.beta * (policy - reference), options.label_smoothing)


def aot_unpaired(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """DPO between quantiles of the batch: the ratios of chosen and of rejected completions; arXiv 2406.05882."""
    apart = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return smoothed(options.beta * apart, options.label_smoothing)


def apo_zero(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``1 - S(beta * ratio_w) + S(beta * ratio_v)``: APO, arXiv 2408.06266, equation 7."""
    chosen, rejected = options.beta * pairs.chosen_ratio, options.beta * pairs.rejected_ratio
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``S(beta * ratio_w) + 1 - S(beta * margin)``: APO, arXiv 2408.06266, equation 8."""
    return torch.sigmoid(options.beta * pairs.chosen_ratio) + torch.sigmoid(-options.beta * pairs.margin)


def discopop(pairs: Pairs, options: DPOOptions) -> torch.Tensor:
    """``-(1 - m) * log S(z) + m * exp(-z)``, z = beta * margin, m = S(z / tau): arXiv 2406.08414, equation 5."""
    logits = options.beta * pairs.margin
    mixed = torch.sigmoid(logits / options.tau)
    return -(1.0 - mixed) * logsigmoid(logits) + mixed * torch.exp(-logits)


DPO_LOSSES: dict[str, Callable[[Pairs, DPOOptions], torch.Tensor]] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid_norm,
    "hinge": hinge,
    "ipo": ipo,
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_pair": aot,  # its older name in TRL
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
}
"""The losses of pairs by name; each gives `(pairs,)` losses, whose mean is the loss of a batch."""

COUPLES_PAIRS = ("aot", "aot_pair", "aot_unpaired")
"""Losses in which every pair of a batch depends on the others."""


def log_odds(log_prob: torch.Tensor) -> torch.Tensor:
    """``log(p / (1 - p))`` from log p <= 0, exact at both ends; a probability of 1 counts as the largest below it."""
    log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).tiny)
    near_one = log_prob > -math.log(2.0)
    # Each branch gets arguments that are harmless where the other one is taken, so that its derivative is finite.
    small = torch.log(-torch.expm1(torch.where(near_one, log_prob, -1.0)))
    large = torch.log1p(-torch.exp(torch.where(near_one, -1.0, log_prob)))
    return log_prob - torch.where(near_one, small, large)


def odds_ratio(pairs: Pairs, beta: float) -> torch.Tensor:
    """``-beta * log S(log odds_w - log odds_v)`` of log-probabilities per token: ORPO, arXiv 2403.07691, equation 7."""
    return -beta * logsigmoid(log_odds(pairs.chosen) - log_odds(pairs.rejected))


def contrastive(pairs: Pairs, beta: float, label_smoothing: float = 0.0, gamma: float = 0.0) -> torch.Tensor:
    """``-log S(beta * (l_w - l_v) - gamma)``, smoothed.

    CPO (arXiv 2401.08417, equation 3) without gamma on sums, SimPO (arXiv 2405.14734, equation 6) on means per token.
    """
    return smoothed(beta * (pairs.chosen - pairs.rejected) - gamma, label_smoothing)


def kto(ratio: torch.Tensor, desirable: torch.Tensor, beta: float, kl: torch.Tensor | None) -> torch.Tensor:
    """``1 - S(beta * (ratio - kl))`` of desirable completions, ``1 - S(beta * (kl - ratio))`` of the others.

    KTO (arXiv 2402.01306) with weights of 1; without `kl` APO-zero of unpaired completions
    (arXiv 2408.06266).

    Args:
        ratio: `(completions,)`.
        desirable: bool `(completions,)`.
        beta: Strength of the pull to the reference.
        kl: Estimate of the divergence from the reference, which broadcasts to `ratio`.
    """
    gain = ratio if kl is None else ratio - kl
    return torch.sigmoid(-beta * torch.where(desirable, gain, -gain))
