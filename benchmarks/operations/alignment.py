"""Losses of alignment: DPO and GRPO over LM heads, and GRPO on given logits."""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from liger_trainer import functional
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations import head
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, reference, wide
from liger_trainer.configs.kernel_config import parse_bytes

exact_log_probs = partial(head.exact_log_probs, size=1)  # with the logits of one sequence at a time


def our_log_probs(hidden: Tensor, weight: Tensor, target: Tensor, retain_logits_memory: str | None = None) -> Any:
    """The trainers' way: TRL's formula on log-probabilities that are computed without building the logits."""
    retained = None if retain_logits_memory is None else parse_bytes(retain_logits_memory)
    return functional.linear_log_probs(hidden, weight, target, retain_memory=retained)


def register_over_heads(
    name: str, loss_of: Callable[..., Callable[..., Tensor]], class_of: Callable[..., Callable[..., Tensor]], kind: str
) -> None:
    """The providers of a loss over heads: a formula on log-probabilities, and the class `kind` for custom loops."""
    provider(name, "torch")(loss_of(head.eager_log_probs))
    reference(name)(loss_of(exact_log_probs))
    provider(name, "liger-kernel")(class_of("liger_kernel.chunked_loss"))
    provider(name, "trl")(loss_of(head.trl_log_probs))
    provider(name, "liger_trainer")(loss_of(our_log_probs))
    provider(name, "liger_trainer", retain_logits_memory="4GiB")(loss_of(our_log_probs))
    provider(name, f"liger_trainer {kind}")(class_of("liger_trainer.losses"))


@operation(
    "dpo_loss",
    "DPO over LM heads: the loss of pairs of completions of 1024 tokens, both models' heads included",
    tokens=8192,
)
def dpo_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The head trained, and frozen; the reference differs slightly from the policy, as in training."""
    length = min(tokens // 2, 1024)
    completions = tokens // (2 * length) * 2
    hidden, matrix = data.normal(completions, length, model.hidden), head.head_weight(data, model)
    ref_hidden = hidden.detach() + data.normal(*hidden.shape, scale=0.05, grad=False)
    ref_weight = matrix.detach().clone()
    target = data.integers(model.vocab, completions, length)
    shape = f"{completions // 2} pairs×{length} H={model.hidden} V={model.vocab}"
    for variant, weight in head.trained_and_frozen(matrix):
        heads = ((hidden.flatten(0, 1), weight), (ref_hidden.flatten(0, 1), ref_weight))
        arguments = {"hidden": hidden, "weight": weight, "target": target}
        arguments |= {"ref_hidden": ref_hidden, "ref_weight": ref_weight}
        yield Case(arguments, shape, Floor(matmuls=head.matmuls(*heads)), variant=variant)


def dpo_of(log_probs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """DPO's loss with TRL's default beta, from both models' `log_probs(hidden, weight, target, **settings)`."""

    def run(
        hidden: Tensor, weight: Tensor, target: Tensor, ref_hidden: Tensor, ref_weight: Tensor, **settings: Any
    ) -> Tensor:
        with torch.no_grad():
            ref = log_probs(ref_hidden, ref_weight, target, **settings).sum(-1)
        chosen, rejected = (log_probs(hidden, weight, target, **settings).sum(-1) - ref).chunk(2)
        return -logsigmoid(0.1 * (chosen - rejected)).mean()

    return run


def dpo_class_of(package: str) -> Callable[..., Tensor]:
    """The loss of a package for custom training loops: gradients are computed in the forward pass."""

    def run(hidden: Tensor, weight: Tensor, target: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensor:
        loss = importlib.import_module(package).LigerFusedLinearDPOLoss()
        # A separate tensor: Liger marks a dimension of its labels as dynamic, and on a tensor with that mark
        # torch.compile's turn would fail.
        return loss(weight, hidden, target.view_as(target), ref_input=ref_hidden, ref_weight=ref_weight)[0]

    return run


register_over_heads("dpo_loss", dpo_of, dpo_class_of, "LigerFusedLinearDPOLoss")


@operation("grpo_loss", "GRPO: the loss of each token, from given logits of the policy", tokens=8192)
def grpo_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Completions of up to 1024 tokens with logits for one more position; the old policy differs slightly."""
    length = min(tokens, 1024)
    samples, size = tokens // length, tokens * model.vocab
    logits = data.normal(samples, length + 1, model.vocab, scale=3.0)
    ids = data.integers(model.vocab, samples, length)
    with torch.no_grad():
        now = torch.stack([log_probs_of_logits(row, row_ids) for row, row_ids in zip(logits, ids)])
    old, ref = (now + data.normal(samples, length, scale=0.1, grad=False, dtype=now.dtype) for _ in range(2))
    advantages = data.normal(samples, grad=False, dtype=now.dtype)
    arguments = {"logits": logits, "old_log_probs": old, "ref_log_probs": ref}
    arguments |= {"completion_ids": ids, "advantages": advantages}
    upstream = (data.upstream(samples, length, dtype=torch.float32),)
    yield Case(arguments, f"{samples}×{length}×{model.vocab}", Floor(size, 2 * size), upstream)


def log_probs_of_logits(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens of one sample or of several."""
    return wide(logits[..., :-1, :]).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def policy_loss(now: Tensor, old: Tensor, ref: Tensor, advantages: Tensor) -> Tensor:
    """Clipped policy loss and KL penalty of each token, with TRL's usual constants."""
    ratio = torch.exp(now - old)
    policy = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return 0.04 * (torch.exp(ref - now) - (ref - now) - 1) - policy


@provider("grpo_loss", "torch")
def eager_grpo(
    logits: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, completion_ids: Tensor, advantages: Tensor
) -> Tensor:
    return policy_loss(log_probs_of_logits(logits, completion_ids), old_log_probs, ref_log_probs, advantages)


reference("grpo_loss")(partial(head.in_parts, eager_grpo, size=1))


@provider("grpo_loss", "liger-kernel")
def liger_grpo(**arguments: Tensor) -> Tensor:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    return triton_grpo_loss(*arguments.values(), temperature=1.0, beta=0.04, eps_low=0.2, eps_high=0.2)[0]


@provider("grpo_loss", "liger_trainer", inplace_backward=True)
@provider("grpo_loss", "liger_trainer")
def our_grpo(**arguments: Any) -> Tensor:
    return functional.grpo_loss(**arguments, beta=0.04, reduction="none").loss


@operation(
    "fused_grpo_loss",
    "GRPO over an LM head: DAPO's loss of completions of 1024 tokens, 900 of which count, with a KL penalty",
)
def fused_grpo_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The head trained, and frozen; old and reference policy differ slightly, and their log-probabilities are given."""
    length = min(tokens // 2, 1024)
    samples = tokens // length
    hidden, matrix = data.normal(samples, length, model.hidden), head.head_weight(data, model)
    ids = data.integers(model.vocab, samples, length)
    mask = (torch.arange(length, device=ids.device) < length * 900 // 1024).expand(samples, length)
    with torch.no_grad():
        now = exact_log_probs(hidden, matrix, ids)
    old, ref = (now + data.normal(samples, length, scale=0.1, grad=False, dtype=now.dtype) for _ in range(2))
    advantages = data.normal(samples, grad=False, dtype=now.dtype)
    rollout = {"completion_ids": ids, "completion_mask": mask, "advantages": advantages}
    policies = {"old_log_probs": old, "ref_log_probs": ref}
    shape = f"{samples}×{length} H={model.hidden} V={model.vocab}"
    for variant, weight in head.trained_and_frozen(matrix):
        floor = Floor(matmuls=head.matmuls((hidden.flatten(0, 1), weight)))
        yield Case({"hidden": hidden, "weight": weight, **rollout, **policies}, shape, floor, variant=variant)


def grpo_of(log_probs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The mean loss over the tokens of the mask, from `log_probs(hidden, weight, ids, **settings)`."""

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
        losses = policy_loss(now, old_log_probs, ref_log_probs, advantages)
        return (losses * completion_mask).sum() / completion_mask.sum()

    return run


def grpo_class_of(package: str) -> Callable[..., Tensor]:
    """The loss of a package for custom training loops: gradients are computed in the forward pass."""

    def run(old_log_probs: Tensor, ref_log_probs: Tensor, **rollout: Tensor) -> Tensor:
        loss = importlib.import_module(package).LigerFusedLinearGRPOLoss()
        policies = {"old_per_token_logps": old_log_probs, "ref_per_token_logps": ref_log_probs}
        return loss(*rollout.values(), **policies)[0]  # the hidden states, the head, ids, mask and advantages

    return run


register_over_heads("fused_grpo_loss", grpo_of, grpo_class_of, "LigerFusedLinearGRPOLoss")
