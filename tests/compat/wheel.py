"""Installs a wheel alone, and beside the transformers and PEFT that other frameworks pin, and runs a few lines."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.compat.versions import OLDEST_TO_PATCH

PINS: dict[str, tuple[str, ...]] = {  # the newest that each allows
    "torch alone": (),
    "the oldest transformers": (OLDEST_TO_PATCH,),
    "LLaMA-Factory 0.9.5": ("transformers==5.6.0", "peft==0.18.1"),
    "verl 0.9.1": ("transformers==5.10.4",),
    "oumi 0.9": ("transformers==5.16.1", "peft==0.19.1"),
    "axolotl 0.19.0": ("transformers==5.16.1", "peft==0.20.0"),
    "ms-swift 4.6.0": ("transformers==5.19.0", "peft==0.20.0"),
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
WITH_PEFT = """
from peft import LoraConfig, get_peft_model
adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
expected = adapted(input_ids=ids, labels=ids).loss
report = apply_liger_kernel(adapted)
torch.testing.assert_close(adapted(input_ids=ids, labels=ids).loss, expected)
assert "lora" in {row.component for row in report.applied}, report
"""


def try_in(folder: Path, wheel: Path, pins: tuple[str, ...], torch: str) -> None:
    """Installs the wheel and `pins` into a new environment, and runs the lines there.

    Raises:
        subprocess.CalledProcessError: if pip or the lines fail.
    """
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", torch, *pins, str(wheel)], check=True)
    adapters = any(pin.startswith("peft") for pin in pins)
    code = TORCH_ALONE + (WITH_TRANSFORMERS if pins else "") + (WITH_PEFT if adapters else "")
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
