"""The recurrence of linear attention: which way it is computed. `chunked.py` has the formulas."""

from __future__ import annotations

import torch

from liger_trainer.kernels.documents import Documents
from liger_trainer.kernels.recurrence.chunked import chunked_recurrence


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    skip: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    scale: float,
    delta: bool,
    documents: Documents,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the final states; arguments and results are those of `chunked_recurrence`."""
    return chunked_recurrence(q, k, v, g, beta, skip, initial_state, scale, delta, documents)
