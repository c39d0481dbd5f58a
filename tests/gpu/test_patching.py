"""The patches with the real kernels: the same verdicts as on the CPU, the same training, and no synchronisation."""

from __future__ import annotations

import copy

import pytest
import torch

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.patching.trial import FP32_TOLERANCE, OF_RECURRENCES
from tests.device import assert_no_host_sync
from tests.patching.comparisons import LAYERS, loss_and_gradients, relative, total_error
from tests.patching.test_families import expected_kernels, families, kernels
from tests.tiny_models import TINY_MODELS, tiny_batch

pytestmark = pytest.mark.gpu


@families
def test_report(family, device):
    report = apply_liger_kernel(TINY_MODELS[family]().to(device), LAYERS)
    assert kernels(report) == expected_kernels(family), str(report)
    for row in report.applied:  # those of recurrences are sums over all tokens, of terms of either sign
        limit = OF_RECURRENCES.gradients if row.component == "recurrence" else FP32_TOLERANCE
        assert row.probe_error <= limit, str(report)


@families
def test_fp32_loss_and_gradients_equal(family, device):
    model = TINY_MODELS[family]().to(device)
    batch = tiny_batch(family, model)
    expected = loss_and_gradients(model, batch)
    largest = max(float(value.norm()) for value in expected.values())
    apply_liger_kernel(model, LAYERS)
    got = loss_and_gradients(model, batch)
    for name, value in expected.items():
        if float(value.norm()) > 1e-5 * largest:  # a key's bias has no gradient but rounding noise
            assert relative(value, got[name]) <= 1e-5, name


@families
@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_is_as_near_to_the_truth_as_the_model_itself(family, autocast, device):
    model = TINY_MODELS[family]().to(device, torch.float32 if autocast else torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "top_k") and hasattr(module, "num_experts"):
            module.top_k = module.num_experts  # a choice of experts is not continuous: rounding may flip it
    if autocast and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default, grouped_mm, leaves fp32 weights fp32 under autocast
    batch = tiny_batch(family, model)
    truth = loss_and_gradients(copy.deepcopy(model).float(), batch)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        theirs = loss_and_gradients(model, batch)
        apply_liger_kernel(model, LAYERS)
        ours = loss_and_gradients(model, batch)
    # Two computations that round independently: their errors differ by some noise on models this small.
    assert total_error(truth, ours) <= 1.2 * total_error(truth, theirs)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "olmo2", "qwen2_vl", "qwen3_moe"])
def test_no_synchronisation(family, device):
    if device != "cuda":
        pytest.skip("torch.cuda.set_sync_debug_mode is for CUDA")
    model = TINY_MODELS[family]().to(device, torch.bfloat16)
    layer = model.get_decoder().layers[0]
    apply_liger_kernel(model, LAYERS)
    hidden = torch.randn(2, 12, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    table = torch.randn(2, 12, 8, device=device, dtype=torch.bfloat16)

    def step():
        output = layer(hidden, position_embeddings=(table, table), attention_mask=None)
        output = output[0] if isinstance(output, tuple) else output
        output.sum().backward()

    assert_no_host_sync(step)


def test_compiled_by_inductor(device):
    model = TINY_MODELS["llama"]().to(device)
    batch = tiny_batch("llama", model)
    batch.pop("labels")
    expected = model(**batch, use_cache=False).logits
    apply_liger_kernel(model, LAYERS)
    got = torch.compile(model)(**batch, use_cache=False).logits
    attended = batch["attention_mask"].bool()  # nothing is computed for padding
    torch.testing.assert_close(got[attended], expected[attended], rtol=1e-3, atol=1e-3)
    revert_liger_kernel(model)
    assert torch.equal(model(**batch, use_cache=False).logits, expected)
