"""Log-probabilities over a head that expect one upstream gradient; any other is right too, and recomputes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer.kernels.autograd import one_number
from liger_trainer.kernels.head import linear_log_probs as operator
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, linear_log_probs_reference
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers.fused_forward import StatisticsOptions
from liger_trainer.trainers.trl_mixin import install_fused_forward
from tests.device import assert_no_host_sync, captured, no_host_sync, peak_memory_of_one_run
from tests.kernels.head.heads import (
    IGNORE,
    MIB,
    ROW,
    TOKENS,
    doubled,
    gpu_head,
    needing_gradients,
    recorded_matmuls,
    small_head,
    token_factors,
)
from tests.steps import step_with

CHUNK = 5 * 2 * ROW  # bytes of five float64 rows of logits


def _case(dtype: torch.dtype = torch.float64, trained: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> Any:
    """The three operands of a small head, and its labels."""
    *leaves, target = small_head(dtype, seed=seed, trained=trained)
    return leaves, target


def _result(leaves: Any, target: torch.Tensor, expected: Any = 1.0, **options: Any) -> Any:
    hidden, weight, bias = leaves
    options = {"outputs": ("entropy",), "logits_memory": CHUNK, "expected_grad": expected, **options}
    return linear_log_probs(hidden, weight, target, bias, **options)


def _reference(leaves: Any, target: torch.Tensor, **options: Any) -> Any:
    hidden, weight, bias = leaves
    return linear_log_probs_reference(hidden, weight, target, bias, outputs=("entropy",), **options)


LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "sum": lambda result: -result.log_probs.sum() / 7,
    "another sum": lambda result: 3.0 * result.log_probs.sum(),
    "zero": lambda result: 0.0 * result.log_probs.sum(),
    "mean of values": lambda result: (result.log_probs * torch.full_like(result.log_probs, 0.3)).mean(),
    "weights": lambda result: (result.log_probs * token_factors(result)).sum(),
    "sum and weights": lambda result: result.log_probs.sum() - (result.log_probs * token_factors(result)).sum(),
    "focal": lambda result: (-result.log_probs * (1.0 - result.log_probs.exp()).square()).sum(),
    "entropy": lambda result: (result.entropy * token_factors(result)).sum(),
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
@settings(max_examples=80)
def test_gradients_are_the_references(
    loss: str, expected: float, trained: tuple[int, ...], softcap: float | None, temperature: float,
    logits_memory: int, seed: int,
) -> None:  # fmt: skip
    leaves, target = _case(trained=trained, seed=seed)
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": 1.5, "temperature": temperature}
    ours = _result(leaves, target, expected, logits_memory=logits_memory, **options)
    theirs = _reference(leaves, target, **options)
    torch.testing.assert_close((ours.log_probs, ours.entropy), (theirs.log_probs, theirs.entropy))
    wanted = needing_gradients(leaves)
    gradients = torch.autograd.grad(LOSSES[loss](ours), wanted)
    torch.testing.assert_close(gradients, torch.autograd.grad(LOSSES[loss](theirs), wanted))


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


@pytest.mark.parametrize(("trained", "matmuls"), [((0, 1, 2), 3), ((0,), 2), ((1,), 2)], ids=["all", "frozen", "head"])
@pytest.mark.parametrize("loss", LOSSES)
def test_logits_are_recomputed_only_where_the_gradient_is_not_one_number(
    loss: str, trained: tuple[int, ...], matmuls: int
) -> None:
    """`matmuls` is in units of N: how often a token's logits, or their gradient, go through one in the forward."""
    leaves, target = _case(torch.float32, trained)
    with recorded_matmuls() as tokens:
        LOSSES[loss](_result(leaves, target, logits_memory=5 * ROW)).backward()
    assert sum(tokens) == TOKENS * matmuls * (1 if loss in ALIKE else 2)


@pytest.mark.parametrize("loss", LOSSES)
def test_values_are_read_only_where_strides_and_entropies_do_not_decide(loss: str) -> None:
    leaves, target = _case()
    by_values = operator.number_by_values
    with mock.patch.object(operator, "number_by_values", side_effect=by_values) as read:
        LOSSES[loss](_result(leaves, target)).backward()
    assert read.called == (loss not in ("sum", "another sum", "zero", "entropy", "sum and entropy"))


def test_a_number_of_values() -> None:
    valid = torch.tensor([True, True, False])
    for values in ([2.0, 2.0, 5.0], [-1.0, -1.0, float("nan")], [float("inf")] * 3):
        found = operator.number_by_values(torch.tensor(values), valid)
        assert found is not None
        assert found.item() == values[0]
    for several in ([2.0, 3.0, 2.0], [float("nan"), 1.0, 1.0], [float("nan")] * 3):
        assert operator.number_by_values(torch.tensor(several), valid) is None
    without = operator.number_by_values(torch.tensor([2.0, 3.0, 4.0]), torch.zeros(3, dtype=torch.bool))
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
    wanted = needing_gradients(leaves)
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


def test_without_gradients_and_with_other_outputs_nothing_is_computed_in_advance() -> None:
    leaves, target = _case()
    with mock.patch.object(operator, "loss_and_gradients", side_effect=AssertionError):
        with torch.no_grad():
            assert not _result(leaves, target).log_probs.requires_grad
        found = _result(leaves, target, outputs=("entropy", "mean_logit"))
        (LOSSES["weights"](found) + LOSSES["entropy"](found)).backward()
    theirs = _reference(leaves, target)
    expected = torch.autograd.grad(LOSSES["weights"](theirs) + LOSSES["entropy"](theirs), leaves)
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(expected))


# Real shapes, memory and waiting on a GPU.


GPU_LOSSES = ("sum", "weights", "entropy", "sum and entropy")


@pytest.mark.gpu
@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("loss", ["sum", "entropy", "sum and entropy"])
def test_nothing_synchronises(loss: str, head_trained: bool) -> None:
    hidden, weight, target = gpu_head(1000, 256, 5003, trained=head_trained)

    def step() -> None:
        options: dict[str, Any] = {"outputs": ("entropy", "top1"), "logits_memory": 2 * MIB, "expected_grad": 1 / 7}
        LOSSES[loss](linear_log_probs(hidden, weight, target, **options)).backward()

    assert_no_host_sync(step)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", GPU_LOSSES)
def test_cuda_graph_replays_on_new_inputs(loss: str) -> None:
    hidden, weight, target = gpu_head(512, 256, 5000)

    def step() -> torch.Tensor:
        result = linear_log_probs(
            hidden, weight, target, outputs=("entropy",), logits_memory=2 * MIB, expected_grad=1 / 7
        )
        value = LOSSES[loss](result)
        gradients = torch.autograd.grad(value, (hidden, weight))
        return torch.stack([value.detach(), *(gradient.float().norm() for gradient in gradients)])

    graph, result = captured(step)
    target.copy_(target.roll(1))
    graph.replay()
    torch.testing.assert_close(result, step())


@pytest.mark.gpu
@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("loss", GPU_LOSSES)
def test_gradients_are_no_further_from_float64_than_eager_bf16(loss: str, head_trained: bool) -> None:
    hidden, weight, target = gpu_head(1024, 1024, 50257, trained=head_trained)
    options: dict[str, Any] = {"softcap": 30.0, "outputs": ("entropy",)}
    doubles = doubled((hidden, weight))
    results = (
        linear_log_probs(hidden, weight, target, logits_memory=32 * MIB, expected_grad=1 / 7, **options),
        linear_log_probs_reference(hidden, weight, target, **options),
        linear_log_probs_reference(*doubles, target, **options),
    )
    wanted, exacts = needing_gradients((hidden, weight)), needing_gradients(doubles)
    ours, eager = (torch.autograd.grad(LOSSES[loss](result), wanted) for result in results[:2])
    for mine, theirs, exact in zip(ours, eager, torch.autograd.grad(LOSSES[loss](results[2]), exacts)):
        assert (mine.double() - exact).norm() <= 1.1 * (theirs.double() - exact).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("head_trained", [True, False])
def test_a_sum_takes_the_memory_of_the_summed_loss(head_trained: bool) -> None:
    hidden, weight, target = gpu_head(8192, 1024, 128256, trained=head_trained)

    def summed_loss() -> None:
        linear_cross_entropy(hidden, weight, target, reduction="sum").backward()

    def log_probs() -> None:
        result = linear_log_probs(hidden, weight, target, outputs=("entropy",), expected_grad=1.0)
        (-result.log_probs.sum()).backward()

    peaks = []
    for step in (summed_loss, log_probs):
        step()  # workspaces and compiled kernels
        hidden.grad = weight.grad = None
        peaks.append(peak_memory_of_one_run(step))
        hidden.grad = weight.grad = None
    assert peaks[1] <= peaks[0] + MIB, f"{peaks[1] / MIB:.1f} MiB, {peaks[0] / MIB:.1f} for the loss"


@pytest.mark.gpu
def test_trls_loss_neither_waits_nor_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=32768, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).cuda().to(torch.bfloat16).train()
    apply_liger_kernel(model)
    install_fused_forward(model, StatisticsOptions(("log_probs", "entropy", "is_top1"), uniform_gradient=True))
    ids = torch.randint(0, 32768, (2, 300), device="cuda")
    items = torch.tensor(598, device="cuda")

    def step() -> None:
        with step_with(expected_gradient=1 / items):
            outputs = model(input_ids=ids, labels=ids, fused_lm_head=True)
            per_token_loss = -outputs.log_probs
            loss = per_token_loss.sum() / torch.as_tensor(items).clamp(min=1)
        loss.backward()

    step()  # kernels are compiled here
    monkeypatch.setattr(operator, "recomputed_gradients", lambda *args: pytest.fail("recomputed"))
    with no_host_sync():
        step()
