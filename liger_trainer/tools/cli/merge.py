"""``liger-trainer merge``: a run's adapters in the weights of their base model, proved to be the same model.

The format of llama.cpp is written by llama.cpp's own converter.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError
from liger_trainer.tools.cli.argument_types import add_run
from liger_trainer.tools.cli.run_recipe import quiet_libraries

if TYPE_CHECKING:
    from liger_trainer.tools.export.fp8_blocks import Survival
    from liger_trainer.tools.export.merging import Proof


CONVERTER = "convert_hf_to_gguf.py"
TYPES = ("f32", "f16", "bf16", "q8_0", "tq1_0", "tq2_0", "auto")
"""What the converter can write; smaller ones are made of these by llama.cpp's ``llama-quantize``."""


def find_converter(llama_cpp: str | None) -> list[str]:
    """The command of llama.cpp's converter: of a checkout, whose script runs with this Python, or on the PATH."""
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
    """Writes the model in `folder` as one GGUF file there, and gives its path."""
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


DTYPES = ("float32", "bfloat16", "float16")


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "merge",
        help="merge a run's adapters into its model",
        description="Writes a plain transformers model with the adapters of a run in its weights, and proves that it "
        "computes the logits of the adapted model.",
    )
    add_run(parser, "adapters")
    parser.add_argument(
        "--output_dir",
        metavar="DIR",
        help="an empty or a new folder for the model; default: `merged` in RUN, or `merged-checkpoint-N` beside it",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the saved weights; default: that of the base model")
    parser.add_argument(
        "--to",
        metavar="fp8",
        help="quantise the merged weights again, into the FP8 of the base, and measure what that leaves of the "
        "adapters; default: 16 bits, which loses nothing",
    )
    parser.add_argument("--gguf", choices=TYPES, help="write a GGUF file too, with llama.cpp's converter")
    parser.add_argument(
        "--llama_cpp", metavar="DIR", help="a checkout of llama.cpp; default: the converter on the PATH"
    )
    parser.set_defaults(function=lambda arguments, _: merge(arguments))


def merge(arguments: Namespace) -> int:
    """Merges the run ``arguments.run``; returns the exit code."""
    if arguments.llama_cpp is not None and arguments.gguf is None:
        raise UserError("`--llama_cpp` is given without `--gguf`; name the type, such as `--gguf q8_0`.")
    if arguments.to is not None and (arguments.dtype or arguments.gguf):
        other = "--dtype" if arguments.dtype else "--gguf"
        raise UserError(f"`--to` and `{other}` are given, and each says what the weights are saved in; leave one out.")
    converter = find_converter(arguments.llama_cpp) if arguments.gguf is not None else None
    quiet_libraries()
    import torch

    from liger_trainer.tools.export.folders import default_folder
    from liger_trainer.tools.export.merging import merge as merge_run
    from liger_trainer.tools.export.saved_run import find_run

    run = find_run(arguments.run, arguments.base_model, arguments.trust_remote_code)
    folder = Path(arguments.output_dir) if arguments.output_dir else default_folder(Path(arguments.run), "merged")
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    proof = merge_run(run, folder, dtype, to=arguments.to)
    for line in _lines(proof):
        print(line)
    print(f"The merged model is in {folder}.")
    if converter is not None:
        print(f"The GGUF file is {convert(converter, folder, arguments.gguf)}.")
    return 0


def _lines(proof: Proof) -> list[str]:
    lines = [
        f"Proved on random tokens: merging changes the logits by {proof.merged:.0e} of their size in fp32, and saving "
        f"by {proof.saved:.1e}, where the rounding of the weights explains {proof.limit:.1e}; the adapters change them "
        f"by {proof.effect:.1e}."
    ]
    if proof.survival is not None:
        lines += _lines_of_survival(proof.survival)
    if proof.effect == 0:
        lines.append("The adapters change nothing: they are as they were before training.")
    elif proof.effect < proof.saved:
        lines.append(
            "Rounding changes the logits by more than the adapters do, so little of the training is left; "
            + ("`--dtype float32` keeps it." if proof.survival is None else "without `--to` more of it is kept.")
        )
    return lines


def _lines_of_survival(survival: Survival) -> list[str]:
    from liger_trainer.tools.export.merging import SURVIVAL_FILE

    if survival.worst is None:
        return ["The adapters change no weight that is in FP8."]
    least = survival.layers[survival.worst]
    return [
        f"In FP8, {survival.model.share:.1%} of the adapters' change survives, with an error of "
        f"{survival.model.error:.1%} of it; in {survival.worst}, the worst, {least.share:.1%} with {least.error:.1%}. "
        f"{SURVIVAL_FILE} has every weight."
    ]
