"""Per-token statistics, and the view that gives a summed loss's gradient to them."""

import contextlib
import sys
import types

import pytest
import torch

from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers.token_statistics import StatisticsOptions, TokenStatistics, _PerToken, token_statistics
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


def summed_view(logits, labels):
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return _PerToken.apply(nll.sum(), nll.detach(), labels, -100)


def test_view_of_a_sum_gives_its_gradient():
    logits, labels = problem()
    logits.requires_grad_()
    log_probs = summed_view(logits, labels)
    (got,) = torch.autograd.grad(-log_probs.sum() / 8 * 3, logits)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 8 * 3
    (expected,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got, expected)


def test_view_of_a_sum_refuses_unequal_weights():
    logits, labels = problem()
    logits.requires_grad_()
    log_probs = summed_view(logits, labels)
    (got,) = torch.autograd.grad((log_probs * torch.arange(10.0).view(2, 5)).sum(), logits)
    assert got.isnan().any()


def test_view_of_a_sum_does_not_look_at_ignored_positions_and_takes_none():
    logits, labels = problem()
    logits.requires_grad_()
    (got,) = torch.autograd.grad((summed_view(logits, labels) * (labels != -100)).sum(), logits)
    assert got.isfinite().all()
    assert got.any()
    labels = torch.full_like(labels, -100)
    (got,) = torch.autograd.grad(summed_view(logits, labels).sum(), logits)
    assert not got.any()


@pytest.mark.parametrize("build", [llama, gemma2])
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
def test_deferred_logits(options, build):
    plain, fused = build(), build()
    apply_liger_kernel(fused, {"logits_memory": 128 * 4 * 5})
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.roll(-1, 1)
    labels[0, :4] = -100
    results = []
    for model, kind in ((plain, torch.Tensor), (fused, DeferredLogits)):
        logits = model.train()(ids).logits
        assert type(logits) is kind
        got = token_statistics(logits, labels, options)
        weights = torch.ones(2, 9) if options.of_summed_loss else torch.arange(18.0).view(2, 9)
        loss = (got.log_probs * weights).sum() / 5
        if got.entropy is not None and not options.of_summed_loss:
            loss = loss + (got.entropy * weights.flip(1)).sum()
        loss.backward()
        results.append((got, dict(model.named_parameters())))
    (expected, expected_parameters), (got, parameters) = results
    for name, left, right in zip(TokenStatistics._fields, got, expected):
        assert (left is not None) == (name in ("log_probs", *options.outputs))
        if left is not None:
            torch.testing.assert_close(left.detach(), right.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, expected_parameters[name].grad, rtol=1e-4, atol=1e-5, msg=name)


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
    model = llama().train()
    apply_liger_kernel(model)
    ids = torch.randint(3, 128, (2, 9))
    logits = model(ids).logits
    assert type(logits) is DeferredLogits
    model.lm_head.weight.ds_id, model.lm_head.weight.ds_status = 0, types.SimpleNamespace(name="AVAILABLE")
    model.lm_head.pre_bwd_fn = PreBackwardFunctionForModule
    statistics = token_statistics(logits, ids.roll(-1, 1), StatisticsOptions(uniform_gradient=uniform_gradient))
    assert not asked
    statistics.log_probs.sum().backward()
    assert asked == ["backward"]
