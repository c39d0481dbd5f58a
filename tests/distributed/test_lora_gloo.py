"""LoRA layers on two gloo processes, under DDP and FSDP2: the gradients of one process on both batches."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

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
    trained = {name: p for name, p in single.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 7
    for _ in range(2):
        model.zero_grad()
        mine = ids.chunk(WORLD)[rank]
        wrapped(input_ids=mine, labels=mine).loss.backward()
        for name, parameter in trained.items():
            gradient = model.get_parameter(name).grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


def _patched(*family: str, **options) -> nn.Module:
    from liger_trainer import apply_liger_kernel

    model = _model(*family, **options)
    assert any(row.component == "lora" for row in apply_liger_kernel(model).applied)
    return model


def _ddp(rank: int, checkpointed: bool) -> None:
    model = _patched()
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    _check(rank, nn.parallel.DistributedDataParallel(model), model, _model())


def _shard(model: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)


def _fsdp2(rank: int) -> None:
    model = _patched()
    _shard(model)
    _check(rank, model, model, _model())


def _experts(rank: int, sharded: bool) -> None:
    """Adapters on experts, of which both processes' tokens reach all."""
    from liger_trainer.patching.moe import experts_formula

    model, single = (build("qwen3_moe", **EXPERTS) for build in (_patched, _model))
    wrapped = model if sharded else nn.parallel.DistributedDataParallel(model)
    if sharded:
        _shard(model)
    with mock.patch.object(experts_formula, "moe_experts", wraps=experts_formula.moe_experts) as calls:
        _check(rank, wrapped, model, single)
    assert [len(call.kwargs["down_adapters"]) for call in calls.call_args_list] == [1] * 4


CASES = {
    "ddp": lambda rank: _ddp(rank, checkpointed=False),
    "ddp, checkpointed": lambda rank: _ddp(rank, checkpointed=True),
    "fsdp2": _fsdp2,
    "experts, ddp": lambda rank: _experts(rank, sharded=False),
    "experts, fsdp2": lambda rank: _experts(rank, sharded=True),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
