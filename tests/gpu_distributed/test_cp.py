"""Sequences that are spread over two GPUs (`cp_size=2`, FSDP2): with torch's ring attention, and with ours.

What stock trainers refuse, which is windows and packed rows, is compared with two processes that have half of the rows
each.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from tests.gpu_distributed.gpus import needs_gpu, results_of, write_results
from tests.trainers.tiny import COMMON, llama, logged, token_rows, tokenizer
from tests.trainers.tiny import SIZES as TINY

pytestmark = needs_gpu

LENGTH = 256
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTH}
CASES = {"trainer": {"gradient_accumulation_steps": 2}, "SFT": {"pad_to_multiple_of": 128}}
WINDOW = 40


def rolled_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions by the places of rows among all, which one process has or two have together."""
    first = trainer.accelerator.process_index * len(prompts)
    generators = [torch.Generator().manual_seed(first + row) for row in range(len(prompts))]
    lengths = [int(torch.randint(8, 60, (), generator=each)) for each in generators]
    ids = [torch.randint(5, 110, (size,), generator=each).tolist() for size, each in zip(lengths, generators)]
    return {"prompt_ids": tokenizer()(prompts)["input_ids"], "completion_ids": ids, "logprobs": None}


OWN: dict[str, dict[str, Any]] = {
    "SFT": {},
    "SFT, packed": {"packing": True, "max_length": LENGTH},
    "DPO": {},
    "KTO": {},
    "GRPO": {"rollout_func": rolled_out, "beta": 0.1},
}
"""With windows; the numbers that a log is compared by are those of the loss and the gradient."""
FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
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


def _save_mistral(folder: Path) -> None:
    """A model with windows, from which references are loaded, too."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(**{**TINY, **SIZES, "num_key_value_heads": 2}, sliding_window=WINDOW)
    MistralForCausalLM(config).save_pretrained(folder / "mistral")


def _train_own(name: str, spread: bool, folder: str) -> list[dict[str, float]]:
    """Our trainers on eight rows a step; `spread` gives each process a part of all, and else half of them."""
    from accelerate import ParallelismConfig

    from tests.trainers.parity import build

    case = {**OWN[name], "use_cpu": False, "bf16": True, "per_device_train_batch_size": 8 if spread else 4}
    if spread:
        case["parallelism_config"] = ParallelismConfig(cp_size=2)
    trainer = build(name.split(",")[0], True, f"{folder}/{name}{spread}", f"{folder}/mistral", **case)
    assert [row.applied for row in trainer.kernel_report if row.component == "attention"] == [True]
    trainer.train()
    return logged(trainer)


def work(folder: str) -> None:
    """What both ranks run."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = {name: {f"{ours}": _train(name, ours, folder) for ours in (False, True)} for name in CASES}
    own = {name: {f"{spread}": _train_own(name, spread, folder) for spread in (False, True)} for name in OWN}
    write_results(folder, {**found, **{f"own {name}": logs for name, logs in own.items()}})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("spread")
    _save_mistral(folder)  # here, as with FSDP only one of the processes would write its configuration
    return results_of("tests.gpu_distributed.test_cp", folder, **FSDP)


def _assert_close(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other):
        assert left.keys() == right.keys()
        assert right.get("loss", 0.0) == pytest.approx(left.get("loss", 0.0), rel=1e-2)
        assert right.get("grad_norm", 0.0) == pytest.approx(left.get("grad_norm", 0.0), rel=5e-2)


@pytest.mark.parametrize("name", CASES)
def test_trainers_log_what_the_stock_ones_do(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        _assert_close(rank[name]["False"], rank[name]["True"])


@pytest.mark.parametrize("name", OWN)
def test_parts_of_rows_teach_what_half_of_the_rows_do(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        _assert_close(rank[f"own {name}"]["False"], rank[f"own {name}"]["True"])


if __name__ == "__main__":
    work(sys.argv[1])
