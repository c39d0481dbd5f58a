"""DeepSpeed ZeRO-3 on two gloo processes: the partitioned head is gathered around its use, forward and backward."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp

from tests.distributed.accelerate_zero3 import HAS_DEEPSPEED, spare_compilation, watch
from tests.distributed.test_head_gloo import _expected, _items, _model, _patched, _share, _whole_batch
from tests.distributed.two_processes import WORLD, failures_of, run_cases, set_up_process

pytestmark = pytest.mark.skipif(not HAS_DEEPSPEED, reason="needs deepspeed")

CASES = {
    "llama": {},
    "tied": {"family": "gemma2"},
    "partitioned at once": {"threshold": 0},
    "loss outside": {"outside": True},
}


def _zero3(rank: int, family: str = "llama", threshold: int = 10**5, outside: bool = False) -> None:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from liger_trainer.head import DeferredLogits

    model = _patched(family)
    inputs = _whole_batch(model, family)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
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
        for name, native in _expected(family).items():
            ours = safe_get_full_grad(model.get_parameter(name))
            torch.testing.assert_close(
                ours, native, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        engine.step()


def _distils(rank: int) -> None:
    """The divergence from a teacher is taken of logits that nobody has built, and that the hooks of two modules saw."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    from liger_trainer.head.context import loss_follows
    from liger_trainer.head.divergence import divergence

    student, whole = _patched("llama"), _model("llama")
    mine = _share(_whole_batch(student, "llama"), rank)
    labels = mine.pop("labels")
    teacher = torch.randn(*labels.shape, student.config.vocab_size, generator=torch.Generator().manual_seed(rank))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=student, optimizer=optimizer, config=config)
    expected = divergence(whole(**mine).logits, teacher, labels, beta=0.5).loss
    expected.backward()
    for _ in range(2):
        with loss_follows():
            loss = divergence(engine(**mine).logits, teacher, labels, beta=0.5).loss
        torch.testing.assert_close(loss, expected)
        engine.backward(loss)
        for name, parameter in whole.named_parameters():
            mean = parameter.grad.clone()
            torch.distributed.all_reduce(mean)
            ours = safe_get_full_grad(student.get_parameter(name))
            torch.testing.assert_close(ours, mean / WORLD, rtol=1e-5, atol=1e-6)
        engine.step()


def _gathers_once(rank: int) -> None:
    """With DeepSpeed's own distances, within which a weight stays whole from the forward to the backward."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle

    model, gathers = _patched("llama"), []
    inputs = _whole_batch(model, "llama")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)
    weight = model.lm_head.weight
    for handle in (AllGatherHandle, AllGatherCoalescedHandle):
        watch(handle, lambda parameters: gathers.extend(each for each in parameters if each is weight))
    for step in range(4):
        gathers.clear()
        loss = engine(**_share(inputs, rank), num_items_in_batch=_items(inputs)).loss
        engine.backward(loss * WORLD)
        engine.step()
        assert len(gathers) == 1 or step < 2, gathers  # it learns the order first


def _worker(rank: int, port: int, failures: mp.Queue) -> None:
    set_up_process(rank, port)
    os.environ.update(LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    import deepspeed

    spare_compilation()
    deepspeed.init_distributed(dist_backend="gloo")
    run_cases(RUN, rank, failures)


RUN = {
    **{name: partial(_zero3, **options) for name, options in CASES.items()},
    "distils": _distils,
    "gathers once": _gathers_once,
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(_worker, timeout=180)


@pytest.mark.parametrize("case", RUN)
def test_gradients_are_those_of_one_process(case: str, failures: dict[str, str]) -> None:
    assert case not in failures, failures[case]
