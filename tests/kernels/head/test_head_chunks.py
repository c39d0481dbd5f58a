"""How many tokens a chunk of logits holds, and how many retain their logits for the backward."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liger_trainer.kernels.head.head_chunks import chunk_rows, retained_rows, saturating_chunk_rows

HALF_GIB = 512 * 2**20


def _head(tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Hidden states and a head without memory."""
    return [torch.empty(size, hidden_size, dtype=dtype, device="meta") for size in (tokens, vocab_size)]


@given(
    tokens=st.integers(1, 200_000),
    hidden_size=st.integers(1, 16384),
    vocab_size=st.integers(1, 300_000),
    memory=st.integers(1, 2**32),
    trained=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_chunk_plan(
    tokens: int, hidden_size: int, vocab_size: int, memory: int, trained: bool, dtype: torch.dtype
) -> None:
    rows = chunk_rows(*_head(tokens, hidden_size, vocab_size, dtype), memory, trained)
    row_bytes = -(-vocab_size // 64) * 64 * dtype.itemsize
    allowed = max(1, memory // row_bytes)
    if allowed >= 896 and rows > allowed:  # a sixth more, for a multiple of 512
        allowed = allowed * 7 // 6
    assert rows >= 1
    if rows > allowed:  # only to spare the fp32 sum of dW, and for less memory than that would take
        assert trained
        assert dtype == torch.bfloat16
        assert -(-tokens // rows) <= 8
        assert (rows - allowed) * row_bytes <= (hidden_size + 128) * row_bytes
    if 128 <= rows < 896 and rows % 128:  # within the last tile that the budget holds, at least half of it
        assert rows // 128 == allowed // 128
        assert allowed % 128 >= 64
    count = -(-tokens // rows)
    assert count == 1 or tokens - (count - 1) * rows > 0


@pytest.mark.parametrize(
    ("budget", "rows"), [(800, 768), (1023, 1024), (1300, 1280), (1766, 2048), (2093, 2048), (2200, 2560), (5000, 5120)]
)
def test_many_tokens_are_whole_blocks_of_tiles(budget: int, rows: int) -> None:
    assert chunk_rows(*_head(rows * 40, 64, 1024), budget * 2048, False) == rows


def test_chunks_of_known_models() -> None:
    assert chunk_rows(*_head(8192, 4096, 128256), HALF_GIB, True) == 2048
    # 8 chunks of 1 GiB rather than 16 and 2 GiB more for dW
    assert chunk_rows(*_head(32768, 4096, 128256), HALF_GIB, True) == 4096
    assert chunk_rows(*_head(8192, 2560, 262208), HALF_GIB, True) == 1024
    assert chunk_rows(*_head(16384, 2048, 151936), HALF_GIB, True) == 2048


@pytest.mark.parametrize(
    ("tokens", "retain_memory", "retained", "rows"),
    [
        (8192, None, 2048, 2048),  # the backward's chunks fit into the memory of the retained ones
        (32768, None, 4096, 3584),
        (8192, 2**31, 8192, 1),
        (8192, 0, 0, 2048),
    ],
)
def test_retained_logits_of_a_known_model(tokens: int, retain_memory: int | None, retained: int, rows: int) -> None:
    hidden, weight = _head(tokens, 4096, 128256)
    assert retained_rows(hidden, weight, HALF_GIB, retain_memory) == retained
    assert saturating_chunk_rows(hidden[: tokens - retained], weight, HALF_GIB, True) == rows


def test_a_frozen_head_gains_nothing_from_more_tokens_than_fill_the_device() -> None:
    assert saturating_chunk_rows(*_head(8192, 4096, 128256), HALF_GIB, False) == 1024


def test_a_block_floating_point_sum_needs_no_bigger_buffer() -> None:
    hidden, weight = _head(8192, 4096, 128256)
    assert chunk_rows(hidden, weight, 64 * 2**20, True) == 1024
    with mock.patch("liger_trainer.kernels.head.weight_gradient.launch_for", return_value=print):
        assert chunk_rows(hidden, weight, 64 * 2**20, True) == 256
        assert chunk_rows(hidden, weight, 62 * 2**20, True) == 249
        assert chunk_rows(hidden, weight.t().contiguous().t(), 64 * 2**20, True) == 1024
