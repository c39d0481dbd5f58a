"""Losses of alignment over a head on a GPU: exactness, no synchronisation, CUDA graphs, peak memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from liger_trainer import losses
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs_reference
from tests.device import assert_no_host_sync, captured, peak_memory

pytestmark = pytest.mark.gpu

IGNORE = -100
MIB = 2**20


class Case:
    """Completions of several lengths, a head, and a reference that is a little off the policy."""

    def __init__(self, batch: int, length: int, size: int, vocab: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        make: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
        self.hidden = torch.randn(batch, length, size, **make).requires_grad_()
        self.weight = (torch.randn(vocab, size, **make) * (3.0 / size**0.5)).requires_grad_()
        self.ref_hidden = self.hidden.detach() + 0.05 * torch.randn(batch, length, size, **make)
        self.ref_weight = self.weight.detach().clone()
        self.target = torch.randint(0, vocab, (batch, length), generator=generator, device="cuda")
        lengths = torch.linspace(length, length // 2, batch, device="cuda").long()
        self.target[torch.arange(length, device="cuda") >= lengths.unsqueeze(-1)] = IGNORE
        self.ids, self.mask = self.target.clamp(min=0), (self.target != IGNORE).long()
        self.numbers = torch.linspace(-1.0, 2.0, batch, device="cuda")
        # Off the policy by as much as clips a part of the ratios.
        log_probs = linear_log_probs_reference(self.hidden.detach(), self.ref_weight, self.target)
        assert isinstance(log_probs, torch.Tensor)
        self.old = log_probs + 0.2 * torch.randn(log_probs.shape, generator=generator, device="cuda")

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [leaf for leaf in (self.hidden, self.weight) if leaf.requires_grad]


Loss = Callable[..., torch.Tensor]


def _dpo(case: Case, **options: Any) -> torch.Tensor:
    loss = losses.LigerFusedLinearDPOLoss(beta=0.02, compute_nll_loss=True, **options)
    return loss(case.weight, case.hidden, case.target, ref_input=case.ref_hidden, ref_weight=case.ref_weight)[0]


def _aot(case: Case, **options: Any) -> torch.Tensor:
    return _dpo(case, loss_type="aot_unpaired", **options)


def _orpo(case: Case, **options: Any) -> torch.Tensor:
    return losses.LigerFusedLinearORPOLoss(**options)(case.weight, case.hidden, case.target, nll_target=case.ids)[0]


def _simpo(case: Case, **options: Any) -> torch.Tensor:
    return losses.LigerFusedLinearSimPOLoss(**options)(case.weight, case.hidden, case.target)[0]


def _kto(case: Case, **options: Any) -> torch.Tensor:
    loss = losses.LigerFusedLinearKTOLoss(beta=0.02, use_ref_model=True, **options)
    reference = {"ref_input": case.ref_hidden, "ref_weight": case.ref_weight, "kl": case.numbers.abs().mean()}
    return loss(case.hidden, case.weight, case.target, preference_labels=case.numbers > 0, **reference)[0]


def _grpo(case: Case, **options: Any) -> torch.Tensor:
    loss = losses.LigerFusedLinearGRPOLoss(**options)
    policies = {"ref_per_token_logps": case.old, "old_per_token_logps": case.old}
    return loss(case.hidden, case.weight, case.ids, case.mask, case.numbers, **policies)[0]


def _gspo(case: Case, **options: Any) -> torch.Tensor:
    return _grpo(case, loss_type="grpo", importance_sampling_level="sequence", **options)


EVERY: list[Loss] = [_dpo, _aot, _orpo, _simpo, _kto, _grpo, _gspo]


@pytest.mark.parametrize("memory", [1 * MIB, 4 * MIB, 512 * MIB], ids=["none-fits", "one-pair", "everything"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("loss", EVERY)
def test_nothing_synchronises(loss: Loss, trained: bool, memory: int) -> None:
    case = Case(6, 200, 256, 5003)  # a pair's logits take 3.9 MiB
    case.weight.requires_grad_(trained)

    def step() -> None:
        torch.autograd.grad(loss(case, logits_memory=memory), case.leaves)

    assert_no_host_sync(step)


@pytest.mark.parametrize("loss", EVERY)
def test_cuda_graph_replays_on_new_inputs(loss: Loss) -> None:
    case = Case(4, 128, 256, 5000)

    def step() -> torch.Tensor:
        value = loss(case, logits_memory=3 * MIB)
        gradients = torch.autograd.grad(value, case.leaves)
        return torch.stack([value.detach(), *(gradient.float().norm() for gradient in gradients)])

    graph, results = captured(step)
    with torch.no_grad():
        case.hidden.mul_(0.9)
    graph.replay()
    torch.testing.assert_close(results, step())


def _eager_pairs(case: Case, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """DPO with its negative log-likelihood, `_dpo`, from all logits."""

    def completions(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        log_probs = linear_log_probs_reference(hidden, weight, case.target)
        assert isinstance(log_probs, torch.Tensor)
        return log_probs

    with torch.no_grad():
        ref = completions(case.ref_hidden.to(hidden.dtype), case.ref_weight.to(hidden.dtype)).sum(-1)
    policy = completions(hidden, weight)
    chosen, rejected = (policy.sum(-1) - ref).chunk(2)
    pairs = len(chosen)
    nll = -policy[:pairs].sum() / case.mask[:pairs].sum()
    return -torch.nn.functional.logsigmoid(0.02 * (chosen - rejected)).mean() + nll


def _eager_policy(case: Case, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """DAPO with its penalty, `_grpo`, from all logits."""
    now = linear_log_probs_reference(hidden, weight, case.target)
    assert isinstance(now, torch.Tensor)
    old, advantages = case.old.to(now.dtype), case.numbers.to(now.dtype).unsqueeze(-1)
    ratio, apart = (now - old).exp(), old - now
    policy = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((0.04 * (apart.exp() - apart - 1.0) - policy) * case.mask).sum() / case.mask.sum()


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("loss", "eager"), [(_dpo, _eager_pairs), (_grpo, _eager_policy)])
def test_gradients_are_no_further_from_float64_than_eager_bf16(loss: Loss, eager: Any, trained: bool) -> None:
    case = Case(6, 256, 1024, 128256)
    case.weight.requires_grad_(trained)
    doubles = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in (case.hidden, case.weight)]
    truth = torch.autograd.grad(eager(case, *doubles), [leaf for leaf in doubles if leaf.requires_grad])
    theirs = torch.autograd.grad(eager(case, case.hidden, case.weight), case.leaves)
    for memory in (128 * MIB, 512 * MIB):  # a pair takes 125 MiB
        ours = torch.autograd.grad(loss(case, logits_memory=memory), case.leaves)
        for mine, other, exact in zip(ours, theirs, truth):
            errors = [float((gradient.double() - exact).norm() / exact.norm()) for gradient in (mine, other)]
            assert errors[0] <= 1.1 * errors[1]


@pytest.mark.parametrize("loss", [_dpo, _grpo])
def test_peak_memory_is_one_chunk_and_the_gradients(loss: Loss) -> None:
    case = Case(8, 1024, 1024, 128256)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss(case, logits_memory=512 * MIB), case.leaves)

    row, d_hidden, d_weight = 2 * 128256, 2 * case.hidden.numel(), 2 * case.weight.numel()
    # 2048 tokens' logits, dX, dW with the exponents of its sum, and for pairs the hidden states in their order.
    assert peak_memory(step) <= 2048 * row + 2 * d_hidden + d_weight * 65 // 64 + 8 * MIB
