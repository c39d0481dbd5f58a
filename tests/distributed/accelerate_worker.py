"""What `accelerate launch` runs on every process: trains the cases named on its command line.

    accelerate launch ... -m tests.distributed.accelerate_worker FOLDER CASE...

A case is trained by our trainer; by the stock one too, where its result depends on the wrapping; by the stock one
alone, on one process. FOLDER gets `CASE.json` (losses, gradient norms, or the failure) and `CASE.pt` (trained weights).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import Trainer, TrainingArguments

from tests.distributed.accelerate_cases import BATCH, CASES, STEPS, VOCAB, Case, collate, rows_of
from tests.distributed.accelerate_on_cpu import shard_on_cpu
from tests.distributed.matrix_models import build_model
from tests.trainers import parity

ARGUMENTS: dict[str, Any] = {
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_steps": STEPS,
    "learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, "seed": 3,
    "bf16": False, "gradient_checkpointing": False, "train_sampling_strategy": "sequential", "ddp_timeout": 60,
    "use_cpu": False,
}  # fmt: skip


def world_size() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def model_of(case: Case, folder: Path) -> Any:
    """A model whose weights are loaded where that is how one gets it; adapters are made here."""
    model = build_model(case.parameters, vocab_size=VOCAB)
    if case.parameters in ("full", "tied head"):
        return str(folder.parent / "models" / case.parameters)
    return model


def build_trainer(case: Case, ours: bool, folder: Path, **more: Any) -> Any:
    """The trainer of `case`, whose model is loaded after its arguments are there."""
    settings = {
        **ARGUMENTS,
        "per_device_train_batch_size": BATCH // world_size(),
        **dict(case.options),
        **more,
    }
    if ours:
        settings["kernel_report"] = False
    output = folder / "output"
    if case.trainer in ("dpo", "grpo"):
        return _alignment(case, ours, output, folder, settings)
    import liger_trainer

    rows = rows_of(case, world_size() == 1)
    if case.trainer == "sft" and ours:
        args = liger_trainer.LigerSFTConfig(
            output_dir=str(output), dataset_kwargs={"skip_prepare_dataset": True}, **settings
        )
        data = Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in rows])
        return liger_trainer.LigerSFTTrainer(
            _loaded(case, folder), args, train_dataset=data, data_collator=collate, processing_class=parity.tokenizer()
        )
    trainer, arguments = (
        (liger_trainer.LigerTrainer, liger_trainer.LigerTrainingArguments) if ours else (Trainer, TrainingArguments)
    )
    args = arguments(output_dir=str(output), **settings)
    return trainer(_loaded(case, folder), args, train_dataset=rows, data_collator=collate)


def _loaded(case: Case, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = model_of(case, folder)
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) if isinstance(model, str) else model


def _alignment(case: Case, ours: bool, output: Path, folder: Path, settings: dict[str, Any]) -> Any:
    if case.trainer == "grpo":
        settings |= {"num_generations": 2, "max_completion_length": 6}
    naive = not ours and case.parameters == "lora with head"
    return parity.build(case.trainer.upper(), ours, output, model_of(case, folder), naive=naive, **settings)


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The whole weights after training; maybe empty on all processes but the first."""
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, FullyShardedDataParallel):  # its full state dict takes an accelerator
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            return {name.replace("_fsdp_wrapped_module.", ""): _copy(each) for name, each in wrapped.named_parameters()}
    state = trainer.accelerator.get_state_dict(wrapped)
    return {name: _copy(value) for name, value in (state or {}).items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().cpu().clone()


def train(case: Case, ours: bool, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The log of a training, and its weights."""
    trainer = build_trainer(case, ours, folder)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {"loss": [log["loss"] for log in logs], "norm": [log.get("grad_norm") for log in logs]}, weights_of(trainer)


def run(name: str, folder: Path) -> None:
    """Trains a case and writes what came of it."""
    case, main = CASES[name], os.environ.get("RANK", "0") == "0"
    kinds = ["stock"] if world_size() == 1 else ["ours"]
    if case.trainer == "grpo" or "average_tokens_across_devices" in dict(case.options):
        kinds = ["stock", "ours"]
    for kind in kinds:
        path = folder / f"{name}.{kind}"
        try:
            found, weights = train(case, kind == "ours", folder)
        except Exception:
            found, weights = {"failure": traceback.format_exc()}, {}
        if main:
            torch.save(weights, f"{path}.pt")
        if main or "failure" in found:
            Path(f"{path}.json").write_text(json.dumps(found))


def main(folder: str, *names: str) -> None:
    """Trains the cases `names` one after another."""
    torch.set_num_threads(1)
    if not torch.accelerator.is_available():
        shard_on_cpu()
    for name in names:
        run(name, Path(folder))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
