"""The layers of a model that are checkpointed, by transformers or by FSDP, and the function that checkpoints them."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import CHECKPOINT_WRAPPERS
from liger_trainer.compat.transformers import CHECKPOINTED_LAYERS

Checkpoint = Callable[..., Any]
"""``checkpoint(function, *args, **kwargs)``, as `torch.utils.checkpoint.checkpoint`."""

Layers = MutableMapping[nn.Module, tuple[str, str]]
"""Modules, each with its name and the attribute that holds the function which checkpoints it."""

OF_TRANSFORMERS = "_gradient_checkpointing_func"
_OF_FSDP = "checkpoint_fn"


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


def layers_of(model: nn.Module) -> Layers:
    """The layers of `model`, with its wrappers, that transformers can checkpoint, or FSDP does."""
    require(CHECKPOINTED_LAYERS)
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    found: Layers = weakref.WeakKeyDictionary()
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            found[module] = name, OF_TRANSFORMERS
        elif wrappers is not None and isinstance(module, wrappers.CheckpointWrapper):
            require(CHECKPOINT_WRAPPERS)
            found[module] = name, _OF_FSDP
    return found


def replace_checkpoints(layers: Layers, instead: Callable[..., Any]) -> None:
    """Has the `layers` that are checkpointed call `instead`, where they do not yet.

    Their own functions come back whenever somebody enables checkpointing again.
    """
    for module, (name, attribute) in layers.items():
        if attribute == OF_TRANSFORMERS and not module.gradient_checkpointing:
            continue
        checkpoint = getattr(module, attribute)
        if not isinstance(checkpoint, Replaced) or checkpoint.instead != instead:
            own = checkpoint.checkpoint if isinstance(checkpoint, Replaced) else checkpoint
            setattr(module, attribute, Replaced(name, own, instead))


def is_reentrant(checkpoint: Checkpoint) -> bool:
    """Whether `checkpoint` is torch's with ``use_reentrant=True``, which takes no contexts."""
    keywords = checkpoint.keywords if isinstance(checkpoint, functools.partial) else {}
    return bool(keywords.get("use_reentrant", False))
