"""All checks of a case, and what they found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from liger_trainer.recipe.schema import TRAINERS
from liger_trainer.tools.diagnosis.hybrids import leaks, unreached, wrong_package
from liger_trainer.tools.diagnosis.labels import (
    behind_positions,
    cut_answers,
    few_labels,
    left_out,
    no_end,
    not_in_text,
    one_label,
    placeholders,
    prompt_alone,
    same_answers,
    two_beginnings,
    weights_without_effect,
    without_label,
)
from liger_trainer.tools.diagnosis.sample import CannotCheckError, Case, Sample, Trap, read_sample
from liger_trainer.tools.diagnosis.settings import (
    idle_fp8,
    low_bit_base,
    reentrant_checkpoints,
    rounded,
    sampling,
    taken_for_experts,
    tied_adapters,
    too_long,
    unshared_prompts,
)

OF_SETTINGS: dict[str, Callable[[Case], list[Trap]]] = {
    "dtype and learning rate": rounded,
    "adapters on tied weights": tied_adapters,
    "adapters on experts": taken_for_experts,
    "weights in 8 bits and fewer": low_bit_base,
    "linear layers without an adapter": unreached,
    "packing": leaks,
    "flash-linear-attention": wrong_package,
    "prompts computed once": unshared_prompts,
    "sampling": sampling,
    "positions": too_long,
    "gradient checkpointing": reentrant_checkpoints,
    "fp8": idle_fp8,
}
OF_LABELS: dict[str, Callable[[Case, Sample], list[Trap]]] = {
    "rows left out": left_out,
    "rows without a label": without_label,
    "labelled share": few_labels,
    "answers cut off": cut_answers,
    "image tokens": placeholders,
    "two beginnings": two_beginnings,
}
OF_ROWS: dict[str, Callable[[Case, Sample], list[Trap]]] = {
    "what reaches the text": not_in_text,
    "answers that are not to be learnt": weights_without_effect,
    "answers that are the same": same_answers,
    "answers of one kind": one_label,
    "prompts before an answer": prompt_alone,
    "rows and positions": behind_positions,
}
_NEEDS: dict[str, tuple[str, ...]] = {  # trainers, where not all
    "packing": ("sft",),
    "sampling": tuple(name for name, kind in TRAINERS.items() if kind.generates),
}

# What a model without a recipe is tried with: settings that are traps for some models.
_TRIED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dtype and learning rate", {"dtype": "bfloat16", "optim": "adamw_torch_fused", "learning_rate": 1e-5}),
    ("adapters on tied weights", {"use_peft": True, "lora_modules_to_save": ["lm_head"]}),
    ("packing", {"packing": True}),
)


@dataclasses.dataclass
class Diagnosis:
    """What was found."""

    traps: list[Trap] = dataclasses.field(default_factory=list)  # mistakes of the recipe or the model
    # Mistakes with other settings, for a model without a recipe.
    notes: list[str] = dataclasses.field(default_factory=list)
    checked: list[str] = dataclasses.field(default_factory=list)  # the names of the checks that looked
    # The names of those that could not, with the reasons.
    unchecked: dict[str, str] = dataclasses.field(default_factory=dict)

    def look(self, name: str, check: Callable[..., list[Trap]], *arguments: Any) -> None:
        """Runs a check, and notes what it found or why it could not look."""
        try:
            self.traps += check(*arguments)
        except CannotCheckError as error:
            self.unchecked[name] = str(error)
        else:
            self.checked.append(name)


def diagnose(case: Case) -> Diagnosis:
    """Runs all checks that concern `case`."""
    found = Diagnosis()
    for name, check in OF_SETTINGS.items():
        if case.values["trainer"] in _NEEDS.get(name, (case.values["trainer"],)):
            found.look(name, check, case)
    if case.is_model:
        _try_settings(case, found)
    _look_at_data(case, found)
    return found


def _look_at_data(case: Case, found: Diagnosis) -> None:
    try:
        sample = read_sample(case)
    except CannotCheckError as error:
        found.unchecked["the data, its labels and the end of an answer"] = str(error)
        return
    if not case.kind.scores:
        found.look("the end of an answer", no_end, case, sample)
    if sample.rows:
        for name, check in OF_ROWS.items():
            found.look(name, check, case, sample)
    labels = f"{', '.join(OF_LABELS)} in the first {sample.rows} rows"
    if case.kind.generates:
        found.unchecked["labels"] = "the answers are generated"
    elif not sample.rows:
        found.unchecked["labels"] = "no data is named; give a recipe, or `--data_files` or `--dataset_name`"
    else:
        found.look(labels, lambda: [trap for check in OF_LABELS.values() for trap in check(case, sample)])


def _try_settings(case: Case, found: Diagnosis) -> None:
    for name, settings in _TRIED:
        try:
            traps = OF_SETTINGS[name](case.having(**settings))
        except (CannotCheckError, ValueError):  # such as a head of another name, to which no adapter goes
            continue
        asked = ", ".join(f"`{key}: {value}`" for key, value in settings.items())
        found.notes += [f"With {asked}: {trap}" for trap in traps if trap not in found.traps]
