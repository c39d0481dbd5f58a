"""Adapters on a packed base on two GPUs, under DDP and FSDP2, with NCCL: the cases of `test_packed_gloo.py`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch.distributed as dist

from liger_trainer.compat.private import is_at_least
from tests.distributed.test_packed_gloo import CASES
from tests.gpu_distributed.gpus import failures_in, join_group, needs_gpu, results_of, write_results

pytestmark = needs_gpu


def work(folder: str) -> None:
    """What both ranks run."""
    failures = failures_in(CASES, join_group())
    write_results(folder, {"backend": dist.get_backend(), **failures})
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("tests.gpu_distributed.test_packed", tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_one_process(case: str, ranks: list[dict[str, Any]]) -> None:
    if "ddp" not in case and not is_at_least("torch", "2.12"):
        pytest.skip("the FSDP2 of torch 2.11 splits no whole numbers")
    for rank in ranks:
        assert rank["backend"] == "nccl"
        assert not rank[case], rank[case]


if __name__ == "__main__":
    work(sys.argv[1])
