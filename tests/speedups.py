"""Skips work of other libraries that slows the tests and that no test checks; every process of the tests imports it."""

import functools
import importlib.metadata
from types import SimpleNamespace

import torch

# accelerate asks at every step whether DeepSpeed and PEFT are installed, and parses their metadata each time.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)

# Each seed is queued for every kind of accelerator, with the stack of the call, which takes longer than to seed.
for accelerator in (torch.cuda, torch.mtia, torch.xpu):
    accelerator.traceback = SimpleNamespace(format_stack=list)
