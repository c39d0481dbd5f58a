"""Cross entropy of given logits: references, checks, kernels against float64, memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.head import cross_entropy as operator
from liger_trainer.kernels.head import cross_entropy_rows
from liger_trainer.kernels.head import head_chunks as _rescale
from liger_trainer.kernels.head.cross_entropy import cross_entropy, cross_entropy_reference
from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_partials_, row_statistics_
from liger_trainer.kernels.head.head_chunks import rescale_
from liger_trainer.kernels.head.loss_options import LossOptions
from liger_trainer.kernels.head.token_statistics import ExtraStats, RowStats, Shard
from liger_trainer.kernels.runtime import INTERPRETED
from tests.aot import compile_launch, on_targets, recorded_launches
from tests.kernels.head.heads import (
    IGNORE,
    MIB,
    assert_close,
    assert_refused,
    in_double,
    relative_error,
    with_class_weights,
)

EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 4.0, "logit_scale": 1.5, "temperature": 0.8}
ALL_OUTPUTS = ("z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll")


def _case(tokens: int, vocab_size: int, seed: int = 0, device: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in float64, or with a `device` in fp32 there, and labels; the first and every third is ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(tokens, vocab_size, generator=generator, dtype=torch.float64)
    target = torch.randint(0, vocab_size, (tokens,), generator=generator)
    target[::3] = IGNORE
    if device is not None:
        logits, target = logits.to(device, torch.float32), target.to(device)
    return logits.requires_grad_(), target


@given(
    tokens=st.integers(1, 9),
    vocab_size=st.integers(1, 40),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_reference_is_torchs_cross_entropy(
    tokens: int, vocab_size: int, reduction: str, smoothing: float, weighted: bool, seed: int
) -> None:
    logits, target = _case(tokens + 1, vocab_size, seed)  # at least one valid token, or torch's mean is NaN
    weights = torch.rand(vocab_size, dtype=torch.float64) + 0.1 if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    expected = F.cross_entropy(logits, target, weight=weights, **options)
    loss = cross_entropy(logits, target, class_weights=weights, **options)
    torch.testing.assert_close(loss, expected)
    upstream = torch.rand_like(loss)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits, upstream), torch.autograd.grad(expected, logits, upstream)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_plain_torch_rows_have_the_gradient_of_the_reference(reduction: str, weighted: bool) -> None:
    logits, target = _case(8, 11)
    weights = torch.rand(11, dtype=torch.float64) if weighted else None
    rows = cross_entropy_reference(logits, target, reduction="none", class_weights=weights, **EVERYTHING)
    upstream = torch.rand(8, dtype=torch.float64)
    (expected,) = torch.autograd.grad(rows, logits, upstream)
    buffer = logits.detach().clone()
    stats = RowStats.allocate(buffer, 8, entropy=True, predicted=True)
    options = LossOptions(IGNORE, *EVERYTHING.values())
    row_statistics_(buffer, target, stats, options, None, weights, upstream)
    torch.testing.assert_close(stats.loss, rows.detach())
    torch.testing.assert_close(buffer, expected)


def test_gradcheck() -> None:
    logits, target = _case(5, 7)
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, **EVERYTHING), logits)


def test_outputs_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0], [1.0, 5.0, 1.0]])
    target = torch.tensor([0, 1, IGNORE])
    result = cross_entropy(logits, target, z_loss=0.5, outputs=ALL_OUTPUTS)
    log_probs = logits.log_softmax(-1)
    lse = logits.logsumexp(-1)
    assert result.predicted_tokens.tolist() == [0, 2, -1]
    assert result.token_accuracy.item() == 0.5
    torch.testing.assert_close(result.z_loss, 0.5 * lse[:2].square().mean())
    torch.testing.assert_close(result.token_nll, torch.stack([-log_probs[0, 0], -log_probs[1, 1], torch.tensor(0.0)]))
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(result.entropy, torch.cat([entropy[:2], torch.zeros(1)]))
    torch.testing.assert_close(result.loss, result.token_nll.sum() / 2 + result.z_loss)


@pytest.mark.parametrize("num_items", [7, torch.tensor(7), torch.tensor([7.0])])
def test_num_items_is_the_normaliser(num_items: Any) -> None:
    logits, target = _case(6, 5)
    expected = F.cross_entropy(logits, target, reduction="sum") / 7
    for reduction in ("mean", "sum"):
        torch.testing.assert_close(cross_entropy(logits, target, reduction=reduction, num_items=num_items), expected)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}, {"num_items": 0}])
def test_all_ignored_is_a_zero_that_backpropagates(options: dict[str, Any]) -> None:
    logits = torch.full((4, 5), float("nan"), requires_grad=True)
    loss = cross_entropy(logits, torch.full((4,), IGNORE), **options)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.eq(0).all()


def test_loss_is_fp32_for_half_precision_logits() -> None:
    logits, target = _case(6, 5)
    for dtype in (torch.bfloat16, torch.float16):
        assert cross_entropy(logits.to(dtype), target).dtype == torch.float32


def test_nan_in_the_input_gives_a_nan_loss() -> None:
    logits, target = _case(6, 5)
    poisoned = logits.detach().clone()
    poisoned[1, 2] = float("nan")
    assert cross_entropy(poisoned, target).isnan()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reduction": "avg"}, ["`reduction`", "'avg'", "'mean'"]),
        ({"label_smoothing": 1.5}, ["`label_smoothing`", "1.5", "[0, 1]"]),
        ({"temperature": 0.0}, ["`temperature`", "more than 0"]),
        ({"softcap": -1.0}, ["`softcap`", "more than 0"]),
        ({"num_items": 3, "reduction": "none"}, ["`num_items`", "'none'"]),
        ({"num_items": -3}, ["`num_items`", "-3"]),
        ({"num_items": torch.ones(2)}, ["`num_items`", "(2,)"]),
        ({"outputs": ("entropy", "accuracy")}, ["['accuracy']", "'token_accuracy'"]),
        ({"outputs": "entropy"}, ["`outputs`", "tuple"]),
        ({"class_weights": torch.ones(4)}, ["`class_weights`", "(4,)", "(5,)"]),
        ({"target": torch.zeros(5, dtype=torch.int64)}, ["`target`", "(5,)", "(6,)"]),
        ({"target": torch.zeros(6)}, ["`target`", "float32", "int64"]),
        ({"target": torch.full((6,), 5)}, ["label 5", "[0, 5)", "vocabulary"]),
        ({"target": torch.full((6,), -1)}, ["label -1", "ignore_index=-100"]),
        ({"logits": torch.zeros(6, 5, dtype=torch.int64)}, ["`logits`", "int64"]),
        ({"logits": torch.zeros(6, 0)}, ["vocabulary is empty"]),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    logits, target = _case(6, 5)
    assert_refused(cross_entropy, words, **{"logits": logits, "target": target, **changes})


def test_empty_batch() -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.shape == (0, 5)


@pytest.mark.parametrize(("target_name", "dtype"), on_targets((torch.bfloat16,), (torch.float32,)))
def test_every_kernel_compiles_ahead_of_time(target_name: str, dtype: torch.dtype) -> None:
    logits, target = torch.empty(2, 20000, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    weights = torch.ones(20000)
    plain, full = LossOptions(IGNORE, 0.0, 0.0, None, 1.0, 1.0), LossOptions(IGNORE, *EVERYTHING.values())
    bare, stats = RowStats.allocate(logits, 2, False, False), RowStats.allocate(logits, 2, True, True)
    capped, ones = LossOptions(IGNORE, 0.0, 0.0, 30.0, 1.0, 0.8), torch.ones(2)
    extra, shard = ExtraStats.allocate(logits, 2, True, True), Shard(20000, 40000)
    hip = "6.4" if target_name.startswith("gfx") else None
    with (
        recorded_launches() as launches,
        mock.patch.object(cross_entropy_rows, "use_triton", return_value=True),
        mock.patch.object(_rescale, "use_triton", return_value=True),
        mock.patch.object(torch.version, "hip", hip),
    ):
        cross_entropy_rows.row_statistics_(logits, target, bare, plain)
        cross_entropy_rows.row_statistics_(logits, target, bare, plain, coefficient=torch.ones(()))
        cross_entropy_rows.row_statistics_(logits, target, stats, full, weights, weights, torch.ones(2))
        cross_entropy_rows.row_statistics_(
            logits, target, bare, plain, coefficient=torch.ones(()), out=torch.empty_like(logits)
        )
        cross_entropy_rows.row_gradient_(logits, target, bare, plain, torch.ones(()), out=torch.empty_like(logits))
        cross_entropy_rows.row_gradient_(logits, target, bare, full, torch.ones(2), weights, weights)
        cross_entropy_rows.row_statistics_(logits, target, stats, capped, extra=extra)
        cross_entropy_rows.row_gradient_(logits, target, stats, capped, ones, entropy_coefficient=ones, shard=shard)
        cross_entropy_rows.row_partials_(logits, target, torch.empty(2, 8), capped, shard)
        _rescale.rescale_(torch.ones(8, dtype=dtype), torch.ones(()), torch.ones(()))
    assert len(launches) == 10
    for launch in launches:
        assert compile_launch(launch, target_name) is not None


# The kernels, under the interpreter or on a GPU.


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "softcap": 5.0, "temperature": 0.7, "logit_scale": -1.3},
    {"num_items": 9, "z_loss": 0.05, "softcap": 30.0, "label_smoothing": 0.2},
    {"weighted": True},
    {"weighted": True, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 8.0, "reduction": "none"},
]


@pytest.mark.kernel
@pytest.mark.parametrize("vocab_size", [1, 7, 128, 1000, 8193])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_cross_entropy(device: str, vocab_size: int, options: dict[str, Any]) -> None:
    logits, target = _case(5, vocab_size, device=device)
    options = with_class_weights(options, vocab_size, device)
    before = logits.detach().clone()
    ours = cross_entropy(logits, target, outputs=ALL_OUTPUTS, **options)
    double = logits.detach().double().requires_grad_()
    exact = cross_entropy_reference(double, target, outputs=ALL_OUTPUTS, **in_double(options))
    for name in ("loss", *ALL_OUTPUTS):
        assert_close(getattr(ours, name), getattr(exact, name))
    upstream = torch.rand_like(ours.loss) + 1.0
    (gradient,) = torch.autograd.grad(ours.loss, logits, upstream, retain_graph=True)
    (again,) = torch.autograd.grad(ours.loss, logits, upstream)
    assert_close(gradient, torch.autograd.grad(exact.loss, double, upstream.double())[0], atol=1e-6)
    assert gradient.equal(again)
    assert logits.equal(before)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_rounding_the_gradient(device: str, dtype: torch.dtype) -> None:
    logits, target = _case(6, 1000, device=device)
    half = logits.detach().to(dtype).requires_grad_()
    loss = cross_entropy(half, target, num_items=1)
    double = half.detach().double().requires_grad_()
    exact = cross_entropy_reference(double, target, num_items=1)
    assert_close(loss, exact)
    (gradient,) = torch.autograd.grad(loss, half)
    (exact_gradient,) = torch.autograd.grad(exact, double)
    if INTERPRETED:  # which truncates to bf16 instead of rounding: one unit in the last place
        torch.testing.assert_close(gradient.double(), exact_gradient, atol=1e-7, rtol=2**-7)
        return
    rounding = (exact_gradient.to(dtype).double() - exact_gradient).norm()
    assert (gradient.double() - exact_gradient).norm() <= 1.02 * rounding


@pytest.mark.kernel
def test_confident_tokens_keep_their_digits(device: str) -> None:
    # p[t] - 1 is about -1e-9 here: p - 1 in fp32 would be 0, lse - z[t] too.
    logits = torch.zeros(2, 50)
    logits[0, 3], logits[1, 4] = 24.0, 9.0
    target = torch.tensor([3, 4])
    double = logits.double().requires_grad_()
    exact = cross_entropy_reference(double, target, reduction="none")
    (exact_gradient,) = torch.autograd.grad(exact.sum(), double)
    logits = logits.to(device).requires_grad_()
    loss = cross_entropy(logits, target.to(device), reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(loss.double().cpu(), exact.detach(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(gradient.double().cpu(), exact_gradient, rtol=1e-5, atol=0.0)


@pytest.mark.kernel
@pytest.mark.parametrize("label", [-1, 9, 2**40, -(2**40)])
def test_a_label_outside_the_vocabulary_is_nan_and_touches_nothing_else(device: str, label: int) -> None:
    canary = torch.full((3, 16), 7.0, device=device)
    buffer = canary.clone()
    rows = buffer[1:2, 4:13]  # nine columns with memory that must stay on every side
    target = torch.tensor([label], device=device)
    stats = RowStats.allocate(rows, 1, entropy=True, predicted=True)
    options = LossOptions(IGNORE, 0.1, 0.1, None, 1.0, 1.0)
    row_statistics_(rows, target, stats, options, coefficient=torch.ones((), device=device))
    assert stats.loss.isnan().all()
    assert stats.nll.isnan().all()
    assert rows.isnan().all()
    rows.fill_(7.0)
    assert buffer.equal(canary)
    rows[:, 0] = 1.0
    row_gradient_(rows, target, stats, options, torch.ones((), device=device))
    assert rows.isnan().all()
    rows.fill_(7.0)
    assert buffer.equal(canary)


@pytest.mark.kernel
def test_padding_columns_are_scratch_and_never_enter(device: str) -> None:
    logits, target = _case(4, 70, device=device)
    one, options = torch.ones((), device=device), LossOptions(IGNORE, 0.1, 0.0, 5.0, 1.0, 1.0)
    results = []
    for padding in (0.0, float("nan")):
        buffer = torch.full((4, 128), padding, device=device)
        buffer[:, :70] = logits.detach()
        stats = RowStats.allocate(buffer, 4, entropy=True, predicted=True)
        row_statistics_(buffer[:, :70], target, stats, options, coefficient=one, width=128)
        results.append([*stats, buffer[:, :70]])
    alone, stats = logits.detach().clone(), RowStats.allocate(logits, 4, entropy=True, predicted=True)
    row_statistics_(alone, target, stats, options, coefficient=one)
    for clean, scratch, exact in zip(*results, [*stats, alone]):
        assert clean.equal(scratch)
        torch.testing.assert_close(clean, exact)


@pytest.mark.kernel
@pytest.mark.parametrize("vocab_start", [0, 70, 140])
def test_partials_are_those_of_plain_torch(device: str, vocab_start: int) -> None:
    logits, target = 3.0 * torch.randn(6, 70), torch.tensor([0, 71, IGNORE, 139, 140, 209])
    bias = torch.randn(70)
    options, shard = LossOptions(IGNORE, 0.0, 0.0, 8.0, 1.2, 0.8), Shard(vocab_start, 210)
    exact = torch.empty(6, 8, dtype=torch.float64)
    row_partials_(logits.double(), target, exact, options, shard, bias.double())
    ours = torch.full((6, 8), float("nan"), device=device)
    buffer = torch.full((6, 128), float("nan"), device=device)
    buffer[:, :70] = logits.to(device)
    row_partials_(buffer[:, :70], target.to(device), ours, options, shard, bias.to(device), width=128)
    exact[:, 6] *= 1.4426950408889634  # the kernel compares powers of two
    torch.testing.assert_close(ours.double().cpu(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.kernel
def test_ignored_rows_are_not_read_and_get_a_zero_gradient(device: str) -> None:
    logits = torch.full((3, 9), float("nan"), device=device)
    logits[1] = torch.arange(9.0, device=device)
    logits.requires_grad_()
    target = torch.tensor([IGNORE, 2, IGNORE], device=device)
    result = cross_entropy(logits, target, z_loss=0.1, outputs=ALL_OUTPUTS)
    result.loss.backward()
    assert result.loss.isfinite()
    assert logits.grad is not None
    assert logits.grad[::2].eq(0).all()
    assert logits.grad[1].ne(0).all()
    assert result.predicted_tokens.tolist() == [-1, 8, -1]
    with torch.no_grad():
        cross_entropy(logits, target)
    assert logits[::2].isnan().all()


@pytest.mark.kernel
def test_minus_infinity_masks_a_class(device: str) -> None:
    logits = torch.tensor([[1.0, float("-inf"), 2.0, float("-inf")]], device=device, requires_grad=True)
    target = torch.tensor([0], device=device)
    loss = cross_entropy(logits, target, outputs=("entropy",))
    loss.loss.backward()
    plain = torch.tensor([[1.0, 2.0]], device=device, requires_grad=True)
    expected = cross_entropy(plain, target, outputs=("entropy",))
    expected.loss.backward()
    assert_close(loss.loss, expected.loss)
    assert_close(loss.entropy, expected.entropy)
    assert logits.grad is not None
    assert_close(logits.grad[:, ::2], plain.grad)
    assert logits.grad[:, 1::2].eq(0).all()


@pytest.mark.kernel
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("layout", ["leaf", "view of a leaf", "expanded"])
def test_inplace_leaves_memory_alone_that_is_not_the_logits_own(reduction: str, layout: str, device: str) -> None:
    leaf, target = _case(6, 70, device=device)
    logits = {"leaf": leaf, "view of a leaf": leaf.view(6, 70), "expanded": (leaf[:1] * 1.0).expand(6, 70)}[layout]
    before = leaf.detach().clone()
    upstream = torch.rand(6 if reduction == "none" else (), device=device)
    loss = cross_entropy(logits, target, reduction=reduction, inplace=True)
    (given,) = torch.autograd.grad(loss, leaf, upstream, retain_graph=True)
    exact = cross_entropy_reference(logits, target, reduction=reduction)
    (expected,) = torch.autograd.grad(exact, leaf, upstream)
    assert_close(given, expected)
    assert leaf.detach().equal(before)


@pytest.mark.kernel
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("upstream", [1.0, 0.25])
def test_inplace_is_right_with_any_upstream_gradient_and_a_retained_graph(
    device: str, options: dict[str, Any], upstream: float
) -> None:
    options = with_class_weights(options, 70, device)
    leaf, target = _case(6, 70, device=device)
    exact = cross_entropy_reference(leaf * 2.0, target, **options)
    grad = torch.full_like(exact, upstream)
    (expected,) = torch.autograd.grad(exact, leaf, grad)
    logits = leaf * 2.0
    loss = cross_entropy(logits, target, inplace=True, **options)
    assert_close(loss, exact)
    for factor in (0.0, 3.0, 1.0):
        (gradient,) = torch.autograd.grad(loss, leaf, factor * grad, retain_graph=True)
        assert_close(gradient, factor * expected, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss, logits, grad)
    assert_close(gradient * 2.0, expected, atol=1e-6)
    assert gradient.data_ptr() == logits.data_ptr()


@pytest.mark.kernel
def test_inplace_writes_the_gradient_in_the_forward_or_in_the_last_backward(device: str) -> None:
    leaf, target = _case(6, 70, device=device)
    expected = torch.autograd.grad(cross_entropy(leaf, target, reduction="sum"), leaf)[0]
    for reduction, step in (("sum", 1), ("none", 1), ("sum", 2)):  # every second row: gaps between them
        logits = leaf.repeat_interleave(step, 0)[::step] if step > 1 else leaf * 1.0
        before = logits.detach().clone()
        loss = cross_entropy(logits, target, reduction=reduction, inplace=True).sum()
        assert logits.detach().equal(before) is (reduction == "none" or step > 1)
        torch.autograd.grad(loss, logits)
        assert_close(logits.detach(), expected, atol=1e-6)


@pytest.mark.kernel
def test_inplace_writes_nothing_where_no_gradient_is_needed(device: str) -> None:
    leaf, target = _case(6, 70, device=device)
    frozen, logits = leaf.detach().clone(), leaf * 1.0
    cross_entropy(frozen, target, inplace=True)
    with torch.no_grad():
        cross_entropy(logits, target, inplace=True)
    assert frozen.equal(leaf)
    assert logits.equal(leaf)


@pytest.mark.kernel
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inplace_is_seen_by_other_users_of_the_logits(device: str, reduction: str) -> None:
    leaf, target = _case(6, 70, device=device)
    logits = leaf.exp()  # which saves its result for its own backward
    loss = cross_entropy(logits, target, reduction=reduction, inplace=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("expected_grad", [None, 1.0, 0.5])
@pytest.mark.parametrize("inplace", [False, True])
def test_the_forward_computes_the_gradient_for_an_expected_upstream_gradient(
    device: str, dtype: torch.dtype, expected_grad: float | None, inplace: bool
) -> None:
    leaf, target = _case(6, 70, device=device)
    leaf = leaf.detach().to(dtype).requires_grad_()
    upstream = torch.tensor(0.5, device=device)
    (right,) = torch.autograd.grad(cross_entropy_reference(leaf.double(), target), leaf, upstream.double())
    with mock.patch.object(operator, "rescaled_gradients", wraps=_rescale.rescaled_gradients) as rescaled:
        loss = cross_entropy(leaf * 1.0, target, expected_grad=expected_grad, inplace=inplace)
        (gradient,) = torch.autograd.grad(loss, leaf, upstream)
    assert rescaled.called is (inplace or expected_grad is not None)
    if expected_grad is not None:
        # In fp16 it is raised by a power of two: 1 / 6 of it would lie low.
        assert rescaled.call_args.args[2] == (expected_grad if dtype == torch.float32 else 4.0)
    assert_close(gradient.float(), right.float(), atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 2**-9)


@pytest.mark.kernel
@given(
    tokens=st.integers(0, 4),
    vocab_size=st.integers(1, 200),
    gaps=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    num_items=st.sampled_from([None, 3, torch.tensor(7)]),
    smoothing=st.sampled_from([0.0, 0.3]),
    z_loss=st.sampled_from([0.0, 0.1]),
    softcap=st.sampled_from([None, 2.0]),
    weighted=st.booleans(),
    inplace=st.booleans(),
    expected_grad=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_stride_dtype_and_option(
    device: str, tokens: int, vocab_size: int, gaps: tuple[int, int], dtype: torch.dtype, reduction: str,
    num_items: Any, smoothing: float, z_loss: float, softcap: float | None, weighted: bool, inplace: bool,
    expected_grad: float | None, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shape = (2, tokens + gaps[0], vocab_size + gaps[1])
    leaf = (2 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()
    target = torch.randint(0, vocab_size, (2, tokens), generator=generator).to(device)
    target[:, 1::3] = IGNORE
    options = with_class_weights(
        {"weighted": weighted, "label_smoothing": smoothing, "z_loss": z_loss}, vocab_size, device
    )
    options |= {"softcap": softcap, "reduction": reduction}
    options |= {} if reduction == "none" else {"num_items": num_items}
    logits = (leaf * 1.0)[:, gaps[0] :, gaps[1] :]
    loss = cross_entropy(logits, target, inplace=inplace, expected_grad=expected_grad, **options)
    double = leaf.detach().double().requires_grad_()
    exact = cross_entropy_reference(double[:, gaps[0] :, gaps[1] :], target, **in_double(options))
    assert_close(loss, exact)
    upstream = torch.full_like(loss, 2.0)
    (gradient,) = torch.autograd.grad(loss, leaf, upstream)
    (right,) = torch.autograd.grad(exact, double, upstream.double())
    eps = torch.finfo(dtype).eps
    assert_close(gradient, right, atol=1e-6, rtol=2e-5 + eps)


@pytest.mark.kernel
def test_greedy_ties_take_the_lowest_id(device: str) -> None:
    logits = torch.zeros(3, 300, device=device)
    logits[1, [20, 250]] = 1.0
    logits[2, [20, 250]] = 1.0
    result = cross_entropy(
        logits, torch.tensor([299, 20, 250], device=device), outputs=("predicted_tokens", "token_accuracy")
    )
    assert result.predicted_tokens.tolist() == [0, 20, 20]
    assert result.token_accuracy.item() == pytest.approx(1 / 3)


@pytest.mark.kernel
@pytest.mark.parametrize("size", [1, 5000, 40000])
def test_rescale(device: str, size: int) -> None:
    tensor = torch.randn(size, device=device).bfloat16()
    before = tensor.clone()
    third = torch.tensor(1 / 3, device=device)
    rescale_(tensor, third, third)
    assert tensor.equal(before)
    rescale_(tensor, third, torch.tensor(2.0, device=device))
    expected = (before.float() * (third / 2.0)).bfloat16()
    torch.testing.assert_close(tensor, expected, atol=0.0, rtol=2**-7 if INTERPRETED else 0.0)


# Real shapes, memory and waiting on a GPU.


@pytest.mark.gpu
def test_cross_entropy_allocates_one_gradient_or_none() -> None:
    tokens, vocab = 2048, 128256
    leaf = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    for options, allowed in (({}, 1), ({"inplace": True}, 0), ({"expected_grad": 1.0}, 1)):
        logits = leaf * 1.0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = cross_entropy(logits, target, **options)
        (gradient,) = torch.autograd.grad(loss, logits)
        peak = torch.cuda.max_memory_allocated() - before
        # The allocator hands out whole blocks: it does not split off what is left where that is 1 MiB or less.
        assert peak <= allowed * (2 * tokens * vocab + MIB) + MIB
        exact = torch.softmax(leaf.detach()[:64].double(), -1) - F.one_hot(target[:64], vocab)
        assert relative_error(gradient[:64], exact / tokens) < 3e-3
        del logits, loss, gradient


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"inplace": True}], ids=str)
def test_rows_beyond_two_billion_elements(options: dict[str, Any]) -> None:
    tokens, vocab = 8400, 262208  # the last rows start past 2**31 elements
    logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    target = torch.full((tokens,), IGNORE, device="cuda")
    target[-2:] = torch.tensor([5, vocab - 1], device="cuda")
    rows = logits[-2:].double().requires_grad_()
    logits = logits.requires_grad_() * 1.0  # a leaf would not be overwritten
    loss = cross_entropy(logits, target, **options)
    (gradient,) = torch.autograd.grad(loss, logits)
    exact = F.cross_entropy(rows, target[-2:])
    assert abs(loss.item() - exact.item()) < 1e-4
    assert relative_error(gradient[-2:], torch.autograd.grad(exact, rows)[0]) < 3e-3
    assert not gradient[:-2:4096].any()
