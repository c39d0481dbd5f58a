"""Matmuls in fp8 on two gloo processes: checkpointed layers under DDP, FSDP and ZeRO give the bits of one process.

So do adapters on a base that is stored in fp8, under DDP.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer import apply_liger_kernel
from liger_trainer.kernels.fp8.modes import Fp8Mode
from liger_trainer.patching import fp8
from liger_trainer.patching.lora.fp8_base import store_base_in_fp8
from liger_trainer.patching.report import KernelReportRow
from tests.distributed.matrix_wrappings import WRAPPINGS, Steps, trained_gradients

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
IDS = torch.arange(64).remainder(90)[None]


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3, vocab_size=96)).bfloat16().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _apply(model: LlamaForCausalLM, mode: Fp8Mode) -> list[KernelReportRow]:
    fp8.LEAST_FEATURES, fp8.LEAST_ROWS = 32, 64
    return [row for row in apply_liger_kernel(model, {"fp8": mode}) if row.component == "fp8"]


def _compare(rank: int, name: str, mode: Fp8Mode, mixed: bool = False) -> None:
    """`mixed`: FSDP holds the weights in fp32, and casts them to bf16."""
    single, model = _model(), _model()
    model = model.float() if mixed else model
    for each in (single, model):
        assert [row.count for row in _apply(each, mode) if row.applied] == [7]
    _assert_same_bits(single, WRAPPINGS[name].wrap(model, torch.bfloat16 if mixed else None))


def _compare_on_an_fp8_base(rank: int) -> None:
    _assert_same_bits(_on_an_fp8_base(), WRAPPINGS["ddp"].wrap(_on_an_fp8_base(), None))


def _on_an_fp8_base() -> PeftModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, vocab_size=96)).bfloat16()
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    (row,) = store_base_in_fp8(adapted, torch.device("cpu"))
    assert row.count == 14
    apply_liger_kernel(adapted)
    return adapted


def _assert_same_bits(single: nn.Module, wrapped: nn.Module) -> None:
    losses = []
    for each in (single, wrapped):
        loss = each(input_ids=IDS, labels=IDS).loss
        Steps(each, 0.1, scaled=False).backward(loss)
        losses.append(loss.item())
    assert losses[0] == losses[1]
    torch.testing.assert_close(trained_gradients(wrapped), trained_gradients(single), rtol=0, atol=0)


def _leave_alone(rank: int) -> None:
    model = WRAPPINGS["tp"].wrap(_model(), None)
    reasons = {row.reason: row.count for row in _apply(model, "rowwise")}
    assert reasons["its weight is split over processes"] == 7


CASES = {
    "ddp": partial(_compare, name="ddp", mode="tensorwise"),
    "ddp on an fp8 base": _compare_on_an_fp8_base,
    "fsdp1": partial(_compare, name="fsdp1", mode="rowwise"),
    "fsdp1 of fp32 weights": partial(_compare, name="fsdp1", mode="rowwise_gw_hp", mixed=True),
    "fsdp2 of fp32 weights": partial(_compare, name="fsdp2 tail", mode="rowwise", mixed=True),
    "fsdp2": partial(_compare, name="fsdp2 tail resharded", mode="rowwise_gw_hp"),
    "tensor parallelism": _leave_alone,
}
CASES |= {name: partial(_compare, name=name, mode="rowwise") for name in ("zero2", "zero3") if name in WRAPPINGS}


@pytest.mark.parametrize("case", CASES)
def test_bits_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
