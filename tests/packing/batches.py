"""Small random padded batches, in which many rows begin alike."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from liger_trainer.packing.packed_row import Padded


class Rows(NamedTuple):
    """A padded batch on the host.

    Attributes:
        ids: (B, S), 0 for padding.
        mask: (B, S), bool.
        labels: (B, S), the token after each, or -100; some are no token's, or those of padding.
    """

    ids: np.ndarray
    mask: np.ndarray
    labels: np.ndarray

    def padded(self) -> Padded:
        ids, mask, labels = (torch.from_numpy(each.astype(np.int64)) for each in self)
        return Padded(ids, mask, None, labels)

    @property
    def starts(self) -> np.ndarray:
        return self.mask.argmax(1)

    @property
    def lengths(self) -> np.ndarray:
        return self.mask.sum(1)


def rows_of_tokens(*rows: list[int], starts: tuple[int, ...] | None = None, columns: int = 0) -> Rows:
    """A batch of these rows, from these columns on (by default from the first)."""
    starts = starts or (0,) * len(rows)
    columns = columns or max(start + len(row) for start, row in zip(starts, rows))
    ids = np.zeros((len(rows), columns), dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=bool)
    for place, (start, row) in enumerate(zip(starts, rows)):
        ids[place, start : start + len(row)] = row
        mask[place, start : start + len(row)] = True
    labels = np.roll(ids, -1, 1)
    labels[~mask] = -100
    return Rows(ids, mask, labels)


def random_rows(seed: int, most: int = 6) -> Rows:
    """Up to `most` rows of up to ten of two tokens, padded on the left or on the right; some are padding alone."""
    random = np.random.default_rng(seed)
    count, columns = random.integers(1, most + 1), random.integers(1, 11)
    lengths = random.integers(0, columns + 1, count)
    starts = np.where(random.random(count) < 0.7, 0, columns - lengths)
    common = random.integers(1, 3, columns)
    kept = random.integers(0, columns + 1, count)  # of the common beginning
    rows = [[*common[:n], *random.integers(1, 3, columns)][:length] for n, length in zip(kept, lengths)]
    batch = rows_of_tokens(*rows, starts=tuple(starts), columns=int(columns))
    labels = np.where(random.random(batch.ids.shape) < 0.3, -100, batch.labels)
    return batch._replace(labels=np.where(random.random(batch.ids.shape) < 0.1, 7, labels))
