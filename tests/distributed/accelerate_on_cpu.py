"""Lets accelerate shard over processes that have no accelerator, so that tests run its own code on any machine."""

from __future__ import annotations

import os


def shard_on_cpu() -> None:
    """Makes accelerate take this gloo process for one with a GPU of its own.

    accelerate looks at FSDP only where there is an accelerator; on CPUs it knows DDP alone. What follows that question
    (its plugins, its wrapping, its checkpoints) asks torch, which shards on any device.
    """
    from accelerate.state import DistributedType, PartialState

    if "LOCAL_RANK" not in os.environ:
        return
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP has no device index
    PartialState._prepare_backend = lambda self, *args: ("gloo", DistributedType.MULTI_GPU)  # type: ignore[method-assign]
