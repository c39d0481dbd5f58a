"""The Triton kernels of the divergences against float64, under the interpreter or on a GPU."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.head import elementwise_divergence
from liger_trainer.kernels.head.divergence_kernel import divergence_rows_, gradient_memory
from liger_trainer.kernels.head.divergence_options import DivergenceOptions, DivergenceStats
from liger_trainer.kernels.head.divergence_torch import divergence_of_logits_reference, divergence_rows_torch_
from liger_trainer.kernels.head.elementwise_divergence import jsd, kl_div, tvd
from liger_trainer.kernels.head.linear_jsd import linear_jsd
from liger_trainer.kernels.runtime import INTERPRETED, use_triton

IGNORE = -100
DIVERGENCES = ["forward_kl", "reverse_kl", "jsd", "probs_kl", "cosine"]
PLAIN = DivergenceOptions("jsd", 0.3, 1.0, 1.0, 0.0, None, 1.0, None, 1.0, 1e-10, IGNORE)
FULL = DivergenceOptions("jsd", 0.3, 0.7, 0.6, 0.4, 5.0, 1.3, 6.0, -0.8, 1e-10, IGNORE)


@pytest.fixture(autouse=True)
def _kernels_run(device: str) -> None:
    if not use_triton(torch.empty(1, device=device)):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")


def _rows(device: str, tokens: int, vocab: int, divergence: str, seed: int = 0) -> Any:
    """Logits of both models (probabilities of the teacher for "probs_kl") and labels, every third ignored."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 3 * torch.randn(2, tokens, vocab, generator=generator)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[2::3] = IGNORE
    teacher = teacher.softmax(-1) if divergence == "probs_kl" else teacher
    return student.to(device), teacher.to(device), labels.to(device)


def _assert_close(ours: Any, exact: Any, atol: float = 2e-5, rtol: float = 2e-5) -> None:
    torch.testing.assert_close(ours.to(exact.dtype), exact, atol=atol, rtol=rtol)


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
        _assert_close(mine, truth)
    _assert_close(ours, exact, atol=2e-6)
    again, before = DivergenceStats.allocate(student, 4, extra, extra), student.clone()
    divergence_rows_(student, teacher, labels, again, options, *biases)
    assert student.equal(before)  # no coefficient, no gradient
    assert all(first.equal(second) for first, second in zip(stats, again))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_torch_row_step_is_the_derivative_of_the_reference(divergence: str) -> None:
    student, teacher, labels = (tensor.cpu() for tensor in _rows("cpu", 6, 11, divergence))
    options = FULL._replace(divergence=divergence)
    leaf = student.double().requires_grad_()
    loss = divergence_of_logits_reference(leaf, teacher.double(), labels, options, "sum")
    (expected,) = torch.autograd.grad(loss, leaf)
    buffer = student.double()
    stats = DivergenceStats.allocate(buffer, 6, True, False)
    divergence_rows_torch_(buffer, teacher.double(), labels, stats, options, None, None, torch.ones(()).double())
    torch.testing.assert_close(buffer, expected)
    torch.testing.assert_close((options.soft_weight * stats.soft + options.hard_weight * stats.hard).sum(), loss)


@given(
    tokens=st.integers(0, 5),
    vocab=st.integers(1, 150),
    beta=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    temperature=st.sampled_from([1.0, 1.7]),
    softcap=st.sampled_from([None, 2.0]),
    hard_weight=st.sampled_from([0.0, 0.5]),
    memory=st.integers(1, 6000),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    teacher_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_linear_jsd(
    device: str, tokens: int, vocab: int, beta: float, temperature: float, softcap: float | None, hard_weight: float,
    memory: int, trained: tuple[bool, bool, bool], teacher_dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, 4), (vocab, 4), (vocab,))
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_(t) for shape, t in zip(shapes, trained)]
    # Small integers: their bf16 products are exact, so that the teacher's logits do not depend on who multiplies them.
    teacher = [
        torch.randint(-3, 4, shape, generator=generator).to(device, teacher_dtype)
        for shape in ((tokens, 3), (vocab, 3))
    ]
    labels = torch.randint(0, vocab, (tokens,), generator=generator).to(device)
    labels[1::2] = IGNORE

    def loss(leaves: list[torch.Tensor], teacher: list[torch.Tensor]) -> torch.Tensor:
        return linear_jsd(
            leaves[0], leaves[1], *teacher, labels, beta, temperature, leaves[2], student_softcap=softcap,
            hard_weight=hard_weight, logits_memory=memory,
        )  # fmt: skip

    doubles = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    ours, exact = loss(leaves, teacher), loss(doubles, [tensor.double() for tensor in teacher])
    _assert_close(ours, exact)
    if any(trained):
        upstream = torch.tensor(2.0, device=device)
        gradients = torch.autograd.grad(ours, [leaf for leaf in leaves if leaf.requires_grad], upstream)
        truth = torch.autograd.grad(exact, [leaf for leaf in doubles if leaf.requires_grad], upstream.double())
        for mine, theirs in zip(gradients, truth):
            _assert_close(mine, theirs)


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
    _assert_close(mine.soft, stats.soft)
    rounding = (exact.to(dtype).double() - exact).norm()
    assert (ours.double() - exact).norm() <= 1.02 * rounding


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
    assert out.equal(student.to(dtype))
    assert all(ours.equal(theirs) for ours, theirs in zip(stats, expected))


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
def test_nan_in_either_model_is_nan_in_the_whole_row(device: str, divergence: str, poisoned: int) -> None:
    student, teacher, labels = _rows(device, 2, 300, divergence)
    (student, teacher)[poisoned][0, 5] = float("nan")
    stats = DivergenceStats.allocate(student, 2, False, False)
    options = PLAIN._replace(divergence=divergence)
    divergence_rows_(student, teacher, labels, stats, options, None, None, torch.ones((), device=device))
    assert stats.soft.isnan().tolist() == [True, False]
    assert student.isnan().all(-1).tolist() == [True, False]


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_classes_masked_in_both_models_take_no_part(device: str, divergence: str) -> None:
    student, teacher, _ = _rows(device, 2, 40, divergence)
    kept = torch.arange(40, device=device) % 3 != 0
    masked = [logits.masked_fill(~kept, -float("inf")) for logits in (student, teacher)]
    dense = [logits[:, kept].contiguous() for logits in (student, teacher)]
    options, one = PLAIN._replace(divergence=divergence), torch.ones((), device=device)
    stats, expected = (DivergenceStats.allocate(student, 2, False, True) for _ in range(2))
    divergence_rows_(*masked, None, stats, options, None, None, one)
    divergence_rows_(*dense, None, expected, options, None, None, one)
    _assert_close(stats.soft, expected.soft, atol=1e-6)
    _assert_close(stats.entropy, expected.entropy, atol=1e-6)
    _assert_close(masked[0][:, kept], dense[0], atol=1e-6)
    assert masked[0][:, ~kept].eq(0).all()


FUNCTIONS: dict[str, Any] = {
    "kl": lambda x, y, **o: kl_div(x, y.exp(), **o),
    "kl_log": lambda x, y, **o: kl_div(x, y, log_target=True, **o),
    "forward_kl": lambda x, y, **o: jsd(x, y, beta=0.0, **o),
    "reverse_kl": lambda x, y, **o: jsd(x, y, beta=1.0, **o),
    "jsd": lambda x, y, **o: jsd(x, y, beta=0.3, **o),
    "tvd": lambda x, y, **o: tvd(x.exp(), y.exp(), **o),
}


@given(
    name=st.sampled_from(list(FUNCTIONS)),
    rows=st.integers(0, 5),
    vocab=st.sampled_from([1, 7, 130, 4100]),
    reduction=st.sampled_from(["none", "sum", "mean", "batchmean"]),
    labelled=st.booleans(),
    layout=st.sampled_from(["plain", "shifted", "transposed"]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_elementwise(
    device: str, name: str, rows: int, vocab: int, reduction: str, labelled: bool, layout: str, masked: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pair = 2 * torch.randn(2, 2, rows + 1, vocab, generator=generator)
    if masked and vocab > 1:
        pair[..., 0] = -float("inf")
    student, teacher = pair.log_softmax(-1).to(device)
    if layout == "transposed":
        student = student.transpose(1, 2).contiguous().transpose(1, 2)
    leaf = student.clone(memory_format=torch.preserve_format).requires_grad_()
    cut = slice(1, None) if layout == "plain" else slice(None, -1)
    labels = torch.randint(0, 2, (2, rows), generator=generator).to(device) * IGNORE if labelled else None
    double = leaf.detach().double().requires_grad_()
    ours = FUNCTIONS[name](leaf[:, cut], teacher[:, cut], reduction=reduction, labels=labels)
    exact = FUNCTIONS[name](double[:, cut], teacher[:, cut].double(), reduction=reduction, labels=labels)
    _assert_close(ours, exact)
    upstream = torch.rand(ours.shape, generator=generator).to(device)
    (gradient,) = torch.autograd.grad(ours, leaf, upstream, retain_graph=True)
    _assert_close(gradient, torch.autograd.grad(exact, double, upstream.double())[0], atol=1e-6)
    assert gradient.equal(torch.autograd.grad(ours, leaf, upstream)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["jsd", "reverse_kl", "kl_log"])
def test_elementwise_half_precision(device: str, dtype: torch.dtype, name: str) -> None:
    student, teacher = (
        (2 * torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0))).log_softmax(-1).to(device)
    )
    half = student.to(dtype).requires_grad_()
    double = half.detach().double().requires_grad_()
    target = teacher.to(dtype)
    loss, exact = (FUNCTIONS[name](x, y, reduction="sum") for x, y in ((half, target), (double, target.double())))
    assert loss.dtype == torch.float32
    _assert_close(loss, exact)
    (gradient,), (truth,) = torch.autograd.grad(loss, half), torch.autograd.grad(exact, double)
    assert (gradient.double() - truth).norm() <= 1.02 * (truth.to(dtype).double() - truth).norm()


def test_tvd_has_no_gradient_at_a_tie(device: str) -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], device=device, requires_grad=True)
    q = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.2, 0.7]], device=device)
    tvd(p, q, reduction="sum").backward()
    assert p.grad.tolist() == [[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]]


def test_inputs_stay_and_double_backward_is_refused(device: str) -> None:
    student, teacher = torch.randn(2, 3, 17, device=device).log_softmax(-1)
    leaf = student.clone().requires_grad_()
    for function in FUNCTIONS.values():
        loss = function(leaf, teacher)
        with pytest.raises(RuntimeError, match="create_graph=True"):
            torch.autograd.grad(loss, leaf, create_graph=True)
    assert leaf.detach().equal(student)


def test_compile_to_one_graph_and_pass_opcheck(device: str) -> None:
    leaf = torch.randn(4, 19, device=device, requires_grad=True)
    teacher = torch.randn(4, 19, device=device).log_softmax(-1)
    weight = torch.randn(6, 19, device=device, requires_grad=True)
    other = torch.randn(6, 19, device=device)

    def step(leaf: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = jsd(leaf.log_softmax(-1), teacher) + tvd(leaf.softmax(-1), teacher.exp(), reduction="none").sum()
        return given + 2.0 * linear_jsd(leaf, weight, teacher, other)

    loss, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(leaf, weight), step(leaf, weight)
    _assert_close(loss, expected)
    for ours, exact in zip(torch.autograd.grad(loss, (leaf, weight)), torch.autograd.grad(expected, (leaf, weight))):
        _assert_close(ours, exact)
    labels = torch.tensor([0, IGNORE, 1, 2], device=device)
    rest = (teacher, labels, "jsd", 0.3, 0.0, IGNORE)
    scale, grad = torch.full((), 0.5, device=device), torch.rand(4, 19, device=device)
    torch.library.opcheck(elementwise_divergence._elements, (leaf, *rest))
    torch.library.opcheck(elementwise_divergence._backward, (grad, None, leaf.detach(), *rest))
    torch.library.opcheck(elementwise_divergence._backward, (scale, scale, leaf.detach(), *rest))
    for expected in (None, torch.ones((), device=device)):  # as it comes: else the backward writes over an output
        torch.library.opcheck(elementwise_divergence._loss, (scale, expected, leaf, *rest))
    for upstream in (scale, 3.0 * scale):
        torch.library.opcheck(
            elementwise_divergence._correct_, (grad.clone(), upstream, scale, scale, leaf.detach(), *rest)
        )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("upstream", [1.0, 0.3, 0.25, 0.0, 4096.0])
def test_the_gradient_is_rounded_once_whatever_was_expected(
    device: str, name: str, dtype: torch.dtype, upstream: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 5, 70, generator=generator).log_softmax(-1).to(device)
    labels = torch.tensor([0, 1, IGNORE, 2, 3], device=device)
    gradients = []
    for expected in (1.0, torch.tensor(0.3, device=device), None):
        leaf = student.to(dtype).requires_grad_()
        loss = FUNCTIONS[name](leaf, teacher, labels=labels, expected_grad=expected)
        kept = torch.autograd.grad(loss, leaf, torch.full_like(loss, 2.0), retain_graph=True)[0]
        before = kept.clone()
        gradients.append(torch.autograd.grad(loss, leaf, torch.full_like(loss, upstream))[0])
        assert kept.equal(before)
    assert all(gradient.equal(gradients[-1]) for gradient in gradients)
    assert bool(gradients[0].any()) == (upstream != 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("upstream", "expected", "exact"),
    [
        (0.25, 1.0, True),
        (-6.0, 0.75, True),
        (0.75, 1.0, False),
        (0.0, 1.0, False),
        (1.0, 0.0, False),
        (math.inf, 1.0, False),
        (math.nan, 1.0, False),
    ],
)
def test_a_gradient_is_multiplied_by_a_power_of_two_and_made_anew_for_any_other_factor(
    device: str, dtype: torch.dtype, upstream: float, expected: float, exact: bool
) -> None:
    student, teacher = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(0)).log_softmax(-1).to(device)
    grad, assumed, scale = (torch.tensor(value, device=device) for value in (upstream, expected, 0.5))
    arguments = (scale, student.to(dtype), teacher, None, "jsd", 0.3, 0.0, IGNORE)
    gradient = torch.full((3, 70), 5.0, device=device, dtype=dtype)  # no divergence has it
    elementwise_divergence._correct_(gradient, grad, assumed, *arguments)
    anew = elementwise_divergence._backward(grad, *arguments)
    if exact and dtype != torch.float16:
        assert gradient.eq(5.0 * upstream / expected).all()
    else:
        torch.testing.assert_close(gradient, anew, rtol=0.0, atol=0.0, equal_nan=True)


def test_what_the_forward_makes(device: str) -> None:
    """A gradient where one is needed and expected, and nothing else."""
    student, teacher = torch.randn(2, 3, 17, device=device).log_softmax(-1)
    leaf, made = student.clone().requires_grad_(), []
    original = elementwise_divergence.launch

    def launch(*args: Any, **kwargs: Any) -> None:
        made.append({name for name in ("sums", "out", "expected") if kwargs.get(name) is not None})
        original(*args, **kwargs)

    with mock.patch.object(elementwise_divergence, "launch", launch):
        jsd(leaf, teacher).backward()
        assert made == [{"sums", "out"}, {"out", "expected"}]
        made.clear()
        jsd(leaf, teacher, expected_grad=None).backward()
        jsd(leaf, teacher, reduction="none").sum().backward()
        assert made == [{"sums"}, {"out"}, {"out"}, {"out"}]
        made.clear()
        jsd(student, teacher.clone().requires_grad_())
        with torch.no_grad():
            jsd(leaf, teacher)
        assert made == [{"sums"}, {"sums"}]


def test_many_rows(device: str) -> None:
    if INTERPRETED:
        pytest.skip("65536 programs take the interpreter minutes")
    student, teacher = torch.randn(2, 70_000, 8, device=device).log_softmax(-1)
    torch.testing.assert_close(
        kl_div(student, teacher.exp()), F.kl_div(student, teacher.exp(), reduction="batchmean"), atol=1e-5, rtol=1e-5
    )
