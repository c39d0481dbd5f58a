"""The row kernel of the divergences: float64, half precision, memory, masks, and compilation for every GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from liger_trainer.kernels.head import divergence_kernel
from liger_trainer.kernels.head.divergence import (
    DivergenceOptions,
    DivergenceStats,
    divergence_of_logits_reference,
    divergence_rows_torch_,
)
from liger_trainer.kernels.head.divergence_kernel import divergence_rows_, gradient_memory
from liger_trainer.kernels.runtime import INTERPRETED
from tests.aot import compile_launch, on_targets, recorded_launches
from tests.kernels.head.heads import IGNORE, assert_close


def _row_launches(dtype: torch.dtype, target: str = "sm_90") -> list[Any]:
    student, teacher = torch.empty(2, 20032, dtype=dtype), torch.empty(2, 20032, dtype=dtype)
    labels, bias = torch.zeros(2, dtype=torch.int64), torch.ones(20000)
    lean, full = (DivergenceStats.allocate(student, 2, extra, extra) for extra in (False, True))
    with (
        recorded_launches() as launches,
        mock.patch.object(divergence_kernel, "use_triton", return_value=True),
        mock.patch.object(divergence_kernel, "has_lg2", return_value=target.startswith("sm_")),
    ):
        for divergence in ("forward_kl", "reverse_kl", "jsd", "probs_kl", "cosine"):
            plain = DivergenceOptions(divergence, 0.5, 1.0, 1.0, 0.0, None, 1.0, None, 1.0, 1e-10, IGNORE)
            capped = plain._replace(student_softcap=5.0, teacher_softcap=7.0, hard_weight=0.5)
            rows = (student[:, :20000], teacher[:, :20000])
            divergence_kernel.divergence_rows_(*rows, None, lean, plain, None, None, torch.ones(()), 20032, 20032)
            memory = divergence_kernel.gradient_memory(student, torch.bfloat16, divergence)[:, :20000]
            last = (bias, bias, torch.ones(2), 20032, 20032, memory)
            divergence_kernel.divergence_rows_(*rows, labels, full, capped, *last)
        divergence_kernel.divergence_rows_(*rows, labels, lean, plain)
    return launches


@pytest.mark.parametrize(("target_name", "dtype"), on_targets((torch.bfloat16,), (torch.float32,)))
def test_every_kernel_compiles_ahead_of_time(target_name: str, dtype: torch.dtype) -> None:
    launches = _row_launches(dtype, target_name)
    assert len(launches) == 11
    # Elsewhere the kernel of each divergence with everything that a launch may ask for.
    for launch in launches if (target_name, dtype) == ("sm_90", torch.bfloat16) else launches[1:10:2]:
        assert compile_launch(launch, target_name) is not None


def test_rows_are_read_128_bits_at_a_time() -> None:
    for launch, accesses in zip(_row_launches(torch.bfloat16)[:6:2], (5, 5, 7)):
        assembly = compile_launch(launch, "sm_90").asm["ptx"]
        wide = assembly.count("ld.global.v4.b32") + assembly.count("st.global.v4.b32")
        assert wide == accesses, launch.arguments["DIVERGENCE"]
        assert "ld.global.b16" not in assembly
        assert ("lg2.approx" in assembly) == (launch.arguments["DIVERGENCE"] == "jsd")


# The kernels, under the interpreter or on a GPU.


DIVERGENCES = ["forward_kl", "reverse_kl", "jsd", "probs_kl", "cosine"]
PLAIN = DivergenceOptions("jsd", 0.3, 1.0, 1.0, 0.0, None, 1.0, None, 1.0, 1e-10, IGNORE)
FULL = DivergenceOptions("jsd", 0.3, 0.7, 0.6, 0.4, 5.0, 1.3, 6.0, -0.8, 1e-10, IGNORE)


def _rows(device: str, tokens: int, vocab: int, divergence: str, dtype: torch.dtype = torch.float32) -> Any:
    """Logits of both models (probabilities of the teacher for "probs_kl") and labels, every third ignored."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = 3 * torch.randn(2, tokens, vocab, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[2::3] = IGNORE
    teacher = teacher.softmax(-1) if divergence == "probs_kl" else teacher
    return student.to(device, dtype), teacher.to(device, dtype), labels.to(device)


@pytest.mark.kernel
@pytest.mark.parametrize("vocab", [1, 7, 128, 1000, 8200])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("options", [PLAIN, FULL], ids=["plain", "full"])
def test_row_kernel(device: str, divergence: str, vocab: int, options: DivergenceOptions) -> None:
    student, teacher, labels = _rows(device, 4, vocab, divergence)
    options = options._replace(divergence=divergence)
    biases = [None, None]
    if options.hard_weight:
        biases = list(torch.randn(2, vocab, generator=torch.Generator().manual_seed(1)).to(device))
        biases = [biases[0], None if divergence == "probs_kl" else biases[1]]
    extra = bool(options.hard_weight)
    coefficient = torch.rand(4, device=device) + 0.5
    exact_stats = DivergenceStats.allocate(student.double(), 4, extra, extra)
    exact = student.double()
    doubles = [None if bias is None else bias.double() for bias in biases]
    divergence_rows_torch_(exact, teacher.double(), labels, exact_stats, options, *doubles, coefficient.double())
    stats, ours = DivergenceStats.allocate(student, 4, extra, extra), student.clone()
    divergence_rows_(ours, teacher, labels, stats, options, *biases, coefficient)
    for mine, truth in zip(stats, exact_stats):
        assert_close(mine, truth)
    assert_close(ours, exact, atol=2e-6)
    again, before = DivergenceStats.allocate(student, 4, extra, extra), student.clone()
    divergence_rows_(student, teacher, labels, again, options, *biases)
    assert student.equal(before)  # no coefficient, no gradient
    assert all(first.equal(second) for first, second in zip(stats, again))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_plain_torch_rows_have_the_gradient_of_the_reference(divergence: str) -> None:
    student, teacher, labels = _rows("cpu", 6, 11, divergence)
    options = FULL._replace(divergence=divergence)
    leaf = student.double().requires_grad_()
    loss = divergence_of_logits_reference(leaf, teacher.double(), labels, options, "sum")
    (expected,) = torch.autograd.grad(loss, leaf)
    buffer = student.double()
    stats = DivergenceStats.allocate(buffer, 6, True, False)
    divergence_rows_torch_(buffer, teacher.double(), labels, stats, options, None, None, torch.ones(()).double())
    torch.testing.assert_close(buffer, expected)
    torch.testing.assert_close((options.soft_weight * stats.soft + options.hard_weight * stats.hard).sum(), loss)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_half_precision_is_no_worse_than_rounding_the_gradient(
    device: str, dtype: torch.dtype, divergence: str
) -> None:
    student, teacher, labels = _rows(device, 4, 1000, divergence)
    student, teacher = student.to(dtype), teacher.to(dtype)
    options = PLAIN._replace(divergence=divergence)
    coefficient = torch.full((), 64.0, device=device)
    exact, stats = student.double(), DivergenceStats.allocate(student.double(), 4, False, False)
    divergence_rows_torch_(exact, teacher.double(), labels, stats, options, None, None, coefficient.double())
    ours, mine = student.clone(), DivergenceStats.allocate(student, 4, False, False)
    divergence_rows_(ours, teacher, labels, mine, options, None, None, coefficient)
    assert_close(mine.soft, stats.soft)
    rounding = (exact.to(dtype).double() - exact).norm()
    assert (ours.double() - exact).norm() <= 1.02 * rounding


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 300, 8200, 13000])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("options", [PLAIN, FULL], ids=["plain", "full"])
def test_half_precision_gradient_lies_in_the_memory_of_fp32_logits(
    device: str, divergence: str, vocab: int, dtype: torch.dtype, options: DivergenceOptions
) -> None:
    """Written where the pass has read already: as many tiles as there are, each is the rounded gradient."""
    student, teacher, labels = _rows(device, 4, vocab, divergence)
    options, one = options._replace(divergence=divergence), torch.ones((), device=device)
    width = -(-vocab // 64) * 64
    buffer = torch.full((4, width), float("nan"), device=device)
    buffer[:, :vocab] = student
    hard = options.hard_weight != 0.0
    stats, expected = (DivergenceStats.allocate(student, 4, hard, False) for _ in range(2))
    out = gradient_memory(buffer, dtype, divergence)[:, :vocab]
    assert out.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    divergence_rows_(buffer[:, :vocab], teacher, labels, stats, options, None, None, one, width, None, out)
    divergence_rows_(student, teacher, labels, expected, options, None, None, one)
    # Two compilations of the same arithmetic may contract other products on a GPU: then a unit of `dtype` apart.
    unit = 0.0 if INTERPRETED else torch.finfo(dtype).eps
    torch.testing.assert_close(out, student.to(dtype), rtol=unit, atol=unit * 1e-3)
    for ours, theirs in zip(stats, expected):
        torch.testing.assert_close(ours, theirs, rtol=unit * 1e-3, atol=unit * 1e-3)


@pytest.mark.kernel
def test_padding_columns_are_scratch_and_never_enter(device: str) -> None:
    for divergence in ("forward_kl", "jsd"):
        options, one = FULL._replace(divergence=divergence), torch.ones((), device=device)
        results = []
        for padding in (0.0, float("nan")):
            student, teacher, labels = _rows(device, 4, 70, divergence)
            buffers = [torch.full((4, 128), padding, device=device) for _ in range(2)]
            for buffer, logits in zip(buffers, (student, teacher)):
                buffer[:, :70] = logits
            stats = DivergenceStats.allocate(student, 4, True, True)
            views = [buffer[:, :70] for buffer in buffers]
            divergence_rows_(*views, labels, stats, options, None, None, one, 128, 128)
            results.append([*stats, views[0]])
        stats = DivergenceStats.allocate(student, 4, True, True)
        divergence_rows_(student, teacher, labels, stats, options, None, None, one)
        for clean, scratch, exact in zip(*results, [*stats, student]):
            assert clean.equal(scratch)
            torch.testing.assert_close(clean, exact)


@pytest.mark.kernel
def test_a_label_outside_the_vocabulary_is_nan_and_touches_nothing_else(device: str) -> None:
    for label in (-1, 9, 2**40):
        buffer = torch.full((3, 16), 7.0, device=device)
        teacher, labels = torch.zeros(1, 9, device=device), torch.tensor([label], device=device)
        stats = DivergenceStats.allocate(buffer, 1, True, False)
        rows = buffer[1:2, 4:13]
        divergence_rows_(rows, teacher, labels, stats, FULL, None, None, torch.ones((), device=device))
        assert stats.hard.isnan().all()
        assert stats.soft.isfinite().all()
        assert rows.isnan().all()
        rows.fill_(7.0)
        assert buffer.eq(7.0).all()


@pytest.mark.kernel
def test_ignored_rows_are_not_read(device: str) -> None:
    for divergence in DIVERGENCES:
        student, teacher, labels = _rows(device, 3, 9, divergence)
        student[2] = teacher[2] = float("nan")
        stats = DivergenceStats.allocate(student, 3, True, True)
        options = FULL._replace(divergence=divergence)
        divergence_rows_(student, teacher, labels, stats, options, None, None, torch.ones((), device=device))
        assert student[2].eq(0).all()
        assert all(field[2] == 0 and field[:2].isfinite().all() for field in stats)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("poisoned", [0, 1])
def test_nan_in_either_model_is_nan_in_the_whole_row(
    backend: tuple[str, torch.dtype], divergence: str, poisoned: int
) -> None:
    device, dtype = backend
    student, teacher, labels = _rows(device, 2, 300, divergence, dtype)
    (student, teacher)[poisoned][0, 5] = float("nan")
    stats = DivergenceStats.allocate(student, 2, False, False)
    options = PLAIN._replace(divergence=divergence)
    divergence_rows_(student, teacher, labels, stats, options, None, None, torch.ones((), device=device))
    assert stats.soft.isnan().tolist() == [True, False]
    assert student.isnan().all(-1).tolist() == [True, False]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_classes_masked_in_both_models_take_no_part(backend: tuple[str, torch.dtype], divergence: str) -> None:
    device, dtype = backend
    student, teacher, _ = _rows(device, 2, 40, divergence, dtype)
    allowed = torch.arange(40, device=device) % 3 != 0
    masked = [logits.masked_fill(~allowed, -float("inf")) for logits in (student, teacher)]
    dense = [logits[:, allowed].contiguous() for logits in (student, teacher)]
    options, one = PLAIN._replace(divergence=divergence), torch.ones((), device=device)
    stats, expected = (DivergenceStats.allocate(student, 2, False, True) for _ in range(2))
    divergence_rows_(*masked, None, stats, options, None, None, one)
    divergence_rows_(*dense, None, expected, options, None, None, one)
    assert_close(stats.soft, expected.soft, atol=1e-6)
    assert_close(stats.entropy, expected.entropy, atol=1e-6)
    assert_close(masked[0][:, allowed], dense[0], atol=1e-6)
    assert masked[0][:, ~allowed].eq(0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "cosine"])
def test_gradient_within_the_memory_of_the_logits_overwrites_nothing_that_is_still_read(divergence: str) -> None:
    tokens, vocab = 4096, 128256
    options = DivergenceOptions(divergence, 0.5, 1.0, 1.0, 0.0, None, 1.0, None, 1.0, 0.0, IGNORE)
    logits, teacher = (3 * torch.randn(2, tokens, vocab, device="cuda")).unbind()
    # What rounding alone may change; a logit that was written over would change its gradient by about a probability.
    slack = 1e-5 * (logits.softmax(-1) + teacher.softmax(-1))
    exact, one = logits.clone(), torch.ones((), device="cuda")
    stats = DivergenceStats.allocate(logits, tokens, False, False)
    divergence_rows_(exact, teacher, None, stats, options, None, None, one)
    first = None
    for _ in range(5):
        buffer = logits.clone()
        out = gradient_memory(buffer, torch.bfloat16, divergence)
        divergence_rows_(buffer, teacher, None, stats, options, None, None, one, out=out)
        assert ((out.float() - exact).abs() <= 2**-8 * exact.abs() + slack).all()
        first = out.clone() if first is None else first
        assert out.equal(first)
