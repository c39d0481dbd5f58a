"""Policy and vocab-parallel losses with Liger's call signatures."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.functional import grpo_loss
from liger_trainer.nn import LigerVocabParallelCrossEntropy, triton_grpo_loss


def test_signatures_are_ligers() -> None:
    assert list(inspect.signature(triton_grpo_loss).parameters) == [
        *("logits", "old_logp", "ref_logp", "completion_ids", "advantages", "completion_mask", "temperature", "beta"),
        *("eps_low", "eps_high", "inplace", "loss_type", "max_completion_length", "importance_sampling_level"),
        *("reduce", "sapo_temperature_pos", "sapo_temperature_neg", "vllm_is_ratio", "delta"),
        *("use_bias_correction_kl", "num_items_in_batch", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
        "vespo_lambda_neg",
    ]
    assert list(inspect.signature(LigerVocabParallelCrossEntropy.__init__).parameters)[1:] == [
        *("ignore_index", "label_smoothing", "reduction", "label_smoothing_formula", "label_smoothing_mode"),
    ]
    forward = inspect.signature(LigerVocabParallelCrossEntropy.forward).parameters
    assert list(forward)[1:] == ["vocab_parallel_logits", "target", "tp_group"]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_grpo_loss_has_ligers_results(loss_type: str) -> None:
    logits, ids = torch.randn(2, 5, 9), torch.randint(0, 9, (2, 4))
    old, ref, advantages = torch.randn(2, 4) - 2.0, torch.randn(2, 4) - 2.0, torch.tensor([1.0, -1.0])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    options = {"temperature": 0.9, "beta": 0.04, "epsilon_high": 0.4, "loss_type": loss_type}
    loss, kl, clipped = triton_grpo_loss(logits, old, ref, ids, advantages, mask, loss_type=loss_type)
    each = grpo_loss(logits, ids, advantages, mask, old, ref, reduction="none", **options)
    for mine, expected in ((loss, each.loss), (kl, each.kl), (clipped, each.clipped)):
        torch.testing.assert_close(mine, expected)
    loss, metrics = triton_grpo_loss(
        logits, old, ref, ids, advantages, mask, loss_type=loss_type, reduce=True, num_items_in_batch=torch.tensor(7)
    )
    items = 7 if loss_type == "dapo" else None
    expected = grpo_loss(logits, ids, advantages, mask, old, ref, num_items=items, **options)
    torch.testing.assert_close((loss, *metrics), (expected.loss, expected.kl, expected.clipped))
    alone, metrics = triton_grpo_loss(logits, None, None, ids, advantages, beta=0.0, loss_type=loss_type, reduce=True)
    assert alone.item() == pytest.approx(0.0, abs=1e-6)  # ratio 1, and as much advantage as disadvantage
    assert len(metrics) == 1


def test_vocab_parallel_cross_entropy_of_one_process() -> None:
    logits, target = torch.randn(5, 2, 12), torch.randint(0, 12, (5, 2))
    for smoothing in (0.0, 0.1):
        loss = LigerVocabParallelCrossEntropy(label_smoothing=smoothing)(logits, target)
        expected = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
        ).view(5, 2)
        torch.testing.assert_close(loss, expected)
    loss = LigerVocabParallelCrossEntropy(label_smoothing=0.1, label_smoothing_formula="megatron")(logits, target)
    log_probs = logits.log_softmax(-1)
    others = torch.ones_like(logits).scatter(-1, target.unsqueeze(-1), 0.0) / 11
    aimed = 0.1 * others + 0.9 * F.one_hot(target, 12)
    torch.testing.assert_close(loss, -(aimed * log_probs).sum(-1))


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"label_smoothing": 1.0},
        {"label_smoothing_formula": "keras"},
        {"label_smoothing_mode": "local"},
    ],
)
def test_vocab_parallel_options_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LigerVocabParallelCrossEntropy(**options)
