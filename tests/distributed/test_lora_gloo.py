"""LoRA layers on two gloo processes, under DDP and FSDP2: the gradients of one process on both batches."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from tests.distributed.two_processes import WORLD, failures_of, run_gloo_cases


def _model() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    from tests.tiny_models import TINY_MODELS

    torch.manual_seed(0)
    return get_peft_model(
        TINY_MODELS["llama"](), LoraConfig(target_modules="all-linear", init_lora_weights=False)
    ).train()


def _check(rank: int, wrapped: nn.Module, model: nn.Module) -> None:
    ids = torch.randint(3, 120, (2 * WORLD, 9), generator=torch.Generator().manual_seed(1))
    single = _model()
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


def _patched() -> nn.Module:
    from liger_trainer import apply_liger_kernel

    model = _model()
    assert any(row.component == "lora" for row in apply_liger_kernel(model).applied)
    return model


def _ddp(rank: int, checkpointed: bool) -> None:
    model = _patched()
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    _check(rank, nn.parallel.DistributedDataParallel(model), model)


def _fsdp2(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _patched(), init_device_mesh("cpu", (WORLD,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    _check(rank, model, model)


CASES = {
    "ddp": lambda rank: _ddp(rank, checkpointed=False),
    "ddp, checkpointed": lambda rank: _ddp(rank, checkpointed=True),
    "fsdp2": _fsdp2,
}


def _worker(rank: int, port: int, failures: mp.Queue) -> None:
    run_gloo_cases(CASES, rank, port, failures)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """Both processes run every case once; failures by case."""
    return failures_of(_worker)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, failures: dict[str, str]) -> None:
    assert case not in failures, failures[case]
