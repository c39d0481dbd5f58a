"""Experts in 4 bits train adapters as the same numbers in 16 or 32 bits do, and keep their 4 bits for the backward."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Llama4ForCausalLM, Llama4TextConfig

from liger_trainer import apply_liger_kernel, quantize_experts
from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.patching.moe.quantized_experts import FourBits, four_bits
from liger_trainer.trainers.moe import check_experts_in_4_bits
from liger_trainer.trainers.trainer import LigerTrainer
from tests.calls import saved_tensors
from tests.quantised import library
from tests.tiny_models import TINY_MODELS

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "llama4")
FIELDS = {"output_router_logits": False}
WHOLE_BLOCKS = {"hidden_size": 64, "moe_intermediate_size": 64}
"""bitsandbytes 0.50.2 gives a block of another row its scale on the CPU, where a row is no multiple of a block."""


@pytest.fixture(autouse=True)
def installed():
    library()
    torch.manual_seed(0)


def llama4(**fields):
    """Llama 4's experts are given all tokens by their block, scaled."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Llama4TextConfig(
        vocab_size=128, intermediate_size_mlp=64, num_hidden_layers=2, head_dim=8, num_local_experts=4,
        num_experts_per_tok=1, interleave_moe_layer_step=1, pad_token_id=0, **sizes,
    )  # fmt: skip
    model = Llama4ForCausalLM(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    return model


BUILD = {**TINY_MODELS, "llama4": llama4}
NAMES = ["experts.gate_up_proj", "experts.down_proj"]


def with_adapters(family, **fields):
    config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=NAMES)
    model = get_peft_model(BUILD[family](**FIELDS, **fields), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.arange(parameter.numel()).mul(0.7).cos().mul(0.1).view(parameter.shape))
    return model.train()


def whole_and_quantised(family, **fields):
    """Two models with adapters: the second in 4 bits, the first with the same numbers in fp32."""
    whole = with_adapters(family, **fields)
    quantised = copy.deepcopy(whole)
    assert quantize_experts(quantised) == 2 * whole.config.num_hidden_layers
    experts = [module for module in quantised.modules() if four_bits(module)]
    for module, plain in zip(experts, [module for module in whole.modules() if "down_proj" in module._parameters]):
        for name in four_bits(module):
            plain._parameters[name].data.copy_(getattr(module, name))
    return whole, quantised


def step(model):
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_weights_are_what_bitsandbytes_makes_of_them(quant_type, double_quant):
    functions, whole = library().functional, TINY_MODELS["qwen3_moe"](**FIELDS, **WHOLE_BLOCKS)
    quantised = copy.deepcopy(whole)
    quantize_experts(quantised, quant_type, double_quant)
    path, name = "model.layers.0.mlp.experts", "gate_up_proj"
    weight, experts = whole.get_submodule(path)._parameters[name], quantised.get_submodule(path)
    packed, state = functions.quantize_4bit(weight.data, compress_statistics=double_quant, quant_type=quant_type)
    assert torch.equal(getattr(experts, name), functions.dequantize_4bit(packed, state))
    held = sum(tensor.nbytes for tensor in (*experts.parameters(), *experts.buffers()))
    assert held < sum(parameter.nbytes for parameter in whole.get_submodule(path).parameters()) / 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_trains_as_the_numbers_that_the_bits_stand_for(family, checkpointed):
    whole, quantised = whole_and_quantised(family)
    expected, expected_gradients = step(whole)
    report = apply_liger_kernel(quantised)
    assert sum(row.count for row in report if row.kernel == "moe_experts (adapters)") == 4
    assert not any("Parametrized" in row.target or row.target == "ModuleDict" for row in report)
    if checkpointed:
        quantised.gradient_checkpointing_enable({"use_reentrant": False})
        quantised.enable_input_require_grads()
    for _ in range(2):
        quantised.zero_grad()
        loss, gradients = step(quantised)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6)


def test_without_adapters_the_model_runs_as_it_is():
    whole, quantised = whole_and_quantised("qwen3_moe")
    ids = torch.randint(3, 64, (2, 12))
    with whole.disable_adapter(), quantised.disable_adapter(), torch.no_grad():
        expected = whole(ids).logits
        torch.testing.assert_close(quantised(ids).logits, expected)
        apply_liger_kernel(quantised)
        torch.testing.assert_close(quantised(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_backward_keeps_four_bits(autocast):
    """No weight that was made floating, or cast, is among what autograd saves."""
    _, quantised = whole_and_quantised("qwen3_moe")
    apply_liger_kernel(quantised)
    config = quantised.config
    with saved_tensors() as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, gradients = step(quantised)
    experts, hidden, intermediate = config.num_experts, config.hidden_size, config.moe_intermediate_size
    assert not {(experts, 2 * intermediate, hidden), (experts, hidden, intermediate)} & {each.shape for each in saved}
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


def test_the_backward_makes_weights_again(monkeypatch):
    """Nothing that was made floating in the forward lives until the backward, which makes it again."""
    _, quantised = whole_and_quantised("qwen3_moe")
    apply_liger_kernel(quantised)
    forward, made = FourBits.forward, []

    def noted(self, packed):
        weight = forward(self, packed)
        made.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(FourBits, "forward", noted)
    ids = torch.randint(3, 64, (2, 12))
    loss = quantised(input_ids=ids, labels=ids).loss
    gc.collect()
    assert len(made) == 4
    assert not any(each() is not None for each in made)
    loss.backward()
    assert len(made) == 8


def test_hooks_around_the_experts_get_all_else_that_is_saved():
    """Those of a checkpoint, which would otherwise not be one, and of offloading; torch runs the innermost alone."""
    _, quantised = whole_and_quantised("qwen3_moe")
    apply_liger_kernel(quantised)
    config, saved = quantised.config, []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor.clone()

    _, expected = step(quantised)
    quantised.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, gradients = step(quantised)
    pre = 2 * 12 * config.num_experts_per_tok, 2 * config.moe_intermediate_size
    assert saved.count(pre) == config.num_hidden_layers
    experts, hidden, intermediate = config.num_experts, config.hidden_size, config.moe_intermediate_size
    assert not {(experts, 2 * intermediate, hidden), (experts, hidden, intermediate)} & set(saved)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


def test_adapters_load_on_the_plain_model(tmp_path):
    whole, quantised = whole_and_quantised("qwen3_moe")
    quantised.save_pretrained(tmp_path)
    apply_liger_kernel(quantised)
    ids = torch.randint(3, 64, (2, 12))
    loaded = PeftModel.from_pretrained(whole.unload(), tmp_path)
    torch.testing.assert_close(loaded.eval()(ids).logits, quantised.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def test_what_peft_would_get_wrong_is_an_error():
    _, quantised = whole_and_quantised("qwen3_moe")
    with pytest.raises(RuntimeError, match="Adapters on experts in 4 bits run in our operator alone"):
        step(quantised)
    apply_liger_kernel(quantised)
    step(quantised)
    next(module for module in quantised.modules() if four_bits(module)).register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="remove hooks from the experts"):
        step(quantised)


def test_merging_is_refused_and_leaves_all_adapters():
    _, quantised = whole_and_quantised("qwen3_moe")
    before = {name: parameter.clone() for name, parameter in quantised.named_parameters()}
    with pytest.raises(RuntimeError, match="Adapters cannot be merged into experts in 4 bits"):
        quantised.merge_adapter()
    with pytest.raises(RuntimeError, match="on the model in 16 bits, and merge there"):
        quantised.merge_and_unload()
    after = dict(quantised.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_cast_leaves_the_bits_alone():
    _, quantised = whole_and_quantised("qwen3_moe")
    experts = next(module for module in quantised.modules() if four_bits(module))
    exact = experts.gate_up_proj
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        quantised.to(dtype)
        assert torch.equal(experts.gate_up_proj, exact.to(dtype))


def test_adapters_that_were_made_too_late_are_an_error(tmp_path):
    model = TINY_MODELS["qwen3_moe"](**FIELDS)
    quantize_experts(model)
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=NAMES))
    args = LigerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", kernel_report=False)
    with pytest.raises(ValueError, match="was in 4 bits when it was made, and has none"):
        LigerTrainer(model, args)


def test_a_trainer_takes_the_right_order_and_no_sharding(tmp_path, monkeypatch):
    args = LigerTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", kernel_report=False)
    trainer = LigerTrainer(whole_and_quantised("qwen3_moe")[1], args)
    assert any(row.kernel == "moe_experts (adapters)" for row in trainer.kernel_report)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    with pytest.raises(ValueError, match="cannot be split, and the launch splits it with DeepSpeed"):
        check_experts_in_4_bits(trainer)


def test_errors_say_what_to_do():
    with pytest.raises(ValueError, match="`quant_type` is 'int4'; it must be one of nf4, fp4"):
        quantize_experts(TINY_MODELS["qwen3_moe"](), "int4")
    merged = with_adapters("qwen3_moe")
    merged.merge_adapter()
    with pytest.raises(ValueError, match="`model` has merged adapters"):
        quantize_experts(merged)
    for model in (nn.Linear(2, 2), whole_and_quantised("qwen3_moe")[1]):
        with pytest.raises(ValueError, match="has no experts with stacked weights in 16 or 32 bits"):
            quantize_experts(model)
