"""Sequences of which each process has a part: context and sequence parallelism of the launch."""

from __future__ import annotations

from accelerate.state import AcceleratorState, is_initialized


def split_sequences() -> str:
    """What gives each process a part of every sequence, and with it an attention of its own; empty if nothing does.

    The launch is known once a trainer, or an `Accelerator`, has been built.
    """
    config = AcceleratorState().parallelism_config if is_initialized() else None
    if config is None:
        return ""
    if config.cp_size > 1:
        return f"context parallelism (`cp_size={config.cp_size}`) needs torch's SDPA"
    if config.sp_size > 1:
        return f"sequence parallelism (`sp_size={config.sp_size}`) runs Ulysses' attention"
    return ""
