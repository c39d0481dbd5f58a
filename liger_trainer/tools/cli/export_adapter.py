"""``liger-trainer export-adapter``: a run's adapters in another layout, for servers that do not read PEFT's."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from liger_trainer.tools.cli.argument_types import add_run
from liger_trainer.tools.cli.run_recipe import quiet_libraries

LAYOUTS = ("per-expert",)


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "export-adapter",
        help="write a run's adapters in the layout that a server reads",
        description="Writes the adapters of a run in another layout. Nothing is computed: the adapters are the same.",
    )
    add_run(parser, "adapters")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        required=True,
        help="per-expert: PEFT's adapters on stacked experts become one adapter for each linear layer of each expert",
    )
    parser.add_argument(
        "--output_dir",
        metavar="DIR",
        help="an empty or a new folder for the adapters; default: `per-expert` in RUN, or `per-expert-checkpoint-N` "
        "beside it",
    )
    parser.set_defaults(function=lambda arguments, _: export(arguments))


def export(arguments: Namespace) -> int:
    """Exports the adapters of ``arguments.run``; returns the exit code."""
    quiet_libraries()
    from liger_trainer.tools.export.expert_adapters import export_per_expert
    from liger_trainer.tools.export.folders import default_folder
    from liger_trainer.tools.export.saved_run import find_run

    run = find_run(arguments.run, arguments.base_model, arguments.trust_remote_code)
    named = arguments.output_dir
    folder = Path(named) if named else default_folder(Path(arguments.run), arguments.layout)
    found = export_per_expert(run, folder)
    if found.lacking:
        print(
            f"The experts have no adapters on {', '.join(found.lacking)}; vLLM loads experts whose layers all have one."
        )
    if not found.by_peft:
        reason = "whose experts it does not stack"
        if found.stacked:
            reason = "whose experts it stacks, but not where only some layers or projections have adapters"
        print(
            f"PEFT cannot read this folder on this model, {reason}; servers with a layer for each expert can, and PEFT "
            "reads the run's own."
        )
    print(f"{found.layers} linear layers of experts have an adapter of rank {found.rank} each; the folder is {folder}.")
    return 0
