"""Cross entropy and total variation distance of logits: torch's own, errors, compilation, kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.liger.operators.fused_ce_tvd import fused_ce_tvd
from tests.aot import TARGETS, compile_launch, recorded_launches

IGNORE = -100
OPS = torch.ops.liger_trainer


def _case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    student, teacher = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return student.clone().requires_grad_(), teacher, torch.tensor([0, IGNORE, 6, 2, IGNORE])


def test_terms_are_torchs() -> None:
    student, teacher, target = _case()
    ce, tvd = fused_ce_tvd(student, teacher, target)
    torch.testing.assert_close(ce, F.cross_entropy(student, target, reduction="none"))
    expected = 0.5 * (student.softmax(-1) - teacher.softmax(-1)).abs().sum(-1)
    torch.testing.assert_close(tvd, torch.where(target == IGNORE, 0.0, expected))
    assert torch.autograd.gradcheck(lambda x: fused_ce_tvd(x, teacher, target), student)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher_logits": torch.zeros(5, 6)}, ["(5, 7)", "(5, 6)"]),
        ({"teacher_logits": torch.zeros(5, 7, dtype=torch.int64)}, ["int64"]),
        ({"teacher_logits": torch.zeros(5, 7, device="meta")}, ["meta"]),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ["`target`", "(4,)", "(5,)"]),
        ({"target": torch.full((5,), 7)}, ["label 7", "[0, 7)"]),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    student, teacher, target = _case()
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        fused_ce_tvd(**{"student_logits": student, "teacher_logits": teacher, "target": target, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_kernels_compile_ahead_of_time(target_name: str, dtype: torch.dtype) -> None:
    logits, target = torch.empty(2, 8192, dtype=dtype), torch.zeros(2, dtype=torch.int64)
    with recorded_launches() as launches:
        ce, tvd, saved = OPS.fused_ce_tvd(logits, logits.float(), target, IGNORE)
        OPS.fused_ce_tvd_backward(ce, tvd, logits, logits, target, saved, IGNORE)
    assert len(launches) == 2
    assembly = [compile_launch(launch, target_name).asm for launch in launches]
    if target_name == "sm_90" and dtype == torch.bfloat16:  # 16 bytes at a time
        assert assembly[1]["ptx"].count("global.v4.b32") == 3


def _kernel_case(device: str, rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = 2 * torch.randn(2, rows, vocab, generator=generator)
    if rows > 1:
        teacher[1] = student[1]  # a tie in every class
    target = torch.randint(0, vocab, (rows,), generator=generator)
    target[2::3] = IGNORE
    return student.to(device).requires_grad_(), teacher.to(device), target.to(device)


@pytest.mark.kernel
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 8200])
def test_values_and_gradients(device: str, rows: int, vocab: int) -> None:
    student, teacher, target = _kernel_case(device, rows, vocab)
    double = student.detach().double().requires_grad_()
    ours, exact = fused_ce_tvd(student, teacher, target), fused_ce_tvd(double, teacher.double(), target)
    before = student.detach().clone()
    for mine, truth in zip(ours, exact):
        torch.testing.assert_close(mine.double(), truth, atol=1e-5, rtol=1e-5)
    upstream = torch.rand(2, rows, device=device)
    for terms in ((0, 1), (0,), (1,)):
        loss, expected = (sum((values[i] * upstream[i]).sum() for i in terms) for values in (ours, exact))
        (gradient,) = torch.autograd.grad(loss, student, retain_graph=True)
        (truth,) = torch.autograd.grad(expected, double, retain_graph=True)
        if rows and 1 in terms:  # at a tie the sign of p - q is that of a rounding error, unless it is 0
            gradient, truth = gradient[[0, 2, 3, 4]], truth[[0, 2, 3, 4]]
        torch.testing.assert_close(gradient.double(), truth, atol=1e-6, rtol=2e-5)
    assert student.detach().equal(before)


@pytest.mark.kernel
def test_a_tie_of_logits_has_no_gradient(device: str) -> None:
    student, teacher, target = _kernel_case(device, 2, 300)
    _, tvd = fused_ce_tvd(student, teacher, target)
    tvd.sum().backward()
    assert tvd[1] == 0.0
    assert not student.grad[1].any()


@pytest.mark.kernel
def test_ignored_rows_are_not_read_and_a_wrong_label_is_nan(device: str) -> None:
    student, teacher, target = _kernel_case(device, 3, 9)
    student = student.detach().clone()
    student[2] = float("nan")
    target = target.clone()
    target[0] = -1
    student.requires_grad_()
    ce, tvd, saved = OPS.fused_ce_tvd(student, teacher, target, IGNORE)
    assert (ce.isnan().tolist(), tvd.isnan().any().item()) == ([True, False, False], False)
    gradient = OPS.fused_ce_tvd_backward(
        ce.detach() * 0 + 1, tvd.detach(), student.detach(), teacher, target, saved, IGNORE
    )
    assert gradient.isnan().all(-1).tolist() == [True, False, False]
    assert gradient[2].eq(0).all()


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strides_compiled(device: str, dtype: torch.dtype) -> None:
    student, teacher, target = _kernel_case(device, 8, 40)
    half = student.detach().to(dtype).view(2, 4, 40).requires_grad_()
    double = half.detach().double().requires_grad_()
    target = target.view(2, 4)[:, 1:]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ce, tvd = fused_ce_tvd(x[:, :-1] * 1.0, y.view(2, 4, 40)[:, :-1], target)
        return (ce + 2.0 * tvd).sum()

    loss, exact = (
        torch.compile(step, fullgraph=True, backend="aot_eager")(half, teacher),
        step(double, teacher.double()),
    )
    torch.testing.assert_close(loss.double(), exact, atol=1e-5, rtol=1e-5)
    (gradient,), (truth,) = torch.autograd.grad(loss, half), torch.autograd.grad(exact, double)
    assert (gradient.double() - truth).norm() <= 1.02 * (truth.to(dtype).double() - truth).norm()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(step(half, teacher), half, create_graph=True)
