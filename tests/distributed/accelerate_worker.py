"""What `accelerate launch` runs on every process: trains the cases named on its command line.

    accelerate launch ... -m tests.distributed.accelerate_worker FOLDER CASE...

A case is trained by our trainer, or by the stock one with `use_kernels=True`; by the stock one as it is, where the
result depends on the wrapping; by that one alone, on one process. FOLDER gets `CASE.json` (losses, gradient norms, or
the failure) and `CASE.pt` (trained weights). The models lie in FOLDER's neighbour `models`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState
from datasets import Dataset
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import liger_trainer
from liger_trainer.stock_trainer import stock_trainer_report
from liger_trainer.trainers.samples import SamplesCallback
from tests.distributed.accelerate_cases import BATCH, CASES, IGNORE, STEPS, VOCAB, Case, collate, rows_of
from tests.distributed.accelerate_zero3 import HAS_DEEPSPEED, gathers_of_head, spare_compilation, split_everything
from tests.distributed.matrix_models import build_model
from tests.trainers import parity

Found = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""What goes into the JSON file, and the weights."""

ARGUMENTS: dict[str, Any] = {
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_steps": STEPS,
    "learning_rate": 0.05, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, "seed": 3,
    "bf16": False, "gradient_checkpointing": False, "train_sampling_strategy": "sequential", "ddp_timeout": 60,
    "use_cpu": False,
}  # fmt: skip


def build_trainer(case: Case, ours: bool, folder: Path, **more: Any) -> Any:
    """The trainer of `case`, whose model is loaded when its arguments are there, as ZeRO-3 wants it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    settings = {**ARGUMENTS, "per_device_train_batch_size": BATCH // world, **dict(case.options), **more}
    settings.setdefault("output_dir", str(folder / "output"))
    switched, ours = ours and case.switched, ours and not case.switched
    if ours:
        settings["kernel_report"] = False
    if case.evaluated:
        settings["per_device_eval_batch_size"] = BATCH // world
    if case.trainer in ("dpo", "grpo"):
        return _alignment(case, ours, switched, folder, settings)
    rows: Any = rows_of(case, alone=world == 1)
    if case.trainer == "sft" and ours:
        args: Any = liger_trainer.LigerSFTConfig(dataset_kwargs={"skip_prepare_dataset": True}, **settings)
        lists = [{name: value.tolist() for name, value in row.items()} for row in rows]
        rows = Dataset.from_list(lists)
        trainer: Any = liger_trainer.LigerSFTTrainer
    else:
        if not ours:
            for unknown in ("activation_offloading", "activation_memory"):  # to it; they change no number
                settings.pop(unknown, None)
        args = (liger_trainer.LigerTrainingArguments if ours else TrainingArguments)(**settings)
        trainer = liger_trainer.LigerTrainer if ours else Trainer
    more = {"train_dataset": rows, "data_collator": collate, "processing_class": parity.tokenizer()}
    if case.evaluated:
        more |= {"compute_metrics": _means, "preprocess_logits_for_metrics": _of_labels, "eval_dataset": rows[:BATCH]}
    return trainer(_loaded(case, switched, folder), args, **more)


def _of_labels(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])
    return log_probs.squeeze(-1), logits.argmax(-1)


def _means(evaluated: Any) -> dict[str, float]:
    (log_probs, best), labels = evaluated.predictions, evaluated.label_ids
    labelled = labels != IGNORE
    return {"log_prob": log_probs[labelled].mean().item(), "accuracy": (best == labels)[labelled].mean().item()}


def _source(case: Case, folder: Path) -> Any:
    """A folder with the model, or the model itself where it has adapters."""
    path = folder.parent / "models" / case.parameters
    return str(path) if path.exists() else build_model(case.parameters, vocab_size=VOCAB)


def _loaded(case: Case, switched: bool, folder: Path) -> Any:
    source = _source(case, folder)
    if isinstance(source, str):
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, use_kernels=switched)
    if switched:
        source.get_base_model().set_use_kernels(True)
    return source


def _alignment(case: Case, ours: bool, switched: bool, folder: Path, settings: dict[str, Any]) -> Any:
    output = settings.pop("output_dir")
    if case.trainer == "grpo":
        settings |= {"num_generations": 2, "max_completion_length": 6}
    source = _source(case, folder)
    if isinstance(source, str):  # under FSDP TRL would put it, and the reference, on the GPU with the most room
        settings["model_init_kwargs"] = {"device_map": None, "use_kernels": switched}
    naive = not ours and case.parameters == "lora with head"  # which TRL's head refuses
    trainer = parity.build(case.trainer.upper(), ours, output, source, naive=naive, **settings)
    if ours and trainer.ref_model is not None and trainer.accelerator.is_fsdp2:
        assert all(isinstance(layer, FSDPModule) for layer in trainer.ref_model.get_decoder().layers)
    return trainer


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The whole weights after training; maybe empty on all processes but the first."""
    wrapped = trainer.model_wrapped
    if isinstance(wrapped, FullyShardedDataParallel):  # torch writes its full state dict on accelerators alone
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            return {name.replace("_fsdp_wrapped_module.", ""): _copy(each) for name, each in wrapped.named_parameters()}
    state = trainer.accelerator.get_state_dict(wrapped)
    return {name.replace("_orig_mod.", ""): _copy(value) for name, value in (state or {}).items()}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().cpu().clone()


def train(case: Case, ours: bool, folder: Path) -> Found:
    """The log of a training, and its weights."""
    trainer = build_trainer(case, ours, folder)
    # accelerate switches TF32 on for a compiled case, whatever `tf32` says, and for all that the process runs after it.
    torch.backends.cuda.matmul.allow_tf32 = False
    gathers = gathers_of_head(trainer)
    if case.sampled:
        trainer.add_callback(SamplesCallback(trainer, parity.WORDS[:2], steps=1, max_new_tokens=5))
    trainer.train()
    if ours and case.switched:
        applied = {row.component for row in stock_trainer_report(trainer.model).applied}
        assert applied >= {"rope", "swiglu", "rms_norm", "attention"} | (
            {"lora"} if "lora" in case.parameters else set()
        )
    if ours and "activation_memory" in dict(case.options):
        assert trainer._kept.kept > 0
    logs = [log for log in trainer.state.log_history if "loss" in log]
    found = {name: [log.get(name) for log in logs] for name in ("loss", "grad_norm")}
    if case.evaluated:
        metrics = trainer.evaluate()
        found["evaluation"] = [metrics["eval_log_prob"], metrics["eval_accuracy"]]
    found["samples"] = [log["samples"] for log in trainer.state.log_history if "samples" in log]
    found["spread"] = _spread(trainer)
    found["gathers"] = gathers
    return found, weights_of(trainer)


def _spread(trainer: Any) -> str:
    """How the model lies on the processes, as it is seen to."""
    wrapped = getattr(trainer.model_wrapped, "_orig_mod", trainer.model_wrapped)  # torch.compile goes around all
    parameters = list(wrapped.parameters())
    if any(hasattr(each, "device_mesh") for each in parameters):
        return f"DTensor on {tuple(parameters[0].device_mesh.shape)}"  # type: ignore[attr-defined]
    if any(hasattr(each, "ds_tensor") for each in parameters):
        return "ZeRO-3"
    return type(wrapped).__name__


def reported(path: Path, work: Callable[[], Found]) -> None:
    """Writes what `work` found, or how it failed: the first process, and any that fails. What is there is not repeated.

    A process that fails ends, and with it the job: the others may wait for it in a collective.
    """
    if Path(f"{path}.json").exists():
        return
    first = os.environ.get("RANK", "0") == "0"
    try:
        found, weights = work()
    except Exception:
        found, weights = {"failure": traceback.format_exc()}, {}
    if first:
        torch.save(weights, f"{path}.pt")
    if first or "failure" in found:
        Path(f"{path}.json").write_text(json.dumps(found))
    if "failure" in found:
        os._exit(1)  # the group's own end would wait for the others too


def save_and_resume(train: Callable[..., Found], folder: str, what: str, *names: str) -> None:
    """Trains cases without an interruption, and from the checkpoint in the middle.

    Args:
        train: Trains a case in a folder, from its checkpoint in the middle or not.
        folder: Where reports are written: `CASE`, and that of a training resumed by W processes `CASE.W`.
        what: `save`, for both, or `resume`.
        names: The cases.
    """
    prepare_process()
    for name in names:
        work = functools.partial(train, name, Path(folder))
        if what == "save":
            reported(Path(folder, name), functools.partial(work, resumes=False))
        reported(Path(folder, f"{name}.{os.environ.get('WORLD_SIZE', '1')}"), functools.partial(work, resumes=True))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def shard_on_cpu() -> None:
    """Makes accelerate take this gloo process for one with a GPU of its own.

    accelerate looks at FSDP only where there is an accelerator; on CPUs it knows DDP alone. What follows that question
    (its plugins, its wrapping, its checkpoints) asks torch, which shards on any device.
    """
    if "LOCAL_RANK" not in os.environ:
        return
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP has no device index
    PartialState._prepare_backend = lambda self, *args: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]


def prepare_process() -> None:
    """What every process does first."""
    torch.set_num_threads(1)
    if HAS_DEEPSPEED:
        spare_compilation()
        split_everything()
    if not torch.accelerator.is_available():
        shard_on_cpu()


def main(folder: str, *names: str) -> None:
    """Trains the cases `names` one after another."""
    prepare_process()
    for name in names:
        case = CASES[name]
        kinds = ("stock",) if "LOCAL_RANK" not in os.environ else ("stock", "ours") if case.of_wrapping else ("ours",)
        for kind in kinds:
            reported(Path(folder, f"{name}.{kind}"), functools.partial(train, case, kind == "ours", Path(folder)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
