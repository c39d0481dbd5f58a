"""Linear attention whose decay is one constant of each head, as in MiniMax (lightning attention, arXiv 2405.17381).

For each head, with a state S of K rows and V columns::

    S_t = exp(-slope) S_{t-1} + k_t v_t^T           o_t = S_t^T q_t

It is the recurrence of `chunked.py` with beta = 1 and g = -slope.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.documents import ROWS, Documents
from liger_trainer.kernels.recurrence.arguments import check_heads, check_initial_state, check_shape, check_tensors
from liger_trainer.kernels.recurrence.chunked import Arguments
from liger_trainer.kernels.recurrence.recurrence import recurrence, recurrence_reference
from liger_trainer.kernels.runtime import reference_of


def decayed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slope: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    documents: Documents = ROWS,
    final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Linear attention with a constant decay over each document, causal.

    States are fp32. What a document gets depends on nothing else in the batch, and is the same in every run.

    Args:
        q: Queries, (batch, tokens, key_heads, K). Any strides, like `k` and `v`, where the last one is 1.
        k: Keys, like `q`.
        v: Values, (batch, tokens, heads, V). Consecutive heads share a key head.
        slope: Decay of the state with each token, to exp(-slope) of it; at least 0, (heads,).
        initial_state: The states that documents without a parent begin with, (roots, heads, K, V), in the order of the
            documents; zeros by default.
        documents: Which tokens are a document; each row by default.
        final_state: Whether to return the states at the ends of the documents too.

    Returns:
        o (batch, tokens, heads, V) in the dtype of `v`, 0 for tokens of no document; with `final_state` also the states
        in fp32 (float64 for float64), (documents, heads, K, V).

    Raises:
        ValueError: If shapes or devices do not fit each other, or a dtype is not floating point.
    """
    name = "decayed_attention"
    check_tensors(name, "v", q=q, k=k, v=v, slope=slope, initial_state=initial_state)
    sizes = check_heads(name, q, k, v)
    check_shape(name, "slope", slope, (sizes.heads,), "(heads,)")
    check_initial_state(name, initial_state, documents, sizes)
    g = -slope.to(torch.promote_types(v.dtype, torch.float32)).expand(v.shape[:3])
    return recurrence(Arguments(q, k, v, g, initial_state=initial_state), 1.0, False, documents, final_state)


decayed_attention_reference = reference_of(decayed_attention, recurrence=recurrence_reference)
