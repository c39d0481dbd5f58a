"""Losses whose gradient is computed in the forward: against autograd, matmuls, backward protocol, memory, kernels."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.head.head_chunks import chunk_rows
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, linear_log_probs_reference
from liger_trainer.kernels.runtime import use_triton
from liger_trainer.liger.operators.linear_grouped_loss import GroupedLoss, linear_grouped_loss
from liger_trainer.losses import LigerFusedLinearDPOLoss
from tests.accuracy import as_large_as

IGNORE = -100

GROUPS, GROUP, HIDDEN, VOCAB = 4, 3, 6, 20

TOKENS = GROUPS * GROUP

ROW = 64  # columns of a row of logits, padded


def _case(dtype: torch.dtype = torch.float64, seed: int = 0, groups: int = GROUPS) -> Any:
    """Hidden states, head, bias and target; every fourth token ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((groups * GROUP, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    target = torch.randint(0, VOCAB, (groups * GROUP,), generator=generator)
    target[::4] = IGNORE
    return (*(tensor.requires_grad_() for tensor in tensors), target)


def _formula(log_probs: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Couples the tokens of a group through its sum, and gives every group a weight of its own."""
    sums = log_probs.view(-1, GROUP).sum(-1)
    factors = torch.arange(start // GROUP + 1, stop // GROUP + 1, dtype=sums.dtype, device=sums.device)
    return (factors * torch.nn.functional.softplus(-0.3 * sums)).sum() / 7.0


def _run(hidden: Any, weight: Any, bias: Any, target: Any, rows: int = GROUP, **options: Any) -> GroupedLoss:
    options = {"normalizer": torch.ones(()), "logits_memory": rows * ROW * hidden.dtype.itemsize, **options}
    return linear_grouped_loss(hidden, weight, target, _formula, GROUP, bias=bias, mean_logit=True, **options)


def _reference(hidden: Any, weight: Any, bias: Any, target: Any, temperature: float = 1.0) -> torch.Tensor:
    log_probs = linear_log_probs_reference(hidden, weight, target, bias, temperature=temperature)
    assert isinstance(log_probs, torch.Tensor)
    return _formula(log_probs, 0, len(target))


def test_saved_tensor_hooks_may_be_forbidden() -> None:
    hidden, weight, bias, target = _case()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = _run(hidden, weight, bias, target).loss
    torch.testing.assert_close(loss, _reference(hidden, weight, bias, target))


@given(
    groups=st.integers(1, 6),
    rows=st.integers(1, 20),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    temperature=st.sampled_from([1.0, 0.6]),
    upstream=st.sampled_from([1.0, -2.5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_value_and_gradients_are_those_of_autograd(
    groups: int, rows: int, trained: tuple[bool, bool, bool], temperature: float, upstream: float, seed: int
) -> None:
    *leaves, target = _case(seed=seed, groups=groups)
    for leaf, train in zip(leaves, trained):
        leaf.requires_grad_(train)
    result = _run(*leaves, target, rows=rows, temperature=temperature)
    expected = _reference(*leaves, target, temperature=temperature)
    torch.testing.assert_close(result.loss, expected)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    ours, theirs = (torch.autograd.grad(loss * upstream, wanted) for loss in (result.loss, expected))
    torch.testing.assert_close(ours, theirs)
    seen = linear_log_probs(*leaves[:2], target, leaves[2], temperature=temperature, outputs=("mean_logit",))
    torch.testing.assert_close(result.log_probs, seen.log_probs.detach())
    torch.testing.assert_close(result.mean_logit, seen.mean_logit)
    assert not result.log_probs.requires_grad
    assert not result.mean_logit.requires_grad


@pytest.mark.parametrize(
    ("trained", "rows", "matmuls"),
    [
        ((0, 1, 2), GROUP, 3),  # a group at a time
        ((0, 1), TOKENS, 3),
        ((1, 2), GROUP, 2),  # frozen hidden states: no dX
        ((0,), GROUP, 2),  # frozen head: no dW
        ((0,), 1, 2),
        ((0, 1, 2), 1, 4 - 1 / TOKENS),  # no group fits: logits are computed again, but those of the last token
        ((), GROUP, 1),
    ],
)
def test_matmuls(trained: tuple[int, ...], rows: int, matmuls: float) -> None:
    *leaves, target = _case(torch.float32)
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in trained)
    spent = 0

    def spy(function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal spent
            spent += next(size for size in (*args[-2].shape, *args[-1].shape) if size not in (HIDDEN, VOCAB))
            return function(*args, **kwargs)

        return count

    with mock.patch.object(torch, "mm", spy(torch.mm)), mock.patch.object(torch, "addmm", spy(torch.addmm)):
        loss = _run(*leaves, target, rows=rows).loss
        if trained:
            loss.backward()
    assert spent / TOKENS == pytest.approx(matmuls)
    assert all((leaf.grad is not None) == (index in trained) for index, leaf in enumerate(leaves))


@given(
    units=st.integers(1, 40),
    unit=st.integers(1, 3000),
    memory=st.integers(1, 2**28),
    trained=st.booleans(),
    vocab=st.integers(1, 50_000),
)
def test_chunks_hold_whole_units_and_the_budget(units: int, unit: int, memory: int, trained: bool, vocab: int) -> None:
    hidden = torch.empty(units * unit, 8, device="meta")  # fp32, whose dW never asks for a bigger buffer
    weight = torch.empty(vocab, 8, device="meta")
    rows = chunk_rows(hidden, weight, memory, trained, unit)
    allowed = max(1, memory // (4 * -(-vocab // ROW) * ROW))
    if unit <= 128 and allowed >= 896:  # a sixth more, for a multiple of 512
        allowed = allowed * 7 // 6
    assert rows % unit == 0
    assert rows <= max(allowed, 1)
    if rows == 0:
        assert unit > allowed or (unit < 128 <= allowed < 256)
    elif unit >= 128 and rows < units * unit:  # no more chunks than needed, and evenly filled
        chunks = -(-units * unit // rows)
        assert chunks == -(-units // (allowed // unit))
        assert rows - unit < units * unit / chunks


def test_a_pair_of_the_benchmark_fits_the_default_budget() -> None:
    hidden = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    assert chunk_rows(hidden, weight, 512 * 2**20, True, 2 * 1024) == 2048
    assert chunk_rows(hidden, weight, 2**30, True, 2 * 1024) == 4096
    assert chunk_rows(hidden[:4160], weight, 512 * 2**20, True, 2 * 1040) == 2080  # 508 MiB
    assert chunk_rows(hidden, weight, 512 * 2**20, True, 2 * 2048) == 0


def test_one_buffer_of_logits_and_no_copy_of_the_weight() -> None:
    *leaves, target = _case(torch.float32)
    made: list[tuple[int, ...]] = []
    real = torch.Tensor.new_empty

    def spy(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        made.append(tuple(size))
        return real(self, *size, **options)

    with mock.patch.object(torch.Tensor, "new_empty", spy):
        _run(*leaves, target, rows=2 * GROUP)
    assert [size for size in made if len(size) == 2] == [(2 * GROUP, ROW)]


def test_backward_protocol() -> None:
    *leaves, target = _case()
    expected = torch.autograd.grad(_reference(*leaves, target), leaves)
    loss = _run(*leaves, target).loss
    for factor in (1.0, 3.0, 0.0, 1.0):
        kept = torch.autograd.grad(loss, leaves, torch.tensor(factor).double(), retain_graph=True)
        torch.testing.assert_close(kept, tuple(factor * gradient for gradient in expected))
    last = torch.autograd.grad(loss, leaves, torch.tensor(2.0).double())
    torch.testing.assert_close(last, tuple(2.0 * gradient for gradient in expected))
    torch.testing.assert_close(kept, expected)  # what was handed out stays as it was
    with pytest.raises(RuntimeError, match="a loss over a head"):
        torch.autograd.grad(_run(*leaves, target).loss, leaves, create_graph=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    *leaves, target = _case()
    calls = mock.Mock(side_effect=_formula)

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        memory = GROUP * ROW * 8
        return linear_grouped_loss(*leaves[:2], target, calls, GROUP, torch.ones(()), leaves[2], logits_memory=memory)[
            0
        ]

    checkpoint(step, *leaves, use_reentrant=reentrant).backward()
    expected = torch.autograd.grad(_reference(*leaves, target), leaves)
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), expected)
    # Once more in the backward. The first forward of a reentrant checkpoint wants no gradient and sees all groups.
    assert calls.call_count == (1 + GROUPS if reentrant else 2 * GROUPS)


def test_inside_a_compiled_function() -> None:
    *leaves, target = _case(torch.float32)
    torch._dynamo.reset()

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        return _run(leaves[0] * 2.0, *leaves[1:], target).loss * 0.5

    loss, expected = torch.compile(step, backend="aot_eager")(*leaves), step(*leaves)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize("chunks", [1, 16])  # few chunks round dW as often as documented in `_weight_gradient`
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_eager(dtype: torch.dtype, chunks: int) -> None:
    found = []
    for seed in range(64):  # the errors of one bias's 20 numbers would be chance
        *leaves, target = _case(dtype, seed, groups=64)
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        ours = _run(*leaves, target, rows=64 // chunks * GROUP).loss
        losses = (_reference(*doubles, target), _reference(*leaves, target), ours)
        found.append([torch.autograd.grad(loss, of) for loss, of in zip(losses, (doubles, leaves, leaves))])
    for index in range(3):
        exact, eager, ours = (torch.stack([each[way][index] for each in found]).double() for way in range(3))
        errors = [float((gradient - exact).norm() / exact.norm()) for gradient in (ours, eager)]
        assert errors[0] <= as_large_as(errors[1], ours.numel(), torch.finfo(dtype).eps / 2)


def test_fp16_gradients_of_a_mean_over_many_tokens_do_not_vanish() -> None:
    hidden, weight, bias, target = _case(torch.float16)
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    normalizer = torch.tensor(2.0**20)

    def mean(log_probs: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return _formula(log_probs, start, stop) / normalizer

    loss = linear_grouped_loss(
        hidden, weight, target, mean, GROUP, normalizer, bias, logits_memory=GROUP * ROW * 2
    ).loss
    truth = torch.autograd.grad(_reference(*doubles, target), doubles)
    # A gradient scaler's factor, as fp16 needs it for what flows on from here.
    ours = torch.autograd.grad(loss, (hidden, weight, bias), normalizer)
    for mine, exact in zip(ours, truth):
        assert float((mine.double() - exact).norm() / exact.norm()) < 5e-3


def test_all_tokens_ignored() -> None:
    *leaves, target = _case()
    loss = _run(*leaves, torch.full_like(target, IGNORE)).loss
    assert loss.isfinite()
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, leaves))


def test_wrong_labels_are_an_error_on_the_cpu() -> None:
    *leaves, target = _case()
    target[1] = VOCAB
    with pytest.raises(ValueError, match=f"label {VOCAB}"):
        _run(*leaves, target)


PAIRS, LENGTH, WIDTH, CLASSES = 2, 3, 8, 70

LOGITS_ROW = 128 * 4  # bytes of an fp32 row of logits, padded to 64 columns


@pytest.mark.kernel
@pytest.mark.parametrize("rows", [2 * LENGTH, 100, 1])
def test_dpo_against_float64(device: str, rows: int) -> None:
    if not use_triton(torch.empty(1, device=device)):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(device).requires_grad_()
        for shape in ((2 * PAIRS, LENGTH, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    )
    target = torch.randint(0, CLASSES, (2 * PAIRS, LENGTH), generator=generator).to(device)
    target[1, 2] = target[2, 0] = -100
    loss = LigerFusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True, logits_memory=rows * LOGITS_ROW)
    value, (*_, chosen_logits, rejected_logits, nll, _, _) = loss(weight, hidden, target, bias)
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    log_probs = linear_log_probs_reference(*doubles[:2], target, doubles[2])
    chosen, rejected = log_probs.sum(-1).chunk(2)
    mask = target != -100
    exact_nll = -log_probs[:PAIRS].sum() / mask[:PAIRS].sum()
    exact = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean() + exact_nll
    logits = torch.nn.functional.linear(*doubles)
    pairs = [
        (value, exact),
        (nll, exact_nll),
        (chosen_logits, logits[:PAIRS][mask[:PAIRS]].mean()),
        (rejected_logits, logits[PAIRS:][mask[PAIRS:]].mean()),
        *zip(torch.autograd.grad(value, (hidden, weight, bias)), torch.autograd.grad(exact, doubles)),
    ]
    for mine, right in pairs:
        torch.testing.assert_close(mine.double(), right, atol=2e-5, rtol=2e-5)
