"""The losses over a head: Liger's call signatures and results, what needs a gradient, padding, and bad input."""

from __future__ import annotations

import contextlib
import inspect
import math
import statistics
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import liger_trainer
from liger_trainer import losses
from liger_trainer import nn as modules
from liger_trainer.liger.losses import functional, grpo, pairs, preference
from liger_trainer.liger.operators.linear_grouped_loss import GroupedLoss
from tests.accuracy import errors
from tests.liger.losses.cases import (
    ALL_AT_ONCE,
    IGNORE,
    NOT_EVEN_ONE,
    ONE_PAIR,
    PAIRS,
    TOKENS,
    VOCAB,
    Batch,
    budget,
    eager,
    gradients,
    make_batch,
)

DESIRABLE = torch.tensor([1, 0, 1, 1, 0, 0]).bool()
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4, 2.0, -1.0, 0.5])


def _dpo(batch: Batch, **options: Any) -> Any:
    loss = losses.LigerFusedLinearDPOLoss(compute_nll_loss=True, **options)
    return loss(batch.weight, batch.hidden, batch.target, batch.bias, *batch.reference)


def _aot(batch: Batch, **options: Any) -> Any:
    return _dpo(batch, loss_type="aot_unpaired", **options)


def _orpo(batch: Batch, **options: Any) -> Any:
    return losses.LigerFusedLinearORPOLoss(**options)(batch.weight, batch.hidden, batch.target, batch.bias)


def _cpo(batch: Batch, **options: Any) -> Any:
    return losses.LigerFusedLinearCPOLoss(**options)(batch.weight, batch.hidden, batch.target, batch.bias)


def _simpo(batch: Batch, **options: Any) -> Any:
    return losses.LigerFusedLinearSimPOLoss(**options)(batch.weight, batch.hidden, batch.target, batch.bias)


def _kto(batch: Batch, **options: Any) -> Any:
    loss = losses.LigerFusedLinearKTOLoss(use_ref_model=True, **options)
    return loss(batch.hidden, batch.weight, batch.target, batch.bias, DESIRABLE, *batch.reference, torch.tensor(0.2))


def _grpo(batch: Batch, **options: Any) -> Any:
    loss = losses.LigerFusedLinearGRPOLoss(**options)
    ids, mask = batch.target.clamp(min=0), batch.mask
    return loss(batch.hidden, batch.weight, ids, mask, ADVANTAGES, batch.bias, None, None, *batch.reference)


def _gspo(batch: Batch, **options: Any) -> Any:
    return _grpo(batch, loss_type="grpo", importance_sampling_level="sequence", **options)


EVERY = [_dpo, _aot, _orpo, _cpo, _simpo, _kto, _grpo, _gspo]


def test_exported() -> None:
    assert liger_trainer.losses is losses
    assert losses.__all__ == sorted(losses.__all__)
    for name in losses.__all__:
        assert inspect.signature(getattr(losses, name)).parameters
    for name in ("LigerFusedLinearJSDLoss", "LigerFusedLinearCosineSimilarityLoss"):
        assert getattr(losses, name) is getattr(modules, name)


def _arguments(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


PAIR = "lin_weight _input target bias"
REFERENCE = "ref_input ref_weight ref_bias"


@pytest.mark.parametrize(
    ("loss", "options", "tensors"),
    [
        (
            losses.LigerFusedLinearDPOLoss,
            "ignore_index beta alpha compute_nll_loss compiled use_ref_model average_log_prob chunk_size loss_type "
            "label_smoothing discopop_tau",
            f"{PAIR} {REFERENCE} ref_log_probs",
        ),
        (
            losses.LigerFusedLinearORPOLoss,
            "ignore_index beta compute_nll_loss compiled chunk_size",
            f"{PAIR} nll_target",
        ),
        (
            losses.LigerFusedLinearCPOLoss,
            "ignore_index beta alpha label_smoothing compute_nll_loss compiled average_log_prob chunk_size",
            PAIR,
        ),
        (
            losses.LigerFusedLinearSimPOLoss,
            "ignore_index beta alpha label_smoothing compute_nll_loss compiled gamma chunk_size",
            PAIR,
        ),
        (
            losses.LigerFusedLinearKTOLoss,
            "ignore_index beta compiled use_ref_model average_log_prob chunk_size",
            f"_input lin_weight target bias preference_labels {REFERENCE} kl ref_log_probs",
        ),
        (
            losses.LigerFusedLinearGRPOLoss,
            "beta compiled use_ref_model chunk_size epsilon_low epsilon_high loss_type max_completion_length "
            "importance_sampling_level sapo_temperature_pos sapo_temperature_neg temperature delta "
            "use_bias_correction_kl vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
            "_input lin_weight selected_token_ids attention_mask advantages bias ref_per_token_logps "
            f"old_per_token_logps {REFERENCE} vllm_is_ratio num_items_in_batch",
        ),
    ],
)
def test_signatures_are_ligers_with_ours_at_the_end(loss: Any, options: str, tensors: str) -> None:
    assert _arguments(loss) == [*options.split(), "logits_memory"]
    assert _arguments(loss.forward) == tensors.split()


def test_as_in_ligers_readme() -> None:
    lm_head, hidden = nn.Linear(8, VOCAB, bias=False), torch.randn(2, 5, 8, requires_grad=True)
    target = torch.randint(0, VOCAB, (2, 5))
    orpo_loss = losses.LigerFusedLinearORPOLoss()
    loss, outputs = orpo_loss(lm_head.weight, hidden, target)
    loss.backward()
    assert loss.dtype == torch.float32
    assert len(outputs) == 9
    assert lm_head.weight.grad is not None
    assert hidden.grad is not None


def test_functions_are_the_modules() -> None:
    batch = make_batch()
    hidden, weight, bias = batch.leaves
    target, reference = batch.target, batch.reference
    tokens = target.clamp(min=0), batch.mask, ADVANTAGES
    kl = torch.tensor(0.2)
    results = [
        (functional.liger_fused_linear_dpo(hidden, weight, target, bias, *reference, IGNORE, 0.1, True), _dpo),
        (functional.liger_fused_linear_orpo(hidden, weight, target, bias), _orpo),
        (functional.liger_fused_linear_cpo(hidden, weight, target, bias), _cpo),
        (functional.liger_fused_linear_simpo(hidden, weight, target, bias, IGNORE, 0.1, 1.0, 0.0, True), _simpo),
        (functional.liger_fused_linear_kto(hidden, weight, target, DESIRABLE, bias, *reference, kl), _kto),
        (functional.liger_fused_linear_grpo(hidden, weight, *tokens, bias, None, None, *reference), _grpo),
    ]
    for (loss, outputs), module in results:
        expected, others = module(batch)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(outputs, others)
    students = batch.hidden[0], batch.weight
    teachers = batch.ref_hidden[0], batch.ref_weight
    for function, loss in (
        (functional.liger_fused_linear_jsd, losses.LigerFusedLinearJSDLoss),
        (functional.liger_fused_linear_cosine, losses.LigerFusedLinearCosineSimilarityLoss),
    ):
        arguments = (*students, *teachers, batch.target[0], batch.bias, batch.ref_bias)
        options = (0.3, 0.7, 0.4, IGNORE, 1.3, True, 1024, True)
        torch.testing.assert_close(function(*arguments, *options), loss(*options)(*arguments))


@pytest.mark.parametrize("trained", [(0,), (1,), (0, 1), (1, 2), (0, 1, 2), ()], ids=str)
@pytest.mark.parametrize("loss", EVERY)
def test_memory_decides_the_way_and_not_the_result(loss: Any, trained: tuple[int, ...]) -> None:
    batch = make_batch()
    for index, leaf in enumerate(batch.leaves):
        leaf.requires_grad_(index in trained)
    results = [loss(batch, logits_memory=budget(rows, torch.float64)) for rows in (ALL_AT_ONCE, ONE_PAIR, NOT_EVEN_ONE)]
    for value, outputs in results:
        torch.testing.assert_close(value, results[0][0])
        torch.testing.assert_close(outputs, results[0][1])
        assert value.requires_grad == bool(trained)
        assert not any(output.requires_grad for output in outputs)
    if trained:
        expected, *others = (gradients(value, batch) for value, _ in results)
        for other in others:
            torch.testing.assert_close(other, expected)


@pytest.mark.parametrize(("loss", "reference"), [(_dpo, 1), (_orpo, 0), (_kto, 1), (_grpo, 1), (_gspo, 1)])
def test_matmuls(loss: Any, reference: int) -> None:
    """A trained head costs three and a frozen one two, and the reference's one."""
    for trained, passes, rows in ((True, 3, ONE_PAIR), (False, 2, ONE_PAIR), (False, 2, NOT_EVEN_ONE)):
        batch = make_batch()
        batch.ref_hidden, batch.ref_weight = batch.hidden.detach(), batch.weight.detach()
        batch.weight.requires_grad_(trained)
        batch.bias.requires_grad_(trained)
        spent = 0

        def spy(function: Any) -> Any:
            def count(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
                nonlocal spent
                spent += tensors[-2].numel() * tensors[-1].shape[-1]
                return function(*tensors, **options)

            return count

        with mock.patch.object(torch, "mm", spy(torch.mm)), mock.patch.object(torch, "addmm", spy(torch.addmm)):
            gradients(loss(batch, logits_memory=budget(rows, torch.float64))[0], batch)
        assert spent == (passes + reference) * batch.hidden.numel() * VOCAB


@pytest.mark.parametrize("loss", EVERY)
def test_ignored_tokens_may_hold_anything_and_get_nothing(loss: Any) -> None:
    batch = make_batch()
    value, outputs = loss(batch)
    clean = gradients(value, batch)
    assert not clean[0][~batch.mask].any()
    batch.hidden = batch.hidden.detach().masked_fill(~batch.mask.unsqueeze(-1), 1e3).requires_grad_()
    poisoned, others = loss(batch)
    torch.testing.assert_close(poisoned, value)
    torch.testing.assert_close(others, outputs)
    torch.testing.assert_close(gradients(poisoned, batch), clean)


@pytest.mark.parametrize("rows", [ALL_AT_ONCE, ONE_PAIR, NOT_EVEN_ONE])
@pytest.mark.parametrize("loss", EVERY)
def test_completions_without_tokens_are_finite(loss: Any, rows: int) -> None:
    for empty in (slice(0, 1), slice(PAIRS, PAIRS + 1), slice(0, None)):
        batch = make_batch(torch.float32)
        batch.target[empty] = IGNORE
        value, outputs = loss(batch, logits_memory=budget(rows, torch.float32))
        assert value.isfinite()
        assert all(output.isfinite().all() for output in outputs)
        for gradient in gradients(value, batch):
            assert gradient.isfinite().all()
            assert empty != slice(0, None) or not gradient.any()


def _with_all_logits(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, formula: Any, bias: Any, **options: Any
) -> GroupedLoss:
    """`linear_grouped_loss` as eager torch has it."""
    log_probs = eager(hidden, weight, bias, target)
    log_probs = options["arrange"](log_probs) if "arrange" in options else log_probs
    return GroupedLoss(formula(log_probs, 0, len(target)), log_probs.detach(), torch.zeros_like(log_probs))


@contextlib.contextmanager
def _eager_head() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (pairs, preference, grpo):
            stack.enter_context(mock.patch.object(module, "linear_grouped_loss", _with_all_logits))
        yield


@pytest.mark.parametrize("loss", EVERY)
def test_bf16_is_as_exact_as_eager(loss: Any) -> None:
    """In the middle of many batches: in one, the order of two pairs or a single token may decide the error."""
    # With more of it, the token that is furthest from the reference outweighs all others.
    options = {"beta": 0.001} if loss in (_grpo, _gspo) else {}
    ours, eagers = [], []
    for number in range(48):
        made = make_batch(seed=number)
        half, double = (
            Batch(
                *(leaf.detach().bfloat16().to(dtype).requires_grad_() for leaf in made.leaves),
                made.target,
                *(tensor.bfloat16().to(dtype) for tensor in made.reference),
            )
            for dtype in (torch.bfloat16, torch.float64)
        )
        value, _ = loss(half, **options)
        assert value.dtype == torch.float32
        mine = gradients(value, half, 1.0)  # another factor is one more rounding
        with _eager_head():
            theirs, truth = (gradients(loss(batch, **options)[0], batch, 1.0) for batch in (half, double))
        ours.append(errors(mine, truth))
        eagers.append(errors(theirs, truth))
    middles = [math.hypot(*(statistics.median(leaf) for leaf in zip(*each))) for each in (ours, eagers)]
    assert middles[0] <= 1.25 * middles[1]


def test_dpo_sums_log_probabilities_unless_asked_for_their_mean() -> None:
    batch = make_batch()
    for average, divisor in ((False, torch.ones(2 * PAIRS)), (True, batch.mask.sum(-1))):
        loss = losses.LigerFusedLinearDPOLoss(**({"average_log_prob": True} if average else {}), use_ref_model=False)
        value, (chosen, rejected, *_) = loss(batch.weight, batch.hidden, batch.target, batch.bias)
        expected = batch.log_probs().sum(-1) / divisor
        torch.testing.assert_close(torch.cat([chosen, rejected]), expected.detach())
        margin = expected[:PAIRS] - expected[PAIRS:]
        torch.testing.assert_close(value, -nn.functional.logsigmoid(0.1 * margin).mean())


@pytest.mark.parametrize("loss_type", ["ipo", "sigmoid_norm"])
def test_lengths_divide_once(loss_type: str) -> None:
    batch = make_batch()
    values = [_dpo(batch, loss_type=loss_type, average_log_prob=average)[0] for average in (False, True)]
    torch.testing.assert_close(*values)


def test_mean_logits_are_over_the_tokens_that_count() -> None:
    batch = make_batch()
    logits = nn.functional.linear(batch.hidden, batch.weight, batch.bias).detach()
    _, outputs = _dpo(batch)
    for mine, half in zip(outputs[2:4], (slice(0, PAIRS), slice(PAIRS, None))):
        torch.testing.assert_close(mine, logits[half][batch.mask[half]].mean())
    _, outputs = _kto(batch)
    for mine, kind in zip(outputs[2:4], (DESIRABLE, ~DESIRABLE)):
        torch.testing.assert_close(mine, logits[kind][batch.mask[kind]].sum())


def test_a_reference_that_is_the_policy_itself_moves_nothing_away() -> None:
    batch = make_batch()
    value, (kl, clipped) = losses.LigerFusedLinearGRPOLoss(use_ref_model=False, beta=0.5)(
        batch.hidden, batch.weight, batch.target.clamp(min=0), batch.mask, ADVANTAGES, batch.bias
    )
    assert kl == 0.0
    assert clipped == 0.0
    without, _ = _grpo(batch, beta=0.0)
    torch.testing.assert_close(value, without)
    torch.testing.assert_close(gradients(value, batch), gradients(without, batch))


def test_advantages_that_are_not_numbers() -> None:
    batch = make_batch()
    batch.target[1] = IGNORE
    ids, mask = batch.target.clamp(min=0), batch.mask
    for level in ("token", "sequence"):
        loss = losses.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="grpo", importance_sampling_level=level)
        masked = ADVANTAGES.unsqueeze(-1).expand(-1, TOKENS).masked_fill(~mask, float("nan"))
        value, _ = loss(batch.hidden, batch.weight, ids, mask, masked, batch.bias)
        assert value.isfinite()  # of tokens that do not count, they are not read
        assert all(gradient.isfinite().all() for gradient in gradients(value, batch))
        counted = ADVANTAGES.index_fill(0, torch.tensor([0]), float("nan"))
        assert loss(batch.hidden, batch.weight, ids, mask, counted, batch.bias)[0].isnan()  # as documented
