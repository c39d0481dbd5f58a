"""Which tokens of a batch are a document, for operators whose tokens depend on those before them.

A recurrence and a causal convolution begin anew with each document. Documents are numbered in the flattened batch, so
those of a packed row and the rows of a padded batch are the same thing, and tokens of padding belong to none. Each
document is cut into chunks of `CHUNK` tokens, the last of which may be shorter. Chunks begin with their document, so no
kernel needs a mask between documents, and what a document gets depends on nothing else in its row.

A document may continue another one, its parent: it begins with the parent's last state, as the completions of a prompt
do. A parent continues none itself. Its gradient gets a term from each of its children, in their order.

Shapes: D documents, C chunks.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.runtime import sent

CHUNK = 64
"""Tokens of a chunk."""

FIRST, TOKENS, PARENT, FIRST_CHILD, CHILDREN, FIRST_CHUNK = range(6)
"""Columns of `Documents.spans`."""


class Documents(NamedTuple):
    """The documents of a batch; `documents_of` makes them.

    Attributes:
        spans: int32 (D, 6), for each document its first token in the flattened batch, its number of tokens, its parent
            (-1 for none), its first child, its number of children, and its first chunk. Those without a parent come
            first, and the children of a document follow each other. None: each row of the batch is a document.
        chunks: int32 (C, 3), for each chunk its document, its first token and its number of tokens, in the order of the
            documents. None with `spans`.
        roots: How many documents have no parent.
        padding: Whether some tokens belong to no document. Results are 0 there.
        tokens: The tokens of the flattened batch. 0 with `spans` of None.
    """

    spans: torch.Tensor | None = None
    chunks: torch.Tensor | None = None
    roots: int = 0
    padding: bool = False
    tokens: int = 0


ROWS = Documents()
"""Each row of the batch is a document."""


@torch.compiler.disable  # it computes with numbers, of which a compiler would make tensors
def documents_of(
    lengths: Sequence[int],
    firsts: Sequence[int] | None = None,
    parents: Sequence[int] | None = None,
    *,
    tokens: int | None = None,
    device: torch.device | str = "cpu",
) -> Documents:
    """The documents of these lengths.

    Args:
        lengths: The tokens of each document; documents of 0 tokens are allowed.
        firsts: The place of the first token of each in the flattened batch; one after another by default. No two
            documents have a token in common.
        parents: The number of the document that each continues, -1 for none. By default none continues another.
        tokens: The tokens of the flattened batch; by default those of the documents.
        device: Where the tables will be.

    Returns:
        The documents, on `device`. They are renumbered: those without a parent first, then children in the order of
        their parents; otherwise in the given order.

    Raises:
        ValueError: if a parent continues a document itself; if `lengths`, `firsts` and `parents` are not whole numbers,
            one for each document; or if a document is not among the tokens, or has some of another one's.
    """
    length = _whole("lengths", lengths, None)
    ends = list(itertools.accumulate(length))
    first = [end - size for end, size in zip(ends, length)] if firsts is None else _whole("firsts", firsts, len(length))
    parent = [-1] * len(length) if parents is None else _whole("parents", parents, len(length))
    count = sum(length) if tokens is None else tokens
    _check_places(length, first, parent, count)
    roots = [document for document, of in enumerate(parent) if of < 0]
    number = {root: place for place, root in enumerate(roots)}  # the new one of each
    if any(of >= 0 and of not in number for of in parent):
        raise ValueError("`parents` names a document that continues another one itself; no parent may have a parent.")
    children = sorted((each for each, of in enumerate(parent) if of >= 0), key=lambda each: number[parent[each]])
    counts = Counter(number[parent[child]] for child in children)
    first_child = len(roots)
    spans: list[tuple[int, ...]] = []
    chunks: list[tuple[int, ...]] = []
    for place, document in enumerate([*roots, *children]):
        size, begin, of = length[document], first[document], number.get(parent[document], -1)
        held = counts[place] if place < len(roots) else 0
        spans.append((begin, size, of, first_child if place < len(roots) else 0, held, len(chunks)))
        first_child += held
        chunks += [(place, begin + start, min(size - start, CHUNK)) for start in range(0, size, CHUNK)]
    with torch.inference_mode(False):  # a training may use them later
        tables = [
            sent(torch.tensor(rows, dtype=torch.int32).view(-1, columns), torch.device(device))
            for rows, columns in ((spans, 6), (chunks, 3))
        ]
    return Documents(tables[0], tables[1], len(roots), count > sum(length), count)


def _whole(name: str, numbers: Sequence[int], documents: int | None) -> list[int]:
    """`numbers`, one for each of so many documents, as they are given."""
    try:
        found = [operator.index(each) for each in numbers]
    except TypeError:
        raise ValueError(f"`{name}` is {numbers}; give one whole number for each document.") from None
    if documents not in (None, len(found)):
        raise ValueError(f"`{name}` has {len(found)} numbers; give one for each of the {documents} `lengths`.")
    return found


def _check_places(length: list[int], first: list[int], parent: list[int], tokens: int) -> None:
    """Raises ValueError if documents are no parts of the tokens, have tokens in common, or continue none that is."""
    places = sorted((begin, begin + size) for begin, size in zip(first, length) if size)
    if any(size < 0 for size in length) or any(begin < 0 or end > tokens for begin, end in places):
        raise ValueError(f"A document is not within the {tokens} tokens of the batch; look at `lengths` and `firsts`.")
    if any(begin < end for (_, end), (begin, _) in itertools.pairwise(places)):
        raise ValueError("Two documents have tokens in common; look at `lengths` and `firsts`.")
    if not all(-1 <= each < len(parent) for each in parent):
        raise ValueError(f"`parents` must be numbers of the {len(parent)} documents, or -1 for none.")


@functools.cache  # without a bound: a CUDA graph goes on to read the tables that it was captured with
def _rows(batch: int, length: int, device: torch.device) -> Documents:
    return documents_of([length] * batch, device=device)


def resolved(documents: Documents, x: torch.Tensor) -> Documents:
    """`documents`, with tables: those of the rows of `x`, (batch, tokens, ...), where it has none."""
    if documents.spans is not None:
        if documents.tokens != x.shape[0] * x.shape[1]:
            raise ValueError(
                f"`documents` are those of {documents.tokens} tokens, and the batch has {x.shape[0] * x.shape[1]}; "
                "give `documents_of` the `tokens` of the batch."
            )
        return documents
    # The tables of a fake tensor are fake, and must not be those of the next real one.
    rows = _rows if type(x) in (torch.Tensor, torch.nn.Parameter) else _rows.__wrapped__
    return rows(x.shape[0], x.shape[1], x.device)
