"""A head that is not a plain linear layer: its own forward runs on one chunk of tokens at a time.

With an adapter on the head (LoRA, DoRA, trained token rows) or a quantised weight, no kernel of ours computes the
logits: the module has to run. It maps each hidden state on its own, so it may run on chunks of them. The logits of a
chunk are reduced to what the loss needs of each token and dropped; the backward runs the module on the chunk again.
That takes four matmuls instead of three, and memory for one chunk of logits instead of all of them.

DeepSpeed ZeRO-3 gathers the parameters of a module in hooks around its call, and again when a gradient reaches its
output. If the head's modules were called once a chunk, processes with different numbers of chunks would gather a
different number of times and wait for each other forever. So every module of the head that has parameters is called
once for all chunks, with a forward that returns these parameters: DeepSpeed gathers and frees them around that call, in
the forward and in the backward, as around any other. The chunks then run a copy of the head on the parameters so
obtained.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import MODULE_CONTENTS
from liger_trainer.head.labelled_rows import LabelledRows
from liger_trainer.head.lm_head import (
    RECORDABLE_DTYPES,
    is_split,
    sharding_of,
    through_owner,
    version_of,
    whole_parameter,
)
from liger_trainer.head.step import current_step, running

require(MODULE_CONTENTS)

_Whole = dict[nn.Parameter, torch.Tensor]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def on_whole_parameters(head: nn.Module, hidden: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """A copy of `head` on whole parameters, connected to their gradients, and `hidden` `(..., H)` to run it on.

    The parameters are freed again in the backward when the gradient of this `hidden` is complete.
    """
    gathered: _Whole = {}
    for module in head.modules():
        parameters = [parameter for _, parameter in module.named_parameters(recurse=False)]
        trained = any(parameter.requires_grad for parameter in parameters)
        if parameters:
            # No gradient passes a frozen module, so DeepSpeed does not gather it for the backward.
            passed, *whole = _called_with(module, _handing_out(parameters), hidden if trained else hidden.detach())
            hidden = passed if trained else hidden
            gathered |= zip(parameters, whole)
    return _copy_on(head, gathered), hidden


def _handing_out(parameters: list[nn.Parameter]) -> Callable:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # DeepSpeed frees a parameter by giving it other memory, so a frozen one needs no copy.
        whole = [each.clone() if each.requires_grad else each.detach() for each in parameters]
        return hidden, *whole

    return forward


def _called_with(module: nn.Module, forward: Callable, hidden: torch.Tensor) -> Any:
    """``module(hidden)`` with `forward` instead of the module's own, and with DeepSpeed's hooks only."""
    own = {name: module.__dict__[name] for name in ("forward", *_HOOKS) if name in module.__dict__}
    module.__dict__["forward"] = forward
    module.__dict__.update((name, _of_deepspeed(own[name], True)) for name in _HOOKS)
    try:
        return nn.Module.__call__(module, hidden)  # a ParameterDict has one of its own
    finally:
        del module.__dict__["forward"]
        module.__dict__.update(own)


def _copy_on(module: Any, whole: _Whole) -> Any:
    """A copy of `module` with the parameters `whole`, without DeepSpeed's hooks and with all others."""
    copied = copy.copy(module)
    copied.__dict__["_parameters"] = {name: whole.get(each, each) for name, each in module._parameters.items()}
    copied.__dict__["_modules"] = {
        name: None if child is None else _copy_on(child, whole) for name, child in module._modules.items()
    }
    for name in _HOOKS:
        copied.__dict__[name] = _of_deepspeed(getattr(module, name), False)
    return copied


def _of_deepspeed(hooks: Any, whether: bool) -> Any:
    """The `hooks` that are DeepSpeed's, or those that are not."""
    modules = {key: getattr(hook, "__module__", None) or "" for key, hook in hooks.items()}
    return type(hooks)((key, hook) for key, hook in hooks.items() if modules[key].startswith("deepspeed.") == whether)


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
