"""Which inputs a causal convolution over documents reads, as tables for plain torch.

The tap of step s of a token reads the input s tokens before it in its document. Before a document's first token are the
last inputs of its parent; before the first token of a document without a parent is its initial state, or zeros.

Inputs are numbered: 0 is a row of zeros, then come the rows of the initial states, then the tokens of the flattened
batch. `halo` is the number of taps less one.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.documents import CHUNK, FIRST, PARENT, TOKENS, Documents


def sources(documents: Documents, tokens: int, halo: int, states: int) -> torch.Tensor:
    """The numbers of the inputs of each token, int64 (tokens, halo + 1), the token itself last.

    Args:
        documents: The documents, with tables.
        tokens: Tokens of the flattened batch. Those of no document read zeros alone.
        halo: How many tokens back the first tap reads.
        states: How many documents have an initial state: all without a parent, or 0.
    """
    assert documents.spans is not None
    assert documents.chunks is not None
    document, first, size = documents.chunks.long()[..., None].unbind(1)
    slot = torch.arange(CHUNK, device=first.device)
    place = torch.where(slot < size, first + slot, tokens)  # the last row of the table, for what no chunk has
    position = first + slot - documents.spans.long()[document, FIRST]
    steps = torch.arange(halo, -1, -1, device=first.device)
    table = first.new_zeros(tokens + 1, halo + 1)
    table[place] = _inputs(documents, document[..., None], position[..., None] - steps, halo, states)
    table[tokens] = 0
    return table[:tokens]


def last_inputs(documents: Documents, halo: int, states: int) -> torch.Tensor:
    """The numbers of the last inputs of each document, int64 (documents, halo), those before its first included."""
    assert documents.spans is not None
    document = torch.arange(len(documents.spans), device=documents.spans.device)[:, None]
    steps = torch.arange(halo, 0, -1, device=documents.spans.device)
    return _inputs(documents, document, documents.spans.long()[document, TOKENS] - steps, halo, states)


def _inputs(
    documents: Documents, document: torch.Tensor, position: torch.Tensor, halo: int, states: int
) -> torch.Tensor:
    """The numbers of the inputs at positions of documents, from -halo on."""
    assert documents.spans is not None
    spans = documents.spans.long()
    parent = spans[document, PARENT]
    continued = (position < 0) & (parent >= 0)
    holder = torch.where(continued, parent, document)
    position = torch.where(continued, position + spans[holder, TOKENS], position)
    of_token = 1 + states * halo + spans[holder, FIRST] + position
    of_state = 1 + holder * halo + halo + position if states else torch.zeros_like(of_token)
    return torch.where(position >= 0, of_token, of_state)
