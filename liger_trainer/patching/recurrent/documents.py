"""The documents of a forward, for layers that mix tokens without attention: recurrences and short convolutions.

A row may hold several documents: a packed row of ours, or one that a collator made. The forward of the model around
the layers finds out which, once, and passes them on as a keyword. Unlike a context, a keyword is there again when a
checkpointed layer is recomputed. The padding mask would not do: in a packed row it holds counts, by which these layers
would multiply.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from liger_trainer.attention.interface import find_packed_sequence_indices
from liger_trainer.attention.masks import packed_documents
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import DEVICE_ASSERTIONS
from liger_trainer.head.forward import never_a_frame, whole_graph_wanted
from liger_trainer.head.step import current_step, running
from liger_trainer.kernels.documents import Documents, documents_of
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.patching.binding import bind_forward, overriding_forward
from liger_trainer.patching.model_forward import CACHE_NAMES

require(DEVICE_ASSERTIONS)

KEYWORD = "liger_documents"
"""What a layer is given its documents as; None, or nothing, if each row of the batch is one."""

BOUNDARIES = ("cu_seq_lens_q", "seq_idx")
"""Arguments of a forward that say where the documents of its rows begin."""

_carriers: set[Callable] = set()


@functools.cache
def forward_with_documents(native: Callable) -> Callable:
    """`native`, the forward of a model, which gives its layers the documents of what it is given."""
    names = tuple(inspect.signature(native).parameters)[1:]

    def told(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if KEYWORD not in kwargs:
            kwargs[KEYWORD] = documents_of_forward({**dict(zip(names, args)), **kwargs})
        documents, step = kwargs[KEYWORD], current_step()
        if documents is None or step.documents is not None:
            return native(self, *args, **kwargs)
        with running(dataclasses.replace(step, documents=lambda: documents)):  # for the masks that it makes
            return native(self, *args, **kwargs)

    told_outside = torch.compiler.disable(told, recursive=False)  # the layers are compiled, with the documents given

    @functools.wraps(native)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return told(self, *args, **kwargs)
        given = {**dict(zip(names, args)), **kwargs}
        if KEYWORD in kwargs or not _may_hold_several(given):
            return native(self, *args, **kwargs)
        if not whole_graph_wanted():
            return told_outside(self, *args, **kwargs)
        _assert_one_a_row(given)
        return native(self, *args, **kwargs)

    _carriers.add(forward)
    return forward


def _may_hold_several(given: Mapping[str, Any]) -> bool:
    """Whether a row may hold several documents, where nothing can be read."""
    if any(given.get(name) is not None for name in CACHE_NAMES):
        return False
    unmasked = given.get("attention_mask") is None
    return any(given.get(name) is not None for name in BOUNDARIES) or (unmasked and _text_positions(given) is not None)


def _assert_one_a_row(given: Mapping[str, Any]) -> None:
    """Fails in a graph that may not break if a row has several documents: the graph cannot read where they begin.

    Raises:
        ValueError: if their boundaries are given.
    """
    named = [name for name in BOUNDARIES if given.get(name) is not None]
    if named:
        raise ValueError(
            f"`{named[0]}` is given in a graph that may not break; layers with a state cannot read the documents of a "
            "packed row there. Compile without `fullgraph`, or give one document in each row."
        )
    positions = _text_positions(given)
    assert positions is not None
    torch._assert_async(
        (positions.diff(dim=-1) == 1).all(),
        "`position_ids` begin anew inside of a row, and layers with a state cannot read where in a graph that may not "
        "break. Compile without `fullgraph`, or give one document in each row.",
    )


def documents_of_forward(given: Mapping[str, Any]) -> Documents | None:
    """The documents of a forward with these arguments; None if each row of the batch is one.

    They are those of the packed row that runs; else what `cu_seq_lens_q` or `seq_idx` say; else they begin where
    `position_ids` start again; else they are the rows without their padding, if it is known. What is on the device is
    read. With a cache each row is one document, as a generation continues rows.
    """
    step = current_step()
    if step.documents is not None:
        return step.documents()
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    if tokens is None or any(given.get(name) is not None for name in CACHE_NAMES):
        return None
    batch, length = tokens.shape[:2]
    offsets, numbers, mask = (given.get(name) for name in ("cu_seq_lens_q", "seq_idx", "attention_mask"))
    if offsets is not None:
        bounds = offsets.tolist()
        lengths = np.diff(bounds).tolist()
        return documents_of(lengths, bounds[:-1], tokens=batch * length, device=tokens.device)
    if numbers is None and mask is None and step.rows is None:
        numbers = _numbers(_text_positions(given), batch)
    if numbers is not None:
        firsts = packed_documents(numbers)
        lengths = np.diff([*firsts, batch * length]).tolist()
        return None if len(firsts) == batch else documents_of(lengths, device=tokens.device)
    rows = None if step.rows is None or mask is None or mask.shape != (batch, length) else step.rows.bounds
    if rows is None or all(row == (0, length) for row in rows):
        return None
    lengths = [behind - first for first, behind in rows]
    firsts = [place * length + first for place, (first, _) in enumerate(rows)]
    return documents_of(lengths, firsts, tokens=batch * length, device=tokens.device)


def _numbers(positions: torch.Tensor | None, batch: int) -> torch.Tensor | None:
    """The number (batch, length) of each token's document, from its position; None if each row is one."""
    return None if positions is None else find_packed_sequence_indices(positions.expand(batch, -1))


def _text_positions(given: Mapping[str, Any]) -> torch.Tensor | None:
    """`position_ids` (batch or 1, length); None without.

    With several positions a token, as for images, the first of four are those of the text, as transformers has it.
    """
    positions = given.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.dim() == 3 and len(positions) == 4:
        positions = positions[0]
    return positions if isinstance(positions, torch.Tensor) and positions.dim() == 2 else None


never_a_frame(documents_of_forward)


def carry_documents(model: nn.Module, mixers: Iterable[nn.Module]) -> None:
    """Has each transformers model inside `model` tell those of `mixers` that it holds of documents."""
    for owner in {id(owner): owner for owner in owners(model, mixers).values() if owner is not None}.values():
        if overriding_forward(owner) is None and not is_bound_by_us(owner) and owner.get_output_embeddings() is None:
            bind_forward(owner, forward_with_documents(type(owner).forward), live=None)


def carries_documents(model: nn.Module | None) -> bool:
    """Whether the forward of `model` gives its layers their documents."""
    forward = None if model is None or not is_bound_by_us(model) else model.__dict__["forward"].__func__
    return getattr(forward, "__wrapped__", None) in _carriers


def owners(model: nn.Module, mixers: Iterable[nn.Module]) -> dict[nn.Module, PreTrainedModel | None]:
    """The innermost transformers model around each of `mixers`; None if there is none."""
    found: dict[nn.Module, PreTrainedModel | None] = dict.fromkeys(mixers)
    for module in model.modules():  # those inside come later
        if isinstance(module, PreTrainedModel):
            found.update((part, module) for part in module.modules() if part in found)
    return found
