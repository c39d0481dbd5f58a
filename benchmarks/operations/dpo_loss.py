"""DPO over LM heads: the loss of pairs of completions of 1024 tokens, both models' heads included."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_trainer.benchmarks.heads import head_logits, in_parts, matmuls
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, reference


@operation("dpo_loss", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The head trained, and frozen; the reference is a little off the policy, as it is in training."""
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
    """Of each completion."""
    logits = head_logits(hidden, weight)
    return (logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)).sum(-1)


def loss(policy: Tensor, ref: Tensor) -> Tensor:
    """DPO with TRL's usual beta, of the completions' log-probabilities."""
    chosen, rejected = (policy - ref).chunk(2)
    return -logsigmoid(0.1 * (chosen - rejected)).mean()


@provider("dpo_loss", "torch")
def eager(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        ref = log_probs(ref_hidden, target, ref_weight)
    return loss(log_probs(hidden, target, weight), ref)


@reference("dpo_loss")
def exact(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        ref = in_parts(log_probs, ref_hidden, target, size=1, weight=ref_weight)
    return loss(in_parts(log_probs, hidden, target, size=1, weight=weight), ref)


@provider("dpo_loss", "liger-kernel")
def liger(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

    # A tensor of its own: Liger marks a dimension of its labels as dynamic, which stays with the tensor, and
    # torch.compile's turn would fail on it.
    labels = target.view_as(target)
    return LigerFusedLinearDPOLoss()(weight, hidden, labels, ref_input=ref_hidden, ref_weight=ref_weight)[0]


@provider("dpo_loss", "trl")
def trl(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, target: Tensor) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def completions(hidden: Tensor, weight: Tensor) -> Tensor:
        head = hidden.flatten(0, 1), weight, None, target.flatten()
        return ChunkedLogProbFunction.apply(*head, 1.0, 32768, None, 1.0, ("log_probs",))[0].view_as(target).sum(-1)

    with torch.no_grad():
        ref = completions(ref_hidden, ref_weight)
    return loss(completions(hidden, weight), ref)


@provider("dpo_loss", "liger_trainer", retain_logits_memory="4GiB")
@provider("dpo_loss", "liger_trainer")
def ours(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    target: Tensor,
    retain_logits_memory: str | None = None,
) -> Tensor:
    """What `LigerDPOTrainer` runs: TRL's formula on log-probabilities that are computed without logits."""
    from liger_trainer.configs.kernel_config import parse_bytes
    from liger_trainer.functional import linear_log_probs

    with torch.no_grad():
        ref = linear_log_probs(ref_hidden, ref_weight, target).sum(-1)
    kept = None if retain_logits_memory is None else parse_bytes(retain_logits_memory)
    return loss(linear_log_probs(hidden, weight, target, retain_memory=kept).sum(-1), ref)


@provider("dpo_loss", "liger_trainer LigerFusedLinearDPOLoss")
def fused(hidden: Tensor, weight: Tensor, ref_hidden: Tensor, ref_weight: Tensor, target: Tensor) -> Tensor:
    """The loss for training loops of one's own: gradients in the forward, no logits computed again."""
    from liger_trainer.losses import LigerFusedLinearDPOLoss

    dpo = LigerFusedLinearDPOLoss()
    return dpo(weight, hidden, target, ref_input=ref_hidden, ref_weight=ref_weight)[0]
