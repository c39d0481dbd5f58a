"""Log-probabilities over a head that expect one upstream gradient: any other is right too, and recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.autograd import one_number
from liger_trainer.kernels.head import linear_cross_entropy as chunks
from liger_trainer.kernels.head import linear_log_probs_expected as expected_gradient
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, linear_log_probs_reference

IGNORE = -100
TOKENS, HIDDEN, VOCAB = 13, 6, 20
CHUNK = 5 * 64 * 8  # bytes of five float64 rows of logits, padded to 64 columns


def _case(dtype: torch.dtype = torch.float64, trained: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> Any:
    """Hidden states, head and bias, of which some train, and targets; the first and every fourth is ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    target[::4] = IGNORE
    return [tensor.requires_grad_(index in trained) for index, tensor in enumerate(tensors)], target


def _result(leaves: Any, target: torch.Tensor, expected: Any = 1.0, **options: Any) -> Any:
    hidden, weight, bias = leaves
    options = {"outputs": ("entropy",), "logits_memory": CHUNK, "expected_grad": expected, **options}
    return linear_log_probs(hidden, weight, target, bias, **options)


def _reference(leaves: Any, target: torch.Tensor, **options: Any) -> Any:
    hidden, weight, bias = leaves
    return linear_log_probs_reference(hidden, weight, target, bias, outputs=("entropy",), **options)


def _factors(result: Any) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, result.log_probs.numel()).to(result.log_probs)


LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "sum": lambda result: -result.log_probs.sum() / 7,
    "another sum": lambda result: 3.0 * result.log_probs.sum(),
    "zero": lambda result: 0.0 * result.log_probs.sum(),
    "mean of values": lambda result: (result.log_probs * torch.full_like(result.log_probs, 0.3)).mean(),
    "weights": lambda result: (result.log_probs * _factors(result)).sum(),
    "sum and weights": lambda result: result.log_probs.sum() - (result.log_probs * _factors(result)).sum(),
    "focal": lambda result: (-result.log_probs * (1.0 - result.log_probs.exp()).square()).sum(),
    "entropy": lambda result: (result.entropy * _factors(result)).sum(),
    "sum and entropy": lambda result: result.log_probs.sum() - 0.1 * result.entropy.sum(),
    "one token": lambda result: result.log_probs[2],
}
ALIKE = ("sum", "another sum", "zero", "mean of values")


@given(
    loss=st.sampled_from(sorted(LOSSES)),
    expected=st.sampled_from([1.0, 1 / 7, -2.0, 0.0, float("inf")]),
    trained=st.sampled_from([(0,), (1,), (2,), (0, 1), (0, 1, 2)]),
    softcap=st.sampled_from([None, 3.0]),
    temperature=st.sampled_from([1.0, 2.0]),
    logits_memory=st.sampled_from([1, CHUNK, 2**20]),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_gradients_are_the_references(
    loss: str, expected: float, trained: tuple[int, ...], softcap: float | None, temperature: float,
    logits_memory: int, seed: int,
) -> None:  # fmt: skip
    leaves, target = _case(trained=trained, seed=seed)
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": 1.5, "temperature": temperature}
    ours = _result(leaves, target, expected, logits_memory=logits_memory, **options)
    theirs = _reference(leaves, target, **options)
    torch.testing.assert_close((ours.log_probs, ours.entropy), (theirs.log_probs, theirs.entropy))
    wanted = [leaves[index] for index in trained]
    gradients = torch.autograd.grad(LOSSES[loss](ours), wanted)
    torch.testing.assert_close(gradients, torch.autograd.grad(LOSSES[loss](theirs), wanted))


def test_log_probs_have_their_gradient_by_finite_differences() -> None:
    leaves, target = _case()
    assert torch.autograd.gradcheck(
        lambda *leaves: (lambda found: (found.log_probs, found.entropy))(_result(leaves, target)), leaves
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs", [(), ("entropy", "top1")])
def test_the_expected_gradient_is_that_of_the_summed_loss_to_the_bit(dtype: torch.dtype, outputs: Any) -> None:
    leaves, target = _case(dtype)
    found = _result(leaves, target, 1 / 9, outputs=outputs)
    log_probs = getattr(found, "log_probs", found)
    loss = linear_cross_entropy(
        leaves[0], leaves[1], target, leaves[2], reduction="sum", logits_memory=CHUNK, expected_grad=1 / 9
    )
    ours, theirs = (torch.autograd.grad(each, leaves) for each in (-log_probs.sum() / 9, loss / 9))
    assert all(map(torch.equal, ours, theirs))


def _matmuls(trained: tuple[int, ...], loss: str) -> float:
    """How many times the head's matmul is computed, in tokens per token, forward and backward."""
    leaves, target = _case(torch.float32, trained)
    rows = 0

    def spy(function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal rows
            left, right = args[-2:]
            rows += next(size for size in (*left.shape, *right.shape) if size not in (HIDDEN, VOCAB))
            return function(*args, **kwargs)

        return count

    with (
        mock.patch.object(chunks.torch, "mm", side_effect=spy(torch.mm)),
        mock.patch.object(chunks.torch, "addmm", side_effect=spy(torch.addmm)),
    ):
        LOSSES[loss](_result(leaves, target, logits_memory=5 * 64 * 4)).backward()
    return rows / TOKENS


@pytest.mark.parametrize(
    ("trained", "made", "recomputed"), [((0, 1, 2), 3, 3), ((0,), 2, 2), ((1,), 2, 2)], ids=["all", "frozen", "head"]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_recomputation_only_where_the_gradient_is_not_one_number(
    loss: str, trained: tuple[int, ...], made: int, recomputed: int
) -> None:
    assert _matmuls(trained, loss) == pytest.approx(made + (0 if loss in ALIKE else recomputed))


@pytest.mark.parametrize("loss", LOSSES)
def test_values_are_looked_at_only_where_strides_and_entropies_say_nothing(loss: str) -> None:
    leaves, target = _case()
    by_values = expected_gradient.number_by_values
    with mock.patch.object(expected_gradient, "number_by_values", side_effect=by_values) as looked:
        LOSSES[loss](_result(leaves, target)).backward()
    assert looked.called == (loss not in ("sum", "another sum", "zero", "entropy", "sum and entropy"))


def test_a_number_of_values() -> None:
    valid = torch.tensor([True, True, False])
    for values in ([2.0, 2.0, 5.0], [-1.0, -1.0, float("nan")], [float("inf")] * 3):
        found = expected_gradient.number_by_values(torch.tensor(values), valid)
        assert found is not None
        assert found.item() == values[0]
    for several in ([2.0, 3.0, 2.0], [float("nan"), 1.0, 1.0], [float("nan")] * 3):
        assert expected_gradient.number_by_values(torch.tensor(several), valid) is None
    without = expected_gradient.number_by_values(torch.tensor([2.0, 3.0, 4.0]), torch.zeros(3, dtype=torch.bool))
    assert without is not None
    assert without.item() == 0.0


def test_a_number_by_strides() -> None:
    number = torch.tensor(3.0)
    for shape in ((4,), (2, 3), (1,), ()):
        assert one_number(number.expand(shape)) == 3.0
    for several in (torch.ones(2), number.expand(2, 1).contiguous(), torch.ones(3, 1).expand(3, 2), torch.empty(0)):
        assert one_number(several) is None


@pytest.mark.parametrize("trained", [(0,), (0, 1, 2)])
def test_a_retained_graph_is_right_for_every_loss_in_turn(trained: tuple[int, ...]) -> None:
    leaves, target = _case(trained=trained)
    wanted = [leaves[index] for index in trained]
    ours, theirs = _result(leaves, target), _reference(leaves, target)
    taken = []
    for name in [*LOSSES, *LOSSES]:
        gradients = torch.autograd.grad(LOSSES[name](ours), wanted, retain_graph=True)
        torch.testing.assert_close(gradients, torch.autograd.grad(LOSSES[name](theirs), wanted, retain_graph=True))
        taken.append((gradients, [gradient.clone() for gradient in gradients]))
    for gradients, copies in taken:  # no later backward wrote into what an earlier one returned
        assert all(gradient.equal(copy) for gradient, copy in zip(gradients, copies))


@pytest.mark.parametrize("loss", ["sum", "weights", "entropy"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool, loss: str) -> None:
    leaves, target = _case()
    checkpoint(lambda *leaves: LOSSES[loss](_result(leaves, target)), *leaves, use_reentrant=reentrant).backward()
    expected = torch.autograd.grad(LOSSES[loss](_reference(leaves, target)), leaves)
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), expected)


@pytest.mark.parametrize("loss", ["sum", "weights", "entropy"])
def test_compiles_to_one_graph(loss: str) -> None:
    torch._dynamo.reset()
    leaves, target = _case(torch.float32)

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        return LOSSES[loss](_result(leaves, target))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves)
    expected = torch.autograd.grad(LOSSES[loss](_reference(leaves, target)), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaves), expected)


@pytest.mark.parametrize("loss", ["sum", "weights", "entropy"])
def test_a_second_derivative_is_refused(loss: str) -> None:
    leaves, target = _case()
    with pytest.raises(RuntimeError, match=r"linear_log_probs.*create_graph=True"):
        torch.autograd.grad(LOSSES[loss](_result(leaves, target)), leaves, create_graph=True)


def test_ignored_tokens_have_no_gradient_whatever_comes_from_upstream() -> None:
    leaves, target = _case()
    for factor in (1.0, torch.linspace(1.0, 2.0, TOKENS, dtype=torch.float64)):
        upstream = torch.where(target == IGNORE, float("inf"), factor)
        gradients = torch.autograd.grad(_result(leaves, target).log_probs, leaves, upstream)
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert gradients[0][::4].eq(0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_no_labels_and_no_tokens_have_gradients_of_zero(loss: str) -> None:
    leaves, target = _case()
    LOSSES[loss](_result(leaves, torch.full_like(target, IGNORE))).backward()
    assert all(leaf.grad.eq(0).all() for leaf in leaves)
    _result([leaves[0][:0], *leaves[1:]], target[:0]).log_probs.sum().backward()
    assert all(leaf.grad.eq(0).all() for leaf in leaves)


def test_a_nan_from_upstream_stays_one() -> None:
    leaves, target = _case()
    upstream = torch.ones(TOKENS, dtype=torch.float64)
    upstream[1] = float("nan")
    (gradient,) = torch.autograd.grad(_result(leaves, target).log_probs, leaves[0], upstream)
    assert gradient[1].isnan().all()
    assert gradient[2:].isfinite().all()


def test_without_gradients_and_with_other_outputs_nothing_is_made() -> None:
    leaves, target = _case()
    with mock.patch.object(expected_gradient, "loss_and_gradients", side_effect=AssertionError):
        with torch.no_grad():
            assert not _result(leaves, target).log_probs.requires_grad
        found = _result(leaves, target, outputs=("entropy", "mean_logit"))
        (LOSSES["weights"](found) + LOSSES["entropy"](found)).backward()
    theirs = _reference(leaves, target)
    expected = torch.autograd.grad(LOSSES["weights"](theirs) + LOSSES["entropy"](theirs), leaves)
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))
