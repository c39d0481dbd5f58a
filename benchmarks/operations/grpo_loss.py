"""GRPO: the loss of each token, from given logits of the policy."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.heads import in_parts
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, reference, wide


@operation("grpo_loss", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Completions of up to 1024 tokens with logits for one more position; the old policy differs slightly."""
    length = min(tokens, 1024)
    samples = tokens // length
    logits = data.normal(samples, length + 1, model.vocab, scale=3.0)
    ids = data.integers(model.vocab, samples, length)
    with torch.no_grad():
        now = torch.stack([log_probs(row, tokens) for row, tokens in zip(logits, ids)])
    old, ref = (now + data.normal(samples, length, scale=0.1, grad=False, dtype=now.dtype) for _ in range(2))
    size = tokens * model.vocab
    yield Case(
        {
            "logits": logits,
            "old_log_probs": old,
            "ref_log_probs": ref,
            "completion_ids": ids,
            "advantages": data.normal(samples, grad=False, dtype=now.dtype),
        },
        f"{samples}×{length}×{model.vocab}",
        Floor(size, 2 * size),
        (data.upstream(samples, length, dtype=torch.float32),),
    )


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of one sample's tokens."""
    return wide(logits[:-1]).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def loss(now: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
    """Clipped policy loss and KL penalty of each token, with TRL's usual constants."""
    ratio = torch.exp(now - old)
    policy = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return 0.04 * (torch.exp(ref - now) - (ref - now) - 1) - policy


@provider("grpo_loss", "torch")
def eager(
    logits: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, completion_ids: Tensor, advantages: Tensor
) -> Tensor:
    now = wide(logits[:, :-1]).log_softmax(-1).gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)
    return loss(now, old_log_probs, ref_log_probs, advantages[:, None])


@reference("grpo_loss")
def exact(
    logits: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, completion_ids: Tensor, advantages: Tensor
) -> Tensor:
    arguments = logits, old_log_probs, ref_log_probs, completion_ids, advantages
    return in_parts(eager, *arguments, size=1)


@provider("grpo_loss", "liger-kernel")
def liger(
    logits: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, completion_ids: Tensor, advantages: Tensor
) -> Tensor:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    arguments = logits, old_log_probs, ref_log_probs, completion_ids, advantages
    return triton_grpo_loss(*arguments, temperature=1.0, beta=0.04, eps_low=0.2, eps_high=0.2)[0]


@provider("grpo_loss", "liger_trainer", inplace_backward=True)
@provider("grpo_loss", "liger_trainer")
def ours(
    logits: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor,
    completion_ids: Tensor,
    advantages: Tensor,
    inplace_backward: bool = False,
) -> Tensor:
    from liger_trainer.functional import grpo_loss

    return grpo_loss(
        logits,
        completion_ids,
        advantages,
        old_log_probs=old_log_probs,
        ref_log_probs=ref_log_probs,
        beta=0.04,
        reduction="none",
        inplace_backward=inplace_backward,
    ).loss
