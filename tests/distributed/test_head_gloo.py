"""Two gloo processes with the deferred head get the gradients of one process on both batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
    for name, native in _expected(family).items():
        parameter = model.get_parameter(name)
        ours = parameter.grad
        assert ours is not None, name
        ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(ours, native, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def _ddp(rank: int, **options: bool) -> None:
    model = _patched()
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    inputs = _whole_batch(model)
    _train_step(wrapped, inputs, rank)
    _check(model)
    model.zero_grad()
    _train_step(wrapped, inputs, rank)  # the reducer is ready for a second step
    _check(model)


def _ddp_loss_outside(rank: int) -> None:
    """A loss computed from the outputs: every parameter is found to be used."""
    model = _patched()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    inputs = _whole_batch(model)
    mine = _share(inputs, rank)
    labels = mine.pop("labels")
    logits = wrapped(**mine).logits
    loss = nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), reduction="sum"
    )
    (loss * WORLD / _items(inputs)).backward()
    _check(model)


def _fsdp2(rank: int, head_alone: bool, reshard: bool, family: str = FAMILY) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _patched(family)
    mesh = init_device_mesh("cpu", (WORLD,))
    inputs = _whole_batch(model, family)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    if head_alone:
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    for _ in range(2):
        model.zero_grad()
        _train_step(model, inputs, rank)
        _check(model, family)


def _fsdp2_loss_outside(rank: int) -> None:
    """Without labels a sharded model gives plain logits: outside the forward the weight is not whole."""
    from torch.distributed.fsdp import fully_shard

    model = _patched()
    inputs = _whole_batch(model)
    fully_shard(model)
    mine = _share(inputs, rank)
    labels = mine.pop("labels")
    logits = model(**mine).logits
    assert type(logits) is torch.Tensor
    loss = nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), reduction="sum"
    )
    (loss * WORLD / _items(inputs)).backward()
    _check(model)


CASES = {
    "ddp": lambda rank: _ddp(rank),
    "ddp find_unused_parameters": lambda rank: _ddp(rank, find_unused_parameters=True),
    "ddp static_graph": lambda rank: _ddp(rank, static_graph=True),
    "ddp loss outside": _ddp_loss_outside,
    "fsdp2 root": lambda rank: _fsdp2(rank, head_alone=False, reshard=False),
    "fsdp2 root reshard": lambda rank: _fsdp2(rank, head_alone=False, reshard=True),
    "fsdp2 tied": lambda rank: _fsdp2(rank, head_alone=False, reshard=True, family="gemma2"),
    "fsdp2 head alone": lambda rank: _fsdp2(rank, head_alone=True, reshard=True),
    "fsdp2 head alone kept": lambda rank: _fsdp2(rank, head_alone=True, reshard=False),
    "fsdp2 loss outside": _fsdp2_loss_outside,
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
