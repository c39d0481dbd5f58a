"""Weights of FSDP2 that a forward inside a backward does not leave gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def sharded_again(model: Any) -> Iterator[None]:
    """The layers of `model` that run inside shard their weights after their forwards, as outside of a backward.

    FSDP2 takes a forward inside a backward for the recomputation of one layer, whose backward is next, and leaves its
    weights gathered. After the recomputation of a whole model those of all layers would be in memory.

    Args:
        model: A transformers model. Its head is left alone: it is the last to run, and the first to have a backward.
    """
    handles = [layer.register_forward_hook(_shard) for layer in _sharded_layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sharded_layers(model: Any) -> list[Any]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    modules = (module for module in model.base_model.modules() if module is not model and list(module.children()))
    return [module for module in modules if isinstance(module, FSDPModule)]


def _shard(layer: Any, args: tuple[Any, ...], output: Any) -> None:
    # FSDP2 gathers the weights for each backward of a layer, but only once if the layer's input gets no gradient.
    if any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
        layer.reshard()
