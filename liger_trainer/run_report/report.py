"""The page about a training run, from what the Trainer has logged: its sections, in the order of reading."""

from __future__ import annotations

import dataclasses
import enum
import math
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import TrainerState, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from liger_trainer._version import __version__
from liger_trainer.compat.private import installed_version
from liger_trainer.configs.flags import copies_without_waiting
from liger_trainer.patching.report import KernelReport
from liger_trainer.run_report.page import curves, page, paragraph, section, table

Points = list[tuple[float, float]]

# These first, then whatever else was logged, in its order.
_FIRST = (
    *("loss", "reward", "rewards", "rewards/accuracies", "accuracy", "rewards/margins", "mean_token_accuracy"),
    *("perplexity", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "peak_memory_gib"),
)
_NO_CURVES = ("step", "epoch", "total_flos", "num_tokens", "num_input_tokens_seen")
_OF_THE_EVALUATION = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")
_PAIR = ("chosen", "rejected")
_OF_THE_RUN = {  # what the Trainer logs at the end: the name here, and the number with its unit
    "train_runtime": ("training time", "{:,.4g} s"),
    "train_loss": ("mean training loss", "{:,.4g}"),
    "train_peak_memory_gib": ("peak memory", "{:,.4g} GiB"),
    "train_mfu": ("MFU", "{:.1%}"),
    "train_labelled_share": ("tokens with a label", "{:.1%}"),
    "train_shared_share": ("tokens shared", "{:.1%}"),
    **{f"train_{what}_per_second": (f"{what} per second", "{:,.4g}") for what in ("tokens", "samples", "steps")},
}

_SAMPLES, _ANSWERS, _CHARACTERS = 8, 32, 2000  # rows of completions and of samples, and characters of a cell

_PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers")
_EMPTY: tuple[Any, ...] = (None, [], {})
_SECRETS = ("token", "key", "password", "secret")
_HIDDEN = "(not shown)"


def run_report(
    args: TrainingArguments,
    state: TrainerState,
    model: nn.Module | None = None,
    kernels: KernelReport | None = None,
    completions: Mapping[str, Any] = MappingProxyType({}),
    ended: str = "",
) -> str:
    """The text of an HTML file about a run.

    Args:
        args: Arguments of the run.
        state: State of the Trainer; its `log_history` has the curves.
        model: The trained model, to name it.
        kernels: The report of the patcher; None without kernels.
        completions: The last of a policy, as TRL keeps them.
        ended: Why training has stopped before its last step, if it has.
    """
    folder = Path(str(args.output_dir)).resolve()
    declared = "Those that differ from the declared defaults, as the run has them."
    return page(
        f"Training run: {folder.name}",
        [
            section("Run", _pairs(_facts(args, state, model, ended))),
            section("Curves", *(charts(state.log_history) or [paragraph("Nothing has been logged.")])),
            samples(state.log_history),
            _completions(completions),
            _kernels(kernels),
            section("Arguments", paragraph(declared), _pairs(changed_arguments(args))),
            section("Environment", _pairs(environment(args))),
        ],
    )


def _facts(
    args: TrainingArguments, state: TrainerState, model: nn.Module | None, ended: str
) -> list[tuple[str, object]]:
    summary: dict[str, Any] = next((entry for entry in reversed(state.log_history) if "train_runtime" in entry), {})
    facts: dict[str, object] = {
        "model": _model_name(model),
        "arguments": type(args).__name__,
        "step": f"{state.global_step:,} of {state.max_steps:,}",
        "epoch": None if state.epoch is None else f"{state.epoch:.2f}",
        "ended": ended,
        "best checkpoint": state.best_model_checkpoint,
        **dict(_of_the_run(name, summary[name]) for name in summary if name.startswith("train_")),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    }
    return [(name, fact) for name, fact in facts.items() if fact]


def _of_the_run(key: str, value: float) -> tuple[str, str]:
    name, form = _OF_THE_RUN.get(key, (key.replace("_", " "), "{:,.4g}"))
    return name, form.format(value)


def _model_name(model: nn.Module | None) -> str:
    path = getattr(getattr(model, "config", None), "name_or_path", "")
    return " · ".join(filter(None, (type(model).__name__ if model is not None else "", path)))


def _kernels(report: KernelReport | None) -> str:
    if report is None:
        return section("Kernels", paragraph("No kernels of liger_trainer were put into the model."))
    rows = [
        (
            row.component,
            row.target,
            row.count,
            row.kernel or "left alone",
            "" if row.probe_error is None else f"{row.probe_error:.1e}",
            row.reason,
        )
        for row in report
    ]
    header = ("component", "target", "count", "kernel", "probe error", "remark")
    return section("Kernels", table(header, rows), *map(paragraph, report.remarks))


def _pairs(rows: Iterable[tuple[str, object]]) -> str:
    return table(("name", "value"), [(name, str(value)) for name, value in rows])


def charts(history: Iterable[Mapping[str, Any]]) -> list[str]:
    """A chart for each quantity in `history` (`TrainerState.log_history`), training and evaluation together.

    What TRL logs of chosen and of rejected answers shares a chart. A value that the Trainer has logged as None was not
    finite.
    """
    found: dict[str, dict[str, Points]] = {}
    for entry in history:
        if "train_runtime" in entry:  # of the whole run
            continue
        for key, value in entry.items():
            number = math.nan if value is None else value
            left_out = key in _NO_CURVES or (key.startswith("eval_") and key.endswith(_OF_THE_EVALUATION))
            if left_out or isinstance(number, bool) or not isinstance(number, int | float) or "step" not in entry:
                continue
            title, line = _place(key)
            found.setdefault(title, {}).setdefault(line, []).append((entry["step"], float(number)))
    order = {title: index for index, title in enumerate(_FIRST)}
    return [curves(title, found[title]) for title in sorted(found, key=lambda title: order.get(title, len(order)))]


def _place(key: str) -> tuple[str, str]:
    """The title of the chart and the name of the line."""
    title = key.removeprefix("eval_")
    where = "training" if title == key else "evaluation"
    prefix, _, last = title.rpartition("/")
    return (prefix, f"{last}, {where}") if prefix and last in _PAIR else (title, where)


def samples(history: Iterable[Mapping[str, Any]]) -> str:
    """A section with the answers to the same prompts at the last steps that had them, or nothing."""
    rows = [[entry["step"], *sample] for entry in history for sample in entry.get("samples", ())][-_ANSWERS:]
    shown = [[f"{step:,}", _shown(prompt), _shown(answer)] for step, prompt, answer in rows]
    return section("Samples", table(("step", "prompt", "answer"), shown)) if shown else ""


def _completions(completions: Mapping[str, Any]) -> str:
    """A section with the last completions of a policy, or nothing if there are none.

    Args:
        completions: As TRL's trainers keep them: `prompt`, `completion` and `advantages`, each with one value for each
            completion, and `rewards` and `extra`, which hold such columns by their names.
    """
    columns = {
        "prompt": completions.get("prompt", ()),
        "completion": completions.get("completion", ()),
        **completions.get("rewards", {}),
        **completions.get("extra", {}),
        "advantage": completions.get("advantages", ()),
    }
    count = len(columns["prompt"])
    if not count:
        return ""
    columns = {name: list(values)[-_SAMPLES:] for name, values in columns.items() if len(values) == count}
    rows = [[_shown(value) for value in row] for row in zip(*columns.values(), strict=True)]
    words = f"The last {len(rows)} of the {count} completions that were generated last."
    return section("Completions", paragraph(words), table(list(columns), rows))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "\n".join(map(_turn, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} … ({len(text):,} characters)"


def _turn(message: Any) -> str:
    """A message of a conversation; its images are named, not shown."""
    if not isinstance(message, Mapping):
        return str(message)
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return f"{message.get('role')}: {content}"


def changed_arguments(args: TrainingArguments) -> list[tuple[str, object]]:
    """Name and value of each argument that is not the default of its class; tokens and keys are not shown."""
    values = args.to_dict()
    given = [field for field in dataclasses.fields(args) if field.init and getattr(args, field.name) not in _EMPTY]
    changed = [field.name for field in given if not _is_default(args, field, values[field.name])]
    return [(name, _without_secrets(name, values[name])) for name in changed]


def environment(args: TrainingArguments) -> list[tuple[str, object]]:
    """Device, processes, and versions of this package and those that it works with."""
    versions = [(name, installed_version(name) or "not installed") for name in _PACKAGES]
    return [
        ("device", _device(args.device)),
        ("processes", args.world_size),
        ("system", platform.platform()),
        ("python", platform.python_version()),
        ("liger-trainer", __version__),
        *versions,
    ]


def _is_default(args: TrainingArguments, field: dataclasses.Field[Any], value: Any) -> bool:
    if field.name == "accelerator_config":  # the default, None, stands for this one
        return value.items() <= AcceleratorConfig(non_blocking=copies_without_waiting(args)).to_dict().items()
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return value == (default.value if isinstance(default, enum.Enum) else default)


def _without_secrets(name: str, value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_secrets(str(key), inner) for key, inner in value.items()}
    return _HIDDEN if isinstance(value, str) and name.lower().endswith(_SECRETS) else value


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    backend = torch.get_device_module(device)
    return backend.get_device_name(device) if hasattr(backend, "get_device_name") else str(device)
