"""Tensors with values on the host: what is computed from them is what the device computes, and nothing waits."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.head.on_host import OnHost, on_host, plain, values_of
from tests.trainers.waits import HostWaits


def ids() -> torch.Tensor:
    return torch.tensor([[5, 6, 0, 7], [8, 0, 9, 0]])


def known(tensor: torch.Tensor) -> torch.Tensor:
    return on_host(tensor, tensor.clone())


FOLLOWED = {
    "labels": lambda x: x.masked_fill(x == 0, -100),
    "targets": lambda x: F.pad(x, (0, 1), value=-100)[:, 1:],
    "columns": lambda x: x[..., 1:],
    "rows": lambda x: x[[1, 0]],
    "shuffled": lambda x: x[torch.tensor([1, 0])],
    "halves": lambda x: torch.cat(x.chunk(2), dim=1),
    "counts": lambda x: torch.stack([each.sum() for each in x.ne(0).sum(-1).split(1)]).amax(),
    "other": lambda x: ~x.bool(),
    "selected": lambda x: x.index_select(0, (x[:, 1] == 0).nonzero().view(-1)),
    "of a dtype": lambda x: x.to(torch.int32).long() * x,
    "flat": lambda x: x.flatten().view(2, 4).detach(),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_values_follow(name):
    compute, tensor = FOLLOWED[name], ids()
    found = compute(known(tensor))
    assert isinstance(found, OnHost)
    assert type(plain(found)) is torch.Tensor
    for each in (plain(found), values_of(found)):
        assert torch.equal(each, compute(tensor))
        assert each.dtype == compute(tensor).dtype


READS = {
    "a list": lambda x, _: x.tolist(),
    "a number": lambda x, _: int((x != 0).sum()),
    "a question": lambda x, _: bool((x == 0).sum() == 3),
    "places": lambda x, _: torch.nonzero(x[0], as_tuple=False).view(-1),
    "a mask": lambda x, scores: scores[x.bool()].sum(),
    "parts": lambda x, scores: [part[mask.bool()] for part, mask in zip(scores.chunk(2), x.chunk(2))],
    "bools": lambda x, scores: scores[torch.as_tensor(x == 0, dtype=torch.bool, device=x.device)],
}


@pytest.mark.parametrize("name", READS)
def test_nothing_waits(name):
    compute, tensor, scores = READS[name], ids(), torch.rand(2, 4)
    with HostWaits(tensor) as stock:
        expected = compute(tensor, scores)
    given = known(tensor)
    with HostWaits(tensor) as waits:
        found = compute(given, scores)
    torch.testing.assert_close(plain(found), expected, rtol=0, atol=0)
    assert sum(stock.found.values()) > 0
    assert not waits.found


def test_a_write_by_an_index_is_known():
    tensor = known(ids())
    labels = tensor.masked_fill(tensor == 0, -100)
    before = labels[:, 1:].sum()
    labels[:, :2] = -100
    assert values_of(labels).tolist() == plain(labels).tolist() == [[-100, -100, -100, 7], [-100, -100, 9, -100]]
    assert before.item() == 6 + 7 + 9 - 3 * 100
    assert values_of(tensor).tolist() == ids().tolist()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.zero_(),
        lambda x: plain(x).add_(1),
        lambda x: plain(x)[0].fill_(3),
        lambda x: x.__setitem__((slice(None), 0), torch.tensor(4)),
    ],
)
def test_after_another_write_the_device_is_asked(write):
    tensor = known(ids())
    half, later = tensor[:, :2], tensor.ne(0)
    write(tensor)
    assert values_of(tensor) is None
    assert values_of(half) is None
    assert tensor.tolist() == plain(tensor).tolist() != ids().tolist()
    assert torch.equal(half.nonzero(), plain(half).nonzero())
    assert values_of(later).tolist() == ids().ne(0).tolist()


def test_writes_that_nobody_counts_are_seen():
    with torch.inference_mode():
        tensor = known(ids())
        plain(tensor).zero_()
        assert tensor.tolist() == [[0] * 4] * 2


def test_with_other_tensors_it_is_a_plain_one():
    tensor, other = known(ids()), torch.ones(2, 4)
    for found in (tensor * other, torch.cat([tensor, ids()]), tensor.float(), other[tensor[0] % 2]):
        assert type(found) is torch.Tensor


def test_copies_and_files_hold_plain_tensors():
    tensor, file = known(ids()), io.BytesIO()
    torch.save({"ids": tensor}, file)
    file.seek(0)
    for found in (torch.load(file, weights_only=True)["ids"], copy.deepcopy(tensor)):
        assert torch.equal(found, ids())
    assert type(copy.deepcopy(tensor)) is torch.Tensor
