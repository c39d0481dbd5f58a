"""What a forward leaves behind besides its result, such as a router's `self.aux_loss`: our forwards leave nothing.

A forward that assigns an attribute, writes to a buffer, or appends to a list has to run as it is, because something
else may read that. [`run_part`] compares what can be reached before and after a run: attributes and buffers of a module
and its children, their classes, and the globals and closures of their functions and of those that these call, with all
that they hold, to any depth. Then everything gets back what it held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.patching.as_written import arrays_read
from liger_trainer.patching.reached import Reached, UnseenError
from liger_trainer.patching.reads import CONTAINERS

_NO_PARAMETER = "which are neither a parameter nor a buffer and may change in place"


class SideEffectError(Exception):
    """Says what a forward changed, as the reason in the report."""


def run_part(forward: Callable, module: nn.Module, *inputs: torch.Tensor | None) -> Any:
    """The result of ``forward(module, *inputs)``.

    Raises:
        SideEffectError: If the module, a child, its class or what its functions reach holds something else afterwards,
            if there is too much to compare, if a hook on a gradient may change more, or if the forward reads tensors
            that are neither parameters nor buffers: no call could see that they change. Whatever was changed, but the
            numbers of tensors, is as before.
    """
    try:
        held = Reached(forward, module, inputs)
        arrays = [] if held.is_simple else arrays_read(module, forward)
    except UnseenError as error:
        raise SideEffectError(str(error)) from error
    if arrays:
        raise SideEffectError(f"its forward reads the numbers of its {arrays[0]}, {_NO_PARAMETER}")
    try:
        result = forward(module, *inputs)
    finally:
        changed = held.restore()
    changed += [f"{name} of its result" for name in held.attributes_of_result(result)]
    if changed:
        raise SideEffectError(f"its forward also sets {', '.join(dict.fromkeys(changed))}, which others may read")
    return result


def copies_of_containers(attributes: dict[str, Any]) -> dict[str, Any]:
    """`attributes` with copies of lists, dictionaries and sets, so that a dummy's forward does not change a model's."""
    return {name: value.copy() if type(value) in CONTAINERS else value for name, value in attributes.items()}
