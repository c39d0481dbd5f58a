"""DeepSpeed ZeRO-3 on two gloo processes: the partitioned head is gathered around its use, forward and backward."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp

from tests.distributed.accelerate_zero3 import HAS_DEEPSPEED, spare_compilation
from tests.distributed.test_head_gloo import _expected, _items, _patched, _share, _whole_batch
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


def _worker(rank: int, port: int, failures: mp.Queue) -> None:
    set_up_process(rank, port)
    os.environ.update(LOCAL_RANK=str(rank), DS_ACCELERATOR="cpu")
    import deepspeed

    spare_compilation()
    deepspeed.init_distributed(dist_backend="gloo")
    run_cases({name: partial(_zero3, **options) for name, options in CASES.items()}, rank, failures)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(_worker, timeout=180)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, failures: dict[str, str]) -> None:
    assert case not in failures, failures[case]
