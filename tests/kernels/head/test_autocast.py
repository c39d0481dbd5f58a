"""Losses over a head under autocast: operands are cast as `F.linear` has it, gradients come back in their dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from liger_trainer import functional as ops
from liger_trainer import losses
from liger_trainer import nn as modules

HIDDEN, VOCAB = 8, 24
TARGET = torch.tensor([[3, -100, 5], [7, 11, 2]])
PROBABILITIES = torch.rand(2, 3, VOCAB, generator=torch.Generator().manual_seed(1)).softmax(-1)
DTYPES = {  # of hidden states, head, bias, the teacher's hidden states and its head
    "mixed": (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.float32),
    "wide": (torch.float32,) * 5,
    "half": (torch.float32, torch.bfloat16, torch.bfloat16, torch.float16, torch.bfloat16),
}

Tensors = list[torch.Tensor]


def _target(like: Tensors) -> torch.Tensor:
    return TARGET.to(like[0].device)


def _dpo(student: Tensors, teacher: Tensors) -> Any:
    return losses.LigerFusedLinearDPOLoss()(student[1], student[0], _target(student), student[2], *teacher)[0]


def _kto(student: Tensors, teacher: Tensors) -> Any:
    loss, target = losses.LigerFusedLinearKTOLoss(use_ref_model=True), _target(student)
    return loss(*student[:2], target, student[2], target[:, 0] == 3, *teacher)[0]


def _grpo(student: Tensors, teacher: Tensors) -> Any:
    loss, target = losses.LigerFusedLinearGRPOLoss(beta=0.1), _target(student)
    reference = {"ref_input": teacher[0], "ref_weight": teacher[1]}
    return loss(*student[:2], target.clamp(min=0), target >= 0, target[:, 0] - 4.5, student[2], **reference)[0]


OPERATORS: dict[str, Callable[[Tensors, Tensors], Any]] = {
    "linear_cross_entropy": lambda s, t: ops.linear_cross_entropy(s[0], s[1], _target(s), s[2]),
    "linear_cross_entropy none": lambda s, t: ops.linear_cross_entropy(
        s[0], s[1], _target(s), s[2], reduction="none"
    ).sum(),
    "linear_log_probs": lambda s, t: ops.linear_log_probs(s[0], s[1], _target(s), s[2]).sum(),
    "linear_jsd": lambda s, t: ops.linear_jsd(*s[:2], *t, _target(s), student_bias=s[2]),
    "linear_kl": lambda s, t: ops.linear_kl(*s[:2], *t, _target(s), student_bias=s[2]),
    "linear_cosine_distance": lambda s, t: ops.linear_cosine_distance(*s[:2], *t, _target(s), student_bias=s[2]),
    "linear_kl_div": lambda s, t: ops.linear_kl_div(s[0], s[1], PROBABILITIES.to(s[0].device), _target(s), s[2]),
}
LOSSES: dict[str, Callable[[Tensors, Tensors], Any]] = {
    "jsd": lambda s, t: modules.LigerFusedLinearJSD()(s[0], s[1], *t, _target(s)) + 0.0 * s[2].sum(),
    "dpo": _dpo,
    "orpo": lambda s, t: losses.LigerFusedLinearORPOLoss()(s[1], s[0], _target(s), s[2])[0],
    "kto": _kto,
    "grpo": _grpo,
}
SPLIT: dict[str, Callable[[Tensors, Tensors], Any]] = {
    "vocab_parallel_linear_cross_entropy": lambda s, t: ops.vocab_parallel_linear_cross_entropy(
        s[0], s[1], _target(s), bias_shard=s[2]
    ),
    "vocab_parallel_linear_log_probs": lambda s, t: ops.vocab_parallel_linear_log_probs(
        s[0], s[1], _target(s), bias_shard=s[2]
    ).sum(),
}
ALL = OPERATORS | LOSSES | SPLIT


@pytest.fixture(autouse=True, scope="module")
def _one_process() -> Iterator[None]:
    """The group over which the vocabulary is split."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _tensors(kind: str, frozen_head: bool = False, device: str = "cpu") -> tuple[Tensors, Tensors]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, HIDDEN), (VOCAB, HIDDEN), (VOCAB,), (2, 3, HIDDEN + 2), (VOCAB, HIDDEN + 2))
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape, dtype in zip(shapes, DTYPES[kind])]
    student = [tensor.requires_grad_(not frozen_head or index == 0) for index, tensor in enumerate(tensors[:3])]
    return student, tensors[3:]


def _gradients(loss: torch.Tensor, leaves: Tensors) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad]))


@pytest.mark.parametrize("frozen_head", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_is_the_loss_of_operands_cast_before(name: str, kind: str, frozen_head: bool, device: str) -> None:
    device = "cpu" if name in SPLIT else device
    student, teacher = _tensors(kind, frozen_head, device)
    cast = [tensor.detach().bfloat16().requires_grad_(tensor.requires_grad) for tensor in student]
    expected = ALL[name](cast, [tensor.bfloat16() for tensor in teacher])
    with torch.autocast(device, torch.bfloat16):
        loss = ALL[name](student, teacher)
    assert loss.equal(expected)
    assert loss.dtype == torch.float32
    leaves = [leaf for leaf in student if leaf.requires_grad]
    for leaf, ours, theirs in zip(leaves, _gradients(loss, student), _gradients(expected, cast)):
        assert ours.dtype == leaf.dtype
        assert ours.equal(theirs.to(leaf.dtype))


@pytest.mark.parametrize("kind", DTYPES)
def test_cross_entropy_is_that_of_torch_under_autocast(kind: str) -> None:
    """Its dtypes; the numbers are compared with float64, as torch rounds too."""
    student, _ = _tensors(kind)
    exact = [tensor.detach().bfloat16().double().requires_grad_() for tensor in student]

    def of_torch(leaves: Tensors) -> torch.Tensor:
        logits = F.linear(*leaves)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.flatten(0, -2), TARGET.flatten())

    with torch.autocast("cpu", torch.bfloat16):
        loss, theirs = ops.linear_cross_entropy(student[0], student[1], TARGET, student[2]), of_torch(student)
    expected = of_torch(exact)
    assert loss.dtype == theirs.dtype
    rounding = 2**-7 * F.linear(*exact).abs().max().item()
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=rounding)
    found = (_gradients(loss, student), _gradients(theirs, student), _gradients(expected, exact))
    for ours, of_theirs, right in zip(*found):
        assert ours.dtype == of_theirs.dtype
        assert (ours - right).norm() <= 3e-2 * right.norm()


@pytest.mark.parametrize("name", ALL)
def test_without_autocast_dtypes_that_differ_are_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="autocast"):
        ALL[name](*_tensors("mixed"))
    with torch.autocast("cpu", enabled=False), pytest.raises(ValueError, match="autocast"):
        ALL[name](*_tensors("mixed"))


@pytest.mark.parametrize("name", ALL)
def test_float64_is_no_concern_of_autocast(name: str) -> None:
    student, teacher = ([tensor.detach().double() for tensor in tensors] for tensors in _tensors("wide"))
    with torch.autocast("cpu", torch.bfloat16):
        loss = ALL[name](student, teacher)
    torch.testing.assert_close(loss, ALL[name](student, teacher), rtol=1e-7, atol=1e-7)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="dtype"):
        ALL[name]([student[0].float(), *student[1:]], teacher)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_compiles_to_one_graph(name: str, inside: bool) -> None:
    student, teacher = _tensors("mixed")

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        if not inside:
            return 2.0 * OPERATORS[name](list(leaves), teacher)
        with torch.autocast("cpu", torch.bfloat16):
            return 2.0 * OPERATORS[name](list(leaves), teacher)

    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        loss = torch.compile(step, fullgraph=True, backend="aot_eager")(*student)
        expected = step(*student)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(_gradients(loss, student), _gradients(expected, student)):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


class _Casts(TorchDispatchMode):
    """Counts the casts of a whole head."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape == (VOCAB, HIDDEN):
            self.casts.append(result.dtype)
        return result


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_log_probs", "dpo"])
def test_a_head_is_cast_once_and_its_gradient_once(name: str) -> None:
    student, teacher = _tensors("wide")
    with torch.autocast("cpu", torch.bfloat16), _Casts() as casts:
        loss = ALL[name](student, teacher)
        loss.backward()
    assert casts.casts == [torch.bfloat16, torch.float32]
