"""The first chunk of a head in the memory of its weight gradient: exactness, the cut, when it is used."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.head import large_first_chunk as panels
from liger_trainer.kernels.head import linear_cross_entropy as operator
from liger_trainer.kernels.head.large_first_chunk import PanelPlan, plan_panels
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.device import captured, no_host_sync, peak_memory_of_one_run
from tests.kernels.head.heads import IGNORE, MIB, doubled, gpu_head, needing_gradients, relative_error

TOKENS, HIDDEN, VOCAB = 40, 16, 500
ALL_OUTPUTS = ("z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll")
FOUR_PANELS = 4 * 512 * 8  # bytes of logits_memory: chunks of 4 float64 rows, so panels of 128 columns for 16 tokens


def _case(tokens: int = TOKENS, vocab: int = VOCAB, size: int = HIDDEN, dtype: torch.dtype = torch.float64) -> Any:
    """Hidden states, head, bias and target; every fourth token ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, size), (vocab, size), (vocab,))
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    target[::4] = IGNORE
    return (*tensors, target)


def _loss(*inputs: Any, **options: Any) -> Any:
    hidden, weight, bias, target = inputs
    with mock.patch.object(operator, "run_panels", side_effect=panels.run_panels) as run:
        result = linear_cross_entropy(hidden, weight, target, bias, logits_memory=FOUR_PANELS, **options)
    taken = options.get("reduction") != "none"  # whose gradients come later
    assert run.call_count == taken
    return result


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1, "z_loss": 0.02},
        {"softcap": 4.0, "logit_scale": -1.5, "temperature": 0.8},
        {"outputs": ALL_OUTPUTS, "label_smoothing": 0.3},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@pytest.mark.parametrize("tokens", [TOKENS, 16])
def test_loss_gradients_and_outputs_equal_the_reference(options: dict[str, Any], reduction: str, tokens: int) -> None:
    hidden, weight, bias, target = _case(tokens)
    result = _loss(hidden, weight, bias, target, reduction=reduction, **options)
    expected = linear_cross_entropy_reference(hidden, weight, target, bias, reduction=reduction, **options)
    mine, exact = (value if isinstance(value, torch.Tensor) else value.loss for value in (result, expected))
    for name in options.get("outputs", ()):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name), check_dtype=name != "z_loss")
    upstream = torch.rand_like(mine)
    leaves = (hidden, weight, bias)
    with mock.patch.object(operator, "run_panels", side_effect=panels.run_panels) as run:
        ours = torch.autograd.grad(mine, leaves, upstream)
    assert run.call_count == (reduction == "none")
    torch.testing.assert_close(mine, exact)
    torch.testing.assert_close(ours, torch.autograd.grad(exact, leaves, upstream))


@pytest.mark.parametrize(
    ("vocab", "plan"),
    [
        (130, PanelPlan(16, 3, 64)),  # the first panel has 2 columns, whose memory holds 2 tokens' sums of dX
        (64, PanelPlan(3, 1, 64)),
        (64, PanelPlan(1, 1, 128)),
        (200, PanelPlan(7, 2, 192)),
        (641, PanelPlan(40, 11, 64)),  # every token
    ],
    ids=str,
)
def test_any_cut_gives_the_same_gradients(vocab: int, plan: PanelPlan) -> None:
    hidden, weight, bias, target = _case(vocab=vocab, size=40)
    with (
        mock.patch.object(operator, "plan_panels", return_value=plan),
        mock.patch.object(operator, "chunk_rows", return_value=40),
    ):
        loss = linear_cross_entropy(hidden, weight, target, bias)
    expected = F.cross_entropy(F.linear(hidden, weight, bias), target)
    torch.testing.assert_close(loss, expected)
    leaves = (hidden, weight, bias)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize("trained", [(1,), (0, 1), (1, 2)])
def test_only_the_gradients_that_are_needed_are_computed(trained: tuple[int, ...]) -> None:
    *leaves, target = _case()
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in trained)
    with mock.patch.object(panels, "_sum_hidden_gradient", side_effect=panels._sum_hidden_gradient) as sums:
        _loss(*leaves, target).backward()
    assert sums.call_count == (0 in trained)
    wanted = needing_gradients(leaves)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(*leaves), target), wanted)
    torch.testing.assert_close(tuple(leaf.grad for leaf in wanted), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [256, 1024])
def test_half_precision_rounds_as_often_as_eager(tokens: int, dtype: torch.dtype) -> None:
    """256 tokens are one chunk instead of 16; 1,024 are 4 of 256, whose sum rounds at each on this device."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 256, generator=generator).to(dtype).requires_grad_()
    weight = (3 / 16 * torch.randn(2048, 256, generator=generator)).to(dtype).requires_grad_()
    target = torch.randint(0, 2048, (tokens,), generator=generator)
    leaves, doubles = (hidden, weight), doubled((hidden, weight))
    exact = torch.autograd.grad(linear_cross_entropy_reference(*doubles, target, reduction="sum"), doubles)
    eager = torch.autograd.grad(F.cross_entropy(F.linear(*leaves).float(), target, reduction="sum"), leaves)
    plan, rows = PanelPlan(256, 8, 256), 256 if tokens > 256 else 32
    with (
        mock.patch.object(operator, "plan_panels", return_value=plan),
        mock.patch.object(operator, "chunk_rows", return_value=rows),
    ):
        ours = torch.autograd.grad(linear_cross_entropy(*leaves, target, reduction="sum"), leaves)
    assert relative_error(ours[0], exact[0]) <= 1.02 * relative_error(eager[0], exact[0])
    assert relative_error(ours[1], exact[1]) <= (1.02 if tokens == 256 else 1.3) * relative_error(eager[1], exact[1])


def test_a_retained_graph_gives_the_same_gradients_twice() -> None:
    *leaves, target = _case()
    for reduction in ("mean", "none"):
        loss = _loss(*leaves, target, reduction=reduction).sum()
        first = torch.autograd.grad(2.0 * loss, leaves, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(2.0 * loss, leaves), first)


def _meta(tokens: int, size: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(tokens, size, dtype=dtype, device="meta"),
        torch.empty(vocab, size, dtype=dtype, device="meta"),
    )


def _planned(tokens: int, size: int, vocab: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> PanelPlan | None:
    with mock.patch.object(panels, "multiplies_into_fp32", return_value=True):
        return plan_panels(*_meta(tokens, size, vocab, dtype), rows)


@given(
    tokens=st.integers(1, 20_000),
    size=st.integers(1, 600).map(lambda eights: 8 * eights),
    vocab=st.integers(1000, 300_000),
    chunk_count=st.integers(8, 64),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
@settings(max_examples=200)
def test_no_panel_is_written_over_before_it_is_used(
    tokens: int, size: int, vocab: int, chunk_count: int, dtype: torch.dtype
) -> None:
    rows = max(1, tokens // chunk_count)
    plan = _planned(tokens, size, vocab, rows, dtype)
    assume(plan is not None)
    assert plan is not None
    assert plan.tokens <= min(tokens, size)
    _, d_weight = _meta(tokens, size, vocab, dtype)
    buffer = d_weight.new_empty(rows, -(-vocab // 64) * 64)
    laid_out = panels._panels(plan, d_weight, buffer)
    assert [panel.start for panel in laid_out] == [0, *(panel.stop for panel in laid_out[:-1])]
    assert laid_out[-1].stop == vocab
    free = laid_out[0].stop * size  # elements of dW up to which nothing but the sums of dX lies
    assert free * dtype.itemsize >= 4 * size  # of one token at least
    for panel in laid_out[:-1]:
        begin = panel.logits.storage_offset()
        assert begin >= max(free, panel.stop * size)  # past what lies before it, and past its own rows of dW
        free = begin + plan.tokens * plan.width
        assert free <= d_weight.numel()
        assert begin * dtype.itemsize % 16 == 0
        assert panel.width <= plan.width
    assert plan.tokens * plan.width <= buffer.numel()
    assert laid_out[-1].logits.storage_offset() == 0


def test_cut_of_known_models() -> None:
    with mock.patch.object(panels, "num_sms", return_value=132):
        assert _planned(8192, 4096, 128256, 256) == PanelPlan(4096, 18, 7168)  # 17 chunks instead of 32
        assert _planned(4096, 4096, 128256, 256) == PanelPlan(4096, 18, 7168)  # 1 instead of 16
        assert _planned(8192, 4096, 128256, 2048) is None  # 3 instead of 4 would not pay
        assert _planned(4096, 4096, 128256, 4096) is None
        assert _planned(8192, 4096, 128256, 1) is None  # 31 columns of 4,096 tokens would be all that the buffer holds


@pytest.mark.parametrize("size", [12, 4095])
def test_rows_that_are_not_aligned_are_left_alone(size: int) -> None:
    assert _planned(8192, size, 128256, 256) is None


def test_half_precision_sums_that_would_round_are_left_alone() -> None:
    hidden, weight = _meta(8192, 4096, 128256)
    assert plan_panels(hidden, weight, 256) is None  # the meta device is none that multiplies into fp32
    assert plan_panels(hidden.float(), weight.float(), 256) is not None


def test_calls_without_panels() -> None:
    hidden, weight, bias, target = _case()

    def taken(weight: torch.Tensor = weight, **options: Any) -> bool:
        with mock.patch.object(operator, "run_panels", side_effect=panels.run_panels) as run:
            linear_cross_entropy(hidden, weight, target, bias, logits_memory=FOUR_PANELS, **options)
        return run.call_count > 0

    assert taken()
    assert not taken(class_weights=torch.ones(VOCAB, dtype=torch.float64))
    assert not taken(weight.detach())
    assert not taken(weight.t().contiguous().t())
    with torch.no_grad():
        assert not taken()


# Real shapes, memory and waiting on a GPU.


TIGHT = 64 * MIB
GPU_TOKENS, SIZE, GPU_VOCAB = 8192, 4096, 128256


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point")
@pytest.mark.parametrize(
    ("tokens", "size", "vocab", "budget", "bound"),
    [
        (GPU_TOKENS, SIZE, GPU_VOCAB, TIGHT, 1.05),
        # Rows of the head that no tile divides, in matmuls for which cuBLAS has no aligned kernels.
        (4096, 1000, 50257, 16 * MIB, 1.1),
    ],
)
def test_gradients_are_no_further_from_float64_than_eager_bf16(
    tokens: int, size: int, vocab: int, budget: int, bound: float
) -> None:
    hidden, weight, target = gpu_head(tokens, size, vocab)
    with mock.patch.object(operator, "run_panels", side_effect=panels.run_panels) as run:
        loss = linear_cross_entropy(hidden, weight, target, logits_memory=budget)
    assert run.call_count == 1
    ours = torch.autograd.grad(loss, (hidden, weight))
    eager = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), target), (hidden, weight))
    doubles = doubled((hidden, weight))
    with mock.patch.object(operator, "plan_panels", return_value=None):
        exact_loss = linear_cross_entropy(*doubles, target)
    exact = torch.autograd.grad(exact_loss, doubles)
    assert abs(loss.item() - exact_loss.item()) < 1e-3
    for mine, theirs, truth in zip(ours, eager, exact):
        assert relative_error(mine, truth) <= bound * relative_error(theirs, truth)


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point")
def test_peak_memory_is_buffer_gradients_and_exponents() -> None:
    hidden, weight, target = gpu_head(GPU_TOKENS, SIZE, GPU_VOCAB)

    def step() -> None:
        linear_cross_entropy(hidden, weight, target, logits_memory=TIGHT).backward()

    step()  # workspaces and compiled kernels
    hidden.grad = weight.grad = None
    peak = peak_memory_of_one_run(step)
    gradients, exponents = 2 * (GPU_VOCAB + GPU_TOKENS) * SIZE, GPU_VOCAB * SIZE // 128
    assert peak <= gradients + TIGHT + exponents + MIB


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point")
def test_nothing_synchronises_and_two_runs_are_equal() -> None:
    hidden, weight, target = gpu_head(2048, 512, 32000)
    runs = [torch.autograd.grad(_tight(hidden, weight, target), (hidden, weight))]
    with no_host_sync():
        runs.append(torch.autograd.grad(_tight(hidden, weight, target), (hidden, weight)))
    assert all(torch.equal(first, second) for first, second in zip(*runs))


def _tight(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(operator, "run_panels", side_effect=panels.run_panels) as run:
        loss = linear_cross_entropy(hidden, weight, target, logits_memory=4 * MIB)
    assert run.call_count == 1
    return loss


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point")
def test_cuda_graph_replays_on_new_inputs() -> None:
    hidden, weight, target = gpu_head(2048, 512, 32000)

    def step() -> torch.Tensor:
        loss = _tight(hidden, weight, target)
        return torch.stack([loss.detach(), *(g.float().norm() for g in torch.autograd.grad(loss, (hidden, weight)))])

    graph, result = captured(step)
    target.copy_(target.roll(1))
    graph.replay()
    torch.testing.assert_close(result, step())
