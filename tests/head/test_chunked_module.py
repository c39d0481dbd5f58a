"""Heads that are no plain linear: exact, with the logits of one chunk in memory."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.head import DeferredLogits, chunked_module
from liger_trainer.head.chunked_module import chunked_rows
from liger_trainer.head.fused_loss import chunked_log_probs
from liger_trainer.kernels.head.log_probs import log_probs_reference
from liger_trainer.patching.head import patch_head
from tests.tiny_models import TINY_MODELS, tiny_batch

VOCAB = 128
ROWS = 3  # tokens in a chunk
MEMORY = ROWS * VOCAB * 4
OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")


def adapted(patched: bool, family: str = "llama", memory: int = MEMORY, **options) -> nn.Module:
    model = TINY_MODELS[family]().train()
    torch.manual_seed(3)
    config = peft.LoraConfig(**{"target_modules": ["q_proj", "lm_head"], "r": 4, "task_type": "CAUSAL_LM", **options})
    model = peft.get_peft_model(model, config)
    with torch.no_grad():  # adapters start as the identity: make them count
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    if patched:
        assert patch_head(model, fused=True, logits_memory=memory).applied
    return model


def gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def model_loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The model's own loss and the gradients of its parameters."""
    loss = model(**inputs).loss
    return [loss.detach(), *gradients(loss, model)]


def assert_close(ours, native):
    for left, right in zip(ours, native, strict=True):
        size = right.abs().max().item() if right.is_floating_point() else 0
        torch.testing.assert_close(left, right, rtol=0, atol=2e-5 * size)


@pytest.fixture
def chunks(monkeypatch):
    """The numbers of tokens that a model's head ran on."""
    seen = []
    run = chunked_module.ModuleCall._run

    def counted(self, parameters, hidden):
        if self.vocab_size == VOCAB:  # not the probe's
            seen.append(len(hidden))
        return run(self, parameters, hidden)

    monkeypatch.setattr(chunked_module.ModuleCall, "_run", counted)
    return seen


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_chunks(reduction, use_dora, chunks):
    native, ours = adapted(False, use_dora=use_dora), adapted(True, use_dora=use_dora)
    inputs = tiny_batch("llama", native)
    target = inputs.pop("labels").flatten()
    weight = torch.linspace(0.5, 2.0, VOCAB)
    results = []
    for model in (native, ours):
        logits = model(**inputs).logits
        assert (type(logits) is DeferredLogits) is (model is ours)
        loss = F.cross_entropy(logits.view(-1, VOCAB), target, weight, reduction=reduction, label_smoothing=0.1)
        total = (loss * torch.arange(1.0, loss.numel() + 1).view(loss.shape)).sum()
        results.append([loss.detach(), *gradients(total, model)])
    assert_close(*results)
    assert max(chunks) == ROWS
    assert sum(chunks) == 2 * target.numel(), "once in the forward and once in the backward"


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_log_probs_of_chunks(family, chunks):
    """Gemma 2 has a soft-cap after its head, which each chunk goes through."""
    native, ours = adapted(False, family), adapted(True, family)
    inputs = tiny_batch(family, native)
    target = inputs.pop("labels")
    target[0, :4] = -100
    factors = torch.linspace(-1, 1, target.numel()).view(target.shape)
    results = []
    for model in (native, ours):
        logits = model(**inputs).logits
        if model is ours:
            found = chunked_log_probs(logits, target, OUTPUTS, temperature=0.7)
        else:
            found = log_probs_reference(logits, target, temperature=0.7, outputs=OUTPUTS)
        loss = (found.log_probs * factors).sum() + (found.entropy * factors.square()).sum()
        values = [found.log_probs, *(getattr(found, name) for name in OUTPUTS)]
        results.append([*(value.detach() for value in values), *gradients(loss, model)])
    assert_close(*results)
    assert max(chunks) == ROWS


def test_without_gradients_the_head_runs_once(chunks):
    model = adapted(True)
    inputs = tiny_batch("llama", model)
    target = inputs.pop("labels")
    logits = model(**inputs).logits
    with torch.no_grad():
        found = chunked_log_probs(logits, target, ("entropy",))
    assert sum(chunks) == target.numel()
    assert not found.log_probs.requires_grad
    assert not logits.recorded.call.has_loss


def test_dropout_is_the_same_in_the_backward(monkeypatch):
    """The gradients are those of the logits of the forward, though these are computed a second time."""
    model = adapted(True, lora_dropout=0.5)
    inputs = tiny_batch("llama", model)
    results = []
    for checkpointed in (True, False):
        if not checkpointed:
            monkeypatch.setattr(chunked_module, "checkpoint", lambda run, *args, use_reentrant: run(*args))
        torch.manual_seed(7)
        results.append(model_loss(model, inputs))
    assert all(map(torch.equal, *results))
    torch.manual_seed(8)
    assert not torch.equal(model(**inputs).loss, results[0][0])


def test_built_logits_are_those_of_the_module():
    native, ours = adapted(False), adapted(True)
    inputs = tiny_batch("llama", native)
    inputs.pop("labels")
    results = []
    for model in (native, ours):
        logits = model(**inputs).logits
        results.append([logits.detach().exp(), *gradients((logits.sin() ** 2).sum(), model)])
    assert_close(*results)


def test_the_adapter_gets_its_gradient_past_torch_function():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return 2.0 * logits

        @staticmethod
        def backward(ctx, grad):
            return 2.0 * grad

    native, ours = adapted(False), adapted(True)
    inputs = tiny_batch("llama", native)
    inputs.pop("labels")
    assert_close(*(gradients(Doubled.apply(model(**inputs).logits).square().sum(), model) for model in (native, ours)))


def test_autocast_of_the_call_is_that_of_the_chunks():
    native, ours = adapted(False), adapted(True)
    inputs = tiny_batch("llama", native)
    labels = inputs.pop("labels")
    results = []
    for model in (native, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(**inputs).logits
        assert logits.dtype == torch.bfloat16
        found = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())  # autocast is off by now
        results.append([found.detach(), *gradients(found, model)])
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=1e-6)
    for left, right in zip(*results):
        torch.testing.assert_close(left, right, rtol=0.05, atol=2e-3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_checkpointing_of_the_model(use_reentrant):
    results = []
    for patched in (False, True):
        model = adapted(patched)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        loss = model(**tiny_batch("llama", model)).loss
        loss.backward()  # torch.autograd.grad refuses reentrant checkpoints
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert_close(*results)


def test_a_disabled_adapter_is_no_part_of_it():
    native, ours = adapted(False), adapted(True)
    inputs = tiny_batch("llama", native)
    with ours.disable_adapter(), native.disable_adapter():
        without = ours(**inputs).loss
        torch.testing.assert_close(without, native(**inputs).loss)
    assert ours(**inputs).loss != without


def test_changed_parameters_are_an_error():
    model = adapted(True)
    inputs = tiny_batch("llama", model)
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lm_head.lora_B" in name).add_(1.0)
    with pytest.raises(RuntimeError, match="head's parameters"):
        chunked_log_probs(logits, inputs["labels"], ("entropy",))


def test_no_token_at_all():
    model = adapted(True)
    inputs = tiny_batch("llama", model)
    target = inputs.pop("labels")
    logits = model(**inputs).logits[:0]
    (column,) = chunked_rows(logits, lambda rows, labels: [rows.sum(-1)], target[:0])
    assert column.shape == target[:0].shape
    all_ignored = F.cross_entropy(model(**inputs).logits.flatten(0, 1), torch.full((target.numel(),), -100))
    assert all_ignored == 0.0
    assert all(not grad.any() for grad in gradients(all_ignored, model))


def test_a_copy_is_a_patched_model():
    model = adapted(True)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.1)
    inputs = tiny_batch("llama", model)
    logits = copied(**{key: value for key, value in inputs.items() if key != "labels"}).logits
    assert logits.recorded.call.head is copied.get_base_model().lm_head
    assert copied(**inputs).loss != model(**inputs).loss


def test_an_adapter_around_a_head_that_is_patched(never_built):
    """The linear inside would defer its logits, too."""
    native = adapted(False, "llama")
    torch.manual_seed(3)
    inner = TINY_MODELS["llama"]().train()
    patch_head(inner, fused=True, logits_memory=MEMORY)
    ours = peft.get_peft_model(inner, copy.deepcopy(native.peft_config["default"]))
    ours.load_state_dict(native.state_dict())
    patch_head(ours, fused=True, logits_memory=MEMORY)
    inputs = tiny_batch("llama", native)
    assert_close(model_loss(ours, inputs), model_loss(native, inputs))


class Quantised(nn.Linear):
    """A head that a library of quantisation would make: a linear with a forward of its own."""

    def forward(self, hidden):
        return F.linear(hidden, self.weight.round(decimals=1))


def test_another_kind_of_linear(chunks):
    native = TINY_MODELS["llama"]().train()
    head = Quantised(native.lm_head.in_features, VOCAB, bias=False)
    head.weight = native.lm_head.weight
    native.lm_head = head
    ours = copy.deepcopy(native)
    assert "Quantised" in patch_head(ours, fused=True, logits_memory=MEMORY).kernel
    inputs = tiny_batch("llama", native)
    assert_close(model_loss(ours, inputs), model_loss(native, inputs))
    assert max(chunks) == ROWS
    assert not patch_head(ours, fused=False, logits_memory=MEMORY).applied
