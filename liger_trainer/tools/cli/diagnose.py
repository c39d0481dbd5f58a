"""The ``liger-trainer doctor`` command: this machine, or the silent traps of a model or a recipe before a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError
from liger_trainer.tools.cli.doctor import doctor
from liger_trainer.tools.cli.run_recipe import prepare_libraries

if TYPE_CHECKING:
    from liger_trainer.tools.diagnosis.diagnose import Diagnosis


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="what runs here, what does not, and why; or the silent traps of a recipe",
        description="Checks versions, devices and known problems. With a model or a recipe, finds its silent traps, "
        "each with its fix, from the configuration, the tokenizer and the first rows of the data; no weights are "
        "loaded. Keys of the recipe are also options. The exit code is 1 if there are any.",
        usage="liger-trainer doctor [MODEL_OR_RECIPE] [--smoke] [--key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "subject",
        metavar="MODEL_OR_RECIPE",
        nargs="?",
        help="a YAML file, the name of a shipped recipe, a Hub id, a model folder, or a config.json",
    )
    parser.add_argument("--smoke", action="store_true", help="check what `train --smoke` would train, offline")
    parser.set_defaults(function=run)


def run(arguments: Namespace, options: Sequence[str]) -> int:
    """Prints the traps of ``arguments.subject`` with the `options` that win over its keys, or looks at this machine.

    Returns:
        The exit code: 1 if there are traps, or if something keeps the package from working, else 0.
    """
    if arguments.subject is None:
        if arguments.smoke:
            raise UserError("`--smoke` needs a recipe: liger-trainer doctor RECIPE --smoke")
        return doctor()
    prepare_libraries(offline=arguments.smoke)
    from liger_trainer.tools.diagnosis.diagnose import diagnose
    from liger_trainer.tools.diagnosis.sample import read_case

    found = diagnose(read_case(arguments.subject, options, arguments.smoke))
    print("\n".join(lines(found)))
    return int(bool(found.traps))


def lines(found: Diagnosis) -> list[str]:
    """The report: a line for each trap and note, then what was checked and what was not."""
    shown = [f"trap: {trap}" for trap in found.traps] or ["nothing found"]
    shown += [f"note: {note}" for note in found.notes]
    shown.append(f"checked: {'; '.join(found.checked)}")
    return shown + [f"not checked: {name}: {reason}" for name, reason in found.unchecked.items()]
