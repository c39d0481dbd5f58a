"""Batches as reinforcement learning makes them, made up: the tokens that run, and the table of the guide."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from liger_trainer.packing.layout import Layout, groups_of, layout_of, starts_and_lengths

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "padding-free.md"
Row = list[int]


class Batches:
    """Rows of random tokens; the numbers of tokens are those of any others that differ."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def new(self, count: int) -> Row:
        """So many tokens that follow nothing else."""
        return self._random.choices(range(1, 50000), k=count)

    def group(self, prompt: int, completions: int) -> list[Row]:
        """A prompt, with so many completions of 512."""
        begun = self.new(prompt)
        return [begun + self.new(512) for _ in range(completions)]

    def system(self) -> list[Row]:
        """A system prompt, four prompts, and four completions of each."""
        begun = self.new(512)
        return [prompt + self.new(512) for prompt in (begun + self.new(1024) for _ in range(4)) for _ in range(4)]

    def turns(self, conversations: int) -> list[Row]:
        """A row for each of the eight turns of each conversation."""
        system, rows = self.new(1500), []
        for _ in range(conversations):
            row = system
            for _ in range(8):
                row = row + self.new(900)
                rows.append(row)
        return rows

    def search(self, row: Row, depth: int = 4) -> Iterator[Row]:
        """The leaves of a tree in which every step has two continuations."""
        if not depth:
            yield row
            return
        for _ in range(2):
            yield from self.search(row + self.new(500), depth - 1)

    def rewritten(self) -> list[Row]:
        """Eight rollouts of eight turns; every third turn or so goes on with a shorter result of its tool."""
        system, rows = self.new(1500), []
        for _ in range(8):
            row = system
            for _ in range(8):
                turn = row + self.new(900)
                if self._random.random() < 0.33:
                    rows.append(turn)
                    turn = row + self.new(200)
                row = turn
            rows.append(row)
        return rows


BATCHES: dict[str, Callable[[Batches], list[Row]]] = {
    "8 completions of 512 of a prompt of 1024": lambda made: made.group(1024, 8),
    "8 completions of 512 of a prompt of 4096": lambda made: made.group(4096, 8),
    "4 prompts of 1024, 4 completions of 512 each, a system prompt of 512": Batches.system,
    "a row for each of 8 turns of 900, 1 conversation behind 1500": lambda made: made.turns(1),
    "a row for each of 8 turns of 900, 4 conversations behind 1500": lambda made: made.turns(4),
    "tree search, 2 branches of 500, 4 deep, behind 1000": lambda made: [*made.search(made.new(1000))],
    "8 rollouts of 8 turns, the context rewritten every third": Batches.rewritten,
}


def padded(rows: list[Row]) -> np.ndarray:
    """The rows, with 0 behind them."""
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return ids


def laid_out(rows: list[Row]) -> list[Layout]:
    """Without sharing, with one level, and with all."""
    ids = padded(rows)
    found = starts_and_lengths(ids > 0)
    assert found is not None
    ways = ((False, False), (True, True), (True, False))
    return [layout_of(groups_of(ids, *found, *way), *found, ids.shape[1]) for way in ways]


def test_the_guide_has_these_numbers():
    table = ["| batch (tokens) | alone | one level | all levels | levels | keys a token | with a window of 512 |"]
    table.append("|---|---|---|---|---|---|---|")
    for name, rows in BATCHES.items():
        alone, flat, tree = laid_out(rows(Batches()))
        raw, one, count = (len(each.tokens) for each in (alone, flat, tree))
        keys, near = (tree.documents(window, 0).key_offsets[-1] / count for window in (0, 512))
        numbers = f"{raw:,} | {one:,} | {count:,} ({raw / count:.1f}×) | {tree.levels} | {keys:.1f} | {near:.1f}"
        table.append(f"| {name} | {numbers} |")
    assert "\n".join(table) in GUIDE.read_text()


@pytest.mark.parametrize("name", BATCHES)
def test_no_more_tokens_run_than_in_the_trie_of_trl(name):
    """That of its asynchronous GRPO, where a token that two tokens follow is there twice."""
    from trl.experimental.async_grpo.packing import TreeRow

    rows = BATCHES[name](Batches())
    theirs = TreeRow()
    for row in rows:
        theirs.add({"input_ids": torch.tensor(row), "completion_mask": torch.ones(len(row)), "group_id": 0})
    assert len(laid_out(rows)[-1].tokens) <= len(theirs.tokens)


def test_a_batch_of_many_long_rows_is_laid_out_at_once():
    """A model's step takes a second, and waits for it."""
    made = Batches()
    rows = [*made.search(made.new(996), 6)]
    ids = padded([row + made.new(100) for row in rows])
    starts, lengths = np.zeros(64, np.int64), np.full(64, ids.shape[1])
    assert ids.shape == (64, 4096)

    def seconds() -> float:
        began = time.process_time()
        found = layout_of(groups_of(ids, starts, lengths, True), starts, lengths, ids.shape[1])
        assert found.levels == 6
        assert found.documents(0, 0).keys is not None
        return time.process_time() - began

    assert min(seconds() for _ in range(5)) < 0.02
