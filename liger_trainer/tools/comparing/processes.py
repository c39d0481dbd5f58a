"""The runs of a comparison, one process after the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from liger_trainer.errors import UserError
from liger_trainer.tools.comparing.request import WARM_START, Request, read_source
from liger_trainer.tools.comparing.side import SIDES, Measured


def run_sides(request: Request, say: Callable[[str], None]) -> dict[str, Measured]:
    """Runs every side in a process of its own, and deletes what they left for each other; `say` is told what runs."""
    request.work.mkdir()
    request.write()
    try:
        warm = read_source(request)[1].get("warm_start") is not None
        for side in (*([WARM_START] if warm else []), *SIDES):
            say(f"{side.replace('_', ' ')}: running")
            log = request.folder / f"{side}.log"
            code = start(side, request.folder, log)
            if code:
                raise UserError(f"The run `{side}` failed: {last_words(log, code)} Its log is {str(log)!r}.")
        return {side: Measured.read(request.work, side) for side in SIDES}
    finally:
        shutil.rmtree(request.work, ignore_errors=True)


def start(side: str, folder: Path, log: Path) -> int:
    """Runs one side, with its output in `log`; returns its exit code."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "liger_trainer.tools.comparing.side", side, str(folder)]
    with log.open("wb") as output:
        return subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode


def last_words(log: Path, code: int) -> str:
    """Why a run ended, as one sentence, from its log and its exit code."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("liger-trainer: ")]
    errors = [line for line in lines if line[:1].isalpha() and "Error" in line.split(":")[0]]
    line = (said or errors or lines or [f"exit code {code}"])[-1].removeprefix("liger-trainer: ").strip()
    return line if line.endswith((".", "!", "?")) else f"{line}."
