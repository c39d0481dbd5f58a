"""Two dimensions of parallelism on four NCCL processes: a GPU each, or in turns where there are fewer.

`pytest tests/gpu_distributed -q`. The cases of `test_mesh_gloo.py`, and rows of every kind to the experts of four.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")
pytest.importorskip("transformers.distributed")

from tests.distributed.test_expert_parallel import ROWS, model_is_that_of_one_process, rows_are_those_of_one
from tests.distributed.test_mesh_gloo import CASES as GLOO_CASES
from tests.distributed.test_mesh_gloo import RANKS
from tests.gpu_distributed.gpus import failures_in, join_group, needs_gpu, results_of, write_results

pytestmark = needs_gpu

TOLERANCE = 1e-3


def _on_gpus(case: Any) -> Callable[[int], None]:
    """A case of gloo processes, within what kernels round."""
    if case.func is rows_are_those_of_one:
        return functools.partial(case, dtype=torch.float32, device="cuda")
    if case.func is model_is_that_of_one_process:
        return functools.partial(case, tolerance=TOLERANCE)
    return functools.partial(case, case=dataclasses.replace(case.keywords["case"], tolerance=TOLERANCE))


def _rows(name: str, dtype: torch.dtype) -> Callable[[int], None]:
    tokens, choose = ROWS[name]
    return functools.partial(rows_are_those_of_one, tokens=tokens, choose=choose, dtype=dtype, device="cuda")


CASES: dict[str, Callable[[int], None]] = {
    **{name: _on_gpus(case) for name, case in GLOO_CASES.items()},
    **{f"rows, {name}, {dtype}": _rows(name, dtype) for name in ROWS for dtype in (torch.float32, torch.bfloat16)},
}


def work(folder: str) -> None:
    """What all ranks run."""
    rank = join_group()
    results = {"processes": dist.get_world_size(), "backend": dist.get_backend(), **failures_in(CASES, rank)}
    write_results(folder, results)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("tests.gpu_distributed.test_four_processes", tmp_path_factory.mktemp("four"), RANKS)


@pytest.mark.parametrize("name", CASES)
def test_four_processes_train_as_one(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert (rank["processes"], rank["backend"]) == (RANKS, "nccl")
        assert not rank[name], rank[name]


if __name__ == "__main__":
    work(sys.argv[1])
