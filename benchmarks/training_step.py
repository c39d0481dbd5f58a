"""One provider's training steps; `liger-trainer bench training` runs this module in its own processes.

Random weights and tokens, bf16 weights, fused AdamW, every layer checkpointed by default. A provider builds a trainer
from a `Setup`, in `training_providers` or in a file of yours:

    from liger_trainer.benchmarks.training_step import training_provider

    @training_provider("mine")
    def mine(setup):
        return setup.trainer(torch_compile=True)
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.packed_base import pack_randomly
from liger_trainer.benchmarks.records import DEFAULT_OPTIM, PACKED_BASES
from liger_trainer.benchmarks.registry import BenchmarkError, load_provider_file
from liger_trainer.benchmarks.training import Task
from liger_trainer.benchmarks.training_providers import Setup, find_training_provider, import_trainer
from liger_trainer.benchmarks.training_providers import training_provider as training_provider
from liger_trainer.callbacks.memory import peak_memory, reset_peak


def quantise(
    model: Any,
    kind: str = "nf4",
    *,
    keep: tuple[str, ...] = ("lm_head",),
    compute_dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Replaces every linear layer of `model` by one of bitsandbytes, and freezes the model.

    Stacked experts are not quantised: `quantize_experts` does that once they have adapters.

    Args:
        model: On its device, with its weights.
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        keep: Last names of linear layers that are not quantised.
        compute_dtype: Dtype of products with 4-bit weights; the weights' dtype by default.
        options: Options of 4-bit weights: ``compress_statistics``, ``blocksize``, ``quant_storage``.

    Returns:
        The model.
    """
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.split(".")[-1] not in keep:
            new = _int8(module) if kind == "int8" else _four_bits(module, kind, compute_dtype, options)
            new.bias = module.bias
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new.to(module.weight.device))  # moving it quantises it
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    return model.requires_grad_(False)


def _int8(layer: nn.Linear) -> Any:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    with torch.device("meta"):  # avoids random weights that would be thrown away
        new = Linear8bitLt(
            layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False, threshold=6.0
        )
    new.weight = Int8Params(layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
    return new


def _four_bits(layer: nn.Linear, kind: str, compute_dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    from bitsandbytes.nn import Linear4bit, Params4bit

    sizes, storage = (layer.in_features, layer.out_features), options.get("quant_storage", torch.uint8)
    with torch.device("meta"):
        new = Linear4bit(
            *sizes, layer.bias is not None, compute_dtype or layer.weight.dtype, quant_type=kind, quant_storage=storage
        )
    new.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type=kind, module=new, **options)
    return new


class Steps(TrainerCallback):
    """Times each step, and the first one with the building of the trainer; measures the peak memory of all.

    The host queues timed steps one after the other, as it does between the logs of a run: events that the device passes
    give the times, and one loss is logged for all of these steps. Reading the loss of each would have the device wait.

    Args:
        device: Where the model is trained.
        warmup: Steps at the start that are not timed, each of which logs its loss.

    Attributes:
        weights: Bytes allocated before the first step: the model, or this process's shard of it.
        first: Seconds from this callback, which comes before its trainer, to the end of the first step.
    """

    def __init__(self, device: torch.device, warmup: int) -> None:
        self.device = Device(device)
        self.warmup = warmup
        self.ends: list[Any] = []
        self.weights = 0
        self.begun = time.perf_counter()
        self.first = 0.0

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        if self.device.module is not None:  # building and splitting the model is not part of a step
            self.device.empty_cache()
            reset_peak(self.device.device)
            self.weights = self.device.module.memory_allocated()
        self.ends = [self.device.mark()]

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.ends.append(self.device.mark())
        if not self.first:
            self.device.synchronize()
            self.first = time.perf_counter() - self.begun
        control.should_log = state.global_step <= self.warmup or state.global_step == state.max_steps

    def seconds(self) -> list[float]:
        """Seconds of each step, from the end of the one before."""
        return [milliseconds / 1e3 for milliseconds in self.device.elapsed(self.ends)]

    def peak(self) -> int:
        """Peak bytes of the steps: what is allocated, and CUDA graphs."""
        return 0 if self.device.module is None else peak_memory(self.device.device)


def run(task: Task, provider: str) -> dict[str, Any]:
    """Trains a few steps; returns the fields of a `TrainingRecord` that this finds."""
    from liger_trainer.callbacks.throughput import flops_per_token, peak_flops

    torch.manual_seed(0)  # the same weights in every process
    device = torch.device(task.device or (torch.accelerator.current_accelerator() or "cpu"))
    if device.type != "cpu" and task.accelerate_config:
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    model = _model(task, device)
    # The formula counts neither a frozen model nor a reference model.
    flops = flops_per_token(model) if task.trainer in ("causal_lm", "sft") and not task.lora else None
    import_trainer(task.trainer)
    steps = Steps(device, task.warmup)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(task, device, folder)
        trainer = find_training_provider(provider)(Setup(task, model, arguments, [steps]))
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not trainer.is_fsdp_enabled:
            raise BenchmarkError(f"accelerate has no FSDP on {device.type}; choose another `--accelerate_config`")
        trainer.train()
    costs = [seconds / tokens for seconds, tokens in zip(steps.seconds(), task.step_tokens)]
    rate = 1 / statistics.median(costs[task.warmup :] or costs[-1:])
    peak = peak_flops(device, half_precision=True)
    sizes = torch.tensor([[steps.peak(), steps.weights]], dtype=torch.float64, device=trainer.accelerator.device)
    fullest = (trainer.accelerator.gather(sizes).amax(dim=0) / 2**30).tolist()
    logged = trainer.state.log_history
    kept = [entry["kept_activations_gib"] for entry in logged if "kept_activations_gib" in entry]
    return {
        "tokens_per_second": rate,
        "mfu": None if peak is None or not flops else rate * flops / peak,
        "peak_gibibytes": None if device.type == "cpu" else fullest[0],
        "weights_gibibytes": None if device.type == "cpu" else fullest[1],
        "losses": [round(entry["loss"], 4) for entry in logged if "loss" in entry],
        "kept_gibibytes": kept[-1] if kept else None,
        "first_step_seconds": round(steps.first, 1),
    }


def _model(task: Task, device: torch.device) -> Any:
    """The task's model with random weights, quantised if the task has it so."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config, dtype = model_config(MODELS[task.model], task.layers), getattr(torch, task.dtype)
    kind: Any = AutoModelForCausalLM
    if task.trainer == "reward":
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    if task.expert_parallel > 1:
        return _split_model(task, kind, config, dtype)
    packed = task.quantize in PACKED_BASES
    with torch.device("meta") if packed else device:
        model = kind.from_config(config, dtype=dtype)
    if packed:
        return pack_randomly(task.model, task.quantize, model, device)
    return quantise(model, task.quantize, compress_statistics=True) if task.quantize else model


def _split_model(task: Task, kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model as `from_pretrained` splits one, each process with random weights in its own part."""
    torch.manual_seed(int(os.environ["RANK"]))  # parts that are alike would tie experts of different processes
    with torch.device("meta"):
        own = type(kind.from_config(config))
    split = {"fsdp_size": task.gpus, "ep_size": task.expert_parallel}
    return own.from_pretrained(None, config=config, state_dict={}, dtype=dtype, distributed_config=split)


def training_arguments(task: Task, device: torch.device, folder: str) -> dict[str, Any]:
    """The training arguments of every provider, which it may change."""
    # A random order would mix the lengths of different steps, and KTO's mismatched completions are of their batch.
    ordered = task.padding or task.lengths or task.trainer == "kto"
    more: dict[str, Any] = {"train_sampling_strategy": "sequential"} if ordered else {}
    if task.context_parallel > 1:
        more["parallelism_config"] = ParallelismConfig(cp_size=task.context_parallel, dp_shard_size=task.batches)
    return {
        **more,
        "output_dir": folder,
        "per_device_train_batch_size": task.batch,
        "max_steps": task.steps,
        "bf16": True,
        "use_cpu": device.type == "cpu",
        "optim": DEFAULT_OPTIM,
        "learning_rate": 1e-4 if task.lora else 1e-5,
        "gradient_checkpointing": task.checkpointing,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def main(argv: list[str]) -> None:
    """Runs one provider on each length in turn, and appends a line to the results file for each.

    Args:
        argv: The task and the lengths as JSON, the provider, the results file, and optionally a provider file.
    """
    task, lengths, provider, results, *files = argv
    for name in files:
        load_provider_file(Path(name))
    for length in json.loads(lengths):
        found = run(dataclasses.replace(Task(**json.loads(task)), length=length), provider)
        if os.environ.get("RANK", "0") == "0":
            with Path(results).open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        gc.collect()  # trainers hold reference cycles; this frees the model before the next length
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception:
        # Exit at once: a normal exit would wait for the other processes, which wait for this one in a collective.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
