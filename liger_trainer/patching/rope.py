"""Rotary position embedding: the function that an attention's forward calls by a global name.

The function is compared with ours. Where they agree, the attention instance gets a copy of its class's forward in which
that name refers to our function (`compat/rebound.py`). The function itself, and every other model in the process, do
not change.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.rebound import forward_calling, used_globals
from liger_trainer.compat.transformers import ROTARY_FUNCTION
from liger_trainer.patching.finding import Finding, bind_own_code, reason_to_leave
from liger_trainer.patching.probe import Probe
from liger_trainer.patching.rotations import ONE_TENSOR, arguments_of, prove_rotation

HIDDEN_CALL = "its forward is decorated in a way that hides the call"


def find_rope(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Iterator[Finding]:
    """The finding for every rotary function that `module`'s forward calls by a global name."""
    patched = type(module).forward
    if enabled("rope") and "transformers.modeling_utils" in sys.modules:  # else the model is not one of its models
        available(ROTARY_FUNCTION)
    functions: list[tuple[str, Callable]] = probe.once(("rope", patched), list, rotary_globals(patched))
    for name, function in functions:
        target = f"{name} in {type(module).__name__}"
        reason = reason_to_leave(module, enabled("rope"))
        if reason:
            yield Finding("rope", target, module, reason=reason)
            continue
        kernel, rotary, agreement, _ = probe.once(("rope", name, function), prove_rotation, function, probe)
        copy = None if rotary is None else forward_calling(patched, name, rotary)
        if copy is None:
            yield Finding("rope", target, module, reason=agreement.reason or HIDDEN_CALL)
        else:
            patched = copy  # with several functions, the forward that is bound last calls all of ours
            yield Finding("rope", target, module, kernel, patched, agreement.error, bind=bind_own_code)


def rotary_globals(forward: Callable) -> Iterator[tuple[str, Callable]]:
    """The rotary functions that `forward`, or what it wraps, calls by a global name."""
    function: Any = forward
    while isinstance(function, types.FunctionType):
        for name, value in used_globals(function).items():
            if not callable(value) or isinstance(value, type):
                continue
            arguments = arguments_of(value)
            rotates = arguments[:4] == ["q", "k", "cos", "sin"] or arguments == ONE_TENSOR
            if rotates or ("apply" in name and "rotary" in name):
                yield name, value
        function = getattr(function, "__wrapped__", None)
