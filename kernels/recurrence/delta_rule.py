"""The gated delta rule of gated delta nets (Qwen3.5, OLMo-hybrid) and, with a decay by channel, of Kimi Linear (KDA).

For each value head, with a state S of K rows and V columns (arXiv 2412.06464, 2510.26692)::

    S_t = diag(exp(g_t)) S_{t-1} + beta_t k_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)^T          o_t = scale * S_t^T q_t

`chunked.py` says how it is computed.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.documents import ROWS, Documents
from liger_trainer.kernels.recurrence.arguments import check_heads, check_initial_state, check_shape, check_tensors
from liger_trainer.kernels.recurrence.chunked import Arguments
from liger_trainer.kernels.recurrence.recurrence import recurrence, recurrence_reference
from liger_trainer.kernels.runtime import reference_of


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    documents: Documents = ROWS,
    final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over each document, causal.

    States are fp32. What a document gets depends on nothing else in the batch, and is the same in every run.

    Args:
        q: Queries, (batch, tokens, key_heads, K). Any strides, like all that follow, where the last one is 1.
        k: Keys, like `q`. Usually both were divided by their lengths.
        v: Values, (batch, tokens, value_heads, V). Consecutive value heads share a key head.
        g: Natural logarithms of the decays, at most 0, (batch, tokens, value_heads), or one for each channel of the
            keys, (batch, tokens, value_heads, K). They are computed with in fp32.
        beta: How much of each token is written, (batch, tokens, value_heads).
        scale: Factor of the result; ``K ** -0.5`` by default.
        initial_state: The states that documents without a parent begin with, (roots, value_heads, K, V), in the order
            of the documents; zeros by default.
        documents: Which tokens are a document; each row by default.
        final_state: Whether to return the states at the ends of the documents too.

    Returns:
        o (batch, tokens, value_heads, V) in the dtype of `v`, 0 for tokens of no document; with `final_state` also the
        states in fp32 (float64 for float64), (documents, value_heads, K, V).

    Raises:
        ValueError: If shapes or devices do not fit each other, or a dtype is not floating point.
    """
    name = "delta_rule"
    check_tensors(name, "v", q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    sizes = check_heads(name, q, k, v)
    by_channel = (sizes.rows,) if g.dim() == 4 else ()
    check_shape(name, "g", g, (*v.shape[:3], *by_channel), "(batch, tokens, value_heads), or with K behind it")
    check_shape(name, "beta", beta, tuple(v.shape[:3]), "(batch, tokens, value_heads)")
    check_initial_state(name, initial_state, documents, sizes)
    scale = sizes.rows**-0.5 if scale is None else scale
    arguments = Arguments(q, k, v, g, beta, initial_state=initial_state)
    return recurrence(arguments, scale, True, documents, final_state)


delta_rule_reference = reference_of(delta_rule, recurrence=recurrence_reference)
