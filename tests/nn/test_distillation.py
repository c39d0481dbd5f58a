"""The distillation losses of `liger_trainer.nn`, with Liger's call signatures, against plain torch."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.nn import (
    LigerFusedCETVDLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
)

TOKENS, HIDDEN, TEACHER, VOCAB = 7, 6, 5, 19
IGNORE = -1


def _heads(vocab: int = VOCAB) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    student = [torch.randn(shape, requires_grad=True) for shape in ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))]
    teacher = [torch.randn(shape) for shape in ((TOKENS, TEACHER), (vocab, TEACHER), (vocab,))]
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[::3] = IGNORE
    return student, teacher, labels


def _jsd(ls: torch.Tensor, lt: torch.Tensor, beta: float) -> torch.Tensor:
    lm = torch.log(beta * lt.exp() + (1 - beta) * ls.exp())
    return beta * (lt.exp() * (lt - lm)).sum(-1) + (1 - beta) * (ls.exp() * (ls - lm)).sum(-1)


def _assert_same(loss: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(loss, expected)
    gradients, truth = (torch.autograd.grad(value, leaves, retain_graph=True) for value in (loss, expected))
    torch.testing.assert_close(gradients, truth)


def _arguments(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


def test_signatures_are_ligers() -> None:
    heads = ["student_input", "student_weight", "teacher_input", "teacher_weight"]
    assert _arguments(LigerFusedLinearJSD.__init__) == ["jsd_beta", "ignore_index", "temperature", "accum_dtype"]
    assert _arguments(LigerFusedLinearJSD.forward) == [*heads, "shift_labels"]
    kl = ["reduction", "ignore_index", "temperature", "eps", "accum_dtype"]
    assert _arguments(LigerFusedLinearKLDivLoss.__init__) == kl
    assert _arguments(LigerFusedLinearKLDivLoss.forward) == [*heads[:2], "target", "shift_labels"]
    assert _arguments(LigerJSD.__init__) == ["beta", "ignore_index"]
    assert _arguments(LigerJSD.forward) == ["log_q", "log_p", "shift_labels"]
    assert _arguments(LigerKLDIVLoss.__init__) == ["eps", "args", "kwargs"]
    assert _arguments(LigerTVDLoss.__init__) == ["reduction", "ignore_index"]
    assert _arguments(LigerTVDLoss.forward) == ["p", "q", "shift_labels"]
    assert _arguments(LigerFusedCETVDLoss.forward) == ["student_logits", "teacher_logits", "target"]
    distillation = ["weight_hard_loss", "weight_soft_loss", "beta", "ignore_index", "temperature"]
    distillation += ["compiled", "chunk_size", "return_soft_hard_loss"]
    for module in (LigerFusedLinearJSDLoss, LigerFusedLinearCosineSimilarityLoss):
        assert _arguments(module.__init__) == distillation
        assert _arguments(module.forward) == [*heads, "true_labels", "student_bias", "teacher_bias"]


def test_fused_linear_jsd() -> None:
    student, teacher, labels = _heads()
    leaves, valid = student[:2], labels != IGNORE
    ls, lt = ((F.linear(*model[:2]) / 2.0).log_softmax(-1) for model in (student, teacher))
    module = LigerFusedLinearJSD(0.3, IGNORE, 2.0, torch.float32)
    _assert_same(module(*leaves, *teacher[:2], labels), _jsd(ls, lt, 0.3)[valid].mean(), leaves)
    without_labels = LigerFusedLinearJSD(0.3, temperature=2.0)(*leaves, *teacher[:2])
    torch.testing.assert_close(without_labels, _jsd(ls, lt, 0.3).mean())


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
def test_fused_linear_kl_div(reduction: str) -> None:
    student, teacher, labels = _heads()
    leaves, valid = student[:2], labels != IGNORE
    target = F.linear(*teacher).softmax(-1)
    log_probs = (F.linear(*leaves) / 2.0).log_softmax(-1)
    module = LigerFusedLinearKLDivLoss(reduction, IGNORE, 2.0)
    expected = F.kl_div(log_probs[valid], target[valid], reduction=reduction)
    _assert_same(module(*leaves, target, labels), expected, leaves)


def test_jsd() -> None:
    student, teacher, labels = _heads()
    ls = F.linear(*student).log_softmax(-1).detach().requires_grad_()
    lt = F.linear(*teacher).log_softmax(-1)
    module = LigerJSD(0.3, IGNORE)
    _assert_same(module(ls, lt, labels), _jsd(ls, lt, 0.3)[labels != IGNORE].mean(), [ls])
    torch.testing.assert_close(module(ls, lt), _jsd(ls, lt, 0.3).mean())


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div(log_target: bool) -> None:
    student, teacher, _ = _heads()
    ls, target = F.linear(*student).log_softmax(-1), F.linear(*teacher).log_softmax(-1)
    target = target if log_target else target.exp()
    for options in ({}, {"reduction": "batchmean"}, {"reduction": "none"}):
        module = LigerKLDIVLoss(1e-10, log_target=log_target, **options)
        assert isinstance(module, nn.KLDivLoss)
        expected = nn.KLDivLoss(log_target=log_target, **options)(ls, target)
        torch.testing.assert_close(module(ls, target), expected)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
def test_tvd(reduction: str) -> None:
    student, teacher, labels = _heads()
    p, q = F.linear(*student).softmax(-1), F.linear(*teacher).softmax(-1)
    valid = labels != IGNORE
    elements = 0.5 * (p - q).abs() * valid.unsqueeze(-1)
    expected = {
        "none": elements,
        "sum": elements.sum(),
        "mean": elements.sum() / (valid.sum() * VOCAB),
        "batchmean": elements.sum() / valid.sum(),
    }[reduction]
    torch.testing.assert_close(LigerTVDLoss(reduction, IGNORE)(p, q, labels), expected)


def test_ce_and_tvd() -> None:
    student, teacher, labels = _heads()
    z, zt = F.linear(*student), F.linear(*teacher)
    ce, tvd = LigerFusedCETVDLoss(IGNORE)(z, zt, labels)
    torch.testing.assert_close(ce, F.cross_entropy(z, labels, ignore_index=IGNORE, reduction="none"))
    expected = LigerTVDLoss("none", IGNORE)(z.softmax(-1), zt.softmax(-1), labels).sum(-1)
    torch.testing.assert_close(tvd, expected)


@pytest.mark.parametrize("vocab", [VOCAB, VOCAB + 3])
@pytest.mark.parametrize("kind", ["jsd", "cosine"])
def test_distillation_with_labels(kind: str, vocab: int) -> None:
    student, teacher, labels = _heads(vocab)
    valid = labels != IGNORE
    z, zt = F.linear(*student), F.linear(*teacher)[:, :VOCAB]
    hard = F.cross_entropy(z[valid], labels[valid])
    if kind == "jsd":
        rows, module = _jsd((z / 2.0).log_softmax(-1), (zt / 2.0).log_softmax(-1), 0.3), LigerFusedLinearJSDLoss
    else:
        rows, module = 0.3 * (1 - F.cosine_similarity(z, zt, dim=-1)), LigerFusedLinearCosineSimilarityLoss
    soft = rows[valid].mean()
    loss_function = module(0.2, 0.8, 0.3, IGNORE, 2.0, True, 2, return_soft_hard_loss=True)
    loss, soft_loss, hard_loss = loss_function(*student[:2], *teacher[:2], labels, student[2], teacher[2])
    torch.testing.assert_close((soft_loss, hard_loss), (soft.detach(), hard.detach()))
    _assert_same(loss, 0.2 * hard + 0.8 * soft, student)
    alone = module(0.2, 0.8, 0.3, IGNORE, 2.0)(*student[:2], *teacher[:2], labels, student[2], teacher[2])
    assert alone.equal(loss)
