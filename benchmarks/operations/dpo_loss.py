"""DPO over LM heads: the loss of pairs of completions of 1024 tokens, both models' heads included."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_trainer.benchmarks.heads import head_logits, in_parts, matmuls
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, reference


@operation("dpo_loss", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The head trained, and frozen; the reference differs slightly from the policy, as in training."""
    length = min(tokens // 2, 1024)
    completions = tokens // (2 * length) * 2
    hidden = data.normal(completions, length, model.hidden)
    weight = data.normal(model.vocab, model.hidden, scale=3 * model.hidden**-0.5)
    ref_hidden = hidden.detach() + data.normal(*hidden.shape, scale=0.05, grad=False)
    ref_weight = weight.detach().clone()
    target = data.integers(model.vocab, completions, length)
    for variant in ("", "frozen"):
        weight = weight.detach().requires_grad_(variant != "frozen")
        heads = ((hidden.flatten(0, 1), weight), (ref_hidden.flatten(0, 1), ref_weight))
        yield Case(
            {
                "hidden": hidden,
                "weight": weight,
                "ref_hidden": ref_hidden,
                "ref_weight": ref_weight,
                "target": target,
            },
            f"{completions // 2} pairs×{length} H={model.hidden} V={model.vocab}",
            Floor(matmuls=matmuls(*heads)),
            variant=variant,
        )


def log_probs(hidden: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Log-probabilities of each completion."""
    logits = head_logits(hidden, weight)
    return (logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)).sum(-1)


def loss(policy: Tensor, ref: Tensor) -> Tensor:
    """DPO's loss with TRL's default beta, from the completions' log-probabilities."""
    chosen, rejected = (policy - ref).chunk(2)
    return -logsigmoid(0.1 * (chosen - rejected)).mean()


def from_log_probs(log_probs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The provider that takes both models' log-probabilities from `log_probs(hidden, weight, target, **settings)`."""

    def run(
        hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, target: Tensor, **settings: Any
    ) -> Tensor:
        with torch.no_grad():
            ref = log_probs(ref_hidden, ref_weight, target, **settings)
        return loss(log_probs(hidden, weight, target, **settings), ref)

    return run


@provider("dpo_loss", "torch")
@from_log_probs
def eager(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return log_probs(hidden, target, weight)


@reference("dpo_loss")
@from_log_probs
def exact(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return in_parts(log_probs, hidden, target, size=1, weight=weight)


@provider("dpo_loss", "liger-kernel")
def liger(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    # A separate tensor: Liger marks a dimension of its labels as dynamic, and on a tensor with that mark
    # torch.compile's turn would fail.
    labels = target.view_as(target)
    return LigerFusedLinearDPOLoss()(weight, hidden, labels, ref_input=ref_hidden, ref_weight=ref_weight)[0]


@provider("dpo_loss", "trl")
@from_log_probs
def trl(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    head = hidden.flatten(0, 1), weight, None, target.flatten()
    return ChunkedLogProbFunction.apply(*head, 1.0, 32768, None, 1.0, ("log_probs",))[0].view_as(target).sum(-1)


@provider("dpo_loss", "liger_trainer", retain_logits_memory="4GiB")
@provider("dpo_loss", "liger_trainer")
@from_log_probs
def ours(hidden: Tensor, weight: Tensor, target: Tensor, retain_logits_memory: str | None = None) -> Tensor:
    """`LigerDPOTrainer`'s way: TRL's formula on log-probabilities that are computed without building the logits."""
    from liger_trainer.configs.kernel_config import parse_bytes
    from liger_trainer.functional import linear_log_probs

    retained = None if retain_logits_memory is None else parse_bytes(retain_logits_memory)
    log_probs = linear_log_probs(hidden, weight, target, retain_memory=retained)
    assert isinstance(log_probs, Tensor)  # no outputs were asked for
    return log_probs.sum(-1)


@provider("dpo_loss", "liger_trainer LigerFusedLinearDPOLoss")
def fused(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, target: Tensor) -> Tensor:
    """The loss for custom training loops: gradients are computed in the forward pass, without recomputing logits."""
    from liger_trainer.losses import LigerFusedLinearDPOLoss

    dpo = LigerFusedLinearDPOLoss()
    return dpo(weight, hidden, target, ref_input=ref_hidden, ref_weight=ref_weight)[0]
