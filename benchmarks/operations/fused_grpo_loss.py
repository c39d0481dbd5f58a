"""GRPO over an LM head: DAPO's loss of completions of 1024 tokens, 900 of which count, with a KL penalty."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from liger_trainer.benchmarks.heads import head_logits, in_parts, matmuls
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.grpo_loss import loss
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, reference


@operation("fused_grpo_loss", tokens=16384)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The head trained, and frozen; old and reference policy differ slightly, and their log-probabilities are given."""
    length = min(tokens // 2, 1024)
    samples = tokens // length
    hidden = data.normal(samples, length, model.hidden)
    weight = data.normal(model.vocab, model.hidden, scale=3 * model.hidden**-0.5)
    ids = data.integers(model.vocab, samples, length)
    mask = (torch.arange(length, device=ids.device) < length * 900 // 1024).expand(samples, length)
    with torch.no_grad():
        now = torch.cat([log_probs(*rows, weight) for rows in zip(hidden.split(1), ids.split(1))])
    old, ref = (now + data.normal(samples, length, scale=0.1, grad=False, dtype=now.dtype) for _ in range(2))
    advantages = data.normal(samples, grad=False, dtype=now.dtype)
    for variant in ("", "frozen"):
        weight = weight.detach().requires_grad_(variant != "frozen")
        yield Case(
            {
                "hidden": hidden,
                "weight": weight,
                "completion_ids": ids,
                "completion_mask": mask,
                "advantages": advantages,
                "old_log_probs": old,
                "ref_log_probs": ref,
            },
            f"{samples}×{length} H={model.hidden} V={model.vocab}",
            Floor(matmuls=matmuls((hidden.flatten(0, 1), weight))),
            variant=variant,
        )


def log_probs(hidden: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Log-probabilities of each token."""
    logits = head_logits(hidden, weight)
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def reduced(now: Tensor, mask: Tensor, advantages: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    """The mean loss over the tokens of the mask."""
    return (loss(now, old, ref, advantages[:, None]) * mask).sum() / mask.sum()


def from_log_probs(log_probs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The provider that takes its log-probabilities from `log_probs(hidden, weight, ids, **settings)`."""

    def run(
        hidden: Tensor,
        weight: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        advantages: Tensor,
        old_log_probs: Tensor,
        ref_log_probs: Tensor,
        **settings: Any,
    ) -> Tensor:
        now = log_probs(hidden, weight, completion_ids, **settings)
        return reduced(now, completion_mask, advantages, old_log_probs, ref_log_probs)

    return run


@provider("fused_grpo_loss", "torch")
@from_log_probs
def eager(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return log_probs(hidden, ids, weight)


@reference("fused_grpo_loss")
@from_log_probs
def exact(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return in_parts(log_probs, hidden, ids, size=1, weight=weight)


@provider("fused_grpo_loss", "liger-kernel")
def liger(
    hidden: Tensor,
    weight: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    policies = {"old_per_token_logps": old_log_probs, "ref_per_token_logps": ref_log_probs}
    return LigerFusedLinearGRPOLoss()(hidden, weight, completion_ids, completion_mask, advantages, **policies)[0]


@provider("fused_grpo_loss", "trl")
@from_log_probs
def trl(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    head = hidden.flatten(0, 1), weight, None, ids.flatten()
    return ChunkedLogProbFunction.apply(*head, 1.0, 32768, None, 1.0, ("log_probs",))[0].view_as(ids)


@provider("fused_grpo_loss", "liger_trainer", retain_logits_memory="4GiB")
@provider("fused_grpo_loss", "liger_trainer")
@from_log_probs
def ours(hidden: Tensor, weight: Tensor, ids: Tensor, retain_logits_memory: str | None = None) -> Tensor:
    """`LigerGRPOTrainer`'s way: TRL's formula on log-probabilities that are computed without building the logits."""
    from liger_trainer.configs.kernel_config import parse_bytes
    from liger_trainer.functional import linear_log_probs

    retained = None if retain_logits_memory is None else parse_bytes(retain_logits_memory)
    log_probs = linear_log_probs(hidden, weight, ids, retain_memory=retained)
    assert isinstance(log_probs, Tensor)  # no outputs were asked for
    return log_probs


@provider("fused_grpo_loss", "liger_trainer LigerFusedLinearGRPOLoss")
def fused(
    hidden: Tensor,
    weight: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
) -> Tensor:
    """The loss for custom training loops: gradients are computed in the forward pass, without recomputing logits."""
    from liger_trainer.losses import LigerFusedLinearGRPOLoss

    policies = {"old_per_token_logps": old_log_probs, "ref_per_token_logps": ref_log_probs}
    grpo = LigerFusedLinearGRPOLoss()
    return grpo(hidden, weight, completion_ids, completion_mask, advantages, **policies)[0]
