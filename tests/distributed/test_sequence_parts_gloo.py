"""Attention whose tokens are spread over four gloo processes, or two of them: values and gradients of one process.

Context parallelism gathers keys, and sequence parallelism exchanges heads.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist

from liger_trainer.kernels.attention.attention import attention, attention_reference
from liger_trainer.kernels.attention.plan import AttentionPlan, Ranks
from liger_trainer.parallel.sequence_parts import SequenceHeads, SequenceParts, columns_of, gathered_columns

RANKS = 4
LENGTH, HEADS, KEY_HEADS, COLUMNS, VALUE_COLUMNS = 48, 4, 2, 8, 6

ROWS = {
    "whole": [[0], [0]],
    "documents": [[0, 5, 22, 23, 36, 47], [0, 12, 24, 40]],
    "padding on the right": [[0, 31], [0]],
    "padding on the left": [[0, 7, 17], [0]],
    "one row": [[0, 30]],
}


def _groups(option: str = "cp_size") -> dict[int, Ranks]:
    """All four processes, and each two of them that have the same rows."""
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    rank = dist.get_rank()
    return {
        4: Ranks(rank, 4, dist.group.WORLD.group_name, option),  # type: ignore[union-attr]
        2: Ranks(rank % 2, 2, pairs[rank // 2].group_name, option),
    }


def _plan_of_all(begins: list[list[int]], window: int, chunk: int) -> AttentionPlan:
    """The plan of one process with whole rows."""
    offsets = [0]
    for row, firsts in enumerate(begins):
        for first, behind in itertools.pairwise((*firsts, LENGTH)):
            cuts = range(first + chunk, behind, chunk) if chunk else ()
            offsets += [row * LENGTH + end for end in (*cuts, behind)]
    longest = max(b - a for a, b in itertools.pairwise(offsets))
    return AttentionPlan(window, torch.tensor(offsets, dtype=torch.int32), longest)


def _compare(
    rank: int,
    rows: str,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
    option: str = "cp_size",
) -> None:
    begins = ROWS[rows]
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    q, k = draw(len(begins), LENGTH, HEADS, COLUMNS), draw(len(begins), LENGTH, KEY_HEADS, COLUMNS)
    v, d_out = draw(len(begins), LENGTH, KEY_HEADS, VALUE_COLUMNS), draw(len(begins), LENGTH, HEADS, VALUE_COLUMNS)
    sinks = draw(HEADS)
    inputs = [q, k, v, sinks]
    options = {"softcap": softcap, "sinks": sinks}
    whole = attention_reference(q, k, v, plan=_plan_of_all(begins, window, chunk), **options)
    expected = torch.autograd.grad(whole, inputs, d_out)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    spread = SequenceParts if option == "cp_size" else SequenceHeads
    for ranks in _groups(option).values():  # four, of which each two share a head of keys that they exchange
        here = columns_of(ranks, LENGTH)
        parts = spread(ranks, begins, LENGTH, torch.device("cpu"))
        mine = [x[:, here].detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        mine = [x.requires_grad_() for x in (*mine, sinks.detach().clone())]
        out = attention(*mine[:3], plan=parts.plan(window, chunk), softcap=softcap, sinks=mine[3])
        torch.testing.assert_close(out, whole[:, here], rtol=0, atol=tolerance)
        found = list(torch.autograd.grad(out, mine, d_out[:, here]))
        dist.all_reduce(found[3])
        found[3] *= ranks.ranks / RANKS  # each group has summed its own queries
        wanted = [*(each[:, here] for each in expected[:3]), expected[3]]
        for name, one, other in zip(("q", "k", "v", "sinks"), found, wanted):
            torch.testing.assert_close(one, other, rtol=0, atol=4 * tolerance, msg=lambda text, n=name: f"{n}: {text}")


def _bf16(rank: int) -> None:
    """Gradients of keys are added in fp32: next to their sum, each rounded to bf16, they would lose their parts."""
    from liger_trainer.kernels.attention.gathered_keys import gathered_keys

    k = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    v = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    ranks = _groups()[4]
    keys, values = gathered_keys(k, v, 4, ranks.group)
    assert keys.shape == (1, 4, 1, 2)
    assert values.shape == (1, 4, 1, 1)
    # 1 + 3 * 2^-9, rounded once to 8 bits, is 1 + 2^-7; sums in bf16 would stay at 1.
    share = 1.0 if rank == 0 else 2.0**-9
    (keys * share).sum().backward()
    assert k.grad is not None
    assert k.grad.flatten().tolist() == [1 + 2.0**-7] * 2


def _statistics(rank: int, option: str = "cp_size") -> None:
    """The mean over all processes of a gradient through whole rows, of each process's part, is that of one process."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(3, 2, LENGTH, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(scores.tanh().sum(-1)).square().sum()

    expected = torch.autograd.grad(loss(rows @ weight), weight)
    for ranks in _groups(option).values():
        part = rows[:, :, columns_of(ranks, LENGTH)] @ weight
        whole = gathered_columns(part, ranks)
        torch.testing.assert_close(whole, rows @ weight, rtol=0, atol=1e-12)
        (gradient,) = torch.autograd.grad(loss(whole), weight)
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient / RANKS, expected[0], rtol=1e-12, atol=1e-12)


CASES = {
    **{f"{rows}, all keys": partial(_compare, rows=rows) for rows in ROWS},
    **{f"{rows}, windows of {size}": partial(_compare, rows=rows, window=size) for rows in ROWS for size in (1, 7, 15)},
    "documents, chunks": partial(_compare, rows="documents", chunk=9),
    "whole, chunks": partial(_compare, rows="whole", chunk=11),
    "documents, soft-cap": partial(_compare, rows="documents", softcap=2.0),
    "documents, windows, fp32": partial(_compare, rows="documents", window=7, dtype=torch.float32),
    **{f"{rows}, heads": partial(_compare, rows=rows, option="sp_size") for rows in ROWS},
    "documents, heads, windows": partial(_compare, rows="documents", window=7, option="sp_size"),
    "documents, heads, chunks": partial(_compare, rows="documents", chunk=9, option="sp_size"),
    "documents, heads, soft-cap": partial(_compare, rows="documents", softcap=2.0, option="sp_size"),
    "sums in fp32": _bf16,
    "statistics of whole rows": _statistics,
    "statistics of whole rows, one part each": partial(_statistics, option="sp_size"),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_attend_as_the_whole(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
