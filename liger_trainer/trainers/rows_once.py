"""Counts of TRL in which processes that train on equal rows are one: those that share a tensor or each sequence.

TRL gathers completions, rewards and counts of all processes. Where R of them have the same rows, each row is gathered R
times: totals are R times too large, and a standard deviation is one of R times as many numbers. The processes of a
group follow each other, so every R-th entry has each row once, that of the first process of a group. Rewards that
differ between the processes of a group, as those of a judge that draws may, thus become the first one's. What TRL
reduces are a sum and its count, whose quotient is right as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from accelerate.utils import gather, gather_object


class RowsOnce:
    """Stands for an `Accelerator` where TRL counts rows; all else is that of the accelerator.

    Args:
        accelerator: The accelerator.
        alike: How many processes have equal rows, at least 2.
    """

    def __init__(self, accelerator: Any, alike: int) -> None:
        self._accelerator, self._alike = accelerator, alike

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    @property
    def num_processes(self) -> int:
        """How many processes have rows of their own."""
        return self._accelerator.num_processes // self._alike

    @property
    def process_index(self) -> int:
        """The place of this process's rows among all."""
        return self._accelerator.process_index // self._alike

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all processes, of which each has as many; (N,) of 0-d tensors."""
        rows = gather(tensor[None])[:: self._alike]
        return rows.flatten(0, 1) if tensor.dim() else rows

    def gather_object(self, values: list[Any]) -> list[Any]:
        """The values of all processes."""
        return [value for each in gather_object([values])[:: self._alike] for value in each]


@contextlib.contextmanager
def rows_once(trainer: Any, trl_module: ModuleType, alike: int) -> Iterator[None]:
    """Around code of TRL that counts rows: `alike` processes have equal ones, and count as one.

    Args:
        trainer: The trainer, whose `accelerator` is a [`RowsOnce`] meanwhile.
        trl_module: Where its code is, whose `gather` and `gather_object` are those of it.
        alike: How many processes have equal rows.
    """
    accelerator, names = trainer.accelerator, vars(trl_module)
    if alike == 1 or isinstance(accelerator, RowsOnce):
        yield
        return
    once, own = RowsOnce(accelerator, alike), {name: names[name] for name in ("gather", "gather_object")}
    try:
        trainer.accelerator = once
        names.update({name: getattr(once, name) for name in own})
        yield
    finally:
        trainer.accelerator = accelerator
        names.update(own)
