"""DeepSpeed ZeRO-3 on two gloo processes: the partitioned head is gathered around its use, forward and backward."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

from tests.distributed.accelerate_zero3 import HAS_DEEPSPEED, spare_compilation, watch
from tests.distributed.matrix_zero import whole_gradient
from tests.distributed.test_head_gloo import _expected, _items, _model, _patched, _share, _whole_batch
from tests.distributed.two_processes import WORLD

pytestmark = pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs deepspeed")


def _engine(model: torch.nn.Module, threshold: int) -> Any:
    """`model` in DeepSpeed's engine, which partitions parameters of more than `threshold` elements."""
    os.environ.update(LOCAL_RANK=os.environ["RANK"], DS_ACCELERATOR="cpu")
    import deepspeed

    spare_compilation()
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": threshold,
            "reduce_bucket_size": 10**6,  # by default, a buffer of 2 GB for each engine
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)
    return engine


def _zero3(rank: int, family: str = "llama", threshold: int = 10**5, outside: bool = False) -> None:
    from liger_trainer.head import DeferredLogits

    model = _patched(family)
    inputs, engine = _whole_batch(model, family), _engine(model, threshold)
    for _ in range(2):
        mine = _share(inputs, rank)
        if outside:
            labels = mine.pop("labels")
            logits = engine(**mine).logits
            assert type(logits) is torch.Tensor
            rows = logits[:, :-1].reshape(-1, logits.size(-1))
            loss = torch.nn.functional.cross_entropy(rows, labels[:, 1:].reshape(-1), reduction="sum") / _items(inputs)
        else:
            outputs = engine(**mine, num_items_in_batch=_items(inputs))
            assert type(outputs.logits) is DeferredLogits
            loss = outputs.loss
        engine.backward(loss * WORLD)
        ours = {name: whole_gradient(parameter) for name, parameter in model.named_parameters()}
        torch.testing.assert_close(ours, _expected(family), rtol=1e-5, atol=1e-6)
        engine.step()


def _distils(rank: int) -> None:
    """The divergence from a teacher is taken of logits that nobody has built, and that the hooks of two modules saw."""
    from liger_trainer.head.divergence import divergence
    from tests.steps import step_with

    student, whole = _patched("llama"), _model("llama")
    mine = _share(_whole_batch(student, "llama"), rank)
    labels = mine.pop("labels")
    teacher = torch.randn(*labels.shape, student.config.vocab_size, generator=torch.Generator().manual_seed(rank))
    engine = _engine(student, 0)
    expected = divergence(whole(**mine).logits, teacher, labels, beta=0.5).loss
    expected.backward()
    for _ in range(2):
        with step_with(loss_follows=True):
            loss = divergence(engine(**mine).logits, teacher, labels, beta=0.5).loss
        torch.testing.assert_close(loss, expected)
        engine.backward(loss)
        for name, parameter in whole.named_parameters():
            mean = parameter.grad.clone()
            torch.distributed.all_reduce(mean)
            ours = whole_gradient(student.get_parameter(name))
            torch.testing.assert_close(ours, mean / WORLD, rtol=1e-5, atol=1e-6)
        engine.step()


def _gathers_once(rank: int) -> None:
    """With DeepSpeed's own distances, within which a weight stays whole from the forward to the backward."""
    model, gathers = _patched("llama"), []
    inputs, engine = _whole_batch(model, "llama"), _engine(model, 0)
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle

    weight = model.lm_head.weight
    for handle in (AllGatherHandle, AllGatherCoalescedHandle):
        watch(handle, lambda parameters: gathers.extend(each for each in parameters if each is weight))
    for step in range(4):
        gathers.clear()
        loss = engine(**_share(inputs, rank), num_items_in_batch=_items(inputs)).loss
        engine.backward(loss * WORLD)
        engine.step()
        assert len(gathers) == 1 or step < 2, gathers  # it learns the order first


CASES = {
    "llama": _zero3,
    "tied": partial(_zero3, family="gemma2"),
    "partitioned at once": partial(_zero3, threshold=0),
    "loss outside": partial(_zero3, outside=True),
    "distils": _distils,
    "gathers once": _gathers_once,
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
