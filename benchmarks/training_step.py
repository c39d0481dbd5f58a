"""One provider's training steps, in a process of its own; `liger-trainer bench training` starts it.

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
import inspect
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, Trainer, TrainerCallback

from liger_trainer.benchmarks.models import MODELS, Model
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
        batch: Sequences of a step, or pairs of DPO.
        length: Tokens of a sequence; GRPO's prompts come on top, an eighth as long.
        steps: Steps in all; the first two warm up.
        checkpointing: Whether every layer is recomputed in backward.
        device: Where; empty for the accelerator.
        lora: Rank of adapters on all linear layers; 0 to train everything.
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
    quantize: str = ""


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


@training_provider("liger_trainer tiled_mlp activation_offloading")
def ours_for_long_sequences(setup: Setup, fraction: float = 1.0) -> Trainer:
    offloading = {"activation_offloading": True, "activation_offloading_fraction": fraction}
    return setup.trainer(ours=True, liger_kernel_config={"tiled_mlp": True}, **offloading)


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


def model_config(model: Model, layers: int = 0) -> PretrainedConfig:
    """The published configuration of a model's shapes."""
    from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": layers or model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "use_cache": False,
    }
    if model.name.startswith("gemma3"):
        return Gemma3TextConfig(**sizes, sliding_window=model.sliding_window)
    if model.experts:
        experts = {"num_experts": model.experts, "num_experts_per_tok": model.experts_per_token}
        config = Qwen3MoeConfig(
            **sizes, **experts, moe_intermediate_size=model.expert_intermediate, norm_topk_prob=True
        )
        config.head_dim = model.head_dim  # read by the model, though not a declared field
        return config
    if model.name.startswith("qwen3"):
        return Qwen3Config(**sizes)
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return LlamaConfig(**sizes, max_position_embeddings=8192, rope_parameters=rope)


class StepTimes(TrainerCallback):
    """Wall-clock seconds of each step, with the device's work waited for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        _synchronize()
        self.start = time.perf_counter()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        _synchronize()
        self.seconds.append(time.perf_counter() - self.start)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def run(task: Task, provider: str) -> dict[str, Any]:
    """Trains a few steps; tokens/s of the median step after two, MFU, GiB of the weights and at the peak, losses."""
    from liger_trainer.callbacks.flops import flops_per_token, peak_flops

    torch.manual_seed(0)
    device = torch.device(task.device or (torch.accelerator.current_accelerator() or "cpu"))
    memory: Any = None if device.type == "cpu" else torch.get_device_module(device)
    with torch.device(device):
        from transformers import AutoModelForCausalLM

        config = model_config(MODELS[task.model], task.layers)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if task.quantize:
        model = quantise(model, task.quantize, compress_statistics=True)
    times = StepTimes()
    arguments = {
        "output_dir": tempfile.mkdtemp(),
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
    # What a token costs with a frozen model, or with a reference model beside it, is not what the formula counts.
    flops = flops_per_token(model) if task.trainer in ("causal_lm", "sft") and not task.lora else None
    trainer = find_training_provider(provider)(Setup(task, model, arguments, [times]))
    if memory is not None:
        memory.reset_peak_memory_stats()
        weights = memory.memory_allocated() / 2**30
    trainer.train()
    rate = tokens_of_step(task) / statistics.median(times.seconds[2:] or times.seconds[-1:])
    peak = peak_flops(device, half_precision=True)
    return {
        "tokens_per_second": rate,
        "mfu": None if peak is None or not flops else rate * flops / peak,
        "peak_gibibytes": None if memory is None else memory.max_memory_allocated() / 2**30,
        "weights_gibibytes": None if memory is None else weights,
        "losses": [round(entry["loss"], 4) for entry in trainer.state.log_history if "loss" in entry],
    }


def main(argv: list[str]) -> None:
    """Runs one provider: the task as JSON, the provider, the file for the result, and a provider file or nothing."""
    task, provider, result, *files = argv
    for file in files:
        load_provider_file(Path(file))
    Path(result).write_text(json.dumps(run(Task(**json.loads(task)), provider)), encoding="utf-8")


if __name__ == "__main__":
    # Under its own name, so that a provider file registers in the same table.
    from liger_trainer.benchmarks import training_step

    training_step.main(sys.argv[1:])
