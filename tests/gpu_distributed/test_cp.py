"""Sequences that accelerate spreads over two GPUs with torch's ring attention (`cp_size=2`, FSDP2)."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from tests.gpu_distributed.gpus import needs_two_gpus, results_of, write_results
from tests.trainers.tiny import COMMON, llama, logged, token_rows

pytestmark = needs_two_gpus

LENGTH = 256
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH}
CASES = {"trainer": {"gradient_accumulation_steps": 2}, "SFT": {"pad_to_multiple_of": 128}}
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def _train(name: str, ours: bool, folder: str) -> list[dict[str, float]]:
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    from liger_trainer import LigerTrainer, LigerTrainingArguments
    from tests.trainers.parity import build

    # Ring attention needs the flash kernel, and that half precision.
    case = {**CASES[name], "use_cpu": False, "bf16": True, "parallelism_config": ParallelismConfig(cp_size=2)}
    output_dir, model = f"{folder}/{name}{ours}", llama(**SIZES)
    if name == "SFT":
        trainer = build(name, ours, output_dir, model, **case)
    else:
        trainer_class, args_class = (LigerTrainer, LigerTrainingArguments) if ours else (Trainer, TrainingArguments)
        args = args_class(output_dir=output_dir, **{**COMMON, **case})
        trainer = trainer_class(model, args, train_dataset=token_rows(length=LENGTH))
    trainer.train()
    return logged(trainer)


def work(folder: str) -> None:
    """What both ranks run."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    write_results(folder, {name: {f"{ours}": _train(name, ours, folder) for ours in (False, True)} for name in CASES})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("tests.gpu_distributed.test_cp", tmp_path_factory.mktemp("spread"), **FSDP)


@pytest.mark.parametrize("name", CASES)
def test_trainers_log_what_the_stock_ones_do(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        stock, ours = rank[name]["False"], rank[name]["True"]
        assert len(stock) == len(ours)
        for left, right in zip(stock, ours):
            assert left.keys() == right.keys()
            assert right.get("loss", 0.0) == pytest.approx(left.get("loss", 0.0), rel=1e-2)
            assert right.get("grad_norm", 0.0) == pytest.approx(left.get("grad_norm", 0.0), rel=5e-2)


if __name__ == "__main__":
    work(sys.argv[1])
