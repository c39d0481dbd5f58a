"""The plug-in for LLaMA-Factory's v1 trainers, called by its name as `v1/core/model_engine.py` does."""

import importlib
import logging

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.head import DeferredLogits
from tests.tiny_models import TINY_MODELS, tiny_batch


@pytest.fixture
def kernels(llamafactory):
    importlib.import_module("liger_trainer.integrations.llamafactory")
    return llamafactory.KernelPlugin("liger_trainer")


def patched(model):
    return {name.rpartition(".")[2] for name, module in model.named_modules() if "forward" in vars(module)}


def gradients(model):
    """Those of weighted log-probabilities, which `v1/core/base_trainer.py` and `sft_trainer.py` take of the logits."""
    batch = tiny_batch("llama", model)
    targets = batch["labels"][..., 1:]
    logits = model(**batch).logits.float()[..., :-1, :].contiguous().view(targets.numel(), -1)
    losses = F.cross_entropy(logits, targets.contiguous().view(-1), reduction="none")
    weights = torch.linspace(0, 1, targets.numel())
    loss = (losses * weights).sum() / weights.sum()
    return loss, *torch.autograd.grad(loss, [model.lm_head.weight, model.model.embed_tokens.weight])


def test_all_kernels(kernels, caplog, monkeypatch):
    model = TINY_MODELS["llama"]().train()
    expected = gradients(model)
    with caplog.at_level(logging.INFO):
        assert kernels(model=model, include_kernels="auto") is model
    assert {"lm_head", "mlp", "norm"} <= patched(model)
    monkeypatch.delattr(DeferredLogits, "_compute")  # which builds logits
    torch.testing.assert_close(gradients(model), expected)
    assert "liger_trainer kernels in LlamaForCausalLM" in caplog.text


def test_named_kernels_or_none(kernels):
    model = TINY_MODELS["llama"]()
    assert patched(kernels(model=model, include_kernels="swiglu, linear_cross_entropy")) == {"", "lm_head", "mlp"}
    model = TINY_MODELS["llama"]()
    assert not patched(kernels(model=model, include_kernels=None))
    with pytest.raises(ValueError, match="did you mean 'rope'"):
        kernels(model=model, include_kernels="ropes")
