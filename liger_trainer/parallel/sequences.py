"""Sequences of which each process has a part: context and sequence parallelism of the launch."""

from __future__ import annotations

from pathlib import Path

import yaml
from accelerate.state import AcceleratorState, is_initialized

SPLIT = "the launch splits sequences with "


def split_sequences() -> str:
    """Why attention is left to the launch: it gives each process a part of every sequence. Empty if it does not.

    The launch is known once a trainer, or an `Accelerator`, has been built.
    """
    config = AcceleratorState().parallelism_config if is_initialized() else None
    return "" if config is None else _reason(config.cp_size, config.sp_size)


def split_by_file(file: Path) -> str:
    """As `split_sequences`, of a launch with this accelerate configuration."""
    config = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("parallelism_config") or {}
    return _reason(config.get("parallelism_config_cp_size", 1), config.get("parallelism_config_sp_size", 1))


def _reason(cp_size: int, sp_size: int) -> str:
    if cp_size > 1:
        return f"{SPLIT}`cp_size={cp_size}`, whose ring attention is torch's SDPA"
    if sp_size > 1:
        return f"{SPLIT}`sp_size={sp_size}`, which brings Ulysses' attention"
    return ""
