"""KL divergence, JSD and TVD of given distributions: references, kernels, memory."""

from __future__ import annotations

import functools
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.head import elementwise_divergence
from liger_trainer.kernels.head.elementwise_divergence import jsd, kl_div, tvd
from liger_trainer.kernels.runtime import INTERPRETED
from tests.aot import compile_launch, on_targets, recorded_launches
from tests.kernels.head.heads import IGNORE, MIB, assert_close, assert_refused, relative_error

REDUCTIONS = ["none", "sum", "mean", "batchmean"]


def _case(rows: int = 6, vocab: int = 9, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the student, a leaf, and of the teacher."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, rows, vocab, generator=generator, dtype=torch.float64).log_softmax(-1).to(dtype)
    return student.clone().requires_grad_(), teacher


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_is_torchs(reduction: str, log_target: bool) -> None:
    student, teacher = _case()
    target = teacher if log_target else teacher.exp()
    expected = F.kl_div(student, target, reduction=reduction, log_target=log_target)
    loss = kl_div(student, target, reduction, log_target)
    torch.testing.assert_close(loss, expected)
    upstream = torch.rand_like(loss)
    torch.testing.assert_close(
        torch.autograd.grad(loss, student, upstream), torch.autograd.grad(expected, student, upstream)
    )


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_is_built_from_kl_divergences(beta: float) -> None:
    student, teacher = _case()
    log_m = torch.log(beta * teacher.exp() + (1 - beta) * student.exp())

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p.exp() * (p - q)).sum() / p.shape[0]

    mixed = beta * kl(teacher, log_m) + (1 - beta) * kl(student, log_m)
    expected = {0.0: kl(teacher, student), 1.0: kl(student, teacher)}.get(beta, mixed)
    loss = jsd(student, teacher, beta=beta)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, student), torch.autograd.grad(expected, student))


def test_tvd_and_its_gradient_at_a_tie(backend: tuple[str, torch.dtype]) -> None:
    device, dtype = backend
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], device=device, dtype=dtype, requires_grad=True)
    q = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.2, 0.7]], device=device, dtype=dtype)
    loss = tvd(p, q, reduction="sum")
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(0.3, device=device, dtype=dtype))
    assert p.grad.tolist() == [[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("function", [kl_div, jsd, tvd])
def test_ignored_rows_do_not_count(function: Any, reduction: str) -> None:
    student, teacher = _case()
    labels = torch.tensor([3, IGNORE, 0, 1, IGNORE, 8])
    valid = labels != IGNORE
    poisoned = torch.where(valid.unsqueeze(-1), student, math.nan)
    loss = function(poisoned, teacher, labels=labels, reduction=reduction)
    expected = function(student[valid], teacher[valid], reduction=reduction)
    torch.testing.assert_close(loss[valid] if reduction == "none" else loss, expected)
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), student)[0])
    nothing = function(student, teacher, labels=torch.full_like(labels, IGNORE), reduction=reduction)
    assert not nothing.any()


@pytest.mark.parametrize("reduction", ["none", "batchmean"])
@pytest.mark.parametrize("function", [kl_div, jsd])
def test_gradcheck(function: Any, reduction: str) -> None:
    student, teacher = _case(3, 5)
    assert torch.autograd.gradcheck(lambda x: function(x, teacher, reduction=reduction), student)


def test_the_teacher_gets_no_gradient() -> None:
    student, teacher = _case()
    teacher.requires_grad_()
    for function in (kl_div, jsd, tvd):
        function(student, teacher).backward()
    assert teacher.grad is None


def test_probabilities_of_zero() -> None:
    half = torch.tensor([[0.5, 0.5, 0.0]])
    third = torch.full((1, 3), 1 / 3)
    expected = math.log(1.5)
    torch.testing.assert_close(kl_div(third.log(), half).item(), expected)
    torch.testing.assert_close(kl_div(third.log(), half.log(), log_target=True).item(), expected)
    torch.testing.assert_close(jsd(half.log(), third.log(), beta=1.0).item(), expected)
    assert kl_div(half.log(), third).item() == math.inf
    assert jsd(half.log(), third.log(), beta=0.0).item() == math.inf
    assert jsd(half.log(), half.log(), beta=0.5).item() == 0.0
    assert kl_div(half.log(), half).item() == 0.0


def test_loss_is_fp32_of_any_shape() -> None:
    student, teacher = _case(dtype=torch.bfloat16)
    for function in (kl_div, jsd, tvd):
        loss = function(student.view(2, 3, 9), teacher.float().view(2, 3, 9))
        assert loss.dtype == torch.float32
        assert loss.equal(function(student, teacher))
        elements = function(student.view(2, 3, 9), teacher.view(2, 3, 9), reduction="none")
        assert (elements.shape, elements.dtype) == ((2, 3, 9), torch.float32)


@pytest.mark.parametrize("reduction", ["sum", "mean", "batchmean"])
def test_empty_batch(reduction: str) -> None:
    student, teacher = _case(0)
    for function in (kl_div, jsd, tvd):
        loss = function(student, teacher, reduction=reduction)
        loss.backward()
        assert loss.item() == 0.0
        assert student.grad.shape == (0, 9)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (kl_div, {"reduction": "avg"}, ["`reduction`", "'avg'", "'batchmean'"]),
        (kl_div, {"y_true": torch.zeros(6, 8)}, ["`y_pred`", "(6, 9)", "(6, 8)"]),
        (kl_div, {"y_true": torch.zeros(6, 9, dtype=torch.int64)}, ["`y_true`", "int64"]),
        (kl_div, {"labels": torch.zeros(5, dtype=torch.int64)}, ["`labels`", "(5,)", "(6,)"]),
        (jsd, {"beta": -0.1}, ["`beta`", "-0.1", "[0, 1]"]),
        (tvd, {"labels": torch.zeros(6)}, ["`labels`", "float32"]),
    ],
)
def test_errors_say_what_is_wrong(function: Any, arguments: dict[str, Any], words: list[str]) -> None:
    student, teacher = _case()
    arguments = dict(arguments)
    target = arguments.pop("y_true", teacher)
    assert_refused(functools.partial(function, student, target), words, **arguments)


def _launches(dtype: torch.dtype, target: str) -> list[Any]:
    x, y, labels = torch.empty(3, 8192, dtype=dtype), torch.empty(3, 8192), torch.zeros(3, dtype=torch.int64)
    y = y.to(dtype)
    with (
        recorded_launches() as launches,
        mock.patch.object(elementwise_divergence, "has_lg2", return_value=target.startswith("sm_")),
    ):
        scale, expected, gradient = torch.ones(()), torch.ones(()), torch.empty_like(x)
        for divergence in ("kl", "kl_log", "forward_kl", "reverse_kl", "jsd", "tvd"):
            pair = elementwise_divergence.Pair(x, y, labels, divergence, 0.3, 1e-10, IGNORE)
            elementwise_divergence._loss(scale, None, pair)
            elementwise_divergence._loss(scale, expected, pair)
            elementwise_divergence._backward(scale, scale, pair)
            elementwise_divergence._launch(pair, out=gradient, grad=scale, scale=scale, expected=expected)
        elements = elementwise_divergence._elements(pair)
        elementwise_divergence._backward(elements, None, pair)
    return launches


@pytest.mark.parametrize(("target_name", "dtype"), on_targets((torch.bfloat16,), (torch.float32,)))
def test_every_kernel_compiles_ahead_of_time(target_name: str, dtype: torch.dtype) -> None:
    launches = _launches(dtype, target_name)
    assert len(launches) == 26
    # Elsewhere the kernel of each divergence with everything that a launch may ask for.
    for launch in launches if (target_name, dtype) == ("sm_90", torch.bfloat16) else launches[3::4]:
        assert compile_launch(launch, target_name) is not None


def test_kernels_read_128_bits_at_a_time() -> None:
    launches = _launches(torch.bfloat16, "sm_90")
    expected = {"kl": (2, 3, 2, 2), "jsd": (2, 3, 3, 3), "tvd": (2, 3, 3, 3)}
    for index, divergence in ((0, "kl"), (16, "jsd"), (20, "tvd")):
        for launch, accesses in zip(launches[index : index + 4], expected[divergence]):
            assert launch.arguments["DIVERGENCE"] == divergence
            assembly = compile_launch(launch, "sm_90").asm["ptx"]
            zeros = int(launch.arguments["out_ptr"] is not None)  # the gradient of an ignored row
            multiplied = 2 * (launch.arguments["expected_ptr"] is not None)  # the gradient, where that is exact
            wide = assembly.count("ld.global.v4.b32") + assembly.count("st.global.v4.b32")
            assert wide == accesses + zeros + multiplied


# The kernels, under the interpreter or on a GPU.


FUNCTIONS: dict[str, Any] = {
    "kl": lambda x, y, **o: kl_div(x, y.exp(), **o),
    "kl_log": lambda x, y, **o: kl_div(x, y, log_target=True, **o),
    "forward_kl": lambda x, y, **o: jsd(x, y, beta=0.0, **o),
    "reverse_kl": lambda x, y, **o: jsd(x, y, beta=1.0, **o),
    "jsd": lambda x, y, **o: jsd(x, y, beta=0.3, **o),
    "tvd": lambda x, y, **o: tvd(x.exp(), y.exp(), **o),
}


@pytest.mark.kernel
@pytest.mark.parametrize("name", FUNCTIONS)
@given(
    rows=st.integers(0, 5),
    vocab=st.sampled_from([1, 7, 130, 4100]),
    reduction=st.sampled_from(["none", "sum", "mean", "batchmean"]),
    labelled=st.booleans(),
    layout=st.sampled_from(["plain", "shifted", "transposed"]),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert_close(ours, exact)
    upstream = torch.rand(ours.shape, generator=generator).to(device)
    (gradient,) = torch.autograd.grad(ours, leaf, upstream, retain_graph=True)
    assert_close(gradient, torch.autograd.grad(exact, double, upstream.double())[0], atol=1e-6)
    assert gradient.equal(torch.autograd.grad(ours, leaf, upstream)[0])


@pytest.mark.kernel
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
    assert_close(loss, exact)
    (gradient,), (truth,) = torch.autograd.grad(loss, half), torch.autograd.grad(exact, double)
    assert (gradient.double() - truth).norm() <= 1.02 * (truth.to(dtype).double() - truth).norm()


@pytest.mark.kernel
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
        first = torch.autograd.grad(loss, leaf, torch.full_like(loss, 2.0), retain_graph=True)[0]
        before = first.clone()
        gradients.append(torch.autograd.grad(loss, leaf, torch.full_like(loss, upstream))[0])
        assert first.equal(before)
    assert all(gradient.equal(gradients[-1]) for gradient in gradients)
    assert bool(gradients[0].any()) == (upstream != 0.0)


@pytest.mark.kernel
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
def test_a_gradient_is_multiplied_by_a_power_of_two_and_recomputed_for_any_other_factor(
    device: str, dtype: torch.dtype, upstream: float, expected: float, exact: bool
) -> None:
    student, teacher = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(0)).log_softmax(-1).to(device)
    grad, assumed, scale = (torch.tensor(value, device=device) for value in (upstream, expected, 0.5))
    pair = elementwise_divergence.Pair(student.to(dtype), teacher, None, "jsd", 0.3, 0.0, IGNORE)
    gradient = torch.full((3, 70), 5.0, device=device, dtype=dtype)  # no divergence has it
    elementwise_divergence._launch(pair, out=gradient, grad=grad, scale=scale, expected=assumed)
    recomputed = elementwise_divergence._backward(grad, scale, pair)
    if exact and dtype != torch.float16:
        assert gradient.eq(5.0 * upstream / expected).all()
    else:
        torch.testing.assert_close(gradient, recomputed, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.kernel
def test_the_forward_computes_a_gradient_only_where_one_is_needed_and_expected(device: str) -> None:
    student, teacher = torch.randn(2, 3, 17, device=device).log_softmax(-1)
    leaf, launched = student.clone().requires_grad_(), []
    original = elementwise_divergence._launch

    def launch(*args: Any, **kwargs: Any) -> None:
        launched.append({name for name in ("sums", "out", "expected") if kwargs.get(name) is not None})
        original(*args, **kwargs)

    with mock.patch.object(elementwise_divergence, "_launch", launch):
        jsd(leaf, teacher).backward()
        assert launched == [{"sums", "out"}, {"out", "expected"}]
        launched.clear()
        jsd(leaf, teacher, expected_grad=None).backward()
        jsd(leaf, teacher, reduction="none").sum().backward()
        assert launched == [{"sums"}, {"out"}, {"out"}, {"out"}]
        launched.clear()
        jsd(student, teacher.clone().requires_grad_())
        with torch.no_grad():
            jsd(leaf, teacher)
        assert launched == [{"sums"}, {"sums"}]


@pytest.mark.kernel
def test_many_rows(device: str) -> None:
    if INTERPRETED:
        pytest.skip("65536 programs take the interpreter minutes")
    student, teacher = torch.randn(2, 70_000, 8, device=device).log_softmax(-1)
    torch.testing.assert_close(
        kl_div(student, teacher.exp()), F.kl_div(student, teacher.exp(), reduction="batchmean"), atol=1e-5, rtol=1e-5
    )


# Real shapes, memory and waiting on a GPU.


@pytest.mark.gpu
def test_given_distributions_allocate_one_gradient() -> None:
    tokens, vocab = 2048, 128256
    student = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).log_softmax(-1).requires_grad_()
    teacher = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).log_softmax(-1)
    for function in (lambda: kl_div(student, teacher, log_target=True), lambda: jsd(student, teacher)):
        function().backward()
        student.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function().backward()
        assert torch.cuda.max_memory_allocated() - before <= 2 * tokens * vocab + 2 * MIB  # allocations are whole MiB
        student.grad = None


@pytest.mark.gpu
def test_rows_beyond_two_billion_elements() -> None:
    tokens, vocab = 8400, 262208  # the last rows start past 2**31 elements
    student = torch.zeros(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    teacher = torch.zeros(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    student[-2:], teacher[-2:] = torch.randn(2, 2, vocab, device="cuda").log_softmax(-1)
    labels = torch.full((tokens,), IGNORE, device="cuda")
    labels[-2:] = 0
    student.requires_grad_()
    loss = jsd(student, teacher, labels)
    (gradient,) = torch.autograd.grad(loss, student)
    rows = student.detach()[-2:].double().requires_grad_()
    exact = jsd(rows, teacher[-2:].double())
    assert abs(loss.item() - exact.item()) < 1e-5
    assert relative_error(gradient[-2:], torch.autograd.grad(exact, rows)[0]) < 3e-3
    assert not gradient[:-2:4096].any()
