"""MLPs with a squared ReLU: `down_proj(relu(up_proj(x)) ** 2)`, as in Nemotron and Arcee."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from liger_trainer.kernels.mlp.relu_squared import relu_squared
from liger_trainer.nn.mlp import outputs_are_unhooked
from liger_trainer.patching.as_written import serves_as_written
from liger_trainer.patching.binding import bind_forward, call_like
from liger_trainer.patching.finding import Finding, reason_to_leave
from liger_trainer.patching.gated_mlp import on_projections, state_besides
from liger_trainer.patching.inputs import MLP
from liger_trainer.patching.probe import Probe, identity, only_argument
from liger_trainer.patching.trial import Trial

_NAMES = ("up_proj", "down_proj")
_SIZES = (16, 24)  # hidden and intermediate size of the dummy module


def find_relu_squared_mlp(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it is such an MLP, else None; two projections alone do not make one."""
    children = {name for name, child in module._modules.items() if child is not None}
    if not children.issuperset(_NAMES) or "gate_proj" in children:
        return None
    forward, error = probe.once(identity(module), _probe_mlp, module, probe)
    if forward is None:
        return None
    target = type(module).__name__
    reason = reason_to_leave(module, enabled("relu_squared"))
    if reason:
        return Finding("relu_squared", target, module, reason=reason)
    bind = functools.partial(bind_forward, live=_NAMES)
    return Finding("relu_squared", target, module, "relu_squared", forward, error, bind=bind)


def _probe_mlp(module: nn.Module, probe: Probe) -> tuple[Callable | None, float]:
    """Our forward and its error; None where the module computes something else."""
    argument = only_argument(module)
    if argument is None or state_besides(module, _NAMES):
        return None, float("inf")
    hidden, intermediate = _SIZES
    tensors = [probe.randn(4, 16, hidden), probe.randn(intermediate, hidden), probe.randn(hidden, intermediate)]
    forward = relu_squared_mlp_forward(argument)
    original, ours = (on_projections(module, _NAMES, each) for each in (type(module).forward, forward))
    agreement = Trial(original, tensors, MLP).prove(ours)
    return forward if agreement.equal else None, agreement.error


@functools.cache
def relu_squared_mlp_forward(argument: str) -> Callable:
    """The forward; the same function for equal arguments."""

    def forward(self, x):
        if serves_as_written(x):
            return type(self).forward(self, x)
        return self.down_proj(relu_squared(self.up_proj(x), inplace_backward=outputs_are_unhooked(self.up_proj)))

    return call_like(forward, argument)
