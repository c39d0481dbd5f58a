"""The runs of a comparison, one process after the other, whether they agree, and the results as JSON and as a page."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from liger_trainer._version import __version__
from liger_trainer.errors import UserError
from liger_trainer.run_report.page import curves, page, paragraph, section, table
from liger_trainer.tools.comparing.request import WARM_START, Request, read_source
from liger_trainer.tools.comparing.side import AGAIN, OURS, SIDES, STOCK, Measured

FACTOR = 10
ROUNDING = 2.0**-23
"""The distance of neighbours in fp32, relative to their size, in which losses and norms are computed."""
RULE = (
    f"Ours agrees if its losses and gradient norms, at every step, and its gradients at the first step differ from "
    f"stock's by at most {FACTOR} times what the two stock runs differ by. That is their largest difference at any "
    "step; for the gradient of a part of the model, that of the same part, or of the median part if that is larger. "
    "It counts as at least one rounding in fp32 (1.2e-07). All runs must start from the same weights and see as many "
    "tokens in every step."
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far two runs are from stock."""

    name: str  # ``"loss"``, ``"gradient norm"``, or a part of the model for its gradient at the first step
    ours: float  # our largest difference from stock: of the loss as it is, of all else relative to stock's norm
    noise: float  # the same distance of the second stock run
    yardstick: float  # the measure of ours: the noise, with the least that `RULE` says
    step: int = 1  # the step of our largest difference, from 1

    @property
    def ratio(self) -> float:
        """How many times the yardstick ours differs; NaN if it is not finite."""
        return self.ours / self.yardstick

    @property
    def agrees(self) -> bool:
        """Whether that is within `FACTOR`."""
        return self.ratio <= FACTOR


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a comparison."""

    curves: tuple[Difference, ...]  # the differences of loss and gradient norm
    parts: tuple[Difference, ...]  # comparisons of the gradients at the first step, the largest ratio first
    reasons: tuple[str, ...]  # why ours differs, as sentences; empty if it agrees

    @property
    def agrees(self) -> bool:
        """Whether ours agrees with stock."""
        return not self.reasons

    @property
    def word(self) -> str:
        """``"agrees"`` or ``"differs"``."""
        return "agrees" if self.agrees else "differs"


def judge(runs: Mapping[str, Measured]) -> Verdict:
    """Compares the runs, the measurements of each of `SIDES`.

    Raises:
        UserError: if stock's gradients are all 0 or its losses are not finite, so that nothing can be compared.
    """
    stock, again, ours = runs[STOCK], runs[AGAIN], runs[OURS]
    _check_stock(stock, again)
    reasons = list(_not_the_same(stock, again, ours))
    if len(ours.loss) != len(stock.loss):
        reasons.append(f"Ours trained {len(ours.loss)} steps, and stock {len(stock.loss)}.")
        return Verdict((), (), tuple(reasons))
    curves = (_loss(stock, again, ours), _norm(stock, again, ours))
    parts = sorted(_parts(again, ours), key=lambda part: (part.agrees, -part.ratio))
    for one in (*curves, *(part for part in parts if not part.agrees)):
        if not one.agrees:
            what = one.name if one in curves else f"gradient of {one.name}"
            reasons.append(
                f"At step {one.step}, the {what} differs by {one.ours:.1e}, {one.ratio:.3g} times {one.yardstick:.1e}."
            )
    return Verdict(curves, tuple(parts), tuple(reasons))


def _check_stock(stock: Measured, again: Measured) -> None:
    if not stock.loss:
        raise UserError("The data does not fill one batch, so nothing was trained; give more rows or a smaller batch.")
    if not any(stock.grad_norm):
        raise UserError(
            "Every gradient of the stock run is 0, so there is nothing to compare: rewards that are all alike, or no "
            "labels. Give other data or rewards."
        )
    for name, run in ((STOCK, stock), (AGAIN, again)):
        if not all(map(math.isfinite, (*run.loss, *run.grad_norm))):
            raise UserError(
                f"The run `{name}` has losses or gradients that are not finite; lower `learning_rate`, or use bf16."
            )


def _not_the_same(*runs: Measured) -> list[str]:
    reasons = []
    if len({run.weights for run in runs}) > 1:
        reasons.append("The runs started from different weights.")
    if any(run.tokens != runs[0].tokens for run in runs):
        reasons.append("The runs saw different numbers of tokens.")
    return reasons


def _loss(stock: Measured, again: Measured, ours: Measured) -> Difference:
    found, step = largest([abs(own - right) for own, right in zip(ours.loss, stock.loss)])
    noise, _ = largest([abs(own - right) for own, right in zip(again.loss, stock.loss)])
    least = ROUNDING * max(1.0, *map(abs, stock.loss))
    return Difference("loss", found, noise, max(noise, least), step)


def _norm(stock: Measured, again: Measured, ours: Measured) -> Difference:
    found, step = largest(relative_norms(ours, stock))
    noise, _ = largest(relative_norms(again, stock))
    return Difference("gradient norm", found, noise, max(noise, ROUNDING), step)


def relative_norms(run: Measured, stock: Measured) -> list[float]:
    """How far the gradient norms of a run are from stock's, relative to those."""
    return [_relative(abs(own - right), right) for own, right in zip(run.grad_norm, stock.grad_norm)]


def _parts(again: Measured, ours: Measured) -> list[Difference]:
    noises = {name: _relative(part["difference"], part["norm"]) for name, part in again.gradients.items()}
    typical = statistics.median(noises.values())
    found = []
    for name, part in ours.gradients.items():
        noise = noises.get(name, 0.0)  # a part that stock has no gradient of
        own = _relative(part["difference"], part["norm"])
        found.append(Difference(name, own, noise, max(noise if math.isfinite(noise) else 0.0, typical, ROUNDING)))
    return found


def _relative(difference: float, norm: float) -> float:
    if difference == 0:
        return 0.0
    return difference / norm if norm else math.inf


def largest(values: Sequence[float]) -> tuple[float, int]:
    """The largest of the values with its step, from 1; NaN is larger than any."""
    at = max(range(len(values)), key=lambda step: (math.isnan(values[step]), values[step]))
    return values[at], at + 1


def run_sides(request: Request, say: Callable[[str], None]) -> dict[str, Measured]:
    """Runs every side in a process of its own, and deletes what they left for each other; `say` is told what runs."""
    request.work.mkdir()
    request.write()
    try:
        warm = read_source(request)[1].get("warm_start") is not None
        for side in (*([WARM_START] if warm else []), *SIDES):
            say(f"{side.replace('_', ' ')}: running")
            log = request.folder / f"{side}.log"
            code = start(side, request.folder, log)
            if code:
                raise UserError(f"The run `{side}` failed: {last_words(log, code)} Its log is {str(log)!r}.")
        return {side: Measured.read(request.work, side) for side in SIDES}
    finally:
        shutil.rmtree(request.work, ignore_errors=True)


def start(side: str, folder: Path, log: Path) -> int:
    """Runs one side, with its output in `log`; returns its exit code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "liger_trainer.tools.comparing.side", side, str(folder)]
    with log.open("wb") as output:
        return subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode


def last_words(log: Path, code: int) -> str:
    """Why a run ended, as one sentence, from its log and its exit code."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("liger-trainer: ")]
    errors = [line for line in lines if line[:1].isalpha() and "Error" in line.split(":")[0]]
    line = (said or errors or lines or [f"exit code {code}"])[-1].removeprefix("liger-trainer: ").strip()
    return line if line.endswith((".", "!", "?")) else f"{line}."


NAMES = {STOCK: "stock", AGAIN: "stock, other sums", OURS: "ours"}
"""The runs as a reader sees them."""
JSON_FILE, PAGE_FILE = "comparison.json", "comparison.html"
_SHOWN = 40  # parts of the model on the page; all are in the JSON file


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Everything that a comparison found."""

    request: Request
    title: str  # the recipe and its trainer
    runs: dict[str, Measured]  # the measurements of each of `SIDES`
    verdict: Verdict
    notes: list[str]  # differences from the recipe, as sentences

    @property
    def headline(self) -> str:
        """The verdict as a sentence."""
        return "Ours agrees with stock." if self.verdict.agrees else "Ours differs from stock."


def tokens_per_second(run: Measured) -> float:
    """The median of the steps after the first, which compiles and allocates; without generation."""
    rates = [tokens / seconds for tokens, seconds in zip(run.tokens, run.seconds)]
    return statistics.median(rates[1:] or rates)


def write_json(found: Comparison) -> Path:
    """Writes all numbers into the request's folder; those that are not finite as null."""
    request, verdict = found.request, found.verdict
    content = {
        "recipe": request.recipe,
        "options": list(request.options),
        "steps": request.steps,
        "smoke": request.smoke,
        "verdict": verdict.word,
        "reasons": list(verdict.reasons),
        "rule": RULE,
        "factor": FACTOR,
        "notes": found.notes,
        "differences": [
            {**dataclasses.asdict(one), "ratio": one.ratio, "agrees": one.agrees}
            for one in (*verdict.curves, *verdict.parts)
        ],
        "runs": {
            side: {**dataclasses.asdict(run), "tokens_per_second": tokens_per_second(run)}
            for side, run in found.runs.items()
        },
        "versions": {"liger_trainer": __version__, **{one: version(one) for one in ("torch", "transformers", "trl")}},
    }
    file = request.folder / JSON_FILE
    file.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return file


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_page(found: Comparison) -> Path:
    """Writes the page into the request's folder: it loads nothing and runs no script."""
    verdict, runs = found.verdict, found.runs
    command = ["liger-trainer", "compare", found.request.recipe, "--steps", str(found.request.steps)]
    command += [*(["--smoke"] if found.request.smoke else []), *found.request.options]
    sections = [
        section("Verdict", *map(paragraph, (found.headline, *verdict.reasons, RULE))),
        section("Curves", *_curves(runs)),
        section("Differences", table(DIFFERENCE_HEADER, [difference_row(one) for one in verdict.curves])),
        section(
            "Gradients at the first step",
            paragraph("Each part's difference from stock, relative to the norm of stock's gradient."),
            table(DIFFERENCE_HEADER, [difference_row(one) for one in verdict.parts[:_SHOWN]]),
        ),
        section("Speed and memory", table(COST_HEADER, cost_rows(runs)), *map(paragraph, cost_notes(runs))),
        section("How it was compared", *map(paragraph, (shlex.join(command), *found.notes))),
        section("What runs in ours", table(("component", "target", "count", "kernel"), runs[OURS].kernels)),
    ]
    file = found.request.folder / PAGE_FILE
    file.write_text(page(f"Stock and ours: {found.title}", sections), encoding="utf-8")
    return file


def _curves(runs: dict[str, Measured]) -> list[str]:
    stock, others = runs[STOCK], {NAMES[side]: runs[side] for side in (AGAIN, OURS)}

    def numbered(values: list[float]) -> list[tuple[float, float]]:
        return [(float(step), value) for step, value in enumerate(values, start=1)]

    losses = {NAMES[side]: numbered(runs[side].loss) for side in SIDES}
    norms = {NAMES[side]: numbered(runs[side].grad_norm) for side in SIDES}
    of_loss = {name: [abs(one - right) for one, right in zip(run.loss, stock.loss)] for name, run in others.items()}
    of_norm = {name: relative_norms(run, stock) for name, run in others.items()}
    return [
        curves("Loss", losses),
        curves("Gradient norm", norms),
        curves("Loss, difference from stock", {name: numbered(values) for name, values in of_loss.items()}),
        curves("Gradient norm, relative difference", {name: numbered(values) for name, values in of_norm.items()}),
    ]


DIFFERENCE_HEADER = ("of", "step", "ours", "stock, other sums", f"times the noise (at most {FACTOR})")


def difference_row(one: Difference) -> tuple[str, ...]:
    """The cells of a difference, under `DIFFERENCE_HEADER`."""
    mark = "" if one.agrees else "  differs"
    return one.name, str(one.step), f"{one.ours:.1e}", f"{one.noise:.1e}", f"{one.ratio:.3g}{mark}"


COST_HEADER = ("run", "tokens/s", "peak memory (GiB)", "device")


def cost_rows(runs: dict[str, Measured]) -> list[tuple[str, ...]]:
    """The cells of each run, under `COST_HEADER`."""
    return [
        (NAMES[side], f"{tokens_per_second(run):,.0f}", f"{run.peak_memory_gib:.2f}", run.device)
        for side, run in runs.items()
    ]


def cost_notes(runs: dict[str, Measured]) -> list[str]:
    """What a reader of `cost_rows` should know."""
    notes = [f"The run `{NAMES[AGAIN]}` sums each linear layer's products in two halves, which takes time of its own."]
    if runs[STOCK].generated:
        notes.append("Generation is not in the tokens/s; it is in the peak memory of the first stock run alone.")
    if runs[STOCK].device == "cpu":
        notes.append("On a CPU, memory is that of the whole process, with the libraries.")
    return notes
