"""The state space of Mamba 2 (arXiv 2405.21060), whose decay is one number a token and head.

For each head, with a state S of N rows and P columns::

    dt = clamp(softplus(dt + dt_bias))      S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T      y_t = S_t^T C_t + D x_t

It is the recurrence of `chunked.py` with keys B, queries C, values x, beta = dt and g = dt A.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.documents import ROWS, Documents
from liger_trainer.kernels.recurrence.arguments import check_heads, check_initial_state, check_shape, check_tensors
from liger_trainer.kernels.recurrence.chunked import Arguments
from liger_trainer.kernels.recurrence.recurrence import recurrence, recurrence_reference
from liger_trainer.kernels.runtime import reference_of


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: torch.Tensor | None = None,
    documents: Documents = ROWS,
    final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The state space of Mamba 2 over each document, causal.

    States and time steps are fp32. What a document gets depends on nothing else in the batch, and is the same in every
    run.

    Args:
        x: (batch, tokens, heads, P). Any strides, like all that follow, where the last one is 1.
        dt: Time steps before their bias and softplus, (batch, tokens, heads).
        A: Rates, negative, (heads,).
        B: (batch, tokens, groups, N). Consecutive heads share a group.
        C: Like `B`.
        D: Factor of `x` that is added to the result, (heads,); None for none.
        dt_bias: Added to `dt`, (heads,); None for none.
        dt_limit: The least and the largest time step.
        initial_state: The states that documents without a parent begin with, (roots, heads, N, P), in the order of the
            documents; zeros by default.
        documents: Which tokens are a document; each row by default.
        final_state: Whether to return the states at the ends of the documents too.

    Returns:
        y (batch, tokens, heads, P) in the dtype of `x`, 0 for tokens of no document; with `final_state` also the
        states in fp32 (float64 for float64), (documents, heads, N, P).

    Raises:
        ValueError: If shapes or devices do not fit each other, a dtype is not floating point, or `dt_limit` is not two
            numbers in their order.
    """
    name = "state_space"
    check_tensors(name, "x", x=x, dt=dt, A=A, B=B, C=C, D=D, dt_bias=dt_bias, initial_state=initial_state)
    sizes = check_heads(name, C, B, x, names=("C", "B", "x"))
    check_shape(name, "dt", dt, tuple(x.shape[:3]), "(batch, tokens, heads)")
    for argument, parameter in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        if parameter is not None:
            check_shape(name, argument, parameter, (sizes.heads,), "(heads,)")
    check_initial_state(name, initial_state, documents, sizes)
    if len(dt_limit) != 2 or not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"`dt_limit` of {name} is {dt_limit}; give the least and the largest time step.")
    compute = torch.promote_types(x.dtype, torch.float32)
    steps = dt.to(compute) if dt_bias is None else dt.to(compute) + dt_bias.to(compute)
    steps = torch.nn.functional.softplus(steps).clamp(*dt_limit)
    g = steps * A.to(compute)
    return recurrence(Arguments(C, B, x, g, steps, D, initial_state), 1.0, False, documents, final_state)


state_space_reference = reference_of(state_space, recurrence=recurrence_reference)
