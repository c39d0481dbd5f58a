"""Which modules the quantisation settings of a checkpoint name: those that they leave in 16 bits, and those of a group.

Their lists hold names, patterns with ``*`` (ModelOpt, gpt-oss) and regular expressions behind ``re:``
(compressed-tensors). The names are those of the checkpoint's modules, with a linear layer for each matrix of an expert.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

_AROUND = ("model", "language_model.model", "model.language_model")  # what checkpoints have before `layers`
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_LEFT = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
_EVERY = "Linear"  # a target that is a class


def settings_for(settings: Mapping[str, Any], name: str, stacked: bool = False) -> Mapping[str, Any] | None:
    """The settings of one weight, with only its own group of several `config_groups`; None if it is left in 16 bits.

    Args:
        settings: The checkpoint's `quantization_config`.
        name: The name of the linear layer in the model, or of the parameter of experts.
        stacked: Whether it is a parameter of stacked experts.
    """
    settings = flat(settings)
    names = _names_of(name, stacked)
    left = [entry for key in _LEFT for entry in settings.get(key) or ()]
    left += [f"re:{key[2:]}" for key in settings.get("dynamic") or () if key.startswith("-:")]  # of GPTQ
    if _any_named(left, names):
        return None
    groups = settings.get("config_groups") or {}
    if not groups:
        return settings
    targets = {key: group.get("targets") or () for key, group in groups.items()}
    key = next((key for key, entries in targets.items() if _any_named(entries, names)), None)
    key = key or next((key for key, entries in targets.items() if _EVERY in entries), None)
    if key is None:
        return None
    form = groups[key].get("format") or settings.get("format")
    return {**settings, "format": form, "config_groups": {key: groups[key]}}


def flat(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings with those that ModelOpt may nest in `quantization`."""
    nested = settings.get("quantization")
    return {**settings, **nested} if isinstance(nested, Mapping) else settings


def _names_of(name: str, stacked: bool) -> list[str]:
    """The names that checkpoints may have for a weight of the model."""
    path, _, leaf = name.rpartition(".")
    own = [name, *(f"{path}.0.{matrix}" for matrix in _MATRICES.get(leaf, ()))] if stacked else [name]
    inside = [found[0] for each in own if (found := re.search(r"(?<![^.])layers\..*", each))]
    return [*own, *(f"{around}.{each}" for around in _AROUND for each in inside)]


def _any_named(entries: Iterable[Any], names: Iterable[str]) -> bool:
    return any(_is_named(str(entry), name) for entry in entries for name in names)


def _is_named(entry: str, name: str) -> bool:
    """Whether `entry` names the module or one around it; without a number of a layer, it names those of all layers."""
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    if "*" in entry:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in (entry, f"{entry}.*"))
    return any(f".{entry}." in f".{each}." for each in (name, re.sub(r"\.\d+(?=\.|$)", "", name)))
