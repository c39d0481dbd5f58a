"""`activation_memory` on two gloo processes: the gradients of a model whose layers keep nothing, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.distributed.matrix_wrappings import WRAPPINGS
from tests.distributed.tensor_parallel import gradients
from tests.distributed.two_processes import WORLD

SMALL, ALL = 20 * 2**10, 2**30


def _model(of_fsdp: bool) -> nn.Module:
    from liger_trainer import apply_liger_kernel
    from tests.tiny_models import TINY_MODELS

    model = TINY_MODELS["llama"]().train()
    model.config.use_cache = False  # as the Trainer: a cache would be filled again in the recomputation
    apply_liger_kernel(model)
    if not of_fsdp:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _run(rank: int, wrap: Callable[[nn.Module], nn.Module], budget: int, of_fsdp: bool, unequal: bool) -> Any:
    from liger_trainer.recompute.activation_memory import ActivationMemory

    model = _model(of_fsdp)
    wrapped = wrap(model)
    if of_fsdp:  # after FSDP1, as accelerate
        apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    kept = ActivationMemory(budget, torch.device("cpu"))
    length = 9 + 4 * rank if unequal else 9
    found = []
    for step in range(5):
        ids = torch.randint(3, 120, (2 * WORLD, length), generator=torch.Generator().manual_seed(step))
        mine = ids.chunk(WORLD)[rank]
        model.zero_grad()
        if budget:
            kept.begin(wrapped, step)
        wrapped(input_ids=mine, labels=mine).loss.backward()
        kept.end()
        found.append(gradients(model))
    return found, kept


def _same(rank: int, wrapping: str, budget: int, of_fsdp: bool = False, unequal: bool = False) -> None:
    wrap = partial(WRAPPINGS[wrapping].wrap, dtype=None)
    expected, _ = _run(rank, wrap, 0, of_fsdp, unequal)
    ours, kept = _run(rank, wrap, budget, of_fsdp, unequal)
    assert 0 < kept.kept <= budget
    assert len(kept.plan().calls) >= 1
    for theirs, own in zip(expected, ours, strict=True):
        assert theirs.keys() == own.keys()
        for name in theirs:
            assert torch.equal(theirs[name], own[name]), name


CASES: dict[str, Any] = {
    "ddp": partial(_same, wrapping="ddp", budget=ALL),
    "fsdp1": partial(_same, wrapping="fsdp1", budget=ALL),
    "fsdp1, checkpointed by FSDP": partial(_same, wrapping="fsdp1", budget=ALL, of_fsdp=True),
    "fsdp2, resharded": partial(_same, wrapping="fsdp2 tail resharded", budget=ALL),
    "fsdp2, resharded, a small budget": partial(_same, wrapping="fsdp2 tail resharded", budget=SMALL),
    "fsdp2, batches of two lengths": partial(_same, wrapping="fsdp2 tail", budget=SMALL, unequal=True),
    "fsdp2, checkpointed by FSDP": partial(_same, wrapping="fsdp2 tail", budget=ALL, of_fsdp=True),
    "tensor parallel": partial(_same, wrapping="tp", budget=ALL),
}


@pytest.mark.parametrize("case", CASES)
def test_no_bit_changes(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
