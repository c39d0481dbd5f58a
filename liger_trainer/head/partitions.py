"""A head that DeepSpeed ZeRO-3 has partitioned, run on one chunk of tokens at a time.

ZeRO-3 gathers the parameters of a module in hooks around its call, and again when a gradient reaches its output. If the
head's modules were called once a chunk, processes with different numbers of chunks would gather a different number of
times and wait for each other forever. So every module of the head that has parameters is called once for all chunks,
with a forward that returns these parameters: DeepSpeed gathers and frees them around that call, in the forward and in
the backward, as around any other. The chunks then run a copy of the head on the parameters so obtained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import MODULE_CONTENTS

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
