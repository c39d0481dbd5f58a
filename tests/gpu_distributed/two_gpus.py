"""Runs `work` of a test module on two GPUs, one process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def results_of(module: str, folder: Path, **environment: str) -> list[dict[str, Any]]:
    """What `work(folder)` of `module` wrote on each rank with [`write_results`]."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", module]
    done = subprocess.run(
        [*command, str(folder)],
        cwd=Path(__file__).parents[2],
        timeout=240,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def write_results(folder: str, results: dict[str, Any]) -> None:
    """Leaves `results` of this rank for [`results_of`]."""
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
