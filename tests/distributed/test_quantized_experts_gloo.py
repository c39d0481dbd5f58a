"""Adapters on experts in 4 bits under DDP: two gloo processes train as one with the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("bitsandbytes")

from liger_trainer import apply_liger_kernel
from liger_trainer.patching.moe.quantized_experts import four_bits

ROWS = 4


def _model() -> torch.nn.Module:
    from tests.test_quantized_experts import whole_and_quantised

    torch.manual_seed(0)
    _, quantised = whole_and_quantised("qwen3_moe")
    apply_liger_kernel(quantised)
    return quantised


def _gradients(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model(input_ids=ids, labels=ids).loss.backward()
    named = ((name.removeprefix("module."), parameter) for name, parameter in model.named_parameters())
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def _is_one_process(rank: int) -> None:
    ids = torch.randint(3, 64, (ROWS, 12), generator=torch.Generator().manual_seed(0))
    expected = _gradients(_model(), ids)
    model = _model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    mine = ids.chunk(dist.get_world_size())[rank]
    found = _gradients(wrapped, mine)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    experts = [module for module in model.modules() if four_bits(module)]
    assert experts
    assert not any(list(module.buffers()) for module in experts)  # which DDP would send at every forward


CASES = {"gradients": _is_one_process}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
