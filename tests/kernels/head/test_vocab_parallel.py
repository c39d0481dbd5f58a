"""Rows whose vocabulary is split: the shards of one process against the whole vocabulary, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.head.cross_entropy import cross_entropy_reference
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs_reference
from liger_trainer.kernels.head.loss_options import LossOptions
from liger_trainer.kernels.head.token_statistics import Shard, combine
from liger_trainer.parallel import vocab_parallel

IGNORE = -100
TOKENS, HIDDEN, VOCAB = 9, 5, 14


def _logits(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    target[::4] = IGNORE
    return logits.requires_grad_(), target


@given(
    cuts=st.lists(st.integers(1, VOCAB - 1), max_size=3, unique=True),
    smoothing=st.sampled_from([0.0, 0.2]),
    z_loss=st.sampled_from([0.0, 0.1]),
    softcap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, -0.5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_shards_of_any_sizes_give_the_whole_vocabularys_loss_and_gradient(
    cuts: list[int], smoothing: float, z_loss: float, softcap: float | None, scale: float, seed: int
) -> None:
    logits, target = _logits(seed)
    bounds = [0, *sorted(cuts), VOCAB]
    parts = [logits[:, start:stop] for start, stop in itertools.pairwise(bounds)]
    shards = [Shard(start, VOCAB) for start in bounds[:-1]]
    options = LossOptions(IGNORE, smoothing, z_loss, softcap, scale, 0.8)
    with torch.no_grad():
        partials = [vocab_parallel.logits_partials(part, target, options, shard) for part, shard in zip(parts, shards)]
        stats, extra = combine(torch.stack(partials), target, options, shards[0], VOCAB, None)
    outputs = ("predicted_tokens", "entropy", "token_nll")
    chosen = {"softcap": softcap, "logit_scale": scale, "temperature": 0.8}
    exact = cross_entropy_reference(
        logits, target, reduction="none", label_smoothing=smoothing, z_loss=z_loss, outputs=outputs, **chosen
    )
    for mine, truth in zip(stats, (exact.loss, exact.token_nll, None, exact.entropy, exact.predicted_tokens)):
        if truth is not None:
            torch.testing.assert_close(mine, truth)
    named = linear_log_probs_reference(
        logits.detach(),
        torch.eye(VOCAB, dtype=torch.float64),
        target,
        outputs=("mean_logit", "sum_squared_probs"),
        **chosen,
    )
    torch.testing.assert_close(extra.mean_logit, named.mean_logit)
    torch.testing.assert_close(extra.sum_squared_probs, named.sum_squared_probs)
    upstream = torch.linspace(-1.0, 2.0, TOKENS, dtype=torch.float64)
    attached = [
        vocab_parallel.attach_logits(stats.loss, part, target, stats.nll, stats.lse, options, shard)
        for part, shard in zip(parts, shards)
    ]
    gradients = [torch.autograd.grad(loss, part, upstream)[0] for loss, part in zip(attached, parts)]
    torch.testing.assert_close(torch.cat(gradients, -1), torch.autograd.grad(exact.loss, logits, upstream)[0])


def test_a_label_in_no_shard_is_nan_and_ties_take_the_lowest_id() -> None:
    logits, target = torch.zeros(3, 4), torch.tensor([9, 1, IGNORE])
    options = LossOptions(IGNORE, 0.0, 0.0, None, 1.0, 1.0)
    partials = [vocab_parallel.logits_partials(logits, target, options, Shard(start, 8)) for start in (0, 4)]
    stats, _ = combine(torch.stack(partials), target, options, Shard(0, 8), 8, None)
    assert stats.loss.isnan().tolist() == [True, False, False]
    assert stats.predicted.tolist() == [0, 0, -1]


def test_confident_tokens_keep_their_digits() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 5] = 24.0
    options = LossOptions(IGNORE, 0.0, 0.0, None, 1.0, 1.0)
    target = torch.tensor([5])
    partials = [vocab_parallel.logits_partials(logits[:, s : s + 4], target, options, Shard(s, 8)) for s in (0, 4)]
    stats, _ = combine(torch.stack(partials), target, options, Shard(0, 8), 8, None)
    exact = cross_entropy_reference(logits.double(), target)
    torch.testing.assert_close(stats.nll[0].double(), exact, rtol=1e-5, atol=0.0)


def test_operators_pass_opcheck() -> None:
    logits, target = (torch.randn(TOKENS, 64), _logits()[1])
    options, shard = (IGNORE, 0.1, 0.1, 5.0, 1.0, 1.0), (3, 70)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(64, HIDDEN)
    torch.library.opcheck(
        vocab_parallel.linear_partials.custom, (hidden, weight, target, None, *options, 1024, 3, *shard)
    )
    torch.library.opcheck(vocab_parallel.logits_partials.custom, (logits, target, *options, *shard))
    some = torch.rand(TOKENS)
    leaf = logits.clone().requires_grad_()
    torch.library.opcheck(vocab_parallel.attach_logits.custom, (some, leaf, target, some, some, *options, *shard))


def test_double_backward_is_refused() -> None:
    logits, target = _logits()
    some = torch.rand(TOKENS, dtype=torch.float64)
    options = LossOptions(IGNORE, 0.0, 0.0, None, 1.0, 1.0)
    loss = vocab_parallel.attach_logits(some, logits, target, some, some, options, Shard(0, VOCAB))
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss.sum(), logits, create_graph=True)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vocab_parallel_cross_entropy", (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))),
        ("vocab_parallel_linear_log_probs", (torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))),
    ],
)
def test_without_a_process_group_it_says_what_to_do(name: str, arguments: Any) -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        getattr(vocab_parallel, name)(*arguments)
