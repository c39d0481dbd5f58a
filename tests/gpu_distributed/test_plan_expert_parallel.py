"""The estimate of expert parallelism against the peak of two GPUs: four layers of Qwen3-30B-A3B, trained whole.

`pytest -s tests/gpu_distributed/test_plan_expert_parallel.py` prints both. A model of 6 GB is written first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers.distributed")

from transformers import AutoModelForCausalLM

from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.plan.estimate import estimate
from liger_trainer.plan.settings import Setting
from liger_trainer.trainers.trainer import LigerTrainer
from tests.gpu_distributed.gpus import needs_gpu, results_of, write_results
from tests.plan.cases import GIB, run_of

pytestmark = needs_gpu

MODEL, LAYERS, LENGTH, BATCH = "qwen3-30b-a3b", 4, 4096, 8
SETTINGS = {
    "checkpointing": Setting("expert_parallel", 2, BATCH, expert_parallel_size=2),
    "accumulated": Setting("expert_parallel", 2, BATCH, 2, expert_parallel_size=2),
    "no checkpointing": Setting("expert_parallel", 2, BATCH, checkpointing=False, expert_parallel_size=2),
}


def _peak(folder: str, setting: Setting) -> float:
    """GiB that torch held at most, over three steps of random tokens."""
    split = {"fsdp_size": setting.gpus, "ep_size": setting.expert_parallel_size}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype="bfloat16", distributed_config=split)
    rows = 3 * BATCH * setting.accumulation * setting.gpus
    ids = torch.randint(3, 100_000, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    args = LigerTrainingArguments(
        output_dir=f"{folder}/run",
        bf16=True,
        optim="adamw_torch_fused",
        gradient_checkpointing=setting.checkpointing,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=setting.accumulation,
        max_steps=3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = LigerTrainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in ids])
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return torch.cuda.max_memory_allocated() / GIB


def work(folder: str) -> None:
    """What both ranks run, one setting in a launch."""
    name = os.environ["PLANNED_SETTING"]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    write_results(folder, {"peak": _peak(folder, SETTINGS[name])})
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    with torch.device("cuda"):
        model: Any = AutoModelForCausalLM.from_config(model_config(MODELS[MODEL], LAYERS), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    del model
    torch.cuda.empty_cache()
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_estimate(name: str, folder: Path) -> None:
    results = results_of("tests.gpu_distributed.test_plan_expert_parallel", folder, PLANNED_SETTING=name)
    planned = estimate(run_of(MODEL, LENGTH, LAYERS), SETTINGS[name])
    peaks = [rank["peak"] for rank in results]
    print(f"{name}: measured {', '.join(f'{peak:.2f}' for peak in peaks)} GiB, planned {planned.total / GIB:.2f}")
    for peak in peaks:
        assert planned.total / GIB == pytest.approx(peak, rel=0.10), planned


if __name__ == "__main__":
    work(sys.argv[1])
