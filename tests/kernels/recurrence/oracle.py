"""The recurrence token by token, in float64, and documents that are hard to get right."""

from __future__ import annotations

import torch

from liger_trainer.kernels.documents import Documents, documents_of
from tests.kernels.document_places import places

LENGTHS = [70, 1, 0, 64, 130, 2, 63, 65]
PARENTS = [-1, 0, -1, 0, -1, 4, -1, 2]
"""Of `LENGTHS`: the first has two children, an empty document and one of three chunks have one each."""


def hard_documents(device: str = "cpu") -> Documents:
    """Documents of `LENGTHS`, apart from each other, with padding before, between and behind."""
    firsts, place = [], 3
    for length in LENGTHS:
        firsts.append(place)
        place += length + 1
    return documents_of(LENGTHS, firsts, PARENTS, tokens=place + 5, device=device)


def hard_tokens() -> int:
    return 3 + sum(LENGTHS) + len(LENGTHS) + 5


def sequential(q, k, v, g, beta, skip, initial_state, scale, delta, documents):
    """o (batch, tokens, heads, V) and the final states (documents, heads, K, V), token by token in float64.

    q, k (batch, tokens, key_heads, K), v (batch, tokens, heads, V), g (batch, tokens, heads) or (..., K), beta (batch,
    tokens, heads) or None, skip (heads,) or None.
    """
    heads = v.shape[2]
    share = heads // k.shape[2]
    flat = [x.double().flatten(0, 1) for x in (q, k, v, g)]
    q, k = (x.repeat_interleave(share, 1) for x in flat[:2])
    values, g = flat[2:]
    beta = torch.ones_like(values[..., 0]) if beta is None else beta.double().flatten(0, 1)
    decay = g.exp()[..., None] if g.dim() == 2 else g.exp()
    outputs = [torch.zeros_like(values[0]) for _ in values]
    finals = []
    for number, (begin, end, parent) in enumerate(places(documents)):
        state = values.new_zeros(heads, k.shape[2], values.shape[2])
        if parent >= 0:
            state = finals[parent]
        elif initial_state is not None:
            state = initial_state[number].double()
        for t in range(begin, end):
            state = state * decay[t][..., None]
            u = values[t]
            if delta:
                u = u - (state * k[t][..., None]).sum(1)
            state = state + k[t][..., None] * (beta[t][:, None] * u)[:, None]
            outputs[t] = scale * (state * q[t][..., None]).sum(1)
            if skip is not None:
                outputs[t] = outputs[t] + skip.double()[:, None] * values[t]
        finals.append(state)
    return torch.stack(outputs).view(v.shape), torch.stack(finals)
