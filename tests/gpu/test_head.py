"""The deferred head on an accelerator: native numbers, no logits in memory, no host synchronisation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from liger_trainer.head import DeferredLogits
from liger_trainer.patching.head import patch_head
from tests.device import no_host_sync
from tests.tiny_models import TINY_MODELS, tiny_batch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "gemma3"])
def test_training_step(name, dtype, device, monkeypatch):
    native, ours = (TINY_MODELS[name]().train().to(device, dtype) for _ in range(2))
    assert patch_head(ours, fused=True, logits_memory=2**20).applied
    monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))
    inputs = tiny_batch(name, native)
    losses = [model(**inputs, num_items_in_batch=torch.tensor(20, device=device)).loss for model in (ours, native)]
    tolerance = 1e-4 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
    for loss in losses:
        loss.backward()
    for (key, mine), theirs in zip(ours.named_parameters(), native.parameters()):
        if theirs.grad is not None:
            difference = (mine.grad - theirs.grad).float().norm() / theirs.grad.float().norm().clamp_min(1e-6)
            assert difference <= 3 * tolerance, f"{key}: {difference}"


def test_step_neither_synchronises_nor_builds_logits(device):
    if device != "cuda":
        pytest.skip("the synchronisation check is CUDA's")
    model = TINY_MODELS["llama"](vocab_size=64000).train().to(device, torch.bfloat16)
    assert patch_head(model, fused=True, logits_memory=2**20).applied
    # Labels and mask without padding: transformers itself looks at a mask on the host.
    inputs = tiny_batch("llama", model, batch=4, length=1024)
    inputs = {key: inputs[key] for key in ("input_ids", "labels")}
    items = torch.tensor(4000, device=device)
    model(**inputs, num_items_in_batch=items).loss.backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hidden = model.model(inputs["input_ids"]).last_hidden_state
    outputs = {"last_hidden_state": hidden, "cache": None, "hidden_states": None, "attentions": None}
    model.model.forward = lambda *args, **kwargs: SimpleNamespace(**outputs)
    with no_host_sync():
        model(**inputs, num_items_in_batch=items).loss.backward()
    bf16_logits = 4 * 1024 * 64000 * 2
    assert torch.cuda.max_memory_allocated() - before < bf16_logits / 2
