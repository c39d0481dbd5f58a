"""Every test draws from its own name, so that its numbers depend on no other test, order, worker or selection."""

from __future__ import annotations

import random
import zlib

import numpy as np
import torch


def seed(*name: object) -> None:
    """Seeds torch on every device, NumPy and Python from `name`, the same in every process."""
    number = zlib.crc32(repr(name).encode())
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
