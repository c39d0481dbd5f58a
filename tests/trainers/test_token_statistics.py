"""Per-token statistics of logits, deferred or not, with a gradient that is expected or not."""

import contextlib
import functools
import sys
import types

import pytest
import torch

from liger_trainer.head import lm_head
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers.fused_forward import StatisticsOptions, TokenStatistics, token_statistics
from tests.steps import step_with
from tests.trainers.tiny import gemma2, llama

OUTPUTS = ("log_probs", "entropy", "is_top1")


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 7, (2, 5), generator=generator)
    labels[0, :2] = -100
    return logits, labels


def test_from_built_logits():
    logits, labels = problem()
    logits.requires_grad_()
    got = token_statistics(logits, labels, StatisticsOptions(OUTPUTS, uniform_gradient=True))
    probabilities = logits.double().softmax(-1)
    valid = labels != -100
    chosen = probabilities.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).log()
    torch.testing.assert_close(got.log_probs.double(), chosen * valid, rtol=1e-5, atol=1e-6)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    torch.testing.assert_close(got.entropy.double(), entropy * valid, rtol=1e-5, atol=1e-6)
    assert torch.equal(got.is_top1, (logits.argmax(-1) == labels) & valid)
    weights = torch.rand_like(got.log_probs)
    (gradient,) = torch.autograd.grad(((got.log_probs + 2.0 * got.entropy) * weights).sum(), logits)
    (expected,) = torch.autograd.grad(((chosen + 2.0 * entropy) * valid * weights).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


WEIGHTS = {
    "alike": (torch.ones(2, 9), None),
    "different": (torch.arange(18.0).view(2, 9), None),
    "alike with entropy": (torch.ones(2, 9), torch.ones(2, 9)),
    "different with entropy": (torch.arange(18.0).view(2, 9), torch.arange(18.0).view(2, 9).flip(1)),
}


@pytest.mark.parametrize("build", [llama, gemma2, functools.partial(llama, tie_word_embeddings=True)])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("expected_grad", [None, 1.0, 0.2])
@pytest.mark.parametrize(
    "options",
    [
        StatisticsOptions(OUTPUTS, uniform_gradient=True),
        StatisticsOptions(OUTPUTS),
        StatisticsOptions(retain_memory=0),
        StatisticsOptions(TokenStatistics._fields, temperature=0.7, retain_memory=2**20),
        StatisticsOptions(("log_probs", "mean_logits"), uniform_gradient=True),
    ],
)
def test_deferred_logits(options, expected_grad, weights, build):
    plain, fused = build(), build()
    apply_liger_kernel(fused, {"logits_memory": 128 * 4 * 5})
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.roll(-1, 1)
    labels[0, :4] = -100
    results = []
    for model, kind in ((plain, torch.Tensor), (fused, DeferredLogits)):
        logits = model.train()(ids).logits
        assert type(logits) is kind
        with step_with(expected_gradient=expected_grad):
            got = token_statistics(logits, labels, options)
        of_log_probs, of_entropy = WEIGHTS[weights]
        loss = (got.log_probs * of_log_probs).sum() / 5
        if got.entropy is not None and of_entropy is not None:
            loss = loss + (got.entropy * of_entropy).sum()
        loss.backward()
        results.append((got, dict(model.named_parameters())))
    (expected, expected_parameters), (got, parameters) = results
    for name, left, right in zip(TokenStatistics._fields, got, expected):
        assert (left is not None) == (name in ("log_probs", *options.outputs))
        if left is not None:
            torch.testing.assert_close(left.detach(), right.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in parameters.items():
        theirs = expected_parameters[name].grad  # sums, whose terms may cancel in an element
        atol = 1e-5 * (1 + theirs.abs().max().item())
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-4, atol=atol, msg=name)


@pytest.mark.parametrize("uniform_gradient", [True, False])
def test_zero3_gathers_the_head_again_for_the_backward(uniform_gradient, monkeypatch):
    """The owner of a partitioned head is asked for it once gradients arrive; DeepSpeed is emulated."""
    asked = []

    class PreBackwardFunctionForModule(torch.autograd.Function):
        @staticmethod
        def forward(ctx, outputs):
            return outputs.detach()

        @staticmethod
        def backward(ctx, *grads):
            asked.append("backward")
            return grads

    deepspeed = types.ModuleType("deepspeed")
    deepspeed.zero = types.SimpleNamespace(GatheredParameters=lambda parameters, enabled: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(lm_head, "_check_deepspeed", lambda: None)  # the emulated one lacks the names it checks
    model = llama().train()
    apply_liger_kernel(model)
    ids = torch.randint(3, 128, (2, 9))
    logits = model(ids).logits
    assert type(logits) is DeferredLogits
    model.lm_head.weight.ds_id, model.lm_head.weight.ds_status = 0, types.SimpleNamespace(name="AVAILABLE")
    model.lm_head.pre_bwd_fn = PreBackwardFunctionForModule
    with step_with(expected_gradient=1.0):
        statistics = token_statistics(logits, ids.roll(-1, 1), StatisticsOptions(uniform_gradient=uniform_gradient))
    assert not asked
    statistics.log_probs.sum().backward()
    assert asked == ["backward"]
