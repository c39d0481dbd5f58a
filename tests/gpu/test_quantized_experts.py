"""Experts in 4 bits on a GPU: gradients as exact as those on 16 bits, no wait, and no floating weight kept."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from liger_trainer import apply_liger_kernel, quantize_experts
from liger_trainer.patching.moe.quantized_experts import four_bits
from tests.device import no_host_sync
from tests.quantised import library

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

TOKENS, LAYERS = 1024, 4


@pytest.fixture(autouse=True)
def installed():
    library()
    torch.manual_seed(0)


def adapted():
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=512, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=384, output_router_logits=False,
    )  # fmt: skip
    names = ["experts.gate_up_proj", "experts.down_proj"]
    with torch.device("cuda"):
        model = get_peft_model(Qwen3MoeForCausalLM(config).bfloat16(), LoraConfig(r=8, target_parameters=names))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    return model.train()


def dense_of(quantised, model):
    """`model` with the numbers that the bits of `quantised` stand for."""
    for one, other in zip(quantised.modules(), _experts_of(model, quantised)):
        for name in four_bits(one):
            other._parameters[name].data.copy_(getattr(one, name))
    return model


def _experts_of(model, quantised):
    plain = iter(module for module in model.modules() if "down_proj" in module._parameters)
    return (next(plain) if four_bits(one) else None for one in quantised.modules())


def gradients(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_as_exact_as_those_on_16_bits():
    ids = torch.randint(0, 512, (1, TOKENS), device="cuda")
    quantised = adapted()
    plain = copy.deepcopy(quantised)
    quantize_experts(quantised)
    dense_of(quantised, plain)
    exact_loss, exact = gradients(copy.deepcopy(plain).float(), ids)
    for model in (plain, quantised):
        apply_liger_kernel(model)
    loss, on_16_bits = gradients(plain, ids)
    loss_4, on_4_bits = gradients(quantised, ids)
    assert loss_4 == pytest.approx(exact_loss, rel=2e-2)
    assert loss_4 == pytest.approx(loss, rel=1e-3)
    for name, value in on_4_bits.items():
        errors = [(found - exact[name]).norm().item() for found in (value, on_16_bits[name])]
        assert errors[0] <= 1.2 * errors[1] + 1e-6, name


def test_no_floating_weight_is_kept_and_reading_one_does_not_wait():
    ids = torch.randint(0, 512, (1, TOKENS), device="cuda")
    quantised = adapted()
    weight = sum(p.nbytes for name, p in quantised.named_parameters() if "experts" in name and p.dim() == 3)
    apply_liger_kernel(quantised)
    model = quantised
    gradients(model, ids)
    before = torch.cuda.memory_allocated()
    loss = model(input_ids=ids, labels=ids).loss
    kept_16 = torch.cuda.memory_allocated() - before
    loss.backward()
    quantize_experts(model)
    apply_liger_kernel(model)
    gradients(model, ids)
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    loss = model(input_ids=ids, labels=ids).loss
    kept_4 = torch.cuda.memory_allocated() - before
    assert kept_4 < kept_16 + weight / LAYERS / 8
    experts = next(module for module in model.modules() if four_bits(module))
    with no_host_sync():
        experts.gate_up_proj  # noqa: B018
    loss.backward()
