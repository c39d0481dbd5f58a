"""Two gloo processes with half of the vocabulary each get the losses and gradients of one with all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.two_processes import WORLD

TOKENS, HIDDEN = 11, 6
IGNORE = -100
ROW = 64 * 8  # bytes of a padded row of float64 logits


def _case(vocab: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, HIDDEN), (vocab, HIDDEN), (vocab,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    target = torch.randint(0, vocab, (TOKENS,), generator=generator)
    target[::4] = IGNORE
    return (*tensors, target)


def _bounds(rank: int, vocab: int) -> slice:
    size = -(-vocab // WORLD)
    return slice(rank * size, min(vocab, (rank + 1) * size))


def _shard(tensor: torch.Tensor, rank: int, vocab: int) -> torch.Tensor:
    return tensor.detach()[_bounds(rank, vocab)].clone().requires_grad_()


def _check_linear(rank: int, vocab: int, names: tuple[str, str], compiled: bool, **options: Any) -> None:
    from liger_trainer import functional

    hidden, weight, bias, target = _case(vocab)
    inputs = [hidden.detach().clone().requires_grad_(), _shard(weight, rank, vocab), _shard(bias, rank, vocab)]
    options["outputs"] = ("entropy",)
    budgets = {"logits_memory": 3 * ROW, "retain_memory": 4 * ROW, "vocab_size": vocab}

    def step(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        ours = getattr(functional, names[0])
        return ours(hidden * 2.0, weight, target, None, bias, **options, **budgets)

    if compiled:
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours = step(*inputs)
    exact = getattr(functional, names[1])(hidden * 2.0, weight, target, bias, **options)
    main = "log_probs" if "log_probs" in names[1] else "loss"
    for name in (main, "entropy"):
        torch.testing.assert_close(getattr(ours, name), getattr(exact, name))

    def loss(result: Any) -> torch.Tensor:
        value = getattr(result, main)
        value = (value * torch.linspace(0.5, 2.0, max(value.numel(), 1)).view(value.shape)).sum()
        return value + result.entropy.square().sum() if result.entropy.requires_grad else value

    expected = torch.autograd.grad(loss(exact), (hidden, weight, bias))
    expected = (expected[0], *(gradient[_bounds(rank, vocab)] for gradient in expected[1:]))
    for last in (False, True):
        torch.testing.assert_close(torch.autograd.grad(loss(ours), inputs, retain_graph=not last), expected)


def _check_logits(rank: int, vocab: int, compiled: bool, **options: Any) -> None:
    from liger_trainer.functional import cross_entropy, vocab_parallel_cross_entropy

    hidden, weight, _, target = _case(vocab)
    logits = (hidden @ weight.t()).detach().requires_grad_()
    mine = logits.detach()[:, _bounds(rank, vocab)].clone().requires_grad_()

    def step(mine: torch.Tensor) -> Any:
        return vocab_parallel_cross_entropy(mine, target, vocab_size=vocab, **options)

    ours = (torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step)(mine)
    exact = cross_entropy(logits, target, **options)
    torch.testing.assert_close(ours, exact)
    (gradient,) = torch.autograd.grad(ours.sum(), mine)
    (expected,) = torch.autograd.grad(exact.sum(), logits)
    torch.testing.assert_close(gradient, expected[:, _bounds(rank, vocab)])


def _check_module(rank: int) -> None:
    from liger_trainer.nn import LigerVocabParallelCrossEntropy

    hidden, weight, _, target = _case(20)
    logits = (hidden @ weight.t()).detach().view(TOKENS, 1, 20)
    mine = logits[..., _bounds(rank, 20)].clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    labels = target.view(TOKENS, 1)
    for formula in ("pytorch", "megatron"):
        for mode in ("global", "partition"):
            module = LigerVocabParallelCrossEntropy(
                label_smoothing=0.1, label_smoothing_formula=formula, label_smoothing_mode=mode
            )
            loss = module(mine, labels, dist.group.WORLD)
            part = log_probs if mode == "global" else log_probs[..., _bounds(rank, 20)]
            smoothing = 0.1 if formula == "pytorch" else 0.1 * part.shape[-1] / (part.shape[-1] - 1)
            hard = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            expected = -(1 - smoothing) * hard - smoothing * part.mean(-1)
            torch.testing.assert_close(loss, expected.masked_fill(labels == IGNORE, 0.0))


def _check_errors(rank: int) -> None:
    from liger_trainer.functional import vocab_parallel_cross_entropy

    target = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="not within the vocabulary of 7"):
        vocab_parallel_cross_entropy(torch.zeros(2, 4), target, vocab_start=4, vocab_size=7)
    with pytest.raises(ValueError, match="smoothing_scope"):
        vocab_parallel_cross_entropy(torch.zeros(2, 4), target, smoothing_scope="local")


LOG_PROBS = ("vocab_parallel_linear_log_probs", "linear_log_probs")
CROSS_ENTROPY = ("vocab_parallel_linear_cross_entropy", "linear_cross_entropy")
EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 4.0, "temperature": 0.8}
CASES = {
    "log-probs": lambda rank: _check_linear(rank, 20, LOG_PROBS, False),
    "log-probs, uneven": lambda rank: _check_linear(rank, 19, LOG_PROBS, False, softcap=4.0, temperature=0.8),
    "log-probs, compiled": lambda rank: _check_linear(rank, 20, LOG_PROBS, True),
    "linear cross entropy": lambda rank: _check_linear(rank, 20, CROSS_ENTROPY, False, **EVERYTHING),
    "linear cross entropy, none": lambda rank: _check_linear(rank, 19, CROSS_ENTROPY, False, reduction="none"),
    "linear cross entropy, compiled": lambda rank: _check_linear(rank, 20, CROSS_ENTROPY, True, num_items=3),
    "cross entropy": lambda rank: _check_logits(rank, 20, False, **EVERYTHING),
    "cross entropy, uneven": lambda rank: _check_logits(rank, 19, False, reduction="none"),
    "cross entropy, compiled": lambda rank: _check_logits(rank, 20, True, num_items=3),
    "module": _check_module,
    "errors": _check_errors,
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
