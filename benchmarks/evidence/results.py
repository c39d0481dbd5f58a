"""What the runs gave, as one CSV file for each trainer, and the tables that are made of it."""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from liger_trainer.benchmarks.evidence.training import STOCK
from liger_trainer.benchmarks.registry import BenchmarkError
from liger_trainer.benchmarks.report import markdown, number

START = "start"  # the variant of what is measured before training
SETTING = "setting"  # the variant of what holds for all: the device, the command, the versions
HELD_OUT = {  # measures of an item: how they are written, and whether more is better
    "loss": (".4f", False),
    "accuracy": (".3f", True),
    "margin": (".4f", True),
    "score": (".3f", True),
}
_STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles 0.975 of Student's distribution, by degrees of freedom; further ones are at most 2.26, which is taken."""
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Value:
    """A number: `measure` of a step, of a held-out item, or of a whole run; of a setting, `value` is a word.

    `measure` is ``"step loss"``, ``"step grad_norm"``, ``"step reward"``, ``"step seconds"``, ``"held-out ..."`` with
    a key of `HELD_OUT`, or ``"peak_gibibytes"``; `optimizers` says its own. `index` counts steps from 1, items from 0.
    """

    variant: str
    seed: int
    measure: str
    index: int
    value: float | str


class Evidence:
    """The values of one trainer's file."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.values = list(values)
        self._found: defaultdict[tuple[str, int, str], dict[int, float]] = defaultdict(dict)
        self.setting: dict[str, str] = {}
        for value in self.values:
            if value.variant == SETTING:
                self.setting[value.measure] = str(value.value)
            else:
                self._found[value.variant, value.seed, value.measure][value.index] = float(value.value)
        keys = list(self._found)
        self.variants = list(dict.fromkeys(variant for variant, _, _ in keys if variant != START))
        runs = {(variant, seed) for variant, seed, _ in keys if variant != START}
        complete = (seed for _, seed in runs if all((variant, seed) in runs for variant in self.variants))
        self.seeds = sorted(set(complete))
        self.measures = list(dict.fromkeys(measure for _, _, measure in keys))
        self.held_out = [name for name in HELD_OUT if f"held-out {name}" in self.measures]

    def of(self, variant: str, seed: int, measure: str) -> list[float]:
        """The values of a run in order; empty if it has none."""
        return list(self.by_index(variant, seed, measure).values())

    def by_index(self, variant: str, seed: int, measure: str) -> dict[int, float]:
        """The same, each with its step or item."""
        return self._found.get((variant, seed, measure), {})

    def score(self, variant: str, seed: int, name: str) -> float:
        """A held-out measure of a run, the mean over the items."""
        return statistics.fmean(self.of(variant, seed, f"held-out {name}"))

    def write(self, file: Path) -> None:
        """Writes a line for each value."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow([field.name for field in dataclasses.fields(Value)])
            for value in self.values:
                cell = f"{value.value:.7g}" if isinstance(value.value, float) else value.value
                writer.writerow([value.variant, value.seed, value.measure, value.index, cell])

    @classmethod
    def read(cls, file: Path) -> Evidence:
        """Reads what `write` has written."""
        with file.open(newline="", encoding="utf-8") as stream:
            return cls(
                [
                    Value(
                        row["variant"],
                        int(row["seed"]),
                        row["measure"],
                        int(row["index"]),
                        row["value"] if row["variant"] == SETTING else float(row["value"]),
                    )
                    for row in csv.DictReader(stream)
                ]
            )

    @classmethod
    def begin(cls, setting: dict[str, str]) -> Evidence:
        """What holds for all runs to come."""
        return cls([Value(SETTING, 0, name, 0, word) for name, word in setting.items()])

    @classmethod
    def resume(cls, file: Path, setting: dict[str, str]) -> Evidence:
        """What a file has, to which runs can be added; without one, the setting alone.

        Raises:
            BenchmarkError: if the file has another setting: other versions, another device or other steps.
        """
        if not file.exists():
            return cls.begin(setting)
        found = cls.read(file)
        for name, now in setting.items():
            was = found.setting.get(name)
            if was != now and name not in ("command", "date"):
                raise BenchmarkError(f"{file} has runs with {name} {was}, now it is {now}; give another --output")
        return found


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of the mean, by Student's distribution; NaN for one value."""
    if len(values) < 2:
        return math.nan
    quantile = _STUDENT[min(len(values), len(_STUDENT)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def bootstrap(items: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean over items, by resampling them."""
    values = torch.tensor(items, dtype=torch.float64)
    drawn = torch.randint(len(items), (_RESAMPLES, len(items)), generator=torch.Generator().manual_seed(0))
    means = values[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return means[0].item(), means[1].item()


def held_out_rows(found: Evidence) -> list[list[str]]:
    """A row for each variant and held-out measure: at the start, at the end, and beside stock TRL."""
    return [_held_out_row(found, name, variant) for name in found.held_out for variant in found.variants]


def _held_out_row(found: Evidence, name: str, variant: str) -> list[str]:
    form, more_is_better = HELD_OUT[name]
    ends = [found.score(variant, seed, name) for seed in found.seeds]
    row = [name, variant, format(found.score(START, 0, name), form), _interval(ends, form)]
    if variant == STOCK:
        return [*row, "", "", ""]
    differences = [end - found.score(STOCK, seed, name) for end, seed in zip(ends, found.seeds)]
    pairs = zip(*(found.of(variant, seed, f"held-out {name}") for seed in found.seeds))
    stock = zip(*(found.of(STOCK, seed, f"held-out {name}") for seed in found.seeds))
    low, high = bootstrap([statistics.fmean(ours) - statistics.fmean(theirs) for ours, theirs in zip(pairs, stock)])
    mean, width = statistics.fmean(differences), half_width(differences)
    verdict = "one seed" if math.isnan(width) else "yes" if abs(mean) <= width or mean == 0 else ""
    verdict = verdict or ("no, better" if (mean > 0) is more_is_better else "no, worse")
    return [*row, _interval(differences, f"+{form}"), f"{low:+{form}} to {high:+{form}}", verdict]


def _interval(values: Sequence[float], form: str) -> str:
    width = half_width(values)
    mean = format(statistics.fmean(values), form)
    return mean if math.isnan(width) else f"{mean} ± {format(width, form.lstrip('+'))}"


def step_rows(found: Evidence) -> list[list[str]]:
    """A row for each variant: how far its steps are from stock TRL's of the same seed, their time, and their memory."""
    rows = []
    for variant in found.variants:
        far = ["", "", "", ""]
        if variant != STOCK:
            far = [
                "–" if math.isnan(value) else f"{value:.1e}"
                for measure in ("step loss", "step grad_norm")
                for value in (_distance(found, variant, measure, first=True), _distance(found, variant, measure))
            ]
        seconds = [found.of(variant, seed, "step seconds") for seed in found.seeds]
        peaks = [peak for seed in found.seeds for peak in found.of(variant, seed, "peak_gibibytes")]
        rows.append(
            [
                variant,
                *far,
                f"{1e3 * statistics.median(value for run in seconds for value in run):.1f}",
                f"{statistics.fmean(map(sum, seconds)):.1f}",
                number(max(peaks, default=None), ".2f", "–"),
            ]
        )
    return rows


def _distance(found: Evidence, variant: str, measure: str, first: bool = False) -> float:
    """The mean difference from stock's steps, in magnitude, by the mean magnitude of those; NaN if that is 0."""
    pairs = [
        pair
        for seed in found.seeds
        for pair in list(zip(found.of(variant, seed, measure), found.of(STOCK, seed, measure)))[: 1 if first else None]
    ]
    whole = sum(abs(theirs) for _, theirs in pairs)
    return sum(abs(ours - theirs) for ours, theirs in pairs) / whole if whole else math.nan


_PACKAGES = ("torch", "triton", "transformers", "trl", "liger-trainer")


def section(trainer: str, file: Path) -> str:
    """Both tables of a trainer's file with what agrees, the command and the versions."""
    found = Evidence.read(file)
    count = len(found.of(START, 0, f"held-out {found.held_out[0]}"))
    held_out = held_out_rows(found)
    header = ["held-out", "variant", "at the start", "at the end", "less TRL's: seeds", "items", "agrees"]
    beside = ["loss, step 1", "all", "gradient norm, step 1", "all"]
    steps = ["variant", *beside, "ms a step", "seconds of all steps", "peak GiB"]
    told = {word: [f"{row[1]} ({row[0]})" for row in held_out if row[-1].startswith(word)] for word in ("yes", "no")}
    return "\n\n".join(
        [
            f"Seeds: {', '.join(map(str, found.seeds))}. Held-out rows: {count}. "
            f"Agrees with TRL: {'; '.join(told['yes']) or 'none'}. Does not: {'; '.join(told['no']) or 'none'}.",
            f"![Steps and held-out scores](images/evidence-{trainer}.png)",
            markdown(header, held_out),
            markdown(steps, step_rows(found)),
            source(found.setting),
        ]
    )


def source(setting: dict[str, str]) -> str:
    """The machine, the versions and the command of a file, as HTML."""
    known = ", ".join(f"{name} {setting[name]}" for name in _PACKAGES if name in setting)
    return f"<sub>{setting.get('device', '')}, {known}: `{setting.get('command', '')}`</sub>"
