"""A padded batch as packed rows: what the model is given, and how what it returns for tokens gets back to the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.attention.masks import bounds_on_host
from liger_trainer.head.deferred_logits import build, recordable
from liger_trainer.head.lm_head import version_of
from liger_trainer.head.step import Pass, ReadLabels, current_step, running, runs_of
from liger_trainer.kernels.attention.plan import AttentionPlan, SharedKeys
from liger_trainer.kernels.copied_rows import Copies, copied_rows, copies_of
from liger_trainer.kernels.documents import Documents, documents_of
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.kernels.runtime import sent
from liger_trainer.packing.layout import Layout, filled, groups_of, layout_of, parts_of, starts_and_lengths

_Result = TypeVar("_Result")


class Padded(NamedTuple):
    """A padded batch of B rows and S columns.

    Attributes:
        input_ids: (B, S).
        attention_mask: (B, S), 0 for padding; None if there is none.
        position_ids: (B, S) or (1, S); None for the numbers of the columns.
        labels: (B, S), of the token after each; -100 for none.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    labels: torch.Tensor


class Scored(NamedTuple):
    """The tokens of a packed row whose next token has a label, and where their statistics belong.

    A token that several rows share, with the same label, is scored once.

    Attributes:
        tokens: The scored tokens, K of T; at least one, so that a gradient reaches the model on every process.
        labels: (K,), and the places of the tokens as the host knows them.
        copies: The statistics of the batch, n of K.
        places: (n,), the place of each in the flattened batch (B, S).
    """

    tokens: Copies
    labels: ReadLabels
    copies: Copies
    places: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRow:
    """One row of T tokens in place of a padded batch, or of some of its rows.

    Args:
        layout: The tokens that the row holds, and their order.
        inputs: `input_ids`, `position_ids` and `attention_mask`, each (1, T). The mask says how many rows of the batch
            share a token: a router's loss, which weighs tokens by it, then counts them as in the batch.
        scored: The tokens and labels that a loss needs.
    """

    layout: Layout
    inputs: dict[str, torch.Tensor]
    scored: Scored
    _plans: dict[tuple[int, int], AttentionPlan] = dataclasses.field(default_factory=dict)

    def attended(self) -> contextlib.AbstractContextManager[None]:
        """Around the model's forward: attention sees of each row what it saw in the batch."""
        return running(dataclasses.replace(current_step(), plan_of=self.plan, documents=lambda: self.documents))

    @functools.cached_property
    def documents(self) -> Documents:
        """Each segment of the row, which continues its parent; for recurrences and convolutions.

        Raises:
            ValueError: for rows that share more than one level; such layers continue a document that continues none.
        """
        begins, ends, parents = zip(*self.layout.segments)
        lengths = [end - begin for begin, end in zip(begins, ends)]
        return documents_of(lengths, begins, parents, device=self.inputs["input_ids"].device)

    def plan(self, window: int, chunk: int) -> AttentionPlan:
        """The plan of attention that sees `window` keys, in chunks of `chunk` tokens; 0 for all."""
        known = self._plans.get((window, chunk))
        if known is not None:
            return known
        offsets, keys, key_offsets = self.layout.documents(window, chunk)
        device, most_keys = self.inputs["input_ids"].device, int(np.diff(key_offsets).max())
        shared = None
        if keys is not None:
            copies = copies_of(torch.from_numpy(keys), len(self.layout.tokens), device)
            shared = SharedKeys(copies, sent(torch.from_numpy(key_offsets), device), most_keys)
        longest, seen = int(np.diff(offsets).max()), window if window < most_keys else 0
        plan = AttentionPlan(seen, sent(torch.from_numpy(offsets), device), longest, keys=shared)
        bounds_on_host[plan.offsets] = offsets.tolist()
        self._plans[window, chunk] = plan
        return plan


def packed_rows(
    batch: Padded,
    share: bool,
    most: int | None = None,
    agreed: Callable[[int, torch.device], int] = lambda rows, device: rows,
    one_level: bool = False,
    fills_below: int = 0,
    values: torch.Tensor | None = None,
) -> list[PackedRow] | None:
    """The batch as packed rows; None if padding is between tokens, which windows could not skip.

    Reads the batch on the host, if that does not know it.

    Args:
        batch: The padded batch.
        share: Whether rows share their common beginnings.
        most: The tokens that a packed row has at most, if it has several rows; None puts all into one.
        agreed: Where there is a `most`, called with their number, returns how many to make; those too many score no
            token.
        one_level: Whether no shared beginning may continue another, as layers with a state need it.
        fills_below: Packed rows of fewer tokens are filled up, so that there are few shapes; 0 for none.
        values: `(3, B, S)`, on the host: the ids, 0 or 1 for padding or not, and the labels.
    """
    if values is None:
        mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask.ne(0).long()
        values = torch.stack([batch.input_ids, mask, batch.labels.to(mask.device)]).cpu()
    ids, mask, labels = values.numpy()
    found = starts_and_lengths(mask)
    if found is None:
        return None
    starts, lengths = found
    share = share and (batch.position_ids is None or len(batch.position_ids) == 1)  # else they may differ
    groups = groups_of(ids, starts, lengths, share, one_level)
    parts = [groups]
    if most is not None:
        parts = parts_of(groups, lengths, most) or [[]]
        parts += [[]] * (agreed(len(parts), batch.input_ids.device) - len(parts))
    layouts = [layout_of(part, starts, lengths, ids.shape[1]) for part in parts]
    layouts = [filled(layout) if len(layout.tokens) < fills_below else layout for layout in layouts]
    return [_packed_row(batch, layout, labels) for layout in layouts]


def _packed_row(batch: Padded, layout: Layout, labels: np.ndarray) -> PackedRow:
    device, columns = batch.input_ids.device, batch.input_ids.shape[1]
    tokens = sent(torch.from_numpy(layout.tokens), device)
    positions = batch.position_ids
    taken = tokens % columns if positions is None or len(positions) == 1 else tokens
    inputs = {
        "input_ids": batch.input_ids.flatten()[tokens][None],
        "position_ids": (taken if positions is None else positions.flatten()[taken])[None],
        "attention_mask": sent(torch.from_numpy(layout.shared_by), device)[None],
    }
    places = np.flatnonzero((labels != IGNORE_INDEX) & (layout.places >= 0))
    scored, targets = layout.places.flat[places], labels.flat[places]
    _, first, copies = np.unique(
        scored * (targets.max(initial=0) + 1) + targets, return_index=True, return_inverse=True
    )
    scored, targets = (scored[first], targets[first]) if len(places) else (np.array([0]), np.array([IGNORE_INDEX]))
    labels_of_tokens = sent(torch.from_numpy(targets), device)
    is_scored = torch.zeros(len(layout.tokens), dtype=torch.bool).index_fill(0, torch.from_numpy(scored), True)
    found = Scored(
        copies_of(torch.from_numpy(scored), len(layout.tokens), device),
        ReadLabels(labels_of_tokens, version_of(labels_of_tokens), runs_of(is_scored)),
        copies_of(torch.from_numpy(copies), len(scored), device),
        sent(torch.from_numpy(places), device),
    )
    return PackedRow(layout, inputs, found)


def each_row(compute: Callable[[PackedRow], _Result], rows: Sequence[PackedRow], model: Any) -> list[_Result]:
    """``compute(row)`` of each row, which runs `model`, a transformers model.

    All but the last are computed again in the backward, one at a time, so that no more than one of them has its
    activations in memory. Their results have to be small.
    """

    def contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        return _computed(Pass(again=False)), _again(model)

    computed = []
    for row in rows:
        if torch.is_grad_enabled() and row is not rows[-1]:
            computed.append(checkpoint(compute, row, use_reentrant=False, context_fn=contexts))
        else:
            computed.append(compute(row))
    return computed


def _computed(computation: Pass) -> contextlib.AbstractContextManager[None]:
    return running(dataclasses.replace(current_step(), computation=computation))


@contextlib.contextmanager
def _again(model: Any) -> Iterator[None]:
    with _computed(Pass(again=True)), sharded_again(model):
        yield


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


def rows_of(logits: torch.Tensor, tokens: Copies) -> torch.Tensor:
    """The logits (K, V) of `tokens`, of those of a packed row (1, T, V); deferred if those are.

    A token's gradients are summed in a fixed order, in fp32: the last token of a prompt predicts the first of every
    answer.
    """
    deferred = recordable(logits)
    if deferred is None:
        return copied_rows(build(logits).flatten(0, 1), tokens)
    hidden = copied_rows(deferred.recorded.hidden.flatten(0, 1), tokens)
    meta = torch.empty(len(hidden), deferred.meta.shape[-1], dtype=deferred.meta.dtype, device="meta")
    return deferred.derive(meta, hidden)
