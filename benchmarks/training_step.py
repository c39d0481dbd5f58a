"""One provider's training steps, in processes of their own; `liger-trainer bench training` starts them.

Random weights and tokens, bf16 weights, fused AdamW, every layer checkpointed unless told otherwise. A provider builds
a trainer from a `Setup`, here or in a file of yours:

    from liger_trainer.benchmarks.training_step import training_provider

    @training_provider("mine")
    def mine(setup):
        return setup.trainer(torch_compile=True)
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.quantised import quantise
from liger_trainer.benchmarks.registry import BenchmarkError, closest, load_provider_file
from liger_trainer.benchmarks.trainer_setups import Setup, tokens_of_step


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained, and how; the same for every provider.

    Attributes:
        model: Name of the model.
        layers: Of the model; 0 for all it has.
        trainer: ``"causal_lm"`` for the Trainer; ``"sft"``, ``"dpo"`` and ``"grpo"`` for TRL's.
        batch: Sequences of a step on one GPU, or pairs of DPO.
        length: Tokens of a sequence; GRPO's prompts come on top, an eighth as long.
        steps: Steps in all.
        checkpointing: Whether every layer is recomputed in backward.
        device: Where; empty for the accelerator.
        lora: Rank of adapters on all linear layers; 0 to train everything.
        warmup: Of the steps, those that are not timed.
        gpus: Processes, one a GPU.
        accelerate_config: File for `accelerate launch`; empty for one process without it.
        quantize: ``"nf4"`` for a base that bitsandbytes has quantised, doubly; empty for bf16.
    """

    model: str
    layers: int = 0
    trainer: str = "causal_lm"
    batch: int = 4
    length: int = 4096
    steps: int = 6
    checkpointing: bool = True
    device: str = ""
    lora: int = 0
    warmup: int = 2
    gpus: int = 1
    accelerate_config: str = ""
    quantize: str = ""

    @property
    def samples(self) -> int:
        """Sequences or pairs of all steps and GPUs."""
        return self.batch * self.steps * self.gpus

    def to_json(self) -> str:
        """The task as the process that trains it reads it."""
        return json.dumps(dataclasses.asdict(self))


TRAINING_PROVIDERS: dict[str, Callable[[Setup], Trainer]] = {}


def training_provider(name: str) -> Callable[[Callable[[Setup], Trainer]], Callable[[Setup], Trainer]]:
    """Registers a function that builds the trainer of a `Setup`."""

    def register(function: Callable[[Setup], Trainer]) -> Callable[[Setup], Trainer]:
        TRAINING_PROVIDERS[name] = function
        return function

    return register


@training_provider("hf")
def hugging_face(setup: Setup) -> Trainer:
    return setup.trainer(use_liger_kernel=False)


@training_provider("hf activation_offloading")
def hugging_face_offloading(setup: Setup) -> Trainer:
    return setup.trainer(use_liger_kernel=False, activation_offloading=True)


@training_provider("torch.compile")
def compiled(setup: Setup) -> Trainer:
    return setup.trainer(use_liger_kernel=False, torch_compile=True)


@training_provider("liger-kernel")
def liger(setup: Setup) -> Trainer:
    from liger_trainer import set_stock_trainer_kernels

    set_stock_trainer_kernels("liger_kernel")
    return setup.trainer(use_liger_kernel=True)


@training_provider("liger_trainer")
def ours(setup: Setup) -> Trainer:
    return setup.trainer(ours=True)


@training_provider("liger_trainer tiled_mlp")
def ours_in_tiles(setup: Setup) -> Trainer:
    return setup.trainer(ours=True, liger_kernel_config={"tiled_mlp": True})


@training_provider("liger_trainer activation_offloading")
def ours_offloading(setup: Setup, fraction: float = 1.0) -> Trainer:
    return setup.trainer(ours=True, **_offloaded(fraction))


@training_provider("liger_trainer tiled_mlp activation_offloading")
def ours_for_long_sequences(setup: Setup, fraction: float = 1.0) -> Trainer:
    return setup.trainer(ours=True, liger_kernel_config={"tiled_mlp": True}, **_offloaded(fraction))


def _offloaded(fraction: float) -> dict[str, Any]:
    return {"activation_offloading": True, "activation_offloading_fraction": fraction}


def find_training_provider(name: str) -> Callable[[Setup], Trainer]:
    """The provider of a name; of ``NAME=NUMBER``, the provider NAME with that number for its second argument.

    Raises:
        BenchmarkError: where there is none of the name, or it takes no number.
    """
    known, equals, number = name.partition("=")
    function = TRAINING_PROVIDERS[closest(known, TRAINING_PROVIDERS, "provider")]
    if not equals:
        return function
    settings = list(inspect.signature(function).parameters)[1:]
    if not settings:
        raise BenchmarkError(f"Provider {known!r} takes no number; leave out {equals + number!r}.")
    try:
        return functools.partial(function, **{settings[0]: float(number)})
    except ValueError:
        raise BenchmarkError(f"Provider {name!r}: {number!r} is no number.") from None


class Steps(TrainerCallback):
    """Wall-clock seconds of each step, with the device's work waited for, and the memory of all of them.

    Attributes:
        seconds: Of each step.
        weights: Bytes allocated before the first step: the model, or the part of it that is this process's.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.seconds: list[float] = []
        self.weights = 0

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        if self.memory is not None:  # what it took to make the model and to split it is no part of a step
            self.memory.empty_cache()
            self.memory.reset_peak_memory_stats()
            self.weights = self.memory.memory_allocated()

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self._synchronize()
        self.start = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self._synchronize()
        self.seconds.append(time.perf_counter() - self.start)

    def peak(self) -> int:
        """Bytes at the fullest moment of the steps."""
        return 0 if self.memory is None else self.memory.max_memory_allocated()

    def _synchronize(self) -> None:
        if self.memory is not None:
            self.memory.synchronize()


def run(task: Task, provider: str) -> dict[str, Any]:
    """Trains a few steps: tokens/s of one GPU in the median step, MFU, losses, GiB of the fullest GPU."""
    from liger_trainer.callbacks.flops import flops_per_token, peak_flops

    torch.manual_seed(0)  # the same weights in every process
    device = torch.device(task.device or (torch.accelerator.current_accelerator() or "cpu"))
    if device.type != "cpu" and task.accelerate_config:
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    with torch.device(device):
        from transformers import AutoModelForCausalLM

        config = model_config(MODELS[task.model], task.layers)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if task.quantize:
        model = quantise(model, task.quantize, compress_statistics=True)
    # What a token costs with a frozen model, or with a reference model beside it, is not what the formula counts.
    flops = flops_per_token(model) if task.trainer in ("causal_lm", "sft") and not task.lora else None
    steps = Steps(device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(task, device, folder)
        trainer = find_training_provider(provider)(Setup(task, model, arguments, [steps]))
        if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not trainer.is_fsdp_enabled:
            raise BenchmarkError(f"accelerate has no FSDP on {device.type}; choose another `--accelerate_config`")
        trainer.train()
    rate = tokens_of_step(task) / statistics.median(steps.seconds[task.warmup :] or steps.seconds[-1:])
    peak = peak_flops(device, half_precision=True)
    sizes = torch.tensor([[steps.peak(), steps.weights]], dtype=torch.float64, device=trainer.accelerator.device)
    fullest = (trainer.accelerator.gather(sizes).amax(dim=0) / 2**30).tolist()
    return {
        "tokens_per_second": rate,
        "mfu": None if peak is None or not flops else rate * flops / peak,
        "peak_gibibytes": None if device.type == "cpu" else fullest[0],
        "weights_gibibytes": None if device.type == "cpu" else fullest[1],
        "losses": [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry],
    }


def training_arguments(task: Task, device: torch.device, folder: str) -> dict[str, Any]:
    """What the arguments of every provider's trainer are, unless it changes them."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": task.batch,
        "max_steps": task.steps,
        "bf16": True,
        "use_cpu": device.type == "cpu",
        "optim": "adamw_torch_fused",
        "learning_rate": 1e-4 if task.lora else 1e-5,
        "gradient_checkpointing": task.checkpointing,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def main(argv: list[str]) -> None:
    """Runs one provider on one length after the other, and appends a line to the file of results for each.

    Args:
        argv: The task and the lengths as JSON, the provider, the file for the results, and a provider file or nothing.
    """
    task, lengths, provider, results, *files = argv
    for name in files:
        load_provider_file(Path(name))
    for length in json.loads(lengths):
        found = run(dataclasses.replace(Task(**json.loads(task)), length=length), provider)
        if os.environ.get("RANK", "0") == "0":
            with Path(results).open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
        gc.collect()  # a trainer is full of cycles, and the next length begins without this one's model
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    # Under its own name, so that a provider file registers in the same table.
    from liger_trainer.benchmarks import training_step

    try:
        training_step.main(sys.argv[1:])
    except Exception:
        # At once: to wind up properly, a process would wait for the others, which wait for it in a collective.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
