"""The embedding as a module, with the call signature of Liger's."""

from __future__ import annotations

import torch
from torch import nn

from liger_trainer.functional import embedding


class LigerEmbedding(nn.Module):
    """A table of vectors with a deterministic backward; see [`liger_trainer.functional.embedding`].

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Columns of the table.
        padding_idx: An id whose row starts as zeros and gets no gradient; negative ones count from the end.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = nn.Parameter(torch.randn(num_embeddings, embedding_dim))
        if padding_idx is not None:
            with torch.no_grad():
                self.weight[padding_idx].zero_()

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """The rows of `indices`, any shape of integers: ``(*indices.shape, embedding_dim)``."""
        return embedding(indices, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        """What printing the module shows."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"
