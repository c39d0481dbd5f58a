"""What the host knows of the rows of a forward, so that its masks need not wait for the device to tell.

Padding shows in the attention mask and packing in the position ids, and both are on the device. Reading them back ends
the host's lead over it. But a forward that is given neither has whole rows, and the trainer can say what its collator
has read of a padding mask while that was on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from liger_trainer.context_variables import set_to
from liger_trainer.head.lm_head import version_of

Bounds = Sequence[tuple[int, int]]
"""The first token of each row, and the one behind the last; (0, 0) for a row of padding."""

# Arguments of a forward that tell nothing of padding or packing.
_SILENT = frozenset(
    {
        "input_ids", "inputs_embeds", "labels", "shift_labels", "use_cache", "return_dict", "num_items_in_batch",
        "output_router_logits", "output_attentions", "output_hidden_states", "logits_to_keep",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KnownRows:
    """The rows of a forward without position ids.

    Args:
        bounds: Of rows with a padding mask; None for rows without one, which are whole.
    """

    bounds: Bounds | None = None


_read: ContextVar[tuple[torch.Tensor, int | None, Bounds] | None] = ContextVar("liger_trainer_read_mask", default=None)
_rows: ContextVar[KnownRows | None] = ContextVar("liger_trainer_known_rows", default=None)


def bounds_of(mask: torch.Tensor) -> Bounds | None:
    """Reads a padding mask (batch, seq) on the host; None if it masks a token between two that it does not."""
    seen = mask.bool().byte()
    behind = mask.shape[1] - seen.flip(-1).argmax(-1)
    rows = torch.stack([seen.argmax(-1), behind, seen.sum(-1)], -1).tolist()
    if any(count and end - start != count for start, end, count in rows):
        return None
    return [(start, end) if count else (0, 0) for start, end, count in rows]


def padding_known(mask: torch.Tensor, bounds: Bounds) -> contextlib.AbstractContextManager[None]:
    """Says what [`bounds_of`] returns for `mask`, to the forwards inside that are given this very tensor."""
    return set_to(_read, (mask, version_of(mask), bounds))


def rows_of_forward(
    model: Any, forward: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """Around ``forward(model, *args, **kwargs)``: its rows are known as far as these and [`padding_known`] tell.

    Nothing is known where code other than transformers' runs before the masks, as it may make position ids or a mask.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    if not (_is_known_code(forward) and _is_known_code(type(getattr(model, "base_model", model)).forward)):
        return set_to(_rows, None)
    arguments = {**dict(zip(_names(forward), args, strict=False)), **kwargs}
    return set_to(_rows, _known({name: value for name, value in arguments.items() if value is not None}))


@functools.cache
def _is_known_code(function: Any) -> bool:
    """Whether the function and what it wraps are transformers', or pass on what they are given."""
    library = getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
    inner = getattr(function, "__wrapped__", None)
    return library in ("transformers", "torch", "liger_trainer") and (inner is None or _is_known_code(inner))


@functools.cache
def _names(forward: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def _known(given: Mapping[str, Any]) -> KnownRows | None:
    if not given.keys() <= _SILENT | {"attention_mask"}:
        return None
    mask, read = given.get("attention_mask"), _read.get()
    if mask is None:
        return KnownRows()
    if read is None or read[0] is not mask or read[1] != version_of(mask):
        return None
    return KnownRows(read[2])


def known_rows() -> KnownRows | None:
    """What is known of the rows of the forward that is running; None if nothing is, or while it is compiled."""
    return None if torch.compiler.is_compiling() else _rows.get()
