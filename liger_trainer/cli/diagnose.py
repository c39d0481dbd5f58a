"""``liger-trainer doctor MODEL_OR_RECIPE``: the silent traps of a model or a recipe, before a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from liger_trainer.cli.run_recipe import prepare_libraries

if TYPE_CHECKING:
    from liger_trainer.diagnosis.diagnose import Diagnosis


def diagnose(arguments: Namespace, options: Sequence[str]) -> int:
    """Prints the traps of ``arguments.subject`` with the `options` that win over its keys.

    Returns:
        The exit code: 1 if there are traps, else 0.

    Raises:
        RecipeError: for a mistake that training would refuse too.
    """
    prepare_libraries(offline=arguments.smoke)
    from liger_trainer.diagnosis.case import read_case
    from liger_trainer.diagnosis.diagnose import diagnose as examine

    found = examine(read_case(arguments.subject, options, arguments.smoke))
    print("\n".join(lines(found)))
    return int(bool(found.traps))


def lines(found: Diagnosis) -> list[str]:
    """The report: a line for each trap and note, then what was checked and what was not."""
    shown = [f"trap: {trap}" for trap in found.traps] or ["nothing found"]
    shown += [f"note: {note}" for note in found.notes]
    shown.append(f"checked: {'; '.join(found.checked)}")
    return shown + [f"not checked: {name}: {reason}" for name, reason in found.unchecked.items()]
