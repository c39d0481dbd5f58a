"""The layers of a model that are checkpointed, by transformers or by FSDP, and the function that checkpoints them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import CHECKPOINT_WRAPPERS
from liger_trainer.compat.transformers import CHECKPOINTED_LAYERS

Checkpoint = Callable[..., Any]
"""``checkpoint(function, *args, **kwargs)``, as `torch.utils.checkpoint.checkpoint`."""

_OF_TRANSFORMERS = "_gradient_checkpointing_func"
_OF_FSDP = "checkpoint_fn"

require(CHECKPOINTED_LAYERS)


class Replaced:
    """Checkpoints a layer by `instead`, which may call the `checkpoint` that the layer had."""

    def __init__(self, name: str, checkpoint: Checkpoint, instead: Callable[..., Any]) -> None:
        self.name, self.checkpoint, self.instead = name, checkpoint, instead

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """The result of ``function(*args)``, checkpointed."""
        return self.instead(self.name, self.checkpoint, function, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable, tuple[Checkpoint]]:
        return _itself, (self.checkpoint,)  # a copy of the model is not the one that is trained


def _itself(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


def checkpointed_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The name of each checkpointed layer, the module, and its attribute with the function that checkpoints it."""
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            yield name, module, _OF_TRANSFORMERS
        elif wrappers is not None and isinstance(module, wrappers.CheckpointWrapper):
            require(CHECKPOINT_WRAPPERS)
            yield name, module, _OF_FSDP


def replace_checkpoints(model: nn.Module, instead: Callable[..., Any]) -> int:
    """Has the checkpointed layers of `model` call `instead`, where they do not yet; returns the number of layers.

    Args:
        model: With its wrappers. Its own functions come back whenever somebody enables checkpointing again.
        instead: Called with the layer's name, the function that the layer had, and that function's arguments.
    """
    layers = list(checkpointed_layers(model))
    for name, module, attribute in layers:
        checkpoint = getattr(module, attribute)
        if not isinstance(checkpoint, Replaced) or checkpoint.instead != instead:
            own = checkpoint.checkpoint if isinstance(checkpoint, Replaced) else checkpoint
            setattr(module, attribute, Replaced(name, own, instead))
    return len(layers)


def is_reentrant(checkpoint: Checkpoint) -> bool:
    """Whether `checkpoint` is torch's with ``use_reentrant=True``, which takes no contexts."""
    keywords = checkpoint.keywords if isinstance(checkpoint, functools.partial) else {}
    return bool(keywords.get("use_reentrant", False))
