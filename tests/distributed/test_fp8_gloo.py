"""Matmuls in fp8 on two gloo processes: checkpointed layers under FSDP2 and DDP give the bits of one process.

So do adapters on a base that is stored in fp8, under DDP.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer import apply_liger_kernel
from liger_trainer.patching import fp8
from liger_trainer.patching.lora.fp8_base import store_base_in_fp8
from tests.distributed.tensor_parallel import gradients

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2}
IDS = torch.arange(520).remainder(90)[None]


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=3, vocab_size=96)).bfloat16()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    least, fp8._LEAST_FEATURES = fp8._LEAST_FEATURES, 32
    report = apply_liger_kernel(model.train(), {"fp8": "rowwise_gw_hp"})
    fp8._LEAST_FEATURES = least
    assert [row.count for row in report if row.component == "fp8" and row.applied] == [7]
    return model


def _fsdp2(model: LlamaForCausalLM) -> nn.Module:
    for module in (*model.model.layers, model):
        fully_shard(module)
    return model


def _on_fp8_base() -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, vocab_size=96)).bfloat16()
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, r=4, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    (row,) = store_base_in_fp8(adapted, torch.device("cpu"))
    assert row.count == 14
    apply_liger_kernel(adapted)
    return adapted


def _compare(rank: int, wrap: Callable[[Any], nn.Module], make: Callable[[], nn.Module] = _model) -> None:
    single, inner = make(), make()
    model = wrap(inner)
    losses = []
    for each in (single, model):
        loss = each(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    torch.testing.assert_close(gradients(inner), gradients(single), rtol=0, atol=0)


CASES = {
    "fsdp2": partial(_compare, wrap=_fsdp2),
    "ddp": partial(_compare, wrap=DistributedDataParallel),
    "ddp on an fp8 base": partial(_compare, wrap=DistributedDataParallel, make=_on_fp8_base),
}


@pytest.mark.parametrize("case", CASES)
def test_bits_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
