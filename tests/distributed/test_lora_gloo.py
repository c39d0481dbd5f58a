"""LoRA on two gloo processes, beyond what the matrix (`matrix.py`) has: checkpointed layers, and experts."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.tensor_parallel import gradients
from tests.distributed.two_processes import WORLD

EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def _model(family: str = "llama", **options) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    from tests.tiny_models import TINY_MODELS

    torch.manual_seed(0)
    base = TINY_MODELS[family]()
    base.config.output_router_logits = False  # the routers' loss on two batches is not that on both
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(base, config).train()


def _check(rank: int, wrapped: nn.Module, model: nn.Module, single: nn.Module) -> None:
    ids = torch.randint(3, 120, (2 * WORLD, 9), generator=torch.Generator().manual_seed(1))
    single(input_ids=ids, labels=ids).loss.backward()
    expected = gradients(single)
    assert len(expected) == 2 * 2 * 7
    for _ in range(2):
        model.zero_grad()
        mine = ids.chunk(WORLD)[rank]
        wrapped(input_ids=mine, labels=mine).loss.backward()
        torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-5)


def _patched(*family: str, **options) -> nn.Module:
    from liger_trainer import apply_liger_kernel

    model = _model(*family, **options)
    assert any(row.component == "lora" for row in apply_liger_kernel(model).applied)
    return model


def _checkpointed(rank: int) -> None:
    model = _patched()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    _check(rank, nn.parallel.DistributedDataParallel(model), model, _model())


def _experts(rank: int, sharded: bool) -> None:
    """Adapters on experts, of which both processes' tokens reach all."""
    from liger_trainer.patching.moe import experts_formula

    model, single = (build("qwen3_moe", **EXPERTS) for build in (_patched, _model))
    if sharded:
        for module in (*model.base_model.model.model.layers, model):
            fully_shard(module)
    wrapped = model if sharded else nn.parallel.DistributedDataParallel(model)
    with mock.patch.object(experts_formula, "moe_experts", wraps=experts_formula.moe_experts) as calls:
        _check(rank, wrapped, model, single)
    assert [len(call.kwargs["down_adapters"]) for call in calls.call_args_list] == [1] * 4


CASES = {
    "checkpointed": _checkpointed,
    "experts, ddp": partial(_experts, sharded=False),
    "experts, fsdp2": partial(_experts, sharded=True),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
