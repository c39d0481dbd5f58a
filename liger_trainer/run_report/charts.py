"""The log of a Trainer as charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from liger_trainer.pages import curves

Points = list[tuple[float, float]]

# These first, then whatever else was logged, in its order.
_FIRST = (
    *("loss", "reward", "rewards", "rewards/accuracies", "accuracy", "rewards/margins", "mean_token_accuracy"),
    *("perplexity", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "peak_memory_gib"),
)
_NO_CURVES = ("step", "epoch", "total_flos", "num_tokens", "num_input_tokens_seen")
_OF_THE_EVALUATION = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")
_PAIR = ("chosen", "rejected")


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
            if not _is_logged_number(key, number) or "step" not in entry:
                continue
            title, line = _place(key)
            found.setdefault(title, {}).setdefault(line, []).append((entry["step"], float(number)))
    order = {title: index for index, title in enumerate(_FIRST)}
    return [curves(title, found[title]) for title in sorted(found, key=lambda title: order.get(title, len(order)))]


def _is_logged_number(key: str, value: object) -> bool:
    left_out = key in _NO_CURVES or (key.startswith("eval_") and key.endswith(_OF_THE_EVALUATION))
    return isinstance(value, int | float) and not isinstance(value, bool) and not left_out


def _place(key: str) -> tuple[str, str]:
    """The title of the chart and the name of the line."""
    title = key.removeprefix("eval_")
    where = "training" if title == key else "evaluation"
    prefix, _, last = title.rpartition("/")
    return (prefix, f"{last}, {where}") if prefix and last in _PAIR else (title, where)
