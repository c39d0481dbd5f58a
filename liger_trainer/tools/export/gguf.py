"""A model in the format of llama.cpp, by llama.cpp's own converter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from liger_trainer.errors import UserError

CONVERTER = "convert_hf_to_gguf.py"
TYPES = ("f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto")
"""What the converter can write; smaller ones are made of these by llama.cpp's ``llama-quantize``."""


def find_converter(llama_cpp: str | None) -> list[str]:
    """The command of llama.cpp's converter.

    Args:
        llama_cpp: A checkout of llama.cpp, whose script runs with this Python; by default the script is on the PATH.

    Raises:
        UserError: if it is not there.
    """
    if llama_cpp is None:
        found = shutil.which(CONVERTER)
        if found is None:
            raise UserError(
                f"`--gguf` needs llama.cpp's {CONVERTER}, which is not on the PATH; give the folder of a llama.cpp "
                "checkout with `--llama_cpp`."
            )
        return [found]
    script = Path(llama_cpp) / CONVERTER
    if not script.is_file():
        raise UserError(f"`--llama_cpp` is {llama_cpp!r}, which holds no {CONVERTER}; give a checkout of llama.cpp.")
    return [sys.executable, str(script)]


def convert(converter: list[str], folder: Path, kind: str) -> Path:
    """Writes the model in `folder` as one GGUF file there, and gives its path.

    Raises:
        UserError: if the converter fails; its last line is in the message.
    """
    file = folder / f"{folder.absolute().name}-{kind}.gguf"
    command = [*converter, str(folder), "--outtype", kind, "--outfile", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not file.is_file():
        file.unlink(missing_ok=True)
        said = (done.stderr.strip() or done.stdout.strip() or "it wrote no file").splitlines()[-1]
        raise UserError(
            f"The merged model in {str(folder)!r} is complete, but {CONVERTER} failed (exit code {done.returncode}): "
            f"{said}"
        )
    return file
