"""bf16 weights need no autocast, under which accelerate's FSDP makes them fp32: that is warned of."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

from liger_trainer import apply_liger_kernel
from liger_trainer.trainers.checks.launch import warn_of_fp32_weights
from tests.trainers.tiny import llama


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({"mixed_precision": "no"}, False),
        ({"optim": "adamw_torch_fused"}, False),
        ({"fsdp": False}, False),
        ({"dtype": torch.float32}, False),
        ({"main": False}, False),
    ],
    ids=str,
)
def test_weights_that_fsdp_makes_fp32(changes, warned, caplog):
    case = {"mixed_precision": "bf16", "optim": "liger_adamw", "fsdp": True, "dtype": torch.bfloat16, "main": True}
    case |= changes
    trainer = SimpleNamespace(
        args=SimpleNamespace(optim=case["optim"]),
        accelerator=SimpleNamespace(mixed_precision=case["mixed_precision"]),
        is_fsdp_enabled=case["fsdp"],
        is_world_process_zero=lambda: case["main"],
        model=llama().to(case["dtype"]),
    )
    warn_of_fp32_weights(trainer)
    assert ("set `bf16: false`" in caplog.text) is warned


SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
}


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_changes_no_bit_of_bf16_weights(family, kernels):
    """The families of the recipes, which set `bf16: false`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.bfloat16)
    if kernels:
        apply_liger_kernel(model)
    ids, found = torch.randint(SIZES["vocab_size"], (2, 33)), []
    for autocast in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    assert found[0][0].dtype == torch.float32
    for without, under in zip(*found):
        assert torch.equal(without, under)
