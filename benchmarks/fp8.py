"""Whether training in fp8 learns what it learns in bf16: a small Llama from random weights, with each value of `fp8`.

    python -m liger_trainer.benchmarks.fp8 --output results            # 3 minutes on an H200
    python -m liger_trainer.benchmarks.fp8 --output results --small    # the CPU, 1 minute
    python -m liger_trainer.benchmarks.fp8 --plot results/fp8.csv

The corpus is Python's standard library, one token a byte, split by file. Weights are in fp32, under bf16 autocast, and
every run has our kernels; the first and the last layer stay in bf16. Runs of one seed start from the same weights and
see the same rows in the same order. Seeds differ in the weights and in the rows, but for those of the last sixth of the
steps, so that the losses of these steps can be compared.

Compared are their mean, and the held-out loss in fp32 of the trained weights, without kernels of ours. The noise is the
standard deviation of bf16 over the seeds. A variant is within it if its mean difference from bf16 of the same seed is
no larger, in both losses. One more variant shows what another rounding does: bf16, each step in two micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args

import torch
from torch import Tensor

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.evidence.results import Evidence, Value, source
from liger_trainer.benchmarks.evidence.training import fp8_at_any_size
from liger_trainer.benchmarks.plots import draw_fp8, draw_if_installed
from liger_trainer.benchmarks.registry import BenchmarkError
from liger_trainer.benchmarks.report import markdown
from liger_trainer.benchmarks.small_llama import (
    Sizes,
    build,
    command,
    corpus,
    cut,
    log_probs_of_all,
    pretrain,
)
from liger_trainer.kernels.fp8.linear import has_fp8
from liger_trainer.kernels.fp8.modes import Fp8Mode
from liger_trainer.patching.apply import apply_liger_kernel, revert_liger_kernel

BF16 = "bf16"
VARIANTS: dict[str, tuple[str | None, int]] = {
    BF16: (None, 1),
    "bf16, two micro-batches": (None, 2),
    **{f"fp8, {mode}": (mode, 1) for mode in get_args(Fp8Mode)},
}
"""The value of `fp8` of each, and the micro-batches of a step."""
_LR = 6e-4
LARGE = Sizes(hidden=1024, layers=8, rows=8, length=512, steps=300, held_out=16, seeds=3)
SMALL = Sizes(hidden=256, layers=3, rows=4, length=64, steps=60, held_out=4, seeds=2)


def last_steps(steps: int | str) -> int:
    """Over how many of the steps losses are compared."""
    return max(1, int(steps) // 6)


def compare(
    sizes: Sizes, device: torch.device, found: Evidence, tell: Callable[[str], object] = print
) -> Iterator[Evidence]:
    """Runs each variant with each seed, but for those that `found` has.

    Args:
        sizes: Sizes of the model and the runs.
        device: Where.
        found: The values that a file has already.
        tell: Gets a line on each run.

    Yields:
        After each run, the values of all so far.
    """
    text = corpus()
    last = last_steps(sizes.steps)
    held_out = _rows(text["held-out"], sizes.held_out, sizes, 0, device)
    rows_at_end = _rows(text["pretraining"], last, sizes, 0, device)
    for seed in range(sizes.seeds):
        rows = torch.cat([_rows(text["pretraining"], sizes.steps - last, sizes, 1 + seed, device), rows_at_end])
        for name in VARIANTS:
            if found.of(name, seed, "step loss"):
                continue
            begin = time.perf_counter()
            found = Evidence([*found.values, *_run(name, seed, rows, held_out, sizes)])
            loss = found.score(name, seed, "loss")
            tell(f"{name}, seed {seed}: held-out loss {loss:.4f}, {time.perf_counter() - begin:.0f} s")
            yield found


def _rows(text: bytes, batches: int, sizes: Sizes, seed: int, device: torch.device) -> Tensor:
    """Rows of a text, (n, 1, length + 1)."""
    generator = torch.Generator().manual_seed(seed)
    return cut(text, batches * sizes.rows, sizes.length, generator).unsqueeze(1).to(device)


def _run(name: str, seed: int, rows: Tensor, held_out: Tensor, sizes: Sizes) -> Iterator[Value]:
    """Trains once; the loss of each step, and the held-out one after the last."""
    mode, parts = VARIANTS[name]
    model = build(sizes, torch.float32, rows.device, seed)
    with fp8_at_any_size():
        apply_liger_kernel(model, {"fp8": mode})
        losses = pretrain(model, rows, sizes.rows, _LR, parts).tolist()
    yield from (Value(name, seed, "step loss", step, loss) for step, loss in enumerate(losses, 1))
    revert_liger_kernel(model)
    loss = -log_probs_of_all(model, held_out, sizes.rows, autocast=False).mean().item()
    yield Value(name, seed, "held-out loss", 0, loss)


def _losses(found: Evidence, name: str) -> list[list[float]]:
    """What is compared, for each seed: the held-out loss, and the mean loss of the last steps."""
    last = last_steps(found.setting["steps"])
    ends = [fmean(found.of(name, seed, "step loss")[-last:]) for seed in found.seeds]
    return [[found.score(name, seed, "loss") for seed in found.seeds], ends]


def _differences(found: Evidence, name: str) -> list[list[float]]:
    """The same, less bf16's of the same seed."""
    pairs = zip(_losses(found, name), _losses(found, BF16))
    return [[loss - of_bf16 for loss, of_bf16 in zip(*of_seeds)] for of_seeds in pairs]


def verdict(found: Evidence, name: str) -> str:
    """Whether a variant is within the noise of bf16's seeds, by the rule above: "yes" or "no"; or "one seed"."""
    if len(found.seeds) < 2:
        return "one seed"
    noise = [stdev(of_seeds) for of_seeds in _losses(found, BF16)]
    away = [abs(fmean(of_seeds)) for of_seeds in _differences(found, name)]
    within = all(distance <= width for distance, width in zip(away, noise))  # NaN is not
    return "yes" if within else "no"


def section(file: Path) -> str:
    """What is within the noise, picture and table, with command and versions."""
    found = Evidence.read(file)
    beside = ["less bf16's, by seed", "mean"]
    header = [
        "",
        "held-out loss",
        *beside,
        f"loss, last {last_steps(found.setting['steps'])} steps",
        *beside,
        "within the noise",
    ]
    return "\n\n".join(
        [
            _sentence(found),
            "![Loss over the steps, its difference from bf16, and held-out losses](../images/fp8.png)",
            markdown(header, [_row(found, name) for name in found.variants]),
            source(found.setting),
        ]
    )


def _row(found: Evidence, name: str) -> list[str]:
    cells = [name]
    for losses, away in zip(_losses(found, name), _differences(found, name)):
        beside = [", ".join(f"{difference:+.4f}" for difference in away), f"{fmean(away):+.4f}"]
        cells += [f"{fmean(losses):.4f}", *(["", ""] if name == BF16 else beside)]
    return [*cells, "" if name == BF16 else verdict(found, name)]


def _sentence(found: Evidence) -> str:
    known, seeds = found.setting, ", ".join(map(str, found.seeds))
    model = f"{known['layers']} layers of {known['hidden']} features"
    runs = f"{known['steps']} steps of {known['rows']} × {known['length']} tokens, seeds {seeds}"
    if len(found.seeds) < 2:
        return f"{model}, {runs}."
    held_out, last = (f"{stdev(of_seeds):.4f}" for of_seeds in _losses(found, BF16))
    noise = f"{held_out} in the held-out loss, {last} in that of the last {last_steps(known['steps'])} steps"
    told: dict[str, list[str]] = {"yes": [], "no": []}
    for name in found.variants:
        if name != BF16:
            told[verdict(found, name)].append(name)
    within, not_within = ("; ".join(names) or "none" for names in told.values())
    return f"{model}, {runs}. The noise is {noise}. Within it: {within}. Not: {not_within}."


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""

    def compared(sizes: Sizes, device: torch.device, *more: Any) -> Iterator[Evidence]:
        if not has_fp8(device):
            raise BenchmarkError(f"{Device(device).name()} has no matmuls in fp8; NVIDIA's Hopper has")
        return compare(sizes, device, *more)

    found, file = command("fp8", __doc__, (LARGE, SMALL), argv, compared)
    print(section(file))
    draw_if_installed(lambda image: draw_fp8(found, last_steps(found.setting["steps"]), image), file)


if __name__ == "__main__":
    main()
