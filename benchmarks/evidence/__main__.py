"""Stock TRL and liger_trainer on a real pretrained model: what they learn, in which time, with which memory.

    python -m liger_trainer.benchmarks.evidence --model evidence --prepare
    python -m liger_trainer.benchmarks.evidence --model evidence --trainer sft --seeds 0 1 2 --output results
    python -m liger_trainer.benchmarks.evidence --plot results/sft.csv

`prepare` says which packages hold the model and the data. Each library trains in a process of its own, and this one
measures the weights that they leave, with transformers' own model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import liger_trainer
from liger_trainer.benchmarks.device import find_device
from liger_trainer.benchmarks.evidence import training
from liger_trainer.benchmarks.evidence.held_out import Measuring
from liger_trainer.benchmarks.evidence.prepare import prepare
from liger_trainer.benchmarks.evidence.results import START, Evidence, Value, section
from liger_trainer.benchmarks.evidence.training import TASKS
from liger_trainer.benchmarks.plots import draw_evidence, draw_if_installed
from liger_trainer.benchmarks.records import setting
from liger_trainer.benchmarks.registry import BenchmarkError


def run(arguments: argparse.Namespace, device: torch.device, known: dict[str, str], file: Path) -> None:
    """Trains and measures what the file lacks of the seeds, and writes it after each library.

    Raises:
        BenchmarkError: if a library's process fails, or the file is of other versions, another device or other steps.
    """
    measuring = Measuring(arguments.model, arguments.trainer, device, arguments.held_out)
    found = Evidence.resume(file, known)
    if not found.held_out:
        found = Evidence([*found.values, *_held_out(START, 0, measuring)])
    for ours in (False, True):
        variants = [variant.name for variant in TASKS[arguments.trainer].variants if variant.ours == ours]
        runs = [(name, seed) for name in variants for seed in arguments.seeds if not found.of(name, seed, "step loss")]
        if not runs:
            continue
        with tempfile.TemporaryDirectory() as folder:
            _train(arguments, device, ours, runs, folder)
            for name, seed in runs:
                found = Evidence([*found.values, *_of_run(Path(folder, f"{name} {seed}"), name, seed, measuring)])
        found.write(file)


def _train(
    arguments: argparse.Namespace, device: torch.device, ours: bool, runs: Sequence[tuple[str, int]], folder: str
) -> None:
    """Runs a library's variants, each with a seed, in a process of its own."""
    job = {
        "data": str(arguments.model.resolve()),
        "trainer": arguments.trainer,
        "steps": _steps(arguments),
        "runs": runs,
        "device": str(device),
        "ours": ours,
        "output": folder,
    }
    package = str(Path(liger_trainer.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-P", training.__file__, json.dumps(job)]
    if subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, check=False).returncode:
        raise BenchmarkError(f"{'liger_trainer' if ours else training.STOCK} failed; its error stands above")


def _steps(arguments: argparse.Namespace) -> int:
    return arguments.steps or TASKS[arguments.trainer].steps


def _of_run(file: Path, variant: str, seed: int, measuring: Measuring) -> list[Value]:
    """The values of a run from the files that it left; the weights are deleted."""
    found = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    values = [
        Value(variant, seed, f"step {measure}", step, float(value))
        for measure, series in found["steps"].items()
        for step, value in enumerate(series, 1)
    ]
    if found["peak_gibibytes"] is not None:
        values.append(Value(variant, seed, "peak_gibibytes", 0, found["peak_gibibytes"]))
    weights = file.with_suffix(".safetensors")
    measuring.load(weights)
    weights.unlink()
    return values + _held_out(variant, seed, measuring)


def _held_out(variant: str, seed: int, measuring: Measuring) -> list[Value]:
    return [
        Value(variant, seed, f"held-out {name}", item, value)
        for name, items in measuring.measure().items()
        for item, value in enumerate(items)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        "python -m liger_trainer.benchmarks.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="the folder with the model and the rows")
    parser.add_argument("--prepare", action="store_true", help="make what is missing in that folder, and nothing else")
    parser.add_argument("--trainer", choices=TASKS, help="which one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the rows' order and of sampling")
    parser.add_argument("--steps", type=int, help="of each run; by default as many as the table in `training` says")
    parser.add_argument("--held-out", type=int, metavar="ROWS", help="how many held-out rows; by default all")
    parser.add_argument("--device", help="by default the accelerator, or the CPU without one")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a folder for TRAINER.csv and TRAINER.png")
    parser.add_argument("--plot", type=Path, metavar="CSV", help="train nothing; draw and print what such a file has")
    arguments = parser.parse_args(argv)
    try:
        if arguments.prepare and arguments.model:
            prepare(arguments.model)
            return
        if arguments.plot:
            file = arguments.plot
        elif arguments.model and arguments.trainer and arguments.output:
            place = find_device(arguments.device)
            of_runs = {"trainer": arguments.trainer, "steps": str(_steps(arguments))}
            file = arguments.output / f"{arguments.trainer}.csv"
            run(arguments, place, of_runs | setting("evidence", place, argv), file)
        else:
            parser.error("give --model and --prepare; or --model, --trainer and --output; or --plot")
    except BenchmarkError as error:
        parser.error(str(error))
    found = Evidence.read(file)
    print(section(found.setting["trainer"], file))
    draw_if_installed(lambda image: draw_evidence(found, image), file)


if __name__ == "__main__":
    main()
