"""Without a gradient and without kernels, as in a generation on the CPU, modules run the code of their classes."""

import inspect

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from liger_trainer import apply_liger_kernel
from liger_trainer.patching import mlps, rotations
from liger_trainer.patching import norm_forwards as norms
from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import llama, mixtral

MODELS = {"llama": llama, "mixtral": mixtral, "qwen3": TINY_MODELS["qwen3"], "gemma2": TINY_MODELS["gemma2"]}


@pytest.mark.parametrize("family", MODELS)
def test_generation_on_the_cpu(family, calls_of):
    ours = calls_of(norms, "rms_norm"), calls_of(rotations, "rope"), calls_of(mlps, "outputs_are_unhooked")
    stock, patched = MODELS[family]().eval(), MODELS[family]().eval()
    report = apply_liger_kernel(patched)
    assert {"rope", "rms_norm"} <= {row.component for row in report.applied}
    for calls in ours:
        calls.clear()
    ids = torch.arange(3, 15).view(2, 6)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    expected, got = (model.generate(ids, **options) for model in (stock, patched))
    assert torch.equal(expected.sequences, got.sequences)
    for left, right in zip(expected.logits, got.logits, strict=True):
        assert torch.equal(left, right), "the same code gives the same bits"
    assert ours == ([], [], [])
    with torch.no_grad():  # a reference model rounds as the policy does
        patched(input_ids=ids, use_cache=False)
    assert ours[0]
    assert ours[1] or ours[2]
    ours[0].clear()
    patched.train()(input_ids=ids, labels=ids).loss.backward()
    assert ours[0]


ARGUMENTS = list(inspect.signature(LlamaForCausalLM.forward).parameters)
NAMES = [name for name in ("cache", "past_key_values") if name in ARGUMENTS]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["positional", *dict.fromkeys([*NAMES, "past_key_values"])])
def test_a_step_is_told_by_its_cache_whatever_its_name(name, calls_of):
    """The cache has another name from version to version; callers may use the older one."""
    ours, model = calls_of(norms, "rms_norm"), llama().eval()
    apply_liger_kernel(model)
    ours.clear()
    ids = torch.arange(3, 15).view(2, 6)
    with torch.no_grad():
        if name == "positional":
            place = ARGUMENTS.index(NAMES[0])
            model(*(ids, *[None] * (place - 2), DynamicCache(config=model.config)))
        else:
            model(input_ids=ids, **{name: DynamicCache(config=model.config)})
    assert ours == []


@pytest.mark.parametrize("chosen", ["eager", "grouped_mm", "batched_mm", "liger_trainer"])
def test_experts_of_every_implementation(chosen):
    stock, patched = mixtral().eval(), mixtral().eval()
    patched.config._experts_implementation = chosen
    stock.config._experts_implementation = "eager" if chosen == "liger_trainer" else chosen
    report = apply_liger_kernel(patched)
    assert any(row.component == "experts" and row.applied for row in report)
    ids = torch.arange(3, 15).view(2, 6)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    for left, right in zip(stock.generate(ids, **options).logits, patched.generate(ids, **options).logits, strict=True):
        assert torch.equal(left, right)
    expected, got = (model(input_ids=ids).logits for model in (stock, patched))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
