"""Cross entropy and total variation distance of logits on the CPU: torch's own, gradcheck, errors, AOT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.kernels.parity import fused_ce_tvd as operators
from liger_trainer.kernels.parity.fused_ce_tvd import fused_ce_tvd
from tests.aot import TARGETS, compile_launch, recorded_launches

IGNORE = -100


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
        ce, tvd, saved = operators._forward(logits, logits.float(), target, IGNORE)
        operators._backward(ce, tvd, logits, logits, target, saved, IGNORE)
    assert len(launches) == 2
    assembly = [compile_launch(launch, target_name).asm for launch in launches]
    if target_name == "sm_90" and dtype == torch.bfloat16:  # 16 bytes at a time
        assert assembly[1]["ptx"].count("global.v4.b32") == 3
