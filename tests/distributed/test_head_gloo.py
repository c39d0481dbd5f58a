"""Two gloo processes with the deferred head get the gradients of one process on both batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.tensor_parallel import gradients
from tests.distributed.two_processes import WORLD
from tests.tiny_models import TINY_MODELS, tiny_batch

FAMILY = "llama"


def _model(family: str = FAMILY) -> nn.Module:
    return TINY_MODELS[family]().train()


def _whole_batch(model: nn.Module, family: str = FAMILY) -> dict[str, torch.Tensor]:
    return tiny_batch(family, model, batch=2 * WORLD)


def _share(inputs: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {key: value.chunk(WORLD)[rank] for key, value in inputs.items()}


def _items(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return (inputs["labels"][:, 1:] != -100).sum()


def _expected(family: str = FAMILY) -> dict[str, torch.Tensor]:
    """Gradients of one process on the whole batch, unpatched."""
    model = _model(family)
    inputs = _whole_batch(model, family)
    model(**inputs, num_items_in_batch=_items(inputs)).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _patched(family: str = FAMILY) -> nn.Module:
    from liger_trainer.head import DeferredLogits
    from liger_trainer.patching.head import patch_head

    def fail(self: DeferredLogits) -> torch.Tensor:
        raise AssertionError("the logits were built")

    DeferredLogits._compute = fail  # this is a process of its own
    model = _model(family)
    row = patch_head(model, fused=True, logits_memory=2**20)
    assert row.applied, row
    return model


def _train_step(wrapped: nn.Module, inputs: dict[str, torch.Tensor], rank: int) -> None:
    # The Trainer's arithmetic: the items of all processes, and the loss times their number.
    loss = wrapped(**_share(inputs, rank), num_items_in_batch=_items(inputs)).loss * WORLD
    loss.backward()


def _check(model: nn.Module, family: str = FAMILY) -> None:
    torch.testing.assert_close(gradients(model), _expected(family), rtol=1e-5, atol=1e-6)


def _loss_outside(wrapped: nn.Module, inputs: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
    """The loss of a caller, from logits that were asked for without labels."""
    mine = _share(inputs, rank)
    labels = mine.pop("labels")
    logits = wrapped(**mine).logits
    loss = nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), reduction="sum"
    )
    (loss * WORLD / _items(inputs)).backward()
    return logits


def _ddp(rank: int, **options: bool) -> None:
    model = _patched()
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    inputs = _whole_batch(model)
    for _ in range(2):  # the reducer is ready for a second step
        model.zero_grad()
        _train_step(wrapped, inputs, rank)
        _check(model)


def _ddp_loss_outside(rank: int) -> None:
    """Every parameter is found to be used."""
    model = _patched()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    _loss_outside(wrapped, _whole_batch(model), rank)
    _check(model)


def _fsdp2_soft_capped(rank: int) -> None:
    model = _patched("gemma2")
    inputs = _whole_batch(model, "gemma2")
    for module in (*model.model.layers, model):
        fully_shard(module, reshard_after_forward=True)
    for _ in range(2):
        model.zero_grad()
        _train_step(model, inputs, rank)
        _check(model, "gemma2")


def _fsdp2_loss_outside(rank: int) -> None:
    """A sharded model gives plain logits: outside the forward the weight is not whole."""
    model = _patched()
    fully_shard(model)
    assert type(_loss_outside(model, _whole_batch(model), rank)) is torch.Tensor
    _check(model)


CASES = {
    "ddp find_unused_parameters": partial(_ddp, find_unused_parameters=True),
    "ddp static_graph": partial(_ddp, static_graph=True),
    "ddp loss outside": _ddp_loss_outside,
    "fsdp2 tied and soft-capped": _fsdp2_soft_capped,
    "fsdp2 loss outside": _fsdp2_loss_outside,
}
"""What the matrix (`matrix.py`) does not have."""


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
