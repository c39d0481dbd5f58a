"""Two gloo processes distil, with sharded heads too, and get the gradients of one process on both batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from tests.distributed.tensor_parallel import gradients
from tests.distributed.test_head_gloo import _items, _model, _patched, _share, _whole_batch
from tests.distributed.two_processes import WORLD

BETA = 0.5


def _other(model: nn.Module) -> nn.Module:
    """`model` with other weights, as a teacher."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def _expected() -> dict[str, torch.Tensor]:
    """Gradients of one process on the whole batch, by TRL's loss on whole logits."""
    from trl.experimental.gkd import GKDTrainer

    model, teacher = _model(), _other(_model())
    inputs = _whole_batch(model)
    labels, items = inputs.pop("labels")[:, 1:], _items(_whole_batch(model))
    with torch.no_grad():
        target = teacher(**inputs).logits[:, :-1]
    student = model(**inputs).logits[:, :-1]
    GKDTrainer.generalized_jsd_loss(student, target, labels, BETA, num_items_in_batch=items).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _distil(rank: int, wrap_student: str, shard_teacher: bool = False, reshard: bool = True) -> None:
    from torch.distributed.fsdp import fully_shard
    from trl.models.utils import _ForwardRedirection

    from liger_trainer.head.divergence import divergence
    from tests.steps import step_with

    model, teacher = _patched(), _other(_patched())
    inputs = _whole_batch(model)
    items, mine = _items(inputs), _share(inputs, rank)
    labels = mine.pop("labels")[:, 1:]
    wrapped: nn.Module = model
    if wrap_student == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer, reshard_after_forward=reshard)
        if wrap_student == "fsdp2 head alone":
            fully_shard(model.lm_head, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
    if shard_teacher:
        fully_shard(teacher)

    def inside() -> torch.Tensor:
        with step_with(loss_follows=True):
            student_logits = model.forward(**mine).logits[:, :-1]
            with torch.no_grad():
                teacher_logits = teacher(**mine).logits[:, :-1]
            return divergence(student_logits, teacher_logits, labels, BETA, num_items=items).loss

    for _ in range(2):
        model.zero_grad()
        (_ForwardRedirection()(wrapped, model, inside) * WORLD).backward()
        torch.testing.assert_close(gradients(model), _expected(), rtol=1e-5, atol=1e-6)


CASES = {
    "ddp": partial(_distil, wrap_student="ddp"),
    "ddp, sharded teacher": partial(_distil, wrap_student="ddp", shard_teacher=True),
    "fsdp2 root": partial(_distil, wrap_student="fsdp2 root", shard_teacher=True),
    "fsdp2 root kept": partial(_distil, wrap_student="fsdp2 root", reshard=False),
    "fsdp2 head alone": partial(_distil, wrap_student="fsdp2 head alone", shard_teacher=True),
    "fsdp2 head alone kept": partial(_distil, wrap_student="fsdp2 head alone", reshard=False),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
