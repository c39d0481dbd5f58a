"""Plans of attention: which masks have one, and the plan where transformers would build a mask.

transformers describes a mask by a function of the indices of row, head, query and key, composed of a few known ones.
`composed_pattern` recognises compositions of causality, a window or chunks, and packing. Together with the lengths of
padded rows they give the documents of an [`AttentionPlan`]. All else, such as images that see both ways, custom
functions, or queries that follow a cache, gives transformers' own boolean mask.

Padding becomes documents of its own. After the last token it needs none, as no token sees it. Nobody reads what a
padding token computes, so that is not reproduced: its logits differ from those of a masked batch. Loss and gradients do
not, as no label is predicted from padding.

A compiled graph can neither read lengths nor look into closures. There, packed rows and chunks keep their mask, padding
is cut on the device, and padding with holes fails an assertion of the device.
"""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import causal_mask_function

from liger_trainer.compat.private import TESTED, installed_version, require
from liger_trainer.compat.torch import DEVICE_ASSERTIONS
from liger_trainer.compat.transformers import MASK_FUNCTIONS, REMAPPED_POSITIONS
from liger_trainer.head.recorded import Pending
from liger_trainer.head.step import Bounds, bounds_of, current_step
from liger_trainer.kernels.attention.plan import AttentionPlan, dense

require(DEVICE_ASSERTIONS)

_DENSE_ADVANTAGE = {9: 1.8}
"""By major compute capability, how much faster torch's attention is on whole rows than on documents: `flash` divided by
`sdpa` in `liger-trainer bench attention --model llama3-8b,gemma3-4b`."""

_PADDING_PIECE = 256  # a document of padding costs the square of its length, and a constant


class Pattern(NamedTuple):
    """What a mask function computes: causality, and in it a window or chunks (0 for none), and packed documents."""

    window: int = 0
    chunk: int = 0
    packed: torch.Tensor | None = None  # (batch, seq), the number of each token's document in its row
    positions: torch.Tensor | None = None  # (batch, seq), with `packed`: rising by one inside of documents


def _inner_code(function: Callable) -> types.CodeType:
    """The code of the mask function that `function`, or what it wraps, returns.

    Raises:
        ImportError: if it defines none.
    """
    constants = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_consts", ())
    codes = (each for each in constants if isinstance(each, types.CodeType) and not each.co_name.startswith("<"))
    code = next(codes, None)
    if code is None:
        raise ImportError(
            f"transformers {installed_version('transformers')}: `masking_utils.{function.__name__}` defines no "
            "function of its own, by which liger_trainer recognises masks. Install the version it is tested with: `pip "
            f"install transformers=={TESTED['transformers']}`."
        )
    return code


_AND, _WINDOW, _CHUNKS, _PACKED = map(_inner_code, require(MASK_FUNCTIONS))
_REMAPPED = _inner_code(*require(REMAPPED_POSITIONS)) if REMAPPED_POSITIONS.applies else None

_PARTS: dict[types.CodeType | None, tuple[str, str]] = {
    _WINDOW: ("window", "sliding_window"),
    _CHUNKS: ("chunk", "chunk_size"),
    _PACKED: ("packed", "packed_sequence_mask"),
}
"""By the code of a mask function: the field of the pattern, and the variable of the closure that holds its value."""


def _parts(function: Callable, positions: torch.Tensor | None = None) -> Iterator[tuple[Callable, torch.Tensor | None]]:
    """The mask functions that must all hold, each with the position ids that stand in for its indices, if any do."""
    code, cells = getattr(function, "__code__", None), _cells(function)
    if code is not None and code is _AND:
        for part in cells["mask_functions"]:
            yield from _parts(part, positions)
    elif code is not None and code is _REMAPPED and positions is None:
        yield from _parts(cells["mask_function"], cells["position_ids"])
    else:
        yield function, positions


def composed_pattern(function: Callable) -> Pattern | None:
    """What the mask function computes; None for anything but causal attention with a window, chunks or packing.

    The caller has asked whether those of the installed transformers are recognised. It composes the same parts in
    another order from version to version.
    """
    found: dict[str, Any] = {}
    remapped: dict[str, torch.Tensor | None] = {}
    for part, positions in _parts(function):
        name, cell = _PARTS.get(getattr(part, "__code__", None), ("", ""))
        if part is causal_mask_function:
            name = "causal"
        if not name or name in found:
            return None
        found[name], remapped[name] = _cells(part).get(cell), positions
    if "causal" not in found or remapped.pop("packed", None) is not None:
        return None
    positions = remapped["causal"]
    if any(each is not positions for each in remapped.values()):
        return None
    if positions is not None and "packed" not in found:
        return None
    # Inside a document positions rise by one, so windows of positions are those of tokens. Without positions, the
    # chunks of packed rows begin with the row.
    if positions is None and {"chunk", "packed"} <= found.keys():
        return None
    del found["causal"]
    return Pattern(**found, positions=positions)


def _cells(function: Any) -> dict[str, Any]:
    code, closure = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return {} if code is None else {name: cell.cell_contents for name, cell in zip(code.co_freevars, closure or ())}


def read_plan(
    pattern: Pattern,
    padding_mask: torch.Tensor | None,
    batch: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> AttentionPlan | None:
    """The plan for these rows, whose lengths are read; None if their padding has holes."""
    window = pattern.window if pattern.window < length else 0
    if pattern.packed is not None:
        chunk = [pattern.positions // pattern.chunk] if pattern.chunk and pattern.positions is not None else []
        return plan_of(packed_documents(pattern.packed, *chunk), batch * length, window, device)
    rows = [(0, length)] * batch if padding_mask is None else _unpadded(padding_mask, batch, length)
    if rows is None:
        return None
    chunks = 0 < pattern.chunk < length
    if not chunks and not _is_worth_documents(rows, length, dtype, torch.device(device)):
        # With a padding mask, transformers does not look for packing.
        return AttentionPlan(window, None, length, whole_rows=padding_mask is not None)
    return plan_of(row_starts(rows, length, pattern.chunk), batch * length, window, device)


def row_starts(rows: Bounds, length: int, chunk: int = 0) -> list[int]:
    """Where the documents of rows with these bounds begin, in chunks of `chunk` tokens; 0 for none."""
    return [start for place, row in enumerate(rows) for start in cut_row(place * length, length, row, chunk)]


def traced_plan(
    local_size: int | None, padding_mask: torch.Tensor | None, batch: int, length: int, config: Any
) -> AttentionPlan | None:
    """The plan in a compiled graph, which cannot read lengths: each row is padding, its tokens, and padding.

    The compiler hides the function of a mask, too. That there is a custom one, or packing, shows in the mask's other
    arguments, which the caller looks at, and chunks in the config. Padding with holes is an assertion of the device.

    Returns:
        The plan; None for chunks.
    """
    if local_size is not None and getattr(config, "attention_chunk_size", None) is not None:
        return None
    window = local_size if local_size is not None and local_size < length else 0
    if padding_mask is None:
        return AttentionPlan(window, None, length)
    mask = padding_mask[:, :length].bool()
    counts = mask.sum(-1)
    first = mask.byte().argmax(-1)
    whole = mask.byte().flip(-1).argmax(-1) + first + counts == length
    torch._assert_async((whole | (counts == 0)).all(), "`attention_mask` masks a token between two that it does not.")
    begins = torch.arange(batch, device=mask.device) * length
    bounds = torch.stack([begins, begins + first, begins + first + counts], -1).flatten()
    return AttentionPlan(window, F.pad(bounds, (0, 1), value=batch * length).to(torch.int32), length)


def plan_of(documents: list[int], tokens: int, window: int, device: torch.device | str) -> AttentionPlan:
    """The plan for documents that begin at these of all `tokens`."""
    bounds = [*documents, tokens]
    longest = max(end - start for start, end in itertools.pairwise(bounds))
    # Copied from pinned memory, so that the host does not wait for what the device still has to do.
    offsets = torch.tensor(bounds, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
    plan = AttentionPlan(window, offsets.to(device, non_blocking=True), longest)
    bounds_on_host[plan.offsets] = bounds
    return plan


bounds_on_host: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Where documents begin, and the number of tokens, by the `offsets` of plans that the host has made: a list of ints."""


def packed_documents(*numbers: torch.Tensor) -> list[int]:
    """Where documents begin: with each row, and where one of these numbers (batch, seq) of its tokens changes."""
    begins = torch.ones_like(numbers[0], dtype=torch.bool)
    begins[:, 1:] = torch.stack([each.diff() != 0 for each in numbers]).any(0)
    return begins.flatten().cpu().nonzero().flatten().tolist()


def _unpadded(mask: torch.Tensor, batch: int, length: int) -> Bounds | None:
    """The bounds of each row, read from the mask unless they are known."""
    known = None if torch.compiler.is_compiling() else current_step().rows
    if known is not None and known.bounds is not None and mask.shape == (batch, length) == (len(known.bounds), length):
        return known.bounds
    return bounds_of(mask[:, :length])


def _is_worth_documents(rows: Bounds, length: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether rows have to be, or are better, cut at their padding.

    Padding behind the last token needs no mask, as no query before it sees it. Whole rows then take longer, but torch
    has a faster attention for them.
    """
    if any(start for start, _ in rows):
        return True
    pairs = sum((end - start) ** 2 for start, end in rows)
    return pairs * _advantage(dtype, device) < 0.9 * len(rows) * length**2


def _advantage(dtype: torch.dtype, device: torch.device) -> float:
    if device.type != "cuda" or (dtype == torch.float32 and not torch.is_autocast_enabled("cuda")):
        return 1.0
    return _DENSE_ADVANTAGE.get(torch.cuda.get_device_capability(device)[0], 1.0)


def cut_row(begin: int, length: int, row: tuple[int, int], chunk: int) -> Iterator[int]:
    """Where the documents of a row begin, whose first token is `begin`: padding, its tokens, and padding."""
    first, behind = row
    yield from _pieces(begin, begin + first, _PADDING_PIECE)
    yield from _pieces(begin + first, begin + behind, chunk)
    yield from _pieces(begin + behind, begin + length, _PADDING_PIECE)


def _pieces(start: int, end: int, size: int) -> range:
    """Where the pieces of at most `size` tokens begin; one piece if `size` is 0."""
    return range(start, end, size or max(end - start, 1))


class SlicedPlan(AttentionPlan):
    """A plan of which the code of a model takes parts, as of a mask: for indexers, and for layers that share keys.

    Ours knows what to do with the plan. Another model with the same config has code that needs the mask.
    """

    rows: tuple[int, int, torch.device]  # their number and length, and their device
    _mask: torch.Tensor | None = None

    def __getitem__(self, index: Any) -> Any:
        """That part of the mask, which is a tensor for all that do not know it; a field by its number."""
        return MaskPart(self, index) if isinstance(index, tuple) else tuple.__getitem__(self, index)

    def dense(self, batch: int, length: int, device: torch.device) -> torch.Tensor:
        """As [`dense`][liger_trainer.kernels.attention.plan.dense], made once for all layers."""
        if self._mask is None:
            self._mask = dense(self, batch, length, device).expand(batch, -1, -1, -1)
        return self._mask


def sliced(plan: AttentionPlan, batch: int, length: int, device: torch.device | str) -> SlicedPlan:
    """`plan` of so many rows of so many tokens."""
    found = SlicedPlan(*plan)
    found.rows = batch, length, torch.device(device)
    return found


class MaskPart(Pending):
    """A part of the mask of a plan (batch, 1, length, length)."""

    def __init__(self, plan: SlicedPlan, index: tuple[Any, ...]) -> None:
        self.plan, self.index = plan, index

    @property
    def is_of_one_head(self) -> bool:
        """Whether it is ``mask[:, 0]``, the whole mask of one head."""
        return self.index[:2] == (slice(None), 0) and all(each == slice(None) for each in self.index[2:])

    def build(self, for_write: bool = False) -> torch.Tensor:
        """The part, a tensor of bools."""
        return self.plan.dense(*self.plan.rows)[self.index]


def of_selected(mask: torch.Tensor | None, indices: torch.Tensor, keys: int) -> torch.Tensor:
    """A mask, boolean or additive, without the keys that are not selected."""
    selected = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    selected = selected.scatter(-1, indices.long(), True).unsqueeze(1)
    if mask is None or mask.dtype == torch.bool:
        return selected if mask is None else mask & selected
    return mask.masked_fill(~selected, torch.finfo(mask.dtype).min)
