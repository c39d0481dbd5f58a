"""The recurrence of linear attention in plain torch, chunk by chunk: gated delta rule, Mamba 2, lightning attention.

For each value head, with a state S of K rows and V columns, and for the tokens t of a document in their order::

    S_t = diag(exp(g_t)) S_{t-1} + k_t u_t^T        u_t = beta_t (v_t - delta (diag(exp(g_t)) S_{t-1})^T k_t)
    o_t = scale * S_t^T q_t + skip * v_t

where g is one number a token, or one for each of the K rows, and delta is 1 or 0. In a chunk of N tokens that begins
with the state S, with G the running sum of g inside of it::

    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)  for j <= i         M_ij = the same with k_i for q_i, for j < i
    (I + delta diag(beta) M) U = diag(beta) (v - delta (k exp(G)) S)
    o = scale ((q exp(G)) S + P U) + skip v                     S' = diag(exp(G_N)) S + (k exp(G_N - G))^T U

No exponent is positive: exp(-G) alone overflows where a gate forgets.

This is the reference of the kernels, what runs where they do not, and what autograd differentiates.

Shapes: T tokens of all rows, C chunks of CHUNK tokens, D documents; H key heads with R value heads each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.documents import CHUNK, FIRST_CHUNK, PARENT, TOKENS, Documents

_BLOCK = 16  # tokens; in a diagonal block of decays by channel, each pair of tokens has exponentials of its own


class Arguments(NamedTuple):
    """The tensors of a recurrence, of any strides where the last one is 1.

    Attributes:
        q: (batch, tokens, H, K).
        k: (batch, tokens, H, K).
        v: (batch, tokens, H * R, V).
        g: Logarithms of the decays, (batch, tokens, H * R), or (batch, tokens, H * R, K).
        beta: (batch, tokens, H * R); None for 1.
        skip: (H * R,); None for 0.
        initial_state: (roots, H * R, K, V), of the documents without a parent; None for 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None = None
    skip: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None


@torch.compiler.disable  # it reads where documents are, at which a compiler would break its graph many times
def chunked_recurrence(
    arguments: Arguments, scale: float, delta: bool, documents: Documents
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over each document, in fp32, or in float64 if `v` is.

    Args:
        arguments: The tensors.
        scale: Factor of the result.
        delta: Whether what the state already holds for k is taken off v.
        documents: With tables.

    Returns:
        o in the shape and dtype of `v`, and the final states of all documents, (D, H * R, K, V).
    """
    q, k, v, g, beta, skip, initial_state = arguments
    assert documents.spans is not None
    assert documents.chunks is not None
    compute = torch.promote_types(v.dtype, torch.float32)
    heads, value_heads = k.shape[2], v.shape[2]
    tokens = _tokens_of_chunks(documents.chunks, v.shape[0] * v.shape[1])

    def in_chunks(x: torch.Tensor) -> torch.Tensor:
        """(C, H, R, CHUNK, ...), with zeros behind the last token of a document."""
        rows = x.to(compute).flatten(0, 1)
        rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[tokens]
        return rows.unflatten(2, (heads, -1)).movedim(1, 3)

    queries, keys, values = in_chunks(q), in_chunks(k), in_chunks(v)
    decays = in_chunks(g if g.dim() == 4 else g[..., None])
    total = decays.cumsum(3)
    inner = _decayed_products(queries, keys, total)  # P
    left, right = queries * total.exp(), keys * (total[..., -1:, :] - total).exp()
    factor = torch.ones_like(values[..., :1]) if beta is None else in_chunks(beta)[..., None]
    known = keys * total.exp() if delta else None
    solve = factor * _decayed_products(keys, keys, total).tril(-1) if delta else None  # its diagonal counts as 1

    def advanced(state: torch.Tensor, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of chunks that begin with these states, and the states behind them."""
        u = values[chunk]
        if known is not None and solve is not None:
            u = factor[chunk] * (u - known[chunk] @ state)
            u = torch.linalg.solve_triangular(solve[chunk], u, upper=False, unitriangular=True)
        else:
            u = factor[chunk] * u
        o = scale * (left[chunk] @ state + inner[chunk] @ u)
        if skip is not None:
            o = o + skip.to(compute).view(heads, -1, 1, 1) * values[chunk]
        return o, state * total[chunk, :, :, -1].exp()[..., None] + right[chunk].mT @ u

    roots, number = documents.roots, len(documents.spans)
    spans = documents.spans.cpu().long()
    chunks_of_document = (spans[:, TOKENS] + CHUNK - 1) // CHUNK
    state = values.new_zeros(roots, heads, value_heads // heads, k.shape[3], v.shape[3])
    if initial_state is not None:
        state = initial_state.to(compute).unflatten(1, (heads, -1))
    finals, outputs, order = [], [], [spans.new_empty(0)]
    for begin, end in ((0, roots), (roots, number)):  # those without a parent, then those with one
        if begin > 0:
            state = state[spans[begin:, PARENT].to(v.device)]
        remaining = chunks_of_document[begin:end]
        for step in range(int(remaining.max()) if end > begin else 0):
            here = (remaining > step).nonzero()[:, 0]
            chunk = spans[begin + here, FIRST_CHUNK] + step
            on_here, on_chunk = here.to(v.device), chunk.to(v.device)
            o, after = advanced(state[on_here], on_chunk)
            state = state.index_copy(0, on_here, after)
            outputs.append(o)
            order.append(chunk)
        finals.append(state)
    final_states = torch.cat(finals).flatten(1, 2)
    o = torch.zeros_like(v, dtype=compute).flatten(0, 1)
    if outputs:
        rows = torch.cat(outputs).movedim(3, 1).flatten(2, 3).flatten(0, 1)
        where = tokens[torch.cat(order).to(v.device)].flatten()
        inside = where < len(o)
        o = o.index_copy(0, where[inside], rows[inside])
    return o.view(v.shape).to(v.dtype), final_states


def _tokens_of_chunks(chunks: torch.Tensor, behind: int) -> torch.Tensor:
    """The place of each token of each chunk in the flattened batch, (C, CHUNK); `behind` where a chunk has ended."""
    offset = torch.arange(CHUNK, device=chunks.device)
    return torch.where(offset < chunks[:, 2:], chunks[:, 1:2] + offset, behind)


def _decayed_products(x: torch.Tensor, k: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """sum_c x_ic k_jc exp(G_ic - G_jc) for j <= i, else 0: (C, H, R, CHUNK, CHUNK).

    Args:
        x: (C, H, 1 or R, CHUNK, K).
        k: Like `x`.
        total: G, (C, H, R, CHUNK, 1 or K).
    """
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    if total.shape[-1] == 1:
        decay = (total - total.mT).masked_fill(~earlier, -torch.inf).exp()
        return (x @ k.mT) * decay
    within = earlier[:_BLOCK, :_BLOCK, None]
    rows = []
    for begin in range(0, CHUNK, _BLOCK):
        # Before the block, decays are those up to its first token times those from there.
        block = slice(begin, begin + _BLOCK)
        first = total[..., begin : begin + 1, :]
        before = (x[..., block, :] * (total[..., block, :] - first).exp()) @ (
            k[..., :begin, :] * (first - total[..., :begin, :]).exp()
        ).mT
        difference = total[..., block, None, :] - total[..., None, block, :]
        decay = difference.masked_fill(~within, -torch.inf).exp()
        diagonal = (x[..., block, None, :] * k[..., None, block, :] * decay).sum(-1)
        behind = diagonal.new_zeros(*diagonal.shape[:-1], CHUNK - begin - _BLOCK)
        rows.append(torch.cat([before, diagonal, behind], -1))
    return torch.cat(rows, -2)
