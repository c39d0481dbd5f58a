"""What is left of a moment that an optimizer has stored."""

from __future__ import annotations

import torch

from liger_trainer.kernels.optim.block_codes import decode, encode


def as_stored(moment: torch.Tensor, states: str, signed: bool) -> torch.Tensor:
    """The numbers to which `states` round a moment, fp32; how far off they are is in kernels/optim/test_block_codes."""
    if states == "8bit":
        return decode(*encode(moment.float(), signed), signed)
    return moment.to({"bf16": torch.bfloat16, "fp32": torch.float32}[states]).float()
