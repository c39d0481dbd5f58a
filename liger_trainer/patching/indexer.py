"""Sparse attention (DeepSeek V3.2, GLM-5): an indexer selects the `index_topk` keys that each query sees.

A query that has no more keys than that sees all of them. So in documents of at most `index_topk` tokens the attention
is dense to the bit, whatever the indexer computes, and it need not run. transformers runs it without gradients: it is
never trained.

Under our name for the attention an indexer is given a part of a plan, and what it selects is passed to our attention:
as the bits of a plan, a 32nd of the indices of 2048 keys at 2048 tokens and a half at 32k. The model's code hands them
on to layers that share a selection, as it would the indices.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from liger_trainer.attention.masks import MaskPart
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.attention.plan import AttentionPlan
from liger_trainer.kernels.attention.selection import select
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

    Given the mask of a plan, it returns int32 (batch, tokens, 0) where every query sees all of its keys. Else keys are
    selected by what `original` projects, and returned as the `bits` of a plan, int32 (words, batch * tokens). With a
    cache, with scores of another form, and given another mask, `original` runs: int32 (batch, tokens, selected), the
    places of the keys.
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
            bits = _selected(functools.partial(original, self), {**given, cache: _Cache()}, plan, self.index_topk)
        if bits is None:
            if not cached:
                kind = type(self).__name__
                warn_once(
                    kind, f"{kind} computes its scores in another form than our kernels, those of all pairs at once."
                )
            given[_MASK] = plan.dense(batch, length, hidden_states.device)[:, 0]
            return original(self, **given)
        return bits

    return forward


class _Scores:
    """Stands for an indexer's keys in its class's code, and then for the scores, which are never all in memory.

    It follows the code as far as ``relu(scale * q @ keys)``, and ends it where the heads are added up.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys
        self.queries: torch.Tensor | None = None
        self.scale = 1.0
        self.is_positive = False

    def _itself(self, *_args: int) -> _Scores:
        """The keys as the right side of a product: in fp32, transposed, for every head."""
        if self.queries is not None:
            raise _OtherCodeError
        return self

    transpose = float = unsqueeze = _itself

    def __mul__(self, scale: Any) -> _Scores:
        if self.queries is None or self.is_positive or isinstance(scale, torch.Tensor):
            raise _OtherCodeError
        self.scale *= scale
        return self

    @classmethod
    def __torch_function__(cls, function: Callable, _types: Any, args: Any = (), kwargs: Any = None) -> _Scores:
        its = args[-1]
        if function is torch.matmul and its.queries is None:
            its.queries = args[0]
        elif function is F.relu and its.queries is not None:
            its.is_positive = True
        elif function is torch.matmul and its.is_positive:
            raise _ScoresAskedError(its, args[0].squeeze(-2))
        else:
            raise _OtherCodeError
        return its


class _ScoresAskedError(Exception):
    """Ends the code of an indexer, with what its scores are made of."""

    def __init__(self, scores: _Scores, weights: torch.Tensor) -> None:
        self.scores, self.weights = scores, weights


class _OtherCodeError(Exception):
    """Ends the code of an indexer that computes something else."""


class _Cache:
    """Stands in for a cache, which is asked for the keys of all tokens."""

    def update_indexer(self, keys: torch.Tensor, _layer: int) -> _Scores:
        return _Scores(keys)


@torch.compiler.disable
def _selected(original: Callable, given: dict[str, Any], plan: AttentionPlan, count: int) -> torch.Tensor | None:
    """What `original` selects, as bits; None if its code is another one."""
    try:
        original(**given)
    except _ScoresAskedError as asked:
        scores, weights = asked.scores, asked.weights
        assert scores.queries is not None
        return select(plan, scores.queries, scores.keys, weights, scores.scale, count)
    except (_OtherCodeError, AttributeError, TypeError):  # such as a method that keys have, and `_Scores` has not
        return None
    return None


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
