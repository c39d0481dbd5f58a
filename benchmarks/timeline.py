"""When the GPU computes during training steps, by torch's profiler, for each provider in turn.

    python -m liger_trainer.benchmarks.timeline --model qwen3-0.6b --lora 16 --batch 1 --length 1024 \\
        --providers hf,"liger_trainer without cuda_graphs",liger_trainer --output timeline.json

Draws the picture beside the file. `--plot FILE` draws that of an earlier run, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from liger_trainer.benchmarks.device import Device, find_device
from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.plots import draw_if_installed, draw_timeline
from liger_trainer.benchmarks.records import setting
from liger_trainer.benchmarks.registry import BenchmarkError
from liger_trainer.benchmarks.report import make_console, make_table
from liger_trainer.benchmarks.training import Task
from liger_trainer.benchmarks.training_providers import Setup, find_training_provider
from liger_trainer.benchmarks.training_step import training_arguments
from liger_trainer.recipe.schema import TRAINERS

_GAP = 20.0  # microseconds between two kernels, at most, that are drawn as one


class Profile(TrainerCallback):
    """Profiles the device in the steps after the first `warmup`, as one stretch of time.

    Attributes:
        kernels: Start and end of each kernel and copy, in microseconds.
        seconds: How long these steps take together.
    """

    def __init__(self, device: Device, warmup: int) -> None:
        self.device, self.warmup = device, warmup
        # With the host's operators too, the profiler would take most of the host's time.
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._begun = self.seconds = 0.0
        self.kernels: list[tuple[float, float]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts before the first step that counts."""
        if state.global_step == self.warmup:
            self.device.synchronize()
            self._profile.start()
            self._begun = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends when the device has finished."""
        self.device.synchronize()
        self.seconds = time.perf_counter() - self._begun
        self._profile.stop()
        on_device = (each for each in self._profile.events() if each.device_type != torch.autograd.DeviceType.CPU)
        self.kernels = [(each.time_range.start, each.time_range.end) for each in on_device]


def merged(intervals: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """The intervals in order, with those merged that overlap or lie at most `gap` apart."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


class Timeline(NamedTuple):
    """A provider's timeline.

    Attributes:
        milliseconds: How long a step takes.
        busy: The share of the time in which the device computes or copies.
        kernels: Start and end of each busy stretch, in microseconds after the start of the first.
    """

    milliseconds: float
    busy: float
    kernels: list[tuple[int, int]]

    @classmethod
    def of(cls, steps: int, seconds: float, kernels: Iterable[tuple[float, float]]) -> Timeline:
        """The timeline of `steps` steps in `seconds`. Kernels are in microseconds, from any origin and in any order."""
        busy = merged(kernels)
        first = busy[0][0] if busy else 0.0
        drawn = [(round(begin - first), round(end - first)) for begin, end in merged(busy, _GAP)]
        return cls(seconds * 1e3 / steps, sum(end - begin for begin, end in busy) / (seconds * 1e6), drawn)

    def up_to(self, milliseconds: float) -> Timeline:
        """The same, without kernels that start later."""
        return self._replace(kernels=[each for each in self.kernels if each[0] < milliseconds * 1e3])


def profiled(task: Task, provider: str, device: torch.device) -> Timeline:
    """The timeline of a provider's steps on random weights and tokens."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(model_config(MODELS[task.model], task.layers), dtype=torch.bfloat16)
    profile = Profile(Device(device), task.warmup)
    with tempfile.TemporaryDirectory() as folder:
        arguments = training_arguments(task, device, folder) | {"logging_steps": task.steps}
        find_training_provider(provider)(Setup(task, model, arguments, [profile])).train()
    return Timeline.of(task.steps - task.warmup, profile.seconds, profile.kernels)


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=0, help="of the model; all by default")
    parser.add_argument("--trainer", choices=TRAINERS, default="causal_lm")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters on all linear layers")
    parser.add_argument("--batch", type=int, default=1, help="rows of a batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=3, help="how many steps are profiled")
    parser.add_argument("--warmup", type=int, default=10, help="how many steps come before")
    parser.add_argument("--providers", default="hf,liger_trainer", help="names of `bench training`, with commas")
    parser.add_argument("--output", type=Path, default=Path("timeline.json"), help="the file of results")
    parser.add_argument("--plot", type=Path, help="draws the picture of this file, and measures nothing")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"argument --steps: {arguments.steps} is not a whole number of 1 or more")
    if arguments.plot is not None:
        draw(arguments.plot, arguments.plot.with_suffix(".png"))
        return
    device = find_device(None)
    if device.type != "cuda":
        parser.error("there is no CUDA device to profile; `--plot FILE` draws an earlier run.")
    names = ("model", "layers", "trainer", "lora", "batch", "length", "warmup")
    task = Task(**{name: getattr(arguments, name) for name in names}, steps=arguments.warmup + arguments.steps)
    title = f"{task.model} · {task.batch} × {task.length}"
    table = make_table(title, "ms a step", "GPU busy", remark=False)
    providers = arguments.providers.split(",")
    try:
        for provider in providers:  # all, so that a wrong name is reported before anything is measured
            find_training_provider(provider)
    except BenchmarkError as error:
        parser.error(str(error))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    lines = {}
    for provider in providers:
        lines[provider] = found = profiled(task, provider, device)
        table.add_row(provider, f"{found.milliseconds:,.1f}", f"{found.busy:.0%}")
        gc.collect()  # trainers hold reference cycles; this frees the model before the next provider
        torch.cuda.empty_cache()
    make_console().print(table)
    longest = max(found.milliseconds for found in lines.values())
    lines = {name: found.up_to(longest) for name, found in lines.items()}
    arguments.output.write_text(json.dumps({"setting": setting("timeline", device, argv), "lines": lines}) + "\n")
    draw_if_installed(lambda image: draw(arguments.output, image), arguments.output)


def draw(file: Path, image: Path) -> None:
    """Draws the picture of a file of results: a line for each provider, as long as the longest step of any."""
    found = json.loads(file.read_text(encoding="utf-8"))
    lines = {name: Timeline(*line) for name, line in found["lines"].items()}
    rows = {
        f"{name}\n{line.milliseconds:,.0f} ms a step, GPU busy {line.busy:.0%}": line.kernels
        for name, line in lines.items()
    }
    longest = max(line.milliseconds for line in lines.values())
    draw_timeline(rows, longest, f"When the GPU computes, {found['setting']['device']}", image)


if __name__ == "__main__":
    main()
