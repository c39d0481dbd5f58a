"""Installs a wheel alone, and beside the transformers that other frameworks pin, and runs a few lines."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.compat.versions import OLDEST_TO_PATCH

PINS: dict[str, tuple[str, ...]] = {
    "torch alone": (),
    "the oldest transformers": (OLDEST_TO_PATCH,),
    "LLaMA-Factory": ("transformers==5.8.1",),
    "oumi": ("transformers==5.9.0",),
    "axolotl": ("transformers==5.14.1",),
    "ms-swift": ("transformers==5.16.1",),
}
TORCH_ALONE = """
import torch
from liger_trainer.functional import linear_cross_entropy
from liger_trainer.losses import LigerFusedLinearDPOLoss
from liger_trainer.nn import LigerRMSNorm
from liger_trainer.optim import LigerAdamW
hidden, head, target = torch.randn(16, 8), torch.randn(50, 8, requires_grad=True), torch.randint(0, 50, (16,))
loss = linear_cross_entropy(LigerRMSNorm(8)(hidden), head, target)
loss.backward()
LigerAdamW([head], lr=1e-3).step()
"""
WITH_TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from liger_trainer import apply_liger_kernel, revert_liger_kernel
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=100))
ids = torch.randint(0, 100, (2, 9))
expected = model(input_ids=ids, labels=ids).loss
report = apply_liger_kernel(model)
torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
names = {"rms_norm", "rope", "swiglu", "attention", "linear_cross_entropy"}
assert {row.component for row in report.applied} >= names, report
revert_liger_kernel(model)
"""


def try_in(folder: Path, wheel: Path, pins: tuple[str, ...], torch: str) -> None:
    """Installs the wheel and `pins` into a new environment, and runs the lines there.

    Raises:
        subprocess.CalledProcessError: if pip or the lines fail.
    """
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", torch, *pins, str(wheel)], check=True)
    code = TORCH_ALONE + (WITH_TRANSFORMERS if pins else "")
    subprocess.run([python, "-W", "ignore", "-c", code], check=True, cwd=folder)
    subprocess.run([python, "-m", "pip", "check"], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Runs what the command line asks for; returns 0 where all environments work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", default="torch", help="what pip is to install, such as torch==2.13.0")
    arguments = parser.parse_args()
    failed = False
    for name, pins in PINS.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                try_in(Path(folder) / "venv", arguments.wheel.resolve(), pins, arguments.torch)
                print(f"{name}: ok", flush=True)
            except subprocess.CalledProcessError as error:
                failed = True
                print(f"{name}: {' '.join(error.cmd[:5])} ... failed", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
