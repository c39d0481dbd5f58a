"""Sparse attention (DeepSeek V3.2, GLM-5): an indexer selects the `index_topk` keys that each query sees.

A query that has no more keys than that sees all of them. So in documents of at most `index_topk` tokens the attention
is dense to the bit, whatever the indexer computes, and it need not run. transformers runs it without gradients: it is
never trained.

Under our name for the attention an indexer is given a part of a plan, and what it selects is passed to our attention:
as the bits of a plan, a 32nd of the indices of 2048 keys at 2048 tokens and a half at 32k. The model's code hands them
on to layers that share a selection, as it would the indices.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.attention.masks import MaskPart
from liger_trainer.kernels.attention.plan import BLOCK, AttentionPlan, bits_of, dense
from liger_trainer.patching.model_forward import CACHE_NAMES

logger = logging.getLogger("liger_trainer")

_MASK = "attention_mask"


def find_indexer(module: nn.Module) -> nn.Module | None:
    """The child of an attention that selects keys; None if it has none."""
    for child in module.children():
        if isinstance(child.__dict__.get("index_topk"), int) and _MASK in _arguments(type(child).forward):
            return child
    return None


def _arguments(forward: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


@functools.cache
def indexer_forward(original: Callable) -> Callable:
    """The forward of an indexer whose class has the forward `original`.

    Given the mask of a plan, it returns int32 (batch, tokens, 0) where every query sees all of its keys. Else
    `original` selects keys for blocks of queries, returned as the `bits` of a plan, int32 (words, batch * tokens).
    With a cache, and given another mask, `original` runs: int32 (batch, tokens, selected), the places of the keys.
    """
    names = _arguments(original)
    cache = next((name for name in names if name in CACHE_NAMES), None)

    def forward(self, hidden_states, *args, **kwargs):
        given = {**dict(zip(names, (hidden_states, *args))), **kwargs}
        mask = given.get(_MASK)
        if not isinstance(mask, MaskPart) or not mask.is_of_one_head:
            return original(self, hidden_states, *args, **kwargs)
        plan = mask.plan
        batch, length = hidden_states.shape[:2]
        cached = any(given.get(name) is not None for name in CACHE_NAMES)
        if plan.longest_keys(length) <= self.index_topk and not cached:
            return torch.empty(batch, length, 0, dtype=torch.int32, device=hidden_states.device)
        bits = None
        if cache is not None and not cached:
            bits = _in_blocks(functools.partial(original, self), given, cache, plan, hidden_states)
        if bits is None:
            given[_MASK] = plan.dense(batch, length, hidden_states.device)[:, 0]
            return original(self, **given)
        return bits

    return forward


class _Keys:
    """Stands in for a cache: gives an indexer the keys of all tokens, or takes those that it has made."""

    def __init__(self, keys: torch.Tensor | None = None) -> None:
        self.keys = keys

    def update_indexer(self, keys: torch.Tensor, _layer: int) -> torch.Tensor:
        """The keys of all tokens."""
        if self.keys is None:
            self.keys = keys
            raise _KeysMadeError
        return self.keys


class _KeysMadeError(Exception):
    pass


@torch.no_grad()
def _in_blocks(
    original: Callable, given: dict[str, Any], cache: str, plan: AttentionPlan, hidden_states: torch.Tensor
) -> torch.Tensor | None:
    """What `original` selects, as bits; None if it asks no cache.

    Its mask, and its scores in fp32, (heads, block, tokens), then take memory for a block of queries.
    """
    batch, length = hidden_states.shape[:2]

    def of(start: int, keys: _Keys) -> dict[str, Any]:
        part = {name: _of_tokens(value, start, length) for name, value in given.items() if name != _MASK}
        mask = dense(plan, batch, length, hidden_states.device, rows=slice(start, start + BLOCK))
        return {**part, _MASK: mask.expand(batch, -1, -1, -1)[:, 0], cache: keys}

    made, blocks = [], range(0, length, BLOCK)
    for start in blocks:
        keys = _Keys()
        with contextlib.suppress(_KeysMadeError):
            original(**of(start, keys))
        if keys.keys is None:
            return None
        made.append(keys.keys)
    known = _Keys(torch.cat(made, 1))
    selected = (bits_of(plan, original(**of(start, known)), length, start) for start in blocks)
    return torch.cat([*selected], 2).flatten(1)


def _of_tokens(value: Any, start: int, length: int) -> Any:
    """The part of an argument that is for a block of queries: dimension 1 are the tokens."""
    if isinstance(value, tuple):
        return tuple(_of_tokens(each, start, length) for each in value)
    of_tokens = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length
    return value[:, start : start + BLOCK] if of_tokens else value


def freeze_indexers(model: nn.Module) -> None:
    """Freezes the parameters of all indexers of `model`, and logs how many these were.

    They never get a gradient, and DDP stops at the second step where a parameter that asks for one gets none.
    """
    indexers = [found for module in model.modules() if (found := find_indexer(module)) is not None]
    asking = [each for indexer in indexers for each in indexer.parameters() if each.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    if asking:
        logger.info(f"Froze {len(asking)} parameters of indexers, which select keys and get no gradient.")
