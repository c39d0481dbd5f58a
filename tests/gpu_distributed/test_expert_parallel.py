"""Experts that two GPUs share: rows, steps and trainers beside one process. `pytest tests/gpu_distributed -q`."""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")
pytest.importorskip("transformers.distributed")

from liger_trainer.kernels.moe.experts import moe_experts
from liger_trainer.patching.moe.expert_parallel import run_exchanged
from tests.distributed.test_expert_parallel import MODELS, ROWS, model_is_that_of_one_process, rows_are_those_of_one
from tests.gpu_distributed.gpus import failures_in, join_group, needs_gpu, results_of, write_results
from tests.tiny_models import TINY_MODELS
from tests.trainers.test_expert_parallel import check_logs, train
from tests.trainers.tiny import logged, tokenizer

pytestmark = needs_gpu

TRAINERS = ("trainer", "SFT")  # adapters are drawn otherwise on a GPU than on a CPU
TOKENS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8192, 32, 1024, 512, 4


def _kept(folder: str) -> int:
    """Bytes that a layer keeps for its backward, over what arrives: rows, weights and pre."""
    torch.manual_seed(dist.get_rank())
    local = EXPERTS // 2
    like = {"device": "cuda", "dtype": torch.bfloat16}
    first = torch.randn(local, 2 * INTERMEDIATE, HIDDEN, **like).mul_(0.02).requires_grad_()
    second = torch.randn(local, HIDDEN, INTERMEDIATE, **like).mul_(0.02).requires_grad_()
    hidden = torch.randn(TOKENS, HIDDEN, **like).requires_grad_()
    weights = torch.rand(TOKENS, TOP_K, **like).requires_grad_()
    index = torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOP_K).indices
    arrived = []

    def experts(rows: torch.Tensor, ids: torch.Tensor, row_weights: torch.Tensor) -> torch.Tensor:
        arrived.append(len(rows))
        return moe_experts(rows, ids, row_weights, first, second)

    before = torch.cuda.memory_allocated()
    out = run_exchanged(experts, hidden, index, weights, local, dist.group.WORLD)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    out.sum().backward()
    return kept - arrived[0] * (HIDDEN + 2 * INTERMEDIATE + 1) * 2


rows_on_gpus = functools.partial(rows_are_those_of_one, device="cuda")
CHECKS: dict[str, Any] = {
    **{
        f"rows, {name}, {dtype}": functools.partial(
            rows_are_those_of_one, tokens=t, choose=c, dtype=dtype, device="cuda"
        )
        for name, (t, c) in ROWS.items()
        for dtype in (torch.float32, torch.bfloat16)
    },
    **{name: functools.partial(model_is_that_of_one_process, tolerance=1e-3, **case) for name, case in MODELS.items()},
}


def work(folder: str) -> None:
    """What both ranks run."""
    rank = join_group()
    results = failures_in(CHECKS, rank)
    results["kept"] = _kept(folder)
    for name in TRAINERS:
        results[f"trainer: {name}"] = logged(train(name, folder, True, True, name, use_cpu=False))
    write_results(folder, results)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("split")
    TINY_MODELS["qwen3_moe"](output_router_logits=False).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return [{"folder": str(folder)}, *results_of("tests.gpu_distributed.test_expert_parallel", folder)]


@pytest.mark.parametrize("name", CHECKS)
def test_two_gpus_are_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks[1:]:
        assert not rank[name], rank[name]


def test_results_of_other_processes_are_not_kept(ranks: list[dict[str, Any]]) -> None:
    """Beyond what arrived: indices, 4 bytes twice a row, and a little."""
    for rank in ranks[1:]:
        assert rank["kept"] < TOKENS * TOP_K * HIDDEN * 2 / 8, rank["kept"]


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_log_what_one_process_does(name: str, ranks: list[dict[str, Any]]) -> None:
    expected = logged(train(name, ranks[0]["folder"], False, False, f"{name} alone"))
    for rank in ranks[1:]:
        check_logs(rank[f"trainer: {name}"], expected, tolerance=1e-3)


if __name__ == "__main__":
    work(sys.argv[1])
