"""Layers that have the keys of earlier ones, and run on the last tokens alone, as in Gemma 4.

Where layers share keys, only tokens that a logit is wanted of need to run through the last layers. So a model cuts what
it gives to them to its last `logits_to_keep` tokens, in a method of its own::

    hidden, tables, masks, n -> hidden[:, -n:], tables[:, -n:], masks[:, :, -n:]        n an integer, 0 for all

A plan is no tensor that could be cut. Without a mask, causality of fewer queries than keys would begin at the wrong
end. So the instance gets a method that keeps all tokens, unless every mask is a tensor. The head takes the last ones
then, as it does after flash attention, whose masks such a method does not cut either. In training, the same method
keeps those that a loss needs (`labelled_tokens.py`).

The class's own method runs on small tensors to see that it is this one.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import CUT_SHARED_LAYERS, CUT_SHARED_LAYERS_METHOD
from liger_trainer.patching.attention_call import Renamed
from liger_trainer.patching.labelled_tokens import HIDDEN, MASKS, of_kept_tokens

METHOD = CUT_SHARED_LAYERS_METHOD
_KEPT = "logits_to_keep"
_LENGTH, _SIZE, _TYPES = 5, 3, ("full_attention", "sliding_attention")


def shares_keys(config: Any) -> bool:
    """Whether layers of a model with this config have the keys of earlier ones."""
    return bool(getattr(config.get_text_config(), "num_kv_shared_layers", None))


def cuts_to_last_tokens(kind: type[nn.Module], config: Any, name: str) -> bool:
    """Whether the method of the class `kind` cuts all that it returns to the last tokens, and does nothing else.

    Args:
        kind: A class of models.
        config: The model's.
        name: The implementation of attention that the model has by default, whose masks the method cuts.
    """
    method: Any = getattr(kind, METHOD, None)
    if method is None or not available(CUT_SHARED_LAYERS):
        return False
    names, given = _returned(method), _arguments()
    if not names or not given.keys() >= {*names}:
        return False
    model = types.SimpleNamespace(config=Renamed(config, name))
    parameters = list(inspect.signature(method).parameters.values())[2 + len(names) :]  # behind `logits_to_keep`
    rest = {each.name: None for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD}
    try:
        for last in (0, 1, 3):
            returned = method(model, *(given[name] for name in names), last, **rest)
            if not isinstance(returned, tuple) or not _equal(returned, [_last(given[name], last) for name in names]):
                return False
    except Exception:  # of the model's own code
        return False
    return True


def method_that_keeps(kind: type[nn.Module]) -> Callable:
    """That of a class for which [`cuts_to_last_tokens`] holds, for masks that are all tensors.

    Else one that keeps all tokens, or those that a loss needs.
    """
    return _keeping(getattr(kind, METHOD))


@functools.cache
def _keeping(method: Callable) -> Callable:
    names = _returned(method)
    masks = names.index(MASKS)

    @functools.wraps(method)
    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *(kwargs[name] for name in names[len(args) :])][: len(names)]
        if all(isinstance(mask, torch.Tensor) for mask in given[masks].values()):
            return method(self, *args, **kwargs)
        found = None if torch.compiler.is_compiling() else of_kept_tokens(dict(zip(names, given)))
        return tuple(given if found is None else found)

    return keep


def _returned(method: Callable) -> list[str]:
    """The names of what a method returns: of its arguments before the number of tokens; empty without that."""
    names = list(inspect.signature(method).parameters)[1:]
    return names[: names.index(_KEPT)] if _KEPT in names and {HIDDEN, MASKS} <= {*names} else []


def _arguments() -> dict[str, Any]:
    """Small tensors for the arguments of such a method, by their names, in order."""
    numbers = torch.arange(_LENGTH * _SIZE, dtype=torch.float32, device="cpu")
    hidden = numbers.view(1, _LENGTH, _SIZE)
    mask = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool, device="cpu").tril()[None, None]
    return {
        HIDDEN: hidden,
        "per_layer_inputs": -hidden[..., None],
        "position_embeddings": dict.fromkeys(_TYPES, (hidden + 1, hidden + 2)),
        MASKS: dict.fromkeys(_TYPES, mask),
    }


def _last(value: Any, count: int) -> Any:
    """The last `count` tokens, or all for 0: of dimension 1, and for masks (1, 1, tokens, keys) of dimension 2."""
    if isinstance(value, Mapping):
        return {kind: _last(each, count) for kind, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_last(each, count) for each in value)
    return value[:, :, -count:] if value.dtype == torch.bool else value[:, -count:]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return False
