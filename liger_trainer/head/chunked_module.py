"""A head that is not a plain linear layer: its own forward runs on one chunk of tokens at a time.

With an adapter on the head (LoRA, DoRA, trained token rows) or a quantised weight, no kernel of ours computes the
logits: the module has to run. It maps each hidden state on its own, so it may run on chunks of them. The logits of a
chunk are reduced to what the loss needs of each token and dropped; the backward runs the module on the chunk again.
That takes four matmuls instead of three, and memory for one chunk of logits instead of all of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_trainer.head.labelled_rows import LabelledRows
from liger_trainer.head.lm_head import (
    RECORDABLE_DTYPES,
    is_split,
    sharding_of,
    through_owner,
    version_of,
    whole_parameter,
)
from liger_trainer.head.partitions import on_whole_parameters
from liger_trainer.head.step import current_step, running


@dataclasses.dataclass(eq=False)
class ModuleCall:
    """One call of such a head whose logits are deferred; the counterpart of `HeadCall`.

    Args:
        head: The module; under ZeRO-3 a copy of it on whole parameters.
        vocab_size: V.
        dtype: The dtype of the logits.
        autocast: The dtype of autocast during the call; None where it was off.
        logits_memory: Bytes for the logits of a chunk.
    """

    head: nn.Module
    vocab_size: int
    dtype: torch.dtype
    autocast: torch.dtype | None
    logits_memory: int
    fused = False

    def __post_init__(self) -> None:
        self.has_loss = False
        named: dict[str, torch.Tensor] = dict(self.head.named_parameters())
        sharded = bool(sharding_of(self.head))
        self._gathered = named if sharded else {}
        self.watched = () if sharded else tuple(named.values())  # which must not change until the backward
        self.versions = [*map(version_of, self.watched)]

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        """The parameters that get a gradient."""
        return tuple(parameter for parameter in self.head.parameters() if parameter.requires_grad)

    def local_product(self, hidden: torch.Tensor) -> torch.Tensor:
        """The module's own logits `(..., V)` of `hidden` `(..., H)`, as a function of `parameters` as they are."""
        return self._run(self._gathered, hidden)

    def gathered_product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `local_product`, with the current parameters; sharded ones are gathered once for all uses."""
        now = dict(self.head.named_parameters()) if self._gathered else {}
        return functools.partial(
            self._run, {name: whole_parameter(now[name], gathered) for name, gathered in self._gathered.items()}
        )

    def _run(self, parameters: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        autocast = torch.autocast(hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with running(replace(current_step(), forward=None)), autocast:
            if not parameters:
                return type(self.head).forward(self.head, hidden).to(self.dtype)
            given = {f"head.{name}": parameter for name, parameter in parameters.items()}
            return torch.func.functional_call(_OwnForward(self.head), given, (hidden,)).to(self.dtype)


class _OwnForward(nn.Module):
    """The forward of `head`'s class, called with other parameters and without the hooks of FSDP or ZeRO-3."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return type(self.head).forward(self.head, hidden)


def module_call(
    head: nn.Module, hidden: torch.Tensor, in_fp32: bool, logits_memory: int
) -> tuple[ModuleCall | None, torch.Tensor]:
    """The call of `head` and its input; None instead of a call where the head must run on all tokens at once.

    That is where tensor parallelism splits it.
    """
    vocab_size = vocab_size_of(head)
    if vocab_size is None or hidden.dtype not in RECORDABLE_DTYPES or is_split(head):
        return None, hidden
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and not in_fp32 else None
    if sharding_of(head) == "ZeRO-3":
        owner, (head, hidden) = head, on_whole_parameters(head, hidden)
        hidden = through_owner(owner, hidden)
    return ModuleCall(head, vocab_size, autocast or hidden.dtype, autocast, logits_memory), hidden


def vocab_size_of(head: nn.Module) -> int | None:
    """The number of logits of a head, from the first module in it that has `out_features`; None if none has."""
    sizes = (getattr(module, "out_features", None) for module in head.modules())
    return next((size for size in sizes if isinstance(size, int)), None)


def chunked_rows(
    logits: Any, of_rows: Callable[..., Sequence[torch.Tensor]], *others: torch.Tensor, rows: LabelledRows | None = None
) -> list[torch.Tensor]:
    """Values for each token, computed from its logits, with the logits of one chunk of tokens in memory at a time.

    Args:
        logits: `(..., V)`, deferred, of any head.
        of_rows: Maps logits `(n, V)` and the rows of `others` for the same tokens to tensors of `(n, ...)`; it runs
            again in the backward.
        others: `(...)` or `(..., X)`, of the same tokens and on the device of the logits.
        rows: The rows to run on, of flat labels; by default all. The first of `others` is then these labels, and
            `of_rows` returns tensors `(n,)`, 0 where the label is ignored.

    Returns:
        The tensors, with the leading dimensions of `logits` in the place of n.
    """
    recorded = logits.recorded
    recorded.check()
    call, hidden = recorded.call, recorded.hidden.reshape(-1, recorded.hidden.shape[-1])
    lead = logits.meta.shape[:-1]
    has_graph = logits.has_graph and torch.is_grad_enabled()
    flat = [other.reshape(len(hidden), *other.shape[len(lead) :]) for other in others]

    def run(part: torch.Tensor, *more: torch.Tensor) -> Sequence[torch.Tensor]:
        replayed = recorded.chain.replay(product(part))
        if rows is not None:  # gathered here, so that only the index is saved for the backward
            labels, index = more
            more = (labels, *(other.index_select(0, index) for other in flat[1:]))
        with torch.autocast(part.device.type, enabled=False):
            return of_rows(replayed, *more)

    step = functools.partial(checkpoint, run, use_reentrant=False) if has_graph else run
    memory = call.logits_memory if rows is None else rows.logits_memory
    size = max(1, memory // (call.vocab_size * logits.meta.element_size()))
    with torch.set_grad_enabled(has_graph):
        # Once, and not for each chunk: ranks with different numbers of chunks would wait for each other forever.
        product = call.gathered_product()
        given = [hidden, *flat] if rows is None else [rows.gathered(hidden), rows.target, rows.index]
        split = (tensor.split(size) for tensor in given)
        columns = [torch.cat(column) for column in zip(*(step(*chunk) for chunk in zip(*split)))]
        if rows is not None:
            columns = [rows.scattered(column) for column in columns]
        columns = [through_owner(call.head, column).view(*lead, *column.shape[1:]) for column in columns]
    call.has_loss = call.has_loss or any(column.requires_grad for column in columns)
    return columns
