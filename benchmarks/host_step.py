"""What a step of SFT with adapters costs the host, by a profile on the CPU: TRL's trainer, and ours.

    python -m liger_trainer.benchmarks.host_step --layers 28

The model has as many modules as a real one. The profile counts calls of functions, of Python and of C, in the place of
time, so every run on any machine finds the same.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import tempfile
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.report import make_console, make_table
from liger_trainer.benchmarks.training import Task
from liger_trainer.benchmarks.training_providers import Setup
from liger_trainer.benchmarks.training_step import training_arguments
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.trainers.module_tree import ModuleTree

WORK: Mapping[str, tuple[Callable, ...]] = {
    "the mode of every module": (ModuleTree._train, nn.Module.train),
    "the norm of the gradients, and clipping": (LigerTrainerMixin._clip_grad_norm, Trainer._clip_grad_norm),
    "removing the gradients": (ModuleTree._zero_grad, nn.Module.zero_grad),
    "the batch": (Trainer.get_batch_samples,),
    "counting floating-point operations": (LigerTrainerMixin.floating_point_ops, Trainer.floating_point_ops),
    "the optimizer": (AcceleratedOptimizer.step,),
    "the backward": (Accelerator.backward,),
    "the rest of a micro-batch, with the forward": (Trainer.training_step,),
}
"""The functions of each part of a step, one of which calls the others; the last part has some of the others inside."""
WALKS = (nn.Module.train, nn.Module.named_modules, nn.Module.named_parameters)


class Profile(TrainerCallback):
    """Profiles the steps after the first `warmup`."""

    def __init__(self, warmup: int) -> None:
        # Its clock ticks whenever it is read: when a function is called, and when it returns.
        self.profile, self.warmup = cProfile.Profile(itertools.count().__next__, 0.5), warmup

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the profile before the first step that counts."""
        if state.global_step == self.warmup:
            self.profile.enable()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the profile."""
        self.profile.disable()


def profiled(layers: int, ours: bool, steps: int, warmup: int = 3) -> tuple[dict[str, float], int]:
    """A step's calls by the part of it, and those of `WALKS`."""
    task = Task(model="tiny", layers=layers, lora=4, trainer="sft", batch=1, length=32, steps=warmup + steps)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(model_config(MODELS[task.model], layers), dtype=torch.float32)
    profile = Profile(warmup)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(task, torch.device("cpu"), folder)
        arguments |= {"bf16": False, "optim": "adamw_torch", "logging_steps": task.steps}
        Setup(task, model, arguments, [profile]).trainer(ours).train()
    found: dict[Any, tuple] = pstats.Stats(profile.profile).stats  # type: ignore[attr-defined]
    parts = {name: max(_inside(found, each) for each in functions) for name, functions in WORK.items()}
    *_, forward = parts
    parts[forward] -= parts["the mode of every module"] + parts["the backward"]
    walks = sum(found[_key(walk)][1] for walk in WALKS if _key(walk) in found)
    return {name: calls / steps for name, calls in parts.items()}, walks // steps


def _key(function: Callable) -> tuple[str, int, str]:
    code: CodeType = function.__code__  # type: ignore[attr-defined]
    return code.co_filename, code.co_firstlineno, code.co_name


def _inside(found: Mapping[Any, tuple], function: Callable) -> float:
    """The calls in a function and in all that it has called."""
    return found[_key(function)][3] if _key(function) in found else 0.0


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="how many layers the model has")
    parser.add_argument("--steps", type=int, default=10, help="how many steps are profiled")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not a whole number of 1 or more")
    theirs, ours = (profiled(arguments.layers, each, arguments.steps) for each in (False, True))
    title = f"Calls of functions in a step · {arguments.layers} layers with adapters, CPU"
    table = make_table(title, "TRL", "liger_trainer", remark=False)
    for name in theirs[0]:
        table.add_row(name, f"{theirs[0][name]:,.0f}", f"{ours[0][name]:,.0f}")
    table.add_row("of all, steps of a walk over modules", f"{theirs[1]:,}", f"{ours[1]:,}")
    make_console().print(table)


if __name__ == "__main__":
    main()
