"""Layers that share keys, under checkpoints that are reentrant.

A layer that stores its keys for later ones is checkpointed as any other. A reentrant checkpoint runs it without a graph
first. So the later layers get keys that no gradient goes back from: the loss is right, and the projections of the keys,
with all before them, learn from their own layer alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_trainer.patching.shared_layers import shares_keys
from liger_trainer.recompute.keeping import OF_TRANSFORMERS, is_reentrant, layers_of


def loses_shared_gradients(config: Any, checkpointing_kwargs: Mapping[str, Any] | None) -> bool:
    """Whether checkpoints with these `gradient_checkpointing_kwargs` lose gradients of a model with this config."""
    return bool((checkpointing_kwargs or {}).get("use_reentrant")) and shares_keys(config)


def check_shared_keys(trainer: Any) -> None:
    """Checks that no gradients of keys that layers share are lost.

    Raises:
        ValueError: if they are.
    """
    args, model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return
    kwargs = args.gradient_checkpointing_kwargs
    if not args.gradient_checkpointing and _is_checkpointed_reentrantly(model):
        kwargs = {"use_reentrant": True}
    if loses_shared_gradients(config, kwargs):
        raise ValueError(
            f"layers of {config.model_type} share keys, whose gradients use_reentrant=True loses. Set it to False."
        )


def _is_checkpointed_reentrantly(model: Any) -> bool:
    """Whether the caller has switched such checkpoints on before the trainer was built."""
    layers = (module for module, (_, attribute) in layers_of(model).items() if attribute == OF_TRANSFORMERS)
    return any(each.gradient_checkpointing and is_reentrant(getattr(each, OF_TRANSFORMERS)) for each in layers)  # type: ignore[arg-type]
