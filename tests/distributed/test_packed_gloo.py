"""Adapters on a packed base on two processes: the losses and the gradients of one, under DDP and under FSDP2.

With gloo here, and with NCCL in `tests/gpu_distributed/test_packed.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from liger_trainer import apply_liger_kernel, load_packed
from liger_trainer.packed.loading import dequantise
from tests.distributed.matrix_wrappings import WRAPPINGS, Steps, trained_gradients
from tests.low_bit import write_mxfp4
from tests.packed_checkpoints import write_dense, write_mixture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}[DEVICE]
"""In fp32, relative: kernels add in another order with half of the rows."""
IDS = torch.arange(3, 67).view(4, 16)
LINEARS = {"target_modules": "all-linear"}
EXPERTS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
Write = Callable[[Path], object]


def _adapted(folder: Path, packed: bool = True, **lora: object) -> PeftModel:
    model = load_packed(str(folder), dtype=torch.float32)
    model = model if packed else dequantise(model)
    model.config.output_router_logits = False  # the routers' loss on two batches is not that on both
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, lora_dropout=0.0, **lora))
    apply_liger_kernel(adapted)
    return adapted


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    Steps(model, 0.1, scaled=False).backward(loss)
    return loss.detach()


def _of_all(loss: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def _both(write: Write, **lora: object) -> list[PeftModel]:
    """The packed model with adapters, and the dequantised one with the same."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return [_adapted(Path(folder), packed, **lora).to(DEVICE) for packed in (True, False)]


def _are_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name


def _compare(rank: int, write: Write, wrapping: str, checkpointed: bool = False, **lora: object) -> None:
    """Each process with its half of the batch, on the packed base; one process with all of it, on the other."""
    model, single = _both(write, **lora)
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        model.train()
    wrapped = WRAPPINGS[wrapping].wrap(model, None)
    ids = IDS.to(DEVICE)
    mine = ids.chunk(dist.get_world_size())[rank]
    for _ in range(2):  # weights are gathered where others lay
        wrapped.zero_grad()
        single.zero_grad()
        torch.testing.assert_close(_of_all(_loss(wrapped, mine)), _loss(single, ids), rtol=TOLERANCE, atol=0)
        _are_close(trained_gradients(wrapped), trained_gradients(single), TOLERANCE)


def _in_half(rank: int, write: Write, **lora: object) -> None:
    """In mixed precision, which casts what is gathered: codes stay as they are, and the rest as it would be cast."""
    models = [WRAPPINGS["fsdp2 tail resharded"].wrap(each, torch.bfloat16) for each in _both(write, **lora)]
    packed, plain = (_loss(model, IDS.to(DEVICE)) for model in models)
    torch.testing.assert_close(packed, plain, rtol=2**-8, atol=0)
    _are_close(*(trained_gradients(model) for model in models), tolerance=2**-6)


def _dense(name: str) -> Write:
    return partial(write_dense, name=name)


CASES = {
    "linear layers, ddp": partial(_compare, write=_dense("fp8 blocks"), wrapping="ddp", **LINEARS),
    "experts, ddp": partial(_compare, write=write_mixture, wrapping="ddp", **EXPERTS),
    # Of 192 rows, each process has 96, and the scales of a block of 128.
    "blocks, fsdp2": partial(_compare, write=_dense("fp8 blocks"), wrapping="fsdp2 tail resharded", **LINEARS),
    "rows, fsdp2": partial(_compare, write=_dense("fp8 rows"), wrapping="fsdp2 root", **LINEARS),
    "nvfp4, fsdp2": partial(_compare, write=_dense("nvfp4"), wrapping="fsdp2 tail", **LINEARS),
    "int4, fsdp2": partial(_compare, write=_dense("int4 with zeros"), wrapping="fsdp2 root resharded", **LINEARS),
    "gptq, fsdp2": partial(_compare, write=_dense("gptq shuffled"), wrapping="hsdp tail", **LINEARS),
    "experts, fsdp2": partial(_compare, write=write_mixture, wrapping="fsdp2 tail resharded", **EXPERTS),
    "experts in nvfp4, fsdp2": partial(
        _compare, write=partial(write_mixture, name="nvfp4"), wrapping="fsdp2 tail", **EXPERTS
    ),
    "experts in gptq, fsdp2": partial(
        _compare, write=partial(write_mixture, name="gptq"), wrapping="fsdp2 tail", **EXPERTS
    ),
    "mxfp4, fsdp2": partial(_compare, write=write_mxfp4, wrapping="fsdp2 root", **EXPERTS),
    "checkpointed, fsdp2": partial(
        _compare, write=_dense("fp8 blocks"), wrapping="fsdp2 tail resharded", checkpointed=True, **LINEARS
    ),
    "checkpointed experts, fsdp2": partial(
        _compare, write=write_mixture, wrapping="fsdp2 tail resharded", checkpointed=True, **EXPERTS
    ),
    "in half": partial(_in_half, write=_dense("fp8 blocks"), **LINEARS),
    "experts in half": partial(_in_half, write=write_mixture, **EXPERTS),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
