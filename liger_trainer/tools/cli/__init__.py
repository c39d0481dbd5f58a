"""The command line: ``liger-trainer``, ``python -m liger_trainer``, and recipes that run as scripts.

Heavy libraries are imported when a command needs them, so that ``--help`` is quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from liger_trainer.tools.cli.run_recipe import run_recipe_file, run_yaml

__all__ = ["main", "run_recipe_file", "run_yaml"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``liger-trainer``.

    Args:
        argv: The arguments after the command's name; those of this process by default.

    Returns:
        The exit code: 0, or 2 after an error that the user can correct.
    """
    from liger_trainer.tools.cli.parser import run

    return run(sys.argv[1:] if argv is None else list(argv))
