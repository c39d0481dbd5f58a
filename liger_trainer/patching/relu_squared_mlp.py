"""MLPs with a squared ReLU: `down_proj(relu(up_proj(x)) ** 2)`, as in Nemotron and Arcee."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from liger_trainer.kernels.mlp.relu_squared import relu_squared
from liger_trainer.nn.mlp import outputs_are_unhooked
from liger_trainer.patching.as_written import serves_as_written
from liger_trainer.patching.binding import call_like
from liger_trainer.patching.finding import Finding, reason_to_leave
from liger_trainer.patching.gated_mlp import dummy_child, has_hooks_between
from liger_trainer.patching.probe import (
    Agreement,
    Probe,
    dummy_module,
    identity,
    is_stateless,
    only_argument,
    projection,
)

_NAMES = ("up_proj", "down_proj")
_SIZES = (16, 24)  # hidden and intermediate size of the dummy module


def find_relu_squared_mlp(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it is such an MLP, else None; two projections alone do not make one."""
    children = {name for name, child in module._modules.items() if child is not None}
    if not children.issuperset(_NAMES) or "gate_proj" in children:
        return None
    key = identity(module)
    forward, agreement = probe.once(key, _probe_mlp, module, probe)
    if forward is None:
        return None
    target = type(module).__name__
    reason = reason_to_leave(module, enabled("relu_squared"))
    if reason:
        return Finding("relu_squared", target, module, reason=reason)
    return Finding("relu_squared", target, module, "relu_squared", forward, agreement.error)


def _probe_mlp(module: nn.Module, probe: Probe) -> tuple[Callable | None, Agreement]:
    failed = None, Agreement(float("inf"))
    argument = only_argument(module)
    others = {name: child for name, child in module._modules.items() if child is not None and name not in _NAMES}
    own = [tensor for tensor in {**module._parameters, **module._buffers}.values() if tensor is not None]
    if argument is None or own or not all(is_stateless(child) for child in others.values()):
        return failed
    hidden, intermediate = _SIZES
    tensors = [probe.randn(4, 16, hidden), probe.randn(intermediate, hidden), probe.randn(hidden, intermediate)]

    def on(forward: Callable) -> Callable:
        def computation(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            children = {name: dummy_child(child) for name, child in others.items()}
            children |= {name: projection(weight) for name, weight in zip(_NAMES, weights)}
            return forward(dummy_module(module, {}, children), x)

        return computation

    forward = relu_squared_mlp_forward(argument)
    agreement = probe.compare(on(type(module).forward), on(forward), tensors)
    return (forward, agreement) if agreement.equal else failed


@functools.cache
def relu_squared_mlp_forward(argument: str) -> Callable:
    """The forward; the same function for equal arguments."""

    def forward(self, x):
        if serves_as_written(x) or has_hooks_between(self, _NAMES):
            return type(self).forward(self, x)
        return self.down_proj(relu_squared(self.up_proj(x), inplace_backward=outputs_are_unhooked(self.up_proj)))

    return call_like(forward, argument)
