"""KL divergence, JSD and TVD of given distributions on the CPU: torch's own, gradcheck, options, errors, AOT."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.kernels.head import elementwise_divergence
from liger_trainer.kernels.head import elementwise_divergence as operators
from liger_trainer.kernels.head.elementwise_divergence import jsd, kl_div, tvd
from tests.aot import compile_launch, on_targets, recorded_launches

IGNORE = -100
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


def test_tvd_and_its_gradient_at_a_tie() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], requires_grad=True)
    q = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.2, 0.7]])
    loss = tvd(p, q, reduction="sum")
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(0.3))
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
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        function(student, target, **arguments)
    assert all(word in str(error.value) for word in words), str(error.value)


def _launches(dtype: torch.dtype, target: str) -> list[Any]:
    x, y, labels = torch.empty(3, 8192, dtype=dtype), torch.empty(3, 8192), torch.zeros(3, dtype=torch.int64)
    y = y.to(dtype)
    with (
        recorded_launches() as launches,
        mock.patch.object(elementwise_divergence, "has_lg2", return_value=target.startswith("sm_")),
    ):
        scale, expected, gradient = torch.ones(()), torch.ones(()), torch.empty_like(x)
        for divergence in ("kl", "kl_log", "forward_kl", "reverse_kl", "jsd", "tvd"):
            rest = (x, y, labels, divergence, 0.3, 1e-10, IGNORE)
            operators._loss(scale, None, *rest)
            operators._loss(scale, expected, *rest)
            operators._backward(scale, scale, *rest)
            operators._correct_(gradient, scale, expected, scale, *rest)
        elements = operators._elements(*rest)
        operators._backward(elements, None, *rest)
    return launches


@pytest.mark.parametrize(("target_name", "dtype"), on_targets((torch.bfloat16,), (torch.float32,)))
def test_every_kernel_compiles_ahead_of_time(target_name: str, dtype: torch.dtype) -> None:
    launches = _launches(dtype, target_name)
    assert len(launches) == 26
    for launch in launches:
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
