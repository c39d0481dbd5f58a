"""Layers that have the keys of earlier ones, and run in training on the tokens that a loss needs alone.

Where layers share keys, as the last ones of Gemma 4 E2B and E4B, all keys are there before the first of them runs. So
of each document only the tokens have to run whose logits a loss reads: those that predict a label. They run from the
first such token of the document to its end, and of a document without labels the last token runs. The queries are then
the last tokens of their documents, which attention has a plan for, and the keys are all tokens::

    kept   = for each document, its tokens from max(its first, min(the first scored one, its last)) on
    hidden (batch, seq, hidden) -> (1, kept, hidden), as per-layer inputs and tables of rotations
    plan   -> documents of the kept tokens, with the keys of whole documents

Behind the last layer the rows go back to their places, among zeros that no loss reads. Losses and gradients are those
of all tokens, as what is left out has no influence on them.

It takes that the host knows the labels (`Step.labels`) and the documents before the layers run: those of a collator's
batch, and those of packed rows. Where anything else may look at the tokens, all of them run: without a loss of labels,
in evaluation and generation, where hidden states or some last logits are asked for, with hooks on these layers, with
adapters other than LoRA, with dropout in attention, compiled, and inside transforms of `torch.func`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from liger_trainer.attention.interface import PROVED, has_our_attention
from liger_trainer.attention.masks import SlicedPlan, bounds_on_host, row_starts
from liger_trainer.compat.hooks import is_watched
from liger_trainer.head.lm_head import version_of
from liger_trainer.head.step import Rows, Runs, current_step, running
from liger_trainer.kernels.attention.plan import AttentionPlan, SharedKeys
from liger_trainer.kernels.runtime import sent
from liger_trainer.patching.as_written import is_bound_by_us

HIDDEN, MASKS = "hidden_states", "causal_mask_mapping"
"""Arguments of the method that cuts what shared layers are given."""

_WORTH_IT = 0.9  # of all tokens; above, selecting them costs more than it saves
_RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")


@functools.cache
def labelled_forward(native: Callable) -> Callable:
    """The forward of a model whose class has the forward `native` and cuts what it gives to its shared layers.

    Where these may run on some tokens alone, the method that cuts finds a list in `Step.kept`, and adds their places.
    """

    @functools.wraps(native)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or args or not _may_leave_out(self, kwargs):
            return native(self, *args, **kwargs)
        kept: list[torch.Tensor] = []
        with running(replace(current_step(), kept=kept)):
            outputs = native(self, **kwargs)
        for places in kept:
            outputs.last_hidden_state = _placed(outputs.last_hidden_state, places, _shape(kwargs))
        return outputs

    return forward


def _shape(kwargs: Mapping[str, Any]) -> torch.Size:
    ids = kwargs.get("input_ids")
    return kwargs["inputs_embeds"].shape[:2] if ids is None else ids.shape


def _placed(rows: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`rows` (1, K, hidden) at these `places` of zeros (batch, seq, hidden)."""
    whole = rows.new_zeros(shape.numel(), rows.shape[-1]).index_copy(0, places, rows[0])
    return whole.view(*shape, rows.shape[-1])


def _may_leave_out(model: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether nothing but a loss of labels that the host has read looks at what the last layers give."""
    step = current_step()
    read, forward = step.labels, step.forward
    if not model.training or read is None or forward is None or forward.labels is not read.tensor:
        return False
    kept, config = kwargs.get("logits_to_keep", 0), model.config
    if version_of(read.tensor) != read.version or isinstance(kept, torch.Tensor) or kept:
        return False
    if any(kwargs.get(name) or getattr(config, name, False) for name in _RECORDED):
        return False
    if getattr(config, "attention_dropout", 0.0) or not has_our_attention(model):
        return False
    shared = model.layers[len(model.layers) - config.num_kv_shared_layers :]
    return all(map(_is_of_single_tokens, itertools.chain(*(each.modules() for each in (*shared, model.norm)))))


def _is_of_single_tokens(module: nn.Module) -> bool:
    """Whether a module of a shared layer runs as its class or ours has it, with nobody looking on."""
    code = type(module).__module__
    if code.startswith("peft.") and not code.startswith("peft.tuners.lora."):
        return False
    if is_watched(module):
        return False
    if getattr(module, "is_causal", False) is True and PROVED not in module.__dict__:
        return False
    return "forward" not in module.__dict__ or is_bound_by_us(module)


def of_kept_tokens(given: Mapping[str, Any]) -> list[Any] | None:
    """What the shared layers are given, of the tokens alone that a loss needs; None for all tokens.

    Args:
        given: The arguments of the method that cuts, by name, in their order: hidden states, what else has a row for
            each token, and plans by the types of layers.

    Returns:
        The values in the same order, with tokens of all rows in one row.
    """
    step, hidden, plans = current_step(), given[HIDDEN], given[MASKS]
    if step.kept is None or step.labels is None or type(hidden) is not torch.Tensor:
        return None
    if not all(isinstance(plan, SlicedPlan) for plan in plans.values()):
        return None
    batch, length = hidden.shape[:2]
    bounds = _bounds([*plans.values()], step.rows, batch, length)
    if bounds is None:
        return None
    firsts = [*_firsts(bounds, step.labels.scored)]
    counts = np.subtract(bounds[1:], firsts)
    if counts.sum() > _WORTH_IT * batch * length:
        return None
    numbers = [np.arange(first, behind) for first, behind in zip(firsts, bounds[1:])]
    places = sent(torch.from_numpy(np.concatenate(numbers)), hidden.device)
    offsets = sent(torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32)), hidden.device)
    keys = SharedKeys(None, sent(torch.tensor(bounds, dtype=torch.int32), hidden.device), int(np.diff(bounds).max()))
    longest = int(counts.max())
    cut = {kind: AttentionPlan(plan.window, offsets, longest, keys=plan.keys or keys) for kind, plan in plans.items()}
    step.kept.append(places)
    return [cut if name == MASKS else _taken(value, places, batch) for name, value in given.items()]


def _bounds(plans: Sequence[AttentionPlan], rows: Rows | None, batch: int, length: int) -> list[int] | None:
    """Where the documents of all `plans` begin, and the number of tokens, if the host knows it."""
    if any(plan.offsets is not None for plan in plans):
        found = [None if plan.offsets is None else bounds_on_host.get(plan.offsets) for plan in plans]
        return found[0] if all(each == found[0] for each in found) else None
    # No token sees the padding behind it, so that the padding may be documents of its own.
    whole = [(0, length)] * batch
    return [*row_starts(whole if rows is None or rows.bounds is None else rows.bounds, length), batch * length]


def _firsts(bounds: Sequence[int], scored: Runs) -> Iterator[int]:
    """The first token of each document that has to run: the first scored one, or the last of all."""
    behinds = [behind for _, behind in scored]
    for begin, end in itertools.pairwise(bounds):
        place = bisect.bisect_right(behinds, begin)
        first = max(begin, scored[place][0]) if place < len(scored) else end
        yield min(first, end - 1)


def _taken(value: Any, places: torch.Tensor, batch: int) -> Any:
    """The tokens at these places of tensors (batch, seq, ...), or (1, seq, ...) if all rows have the same."""
    if isinstance(value, Mapping):
        return {kind: _taken(each, places, batch) for kind, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_taken(each, places, batch) for each in value)
    if len(value) < batch:
        places = places % value.shape[1]
    return value.flatten(0, 1).index_select(0, places)[None]
