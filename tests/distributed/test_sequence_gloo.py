"""A sequence that is spread over two gloo processes gives the loss and the gradients of one process with all of it.

Of Ulysses' sequence parallelism, the reduction of the loss is transformers' own function; deepspeed's group and its
attention are stood in for.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from liger_trainer.trainers.sequence_parts import of_one_rank
from tests.distributed.gathered_attention import gathered_attention, head_and_tail, in_order
from tests.distributed.matrix_batches import LOSSES
from tests.distributed.tensor_parallel import IGNORE, Case, assert_near, assert_same_gradients, gradients, kernels_in
from tests.distributed.two_processes import WORLD
from tests.tiny_models import TINY_MODELS

LENGTH = 16
Positions = Callable[[int, int], torch.Tensor]


def _batch(unlabelled: int) -> dict[str, torch.Tensor]:
    """Rows whose first `unlabelled` positions have no label, without padding, as context parallelism drops masks."""
    generator = torch.Generator().manual_seed(5)
    input_ids = torch.randint(3, 64, (2, LENGTH), generator=generator)
    labels = input_ids.clone()
    labels[:, :unlabelled] = IGNORE
    return {"input_ids": input_ids, "labels": labels}


def _model(family: str, loss: str) -> Any:
    """A model with the kernels, whose attention gets no mask, as accelerate sees to."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model = kernels_in(TINY_MODELS[family]().train(), Case(family, loss))
    _attach_context_parallel_hooks(model)
    return model


def _part(batch: dict[str, torch.Tensor], rank: int, positions: Positions) -> dict[str, torch.Tensor]:
    """What the data loader gives a rank: its positions, and the label of the next token of each."""
    shifted = F.pad(batch["labels"], (0, 1), value=IGNORE)[:, 1:]
    here = positions(rank, LENGTH)
    return {
        "input_ids": batch["input_ids"][:, here],
        "position_ids": here.expand(2, -1),
        "shift_labels": shifted[:, here],
    }


def _check(model: Any, total: torch.Tensor, family: str, batch: dict[str, torch.Tensor], items: torch.Tensor) -> None:
    """Raises where the loss, or the sum of the ranks' gradients, is not one process's."""
    whole = TINY_MODELS[family]().train()
    expected = whole(**batch, num_items_in_batch=items).loss
    expected.backward()
    assert_near("the loss", total, expected.detach(), 1e-5)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    assert_same_gradients(gradients(model), gradients(whole), 1e-4)


def _context_parallel(rank: int, family: str, loss: str) -> None:
    """As the Trainer: each rank's sum over the labels of all, and `num_items_in_batch` of the whole batch."""
    model, batch = _model(family, loss), _batch(unlabelled=5)
    part = _part(batch, rank, head_and_tail)
    items = (batch["labels"][:, 1:] != IGNORE).sum()
    with gathered_attention():
        if LOSSES[loss].options is None:
            # A stray second shift of these would be wrong by a token.
            value = model(**part, labels=part["shift_labels"], num_items_in_batch=items).loss
        else:
            outputs = model(**part, fused_lm_head=True)
            assert outputs.log_probs.shape == part["shift_labels"].shape
            value = -outputs.log_probs.sum() / items
        value.backward()
    total = value.detach().clone()
    dist.all_reduce(total)
    _check(model, total, family, batch, items)


@contextmanager
def _deepspeed_groups() -> Iterator[None]:
    """`deepspeed.utils.groups`, all of it that transformers asks for."""
    groups = types.SimpleNamespace(_get_sequence_parallel_group=lambda: dist.group.WORLD)
    modules = {"deepspeed": types.ModuleType("deepspeed"), "deepspeed.utils": types.ModuleType("deepspeed.utils")}
    modules["deepspeed.utils"].groups = groups  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _sequence_parallel(rank: int, loss: str, unlabelled: int) -> None:
    """As the Trainer with `sp_size`: the mean of each rank's labels, weighed by their number."""
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    from tests.steps import step_with

    family = "qwen3"
    model, batch = _model(family, loss), _batch(unlabelled)
    inputs: dict[str, Any] = _part(batch, rank, in_order)
    if LOSSES[loss].options is not None:
        inputs["fused_lm_head"] = True  # as TRL's SFT
    items = (batch["labels"][:, 1:] != IGNORE).sum()
    config = types.SimpleNamespace(sp_backend="deepspeed", sp_size=WORLD)
    # Another gradient than the mixin expects from `num_items_in_batch`.
    with gathered_attention(in_order), _deepspeed_groups(), step_with(expected_gradient=1.0 / items):
        value = deepspeed_sp_compute_loss(types.SimpleNamespace(), model, inputs, False, config)
        # Every rank has the whole loss, whose gradient reaches all parts, and deepspeed adds the parts up.
        of_one_rank(value, WORLD).backward()
    _check(model, value.detach(), family, batch, items)


CASES = {
    "context parallel, labels": partial(_context_parallel, family="llama", loss="labels"),
    "context parallel, norms of q and k": partial(_context_parallel, family="qwen3", loss="labels"),
    "context parallel, sft": partial(_context_parallel, family="qwen3", loss="sft"),
    "sequence parallel, labels": partial(_sequence_parallel, loss="labels", unlabelled=5),
    "sequence parallel, sft": partial(_sequence_parallel, loss="sft", unlabelled=5),
    "sequence parallel, labels, none on a rank": partial(_sequence_parallel, loss="labels", unlabelled=9),
    "sequence parallel, sft, none on a rank": partial(_sequence_parallel, loss="sft", unlabelled=9),
}


@pytest.mark.parametrize("case", CASES)
def test_two_parts_are_the_sequence(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
