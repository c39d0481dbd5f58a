"""A head whose parameters DeepSpeed ZeRO-3 has partitioned, and which runs on a chunk of tokens at a time.

ZeRO-3 gathers the parameters of a module in hooks around its call, and again when a gradient reaches its output. A head
whose modules were called for each chunk would be gathered as often, on each process another number of times, and
processes that wait for each other in another order never end. So every module in the head that has parameters is called
once for all chunks, with a forward that hands its parameters out: DeepSpeed gathers and frees around it, in the forward
and in the backward, as around any other call. The chunks then run a copy of the head on what was handed out.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.deepspeed import PARTITIONED_HEAD
from liger_trainer.compat.private import require

_Lent = dict[nn.Parameter, torch.Tensor]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def is_partitioned(head: nn.Module) -> bool:
    """Whether ZeRO-3 owns parameters of `head`."""
    if not any(hasattr(parameter, "ds_id") for parameter in head.parameters()):
        return False
    _check_deepspeed()
    return True


@functools.cache
def _check_deepspeed() -> None:
    require(PARTITIONED_HEAD)


def lend(head: nn.Module, hidden: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    """A copy of `head` on whole parameters, connected to their gradients, and `hidden` `(..., H)` to run it on.

    The parameters are freed again in the backward when the gradient of this `hidden` is complete.
    """
    lent: _Lent = {}
    for module in head.modules():
        parameters = [parameter for _, parameter in module.named_parameters(recurse=False)]
        trained = any(parameter.requires_grad for parameter in parameters)
        if parameters:
            # Past a frozen module no gradient flows, so that it is not gathered for the backward.
            passed, *whole = _called_with(module, _handing_out(parameters), hidden if trained else hidden.detach())
            hidden = passed if trained else hidden
            lent |= zip(parameters, whole)
    return _copy_on(head, lent), hidden


def _handing_out(parameters: list[nn.Parameter]) -> Callable:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # DeepSpeed empties a parameter by giving it other memory, so what is not differentiated needs no copy.
        whole = [each.clone() if each.requires_grad else each.detach() for each in parameters]
        return hidden, *whole

    return forward


def _called_with(module: nn.Module, forward: Callable, hidden: torch.Tensor) -> Any:
    """``module(hidden)`` with `forward` in the place of the module's own, and DeepSpeed's hooks alone."""
    own = {name: module.__dict__[name] for name in ("forward", *_HOOKS) if name in module.__dict__}
    module.__dict__["forward"] = forward
    module.__dict__.update((name, _of_deepspeed(own[name], True)) for name in _HOOKS)
    try:
        return nn.Module.__call__(module, hidden)  # a ParameterDict has one of its own
    finally:
        del module.__dict__["forward"]
        module.__dict__.update(own)


def _copy_on(module: Any, lent: _Lent) -> Any:
    """A copy of `module` with `lent` in the place of its parameters, without DeepSpeed's hooks; others stay."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {name: lent.get(each, each) for name, each in module._parameters.items()}
    twin.__dict__["_modules"] = {
        name: None if child is None else _copy_on(child, lent) for name, child in module._modules.items()
    }
    for name in _HOOKS:
        twin.__dict__[name] = _of_deepspeed(getattr(module, name), False)
    return twin


def _of_deepspeed(hooks: Any, whether: bool) -> Any:
    """Those of `hooks` that are DeepSpeed's, or the others."""
    modules = {key: getattr(hook, "__module__", None) or "" for key, hook in hooks.items()}
    return type(hooks)((key, hook) for key, hook in hooks.items() if modules[key].startswith("deepspeed.") == whether)
