"""Sequences of which each process has a part: context and sequence parallelism of the launch."""

from __future__ import annotations

import sys


def split_sequences() -> str:
    """Why attention is left to the launch: it gives each process a part of every sequence. Empty if it does not.

    The launch is known once a trainer, or an `Accelerator`, has been built.
    """
    state = sys.modules.get("accelerate.state")
    config = state.AcceleratorState().parallelism_config if state is not None and state.is_initialized() else None
    return "" if config is None else reason_of_sizes(config.cp_size, config.sp_size)


def reason_of_sizes(cp_size: int, sp_size: int) -> str:
    """As `split_sequences`, of a launch with these sizes of the context and the sequence parallel group."""
    if cp_size > 1:
        return f"the launch splits sequences with `cp_size={cp_size}`, whose ring attention is torch's SDPA"
    if sp_size > 1:
        return f"the launch splits sequences with `sp_size={sp_size}`, which brings Ulysses' attention"
    return ""
