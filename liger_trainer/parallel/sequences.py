"""Sequences of which each process has a part: context and sequence parallelism of the launch."""

from __future__ import annotations

from accelerate.state import AcceleratorState, is_initialized

SPLIT = "the launch splits sequences with "


def split_sequences() -> str:
    """Why attention is left to the launch: it gives each process a part of every sequence. Empty if it does not.

    The launch is known once a trainer, or an `Accelerator`, has been built.
    """
    config = AcceleratorState().parallelism_config if is_initialized() else None
    if config is None:
        return ""
    if config.cp_size > 1:
        return f"{SPLIT}`cp_size={config.cp_size}`, whose ring attention is torch's SDPA"
    if config.sp_size > 1:
        return f"{SPLIT}`sp_size={config.sp_size}`, which brings Ulysses' attention"
    return ""
