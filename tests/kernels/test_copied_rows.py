"""Copies of rows: the lists, values and gradients against torch, and the order of the sums."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels import copied_rows as module
from liger_trainer.kernels.copied_rows import copied_rows, copied_rows_reference, copies_of, sum_of_copies
from tests.accuracy import assert_as_accurate, seeded_randn
from tests.aot import TARGETS, compile_launch, recorded_launches

INDEX = (3, 0, 3, 5, 3, 0, 6, 6)  # of 8 rows, of which 1, 2, 4 and 7 have no copy


def copies_on(device, index=INDEX, rows=8):
    return copies_of(torch.tensor(index, dtype=torch.int64), rows, device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_copies_of(dtype):
    copies = copies_of(torch.tensor(INDEX, dtype=dtype), 8)
    assert copies.index.tolist() == [*INDEX]
    assert copies.order.tolist() == [1, 5, 0, 2, 4, 3, 6, 7]
    assert copies.begins.tolist() == [0, 2, 2, 2, 5, 5, 6, 8, 8]
    assert {part.dtype for part in copies} == {torch.int32}


def test_the_reference_is_indexing_in_float64():
    x = seeded_randn(8, 3, dtype=torch.float64).requires_grad_()
    assert torch.equal(copied_rows(x, copies_on("cpu")), x[list(INDEX)])
    assert torch.autograd.gradcheck(lambda x: copied_rows(x, copies_on("cpu")), x)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(8,), (8, 5), (8, 3, 700)], ids=str)
def test_is_as_accurate_as_torch(shape, dtype, device):
    """Of contiguous rows, and of slices and transposes, whose copies are contiguous."""
    x, copies = seeded_randn(*shape, dtype=dtype, device=device), copies_on(device)
    for view in (x, x.mT.contiguous().mT if x.dim() > 1 else x, torch.stack([x, x], -1)[..., 0]):
        assert torch.equal(copied_rows(view, copies), x[list(INDEX)])
        assert copied_rows(view, copies).is_contiguous()
        assert_as_accurate(copied_rows, copied_rows_reference, [view], copies=copies)


@pytest.mark.kernel
def test_each_row_is_summed_in_order_and_rounded_once(device):
    """In bf16, 256 + 1 is 256, in any order of two; in fp32, 1 is lost beside 2**25 until that has gone."""
    copies = copies_on(device, (0, 0, 0, 2, 2, 2), 3)
    d = torch.tensor([256.0, 1.0, 1.0, 2.0**25, 1.0, -(2.0**25)], dtype=torch.bfloat16, device=device)
    assert sum_of_copies(d, copies).tolist() == [258.0, 0.0, 0.0]


@pytest.mark.kernel
def test_no_copies_and_no_columns(device):
    x = torch.ones(3, 2, device=device, requires_grad=True)
    y = copied_rows(x, copies_on(device, (), 3))
    assert y.shape == (0, 2)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(3, 2, device=device))
    assert sum_of_copies(torch.ones(8, 0, device=device), copies_on(device)).shape == (8, 0)


@pytest.mark.kernel
def test_every_run_gives_the_same_bits(device):
    index = torch.randint(0, 7, (500,), generator=torch.Generator().manual_seed(0))
    d, copies = seeded_randn(500, 33, device=device), copies_on(device, index.tolist())
    first = sum_of_copies(d, copies)
    assert torch.equal(sum_of_copies(d, copies), first)
    # That is the order of the copies.
    one_by_one = torch.zeros(8, 33, device=device)
    for copy, row in enumerate(index.tolist()):
        one_by_one[row] += d[copy]
    assert torch.equal(first, one_by_one)


@pytest.mark.kernel
def test_traced_in_one_graph(device):
    x, copies = seeded_randn(8, 3, device=device).requires_grad_(), copies_on(device)
    torch.compiler.reset()
    traced = torch.compile(copied_rows, fullgraph=True, backend="aot_eager")
    gradients = [torch.autograd.grad(run(x, copies).square().sum(), x)[0] for run in (traced, copied_rows)]
    assert torch.equal(*gradients)


@pytest.mark.kernel
def test_a_second_derivative_is_refused(device):
    x = seeded_randn(8, 3, device=device).requires_grad_()
    (dx,) = torch.autograd.grad(copied_rows(x, copies_on(device)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of copied_rows cannot itself be differentiated"):
        dx.sum().backward()


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target):
    with recorded_launches() as launches:
        module._launch(torch.zeros(8, 3, 700, dtype=torch.bfloat16), *copies_of(torch.tensor(INDEX), 8)[1:])
    (launch,) = launches
    compile_launch(launch, target)
