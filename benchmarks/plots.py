"""Pictures of a run: time and memory over the token count, and speed against memory."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from liger_trainer.benchmarks.records import ACTIVATION_MEMORY, PADDED, UNSHARED, Record, Run, TrainingRecord, grouped
from liger_trainer.benchmarks.registry import family

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from liger_trainer.benchmarks.evidence.results import Evidence

_COLOURS = {
    "hf": "#b8b8b8",
    "torch": "#9a9a9a",
    "torch.compile": "#5f5f5f",
    "liger-kernel": "#f2a65a",
    "trl": "#8f6bb3",
    "cut-cross-entropy": "#4f9d69",
    "quack": "#c44e52",
    "liger_trainer": "#2a6f97",
    PADDED: "#a9c8dc",
    UNSHARED: "#6a9fc0",
}


def draw(run: Run, folder: Path, mode: str = "both") -> list[Path]:
    """Draws the plots for which the run has enough records.

    Args:
        run: The results.
        folder: Folder for the images.
        mode: Which time: ``"forward"``, ``"backward"`` or ``"both"``.

    Returns:
        The files.
    """
    measured = [record for record in run.records if getattr(record, mode) is not None]
    files = []
    for names, records in grouped(measured, lambda record: (record.operation, record.model, record.variant)).items():
        name = "-".join(filter(None, names))
        if len({record.tokens for record in records}) > 1:
            files.append(over_tokens(records, folder / f"{name}-tokens.png", mode, run.machine.device))
        settings = [record for record in records if record.provider != family(record.provider)]
        if settings and any(record.peak_gibibytes is not None for record in records):
            largest = max(record.tokens for record in records)
            chosen = [record for record in records if record.tokens == largest]
            files.append(speed_and_memory(chosen, folder / f"{name}-memory.png", mode, run.machine.device))
    return files


def _axes(count: int, title: str, width: float = 5.5, rows: int = 1) -> tuple:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"axes.titlesize": 10, "figure.titlesize": 10, "legend.fontsize": 7, "legend.frameon": False}
    plt.rcParams.update({**style, "savefig.dpi": 140, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(rows, count // rows, figsize=(width * (count // rows), 4 * rows), squeeze=False)
    figure.suptitle(title)
    return figure, axes.ravel()


def _ink() -> str:
    """The colour of text, which depends on the style."""
    import matplotlib.pyplot as plt

    return plt.rcParams["text.color"]


def _save(figure, file: Path) -> Path:
    import matplotlib.pyplot as plt

    file.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
    return file


def draw_if_installed(draw_picture: Callable[[Path], object], file: Path) -> None:
    """Draws the picture of a file of results beside it; says so if matplotlib is missing."""
    try:
        draw_picture(file.with_suffix(".png"))
    except ModuleNotFoundError as error:
        print(f"No picture: {error.name} is not installed. Where it is, run this with --plot {file}.")


def over_tokens(records: Sequence[Record], file: Path, mode: str, device: str) -> Path:
    """Time and peak memory over the token count, one line per provider, with the floor."""
    first = records[0]
    figure, (left, right) = _axes(2, " · ".join(filter(None, (first.operation, first.variant, first.model, device))))
    for provider, own in grouped(records, lambda record: record.provider).items():
        own = sorted(own, key=lambda record: record.tokens)
        style = {"marker": "o", "markersize": 4, "label": provider, "color": _COLOURS.get(family(provider))}
        style["linestyle"] = "-" if provider == family(provider) else ":"
        left.plot([record.tokens for record in own], [getattr(record, mode) for record in own], **style)
        measured = [record for record in own if record.peak_gibibytes is not None]
        right.plot([record.tokens for record in measured], [record.peak_gibibytes for record in measured], **style)
    name = "floor" if mode == "both" else f"{mode}_floor"
    floors = sorted({(record.tokens, getattr(record, name)) for record in records if getattr(record, name)})
    if floors:
        left.plot(*zip(*floors), color=_ink(), linestyle="--", linewidth=1, label="floor")
    for axis, title in ((left, f"{mode}, ms" if mode != "both" else "forward and backward, ms"), (right, "peak, GiB")):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens")
        axis.set_title(title)
    left.set_yscale("log")
    left.legend()
    return _save(figure, file)


def speed_and_memory(records: Sequence[Record], file: Path, mode: str, device: str) -> Path:
    """Time against peak memory, one point per provider and setting; lower left is better."""
    first = records[0]
    title = " · ".join(filter(None, (first.operation, first.variant, first.model, first.shape, device)))
    figure, (axis,) = _axes(1, title)
    for record in records:
        if record.peak_gibibytes is not None:
            time = getattr(record, mode)
            axis.scatter(record.peak_gibibytes, time, color=_COLOURS.get(family(record.provider)), s=28)
            axis.annotate(
                record.provider, (record.peak_gibibytes, time), (4, 4), textcoords="offset points", fontsize=6
            )
    if mode == "both" and first.floor:
        axis.axhline(first.floor, color=_ink(), linestyle="--", linewidth=1)
    axis.set_xlabel("peak above the inputs, GiB")
    axis.set_ylabel("ms")
    return _save(figure, file)


def draw_gain(tasks: Sequence[Sequence[TrainingRecord]], device: str, file: Path) -> Path:
    """Our speed relative to the fastest other library that was measured, a bar for each task, with the peak memory."""
    from liger_trainer.benchmarks.training_tables import UNEVEN_LIBRARIES, task_title

    titles = {"hf": "Hugging Face", "liger-kernel": "Liger", "unsloth": "Unsloth"}
    found = []
    for records in tasks:
        measured = [record for record in records if record.tokens_per_second]
        ours = [record for record in measured if family(record.provider) == "liger_trainer"]
        others = [record for record in measured if family(record.provider) in titles]
        if ours and others:
            best, other = (max(each, key=lambda record: record.tokens_per_second or 0) for each in (ours, others))
            name = (UNEVEN_LIBRARIES if best.lengths else titles)[family(other.provider)].removeprefix("+ ")
            ratio = (best.tokens_per_second or 0) / (other.tokens_per_second or 1)
            label = f"{ratio:.2f} × {name}, {best.peak_gibibytes:.0f} GiB for {other.peak_gibibytes:.0f}"
            title, *rows = re.split(", (?:prompts|rows) of ", task_title(records[0]).replace("`", ""))
            work = ["full fine-tuning"] if not best.lora and best.trainer == "causal_lm" else []
            work += ["uneven lengths" if " to " in each else each.partition(", ")[2] for each in rows]
            found.append((ratio, ", ".join([title, *work]), label))
    found.sort()
    figure, (axis,) = _axes(1, f"Training speed relative to the fastest other library measured, one {device}", 9)
    bars = axis.barh(range(len(found)), [ratio for ratio, *_ in found], 0.7, color=_COLOURS["liger_trainer"])
    axis.bar_label(bars, [label for *_, label in found], padding=4, fontsize=8)
    axis.axvline(1.0, color="gray", linewidth=1)
    axis.set_yticks(range(len(found)), [title for _, title, _ in found], fontsize=8)
    axis.set_xlim(0, 1.55 * max(ratio for ratio, *_ in found))
    axis.set_xticks([1.0], ["1 ×"])
    axis.spines["bottom"].set_visible(False)
    return _save(figure, file)


def _draw_bars(
    tasks: Sequence[Sequence[TrainingRecord]], labels: Mapping[str, str], title: str, file: Path, rows: int = 1
) -> Path:
    """Tokens/s and peak memory, a group of bars for each task and in it one for each provider."""
    from liger_trainer.benchmarks.training_tables import task_title

    figure, axes = _axes(2, title, max(5.5, 2 * len(tasks)) if rows > 1 else 5.5, rows)
    names = [task_title(records[0]).replace(", ", "\n") for records in tasks]
    step = 0.81 / len(labels)
    for axis, field, heading in (
        (axes[0], "tokens_per_second", "tokens/s (higher is better)"),
        (axes[1], "peak_gibibytes", "peak memory, GiB (lower is better)"),
    ):
        for offset, (provider, label) in enumerate(labels.items()):
            found = [
                (place + (offset - (len(labels) - 1) / 2) * step, getattr(record, field))
                for place, records in enumerate(tasks)
                for record in records
                if record.provider == provider and getattr(record, field) is not None
            ]
            places, values = [place for place, _ in found], [value for _, value in found]
            bars = axis.bar(places, values, step - 0.01, label=label, color=_COLOURS[provider])
            axis.bar_label(bars, fmt="{:,.0f}", fontsize=7)
        axis.set_xticks(range(len(names)), names, fontsize=7)
        axis.set_title(heading)
    axes[0].legend(ncols=len(labels), loc="lower left", bbox_to_anchor=(0, 1.06))
    return _save(figure, file)


def draw_alignment(records: Iterable[TrainingRecord], device: str, file: Path) -> Path | None:
    """Tokens/s and peak memory of each task on uneven lengths on one GPU, one bar per provider.

    Args:
        records: Records; other tasks and other settings are left out.
        device: The device's name, for the title.
        file: The image.

    Returns:
        `file`; None if there is no record to draw.
    """
    from liger_trainer.benchmarks.training_tables import UNEVEN_LIBRARIES

    uneven = [record for record in records if record.lengths and not record.accelerate_config]
    tasks = grouped((record for record in uneven if record.provider in UNEVEN_LIBRARIES), lambda record: record.group)
    measured = {record.provider for record in uneven if record.tokens_per_second}
    labels = {name: label for name, label in UNEVEN_LIBRARIES.items() if name in measured}
    title = f"Alignment on uneven lengths, tokens of TRL's padded batch, {device}"
    return _draw_bars([*tasks.values()], labels, title, file, rows=2) if labels else None


def draw_pareto(records: Iterable[TrainingRecord], device: str, file: Path) -> Path | None:
    """Tokens/s over peak memory of each task, one line per library through its settings; upper left is better.

    Drawn are tasks in which a record has `activation_memory`. Records that differ only in whether layers are
    checkpointed belong to one task.

    Args:
        records: Records; those without a result or a peak are left out.
        device: The device's name, for the title.
        file: The image.

    Returns:
        `file`; None if there is no record to draw.
    """
    from liger_trainer.benchmarks.training import ALIGNMENT
    from liger_trainer.benchmarks.training_tables import task_title

    known = [record for record in records if None not in (record.tokens_per_second, record.peak_gibibytes)]
    tasks = grouped(known, lambda record: dataclasses.replace(record, checkpointing=True).group)
    shown = [found for found in tasks.values() if any(record.activation_memory for record in found)]
    if not shown:
        return None
    figure, axes = _axes(len(shown), f"Speed and memory of a training step, {device}")
    for axis, found in zip(axes, shown):
        first = found[0]
        task = task_title(dataclasses.replace(first, checkpointing=True))
        sizes = "" if first.trainer in ALIGNMENT else f"{first.batch} × {first.length}"
        title = ", ".join(filter(None, (task, sizes, f"{first.gpus} GPUs" if first.gpus > 1 else "")))
        axis.set_title(title)
        for library, own in grouped(found, lambda record: family(record.provider)).items():
            own.sort(key=lambda record: record.peak_gibibytes or 0)
            points = [(record.peak_gibibytes, record.tokens_per_second) for record in own]
            style = {"marker": "o", "markersize": 4, "label": library, "color": _COLOURS.get(library)}
            continuous = any(record.activation_memory for record in own)
            axis.plot(*zip(*points), linestyle="-" if continuous else ":", **style)
            offset = (-3, 4) if continuous else (4, -9)  # labels are above the one line and below the others
            for record, point in zip(own, points):
                axis.annotate(_setting(record), point, offset, textcoords="offset points", fontsize=6, ha="right")
        axis.margins(x=0.1)
        axis.set_xlabel("peak memory, GiB")
        axis.set_ylabel("tokens/s" if first.gpus == 1 else "tokens/s a GPU")
    axes[0].legend()
    return _save(figure, file)


def _setting(record: TrainingRecord) -> str:
    """What sets a record apart from its library with every layer checkpointed."""
    setting = record.provider.removeprefix(family(record.provider)).replace(ACTIVATION_MEMORY, " ").strip()
    return setting if record.checkpointing else f"{setting} no checkpointing".strip()


def draw_optimizers(found: Evidence, file: Path) -> Path:
    """Held-out loss of each task over its steps, and the share of bf16 weights that changed; means over the seeds.

    A curve has the color of its optimizer's name.
    """
    tasks = list(dict.fromkeys(measure.split()[0] for measure in found.measures))
    figure, axes = _axes(len(tasks) + 1, f"Fine-tuning from one bf16 checkpoint, {found.setting['device']}")
    names = found.variants
    for place, task in enumerate(tasks):
        places, shares = [], []
        for number, name in enumerate(names):
            runs = [run for seed in found.seeds if (run := found.by_index(name, seed, f"{task} loss"))]
            if not runs:
                continue
            style = {"linewidth": 1.2} if number else {"linewidth": 4, "alpha": 0.5}  # others lie on it
            line = [*map(mean, zip(*(run.values() for run in runs)))]
            axes[place].plot(list(runs[0]), line, label=name, color=f"C{number}", **style)
            places.append(number + (place + 0.5) * 0.8 / len(tasks) - 0.4)
            shares.append(
                mean(100 * share for seed in found.seeds for share in found.of(name, seed, f"{task} changed"))
            )
        axes[place].set_xlabel("steps")
        axes[place].set_title(f"{task}: held-out loss")
        bars = axes[-1].barh(places, shares, 0.36, label=task, color=f"{0.35 + 0.35 * place}")
        axes[-1].bar_label(bars, fmt="{:.1f}", fontsize=7)
    axes[-1].set_yticks(range(len(names)), names)
    for number, label in enumerate(axes[-1].get_yticklabels()):
        label.set_color(f"C{number}")  # the legend of the curves
    axes[-1].invert_yaxis()
    axes[-1].set_title("bf16 weights that changed, %")
    axes[-1].legend(ncols=len(tasks), loc="upper right", bbox_to_anchor=(1, -0.06))
    return _save(figure, file)


def draw_evidence(found: Evidence, file: Path) -> Path:
    """Loss or reward and gradient norm over the steps, means and ranges over the seeds, and each seed's last score."""
    from liger_trainer.benchmarks.evidence.results import START

    reward = bool(found.of(found.variants[0], found.seeds[0], "step reward"))
    learned = "reward" if reward else "loss"
    measures = {learned: learned, "grad_norm": "gradient norm"}
    title = f"{found.setting['trainer'].upper()}, SmolLM2-135M, {found.setting['device']}"
    figure, axes = _axes(len(measures) + len(found.held_out), title)
    for axis, (measure, heading) in zip(axes, measures.items()):
        _draw_steps(axis, found, measure, heading)
    for axis, name in zip(axes[len(measures) :], found.held_out):
        _draw_scores(axis, found, name)
        axis.axhline(found.score(START, 0, name), color=_ink(), linestyle="--", linewidth=1, label="at the start")
        axis.legend()
    axes[0].legend()
    return _save(figure, file)


def _draw_steps(axis: Axes, found: Evidence, measure: str, heading: str) -> None:
    """A measure over the steps, means and ranges over the seeds."""
    for place, variant in enumerate(found.variants):
        runs = [found.of(variant, seed, f"step {measure}") for seed in found.seeds]
        steps = range(1, len(runs[0]) + 1)
        style: dict[str, Any] = {"linewidth": 4, "alpha": 0.5} if not place else {"linewidth": 1.2}  # others lie on it
        axis.plot(steps, [*map(mean, zip(*runs))], label=variant, color=f"C{place}", **style)
        axis.fill_between(steps, [*map(min, zip(*runs))], [*map(max, zip(*runs))], color=f"C{place}", alpha=0.1)
    axis.set_xlabel("steps")
    axis.set_title(f"{heading} of each step")


def _draw_scores(axis: Axes, found: Evidence, name: str) -> None:
    """A held-out measure after training, a point for each seed."""
    for place, variant in enumerate(found.variants):
        scores = [found.score(variant, seed, name) for seed in found.seeds]
        axis.scatter([place] * len(scores), scores, color=f"C{place}", s=16)
    axis.set_xticks(range(len(found.variants)), [name.replace(", ", "\n") for name in found.variants], fontsize=7)
    axis.set_title(f"held-out {name} after training, by seed")


def draw_fp8(found: Evidence, window: int, file: Path) -> Path:
    """Loss over the steps, its difference from bf16's beside the noise, and each seed's held-out loss.

    The difference is that of the means of the last `window` steps, between runs of one seed, in the mean over the
    seeds; the noise is the standard deviation over the seeds of bf16's mean of the very last ones.
    """
    figure, axes = _axes(3, f"From random weights, in fp8 and in bf16, {found.setting['device']}")
    _draw_steps(axes[0], found, "loss", "loss")
    runs = {
        variant: [_running_mean(found.of(variant, seed, "step loss"), window) for seed in found.seeds]
        for variant in found.variants
    }
    first, *others = found.variants
    steps = range(window, window + len(runs[first][0]))
    if len(found.seeds) > 1:
        noise = stdev(run[-1] for run in runs[first])
        axes[1].axhspan(-noise, noise, color="C0", alpha=0.2, label="the noise at the end")
    for place, variant in enumerate(others, 1):
        away = [[a - b for a, b in zip(*pair)] for pair in zip(runs[variant], runs[first])]
        axes[1].plot(steps, [*map(mean, zip(*away))], label=variant, color=f"C{place}", linewidth=1.2)
    axes[1].set_xlabel("steps")
    axes[1].set_title(f"mean loss of the last {window} steps, less {first}'s")
    _draw_scores(axes[2], found, "loss")
    for axis in axes[:2]:
        axis.legend()
    return _save(figure, file)


def draw_timeline(rows: Mapping[str, Sequence[tuple[int, int]]], milliseconds: float, title: str, file: Path) -> Path:
    """When a device computes, a row for each name: its stretches in microseconds, up to so many milliseconds."""
    figure, (axis,) = _axes(1, title, 10)
    figure.set_figheight(0.9 + 0.6 * len(rows))
    for place, stretches in enumerate(rows.values()):
        bars = [(begin / 1e3, (end - begin) / 1e3) for begin, end in stretches]
        axis.broken_barh(bars, (place - 0.35, 0.7), color=_COLOURS["liger_trainer"], linewidth=0)
    axis.set_yticks(range(len(rows)), [*rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, milliseconds)
    axis.set_xlabel("ms")
    return _save(figure, file)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each `window` successive values."""
    return [mean(values[end - window : end]) for end in range(window, len(values) + 1)]
