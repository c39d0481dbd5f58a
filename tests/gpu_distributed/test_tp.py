"""A model that transformers splits over two GPUs: steps, trainers and memory. `pytest tests/gpu_distributed -q`."""

from __future__ import annotations

import dataclasses
import sys
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")
pytest.importorskip("transformers.distributed")

from tests.distributed.tensor_parallel import Case, batch_of, check_step, kernels_in, load_split
from tests.distributed.test_tensor_parallel_gloo import TRAINED as GLOO_CASES
from tests.gpu_distributed.gpus import join_group, needs_gpu, results_of, write_results
from tests.tiny_models import TINY_MODELS
from tests.trainers.tiny import llama, logged, tokenizer

pytestmark = needs_gpu

STEPS = [
    "llama, grpo",
    "odd vocabulary, sft",
    "odd vocabulary, dpo",
    "qwen3",
    "gemma3, tied",
    "gemma2, tied and soft-capped",
    "head not fused",
    "bf16 autocast",
]
TRAINERS = ["SFT", "DPO"]
VOCAB, TOKENS = 65536, 4096


def _train(kind: str, ours: bool, folder: str) -> list[dict[str, float]]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from tests.trainers.parity import build

    def model() -> Any:
        config = DistributedConfig(tp_size=2)
        return AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32, distributed_config=config)

    case = {"ref_model": model()} if kind == "DPO" else {}
    trainer = build(kind, ours, f"{folder}/{kind}{ours}", model(), use_cpu=False, **case)
    if ours:
        (head,) = (row for row in trainer.kernel_report if row.component == "linear_cross_entropy")
        assert "vocabulary parallel" in head.kernel, head
    trainer.train()
    return logged(trainer)


def _peak(ours: bool) -> int:
    """Bytes of the GPU at the fullest moment of a step whose logits are a GiB in fp32."""
    model = load_split(TINY_MODELS["llama"](vocab_size=VOCAB, max_position_embeddings=TOKENS), tp_size=2)
    if ours:
        kernels_in(model, Case(kernels={"logits_memory": "64MiB"}))
    ids = torch.randint(3, VOCAB, (1, TOKENS), generator=torch.Generator().manual_seed(0)).cuda()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(input_ids=ids, labels=ids).loss.backward()
    return torch.cuda.max_memory_allocated() - before


def work(folder: str) -> None:
    """What both ranks run."""
    join_group()
    results: dict[str, Any] = {}
    for name in STEPS:
        case = GLOO_CASES[name]
        case = dataclasses.replace(case, tolerance=max(case.tolerance, 1e-3))
        try:
            model = kernels_in(load_split(TINY_MODELS[case.family](**case.overrides), tp_size=2), case)
            check_step(model, case, [batch_of(case)])
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    for kind in TRAINERS:
        results[kind] = {f"{ours}": _train(kind, ours, folder) for ours in (False, True)}
    results["peaks"] = {f"{ours}": _peak(ours) for ours in (False, True)}
    write_results(folder, results)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("split")
    llama().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return results_of("tests.gpu_distributed.test_tp", folder)


@pytest.mark.parametrize("name", STEPS)
def test_step_is_that_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert not rank[name], rank[name]


@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers_log_what_the_stock_ones_do(kind: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        stock, ours = rank[kind]["False"], rank[kind]["True"]
        assert len(stock) == len(ours)
        for left, right in zip(stock, ours):
            assert left.keys() == right.keys()
            for key in left:
                assert right[key] == pytest.approx(left[key], abs=1e-4, rel=1e-4), key


def test_no_process_holds_the_logits(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["peaks"]["True"] < rank["peaks"]["False"] - VOCAB * TOKENS * 4, rank["peaks"]


if __name__ == "__main__":
    work(sys.argv[1])
