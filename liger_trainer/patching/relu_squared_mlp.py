"""MLPs with a squared ReLU: `down_proj(relu(up_proj(x)) ** 2)`, as in Nemotron, Arcee, Persimmon and nanochat."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from liger_trainer.compat.hooks import outputs_are_unhooked
from liger_trainer.kernels.mlp.relu_squared import relu_squared
from liger_trainer.patching.as_written import EVERY_PRECISION, Precisions, runs_ours
from liger_trainer.patching.binding import bind_forward, call_like
from liger_trainer.patching.gated_mlp import biased, dummy_tensors, on_projections, precisions_of, state_besides
from liger_trainer.patching.inputs import MLP
from liger_trainer.patching.probe import Probe, identity, only_argument
from liger_trainer.patching.report import Finding, reason_to_leave
from liger_trainer.patching.trial import Trial

_NAMES = (("up_proj", "down_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"))


def find_relu_squared_mlp(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it is such an MLP, else None; two projections alone do not make one."""
    children = {name for name, child in module._modules.items() if child is not None}
    names = next((names for names in _NAMES if children.issuperset(names)), None)
    if names is None or "gate_proj" in children:
        return None
    forward, error = probe.once((identity(module), biased(module, names)), _probe_mlp, module, names, probe)
    if forward is None:
        return None
    target = type(module).__name__
    reason = reason_to_leave(module, enabled("relu_squared"))
    if reason:
        return Finding("relu_squared", target, module, reason=reason)
    bind = functools.partial(bind_forward, live=names)
    return Finding("relu_squared", target, module, "relu_squared", forward, error, bind=bind)


def _probe_mlp(module: nn.Module, names: tuple[str, str], probe: Probe) -> tuple[Callable | None, float]:
    """Our forward and its error; None where the module computes something else."""
    argument = only_argument(module)
    if argument is None or state_besides(module, names):
        return None, float("inf")
    first, last = {names[0]: 1}, names[1]
    forward = relu_squared_mlp_forward(argument, names)
    original, ours = (on_projections(module, names, each) for each in (type(module).forward, forward))
    agreement = Trial(original, dummy_tensors(module, first, last, probe), MLP).prove(ours)
    precisions = precisions_of(module, first, last, forward, probe) if agreement.equal else None
    return None if precisions is None else relu_squared_mlp_forward(argument, names, precisions), agreement.error


@functools.cache
def relu_squared_mlp_forward(
    argument: str, names: tuple[str, str], precisions: Precisions = EVERY_PRECISION
) -> Callable:
    """The forward, for where the proof holds; the same function for equal arguments.

    Args:
        argument: Name of the forward's argument.
        names: Of the projections.
        precisions: Where the proof holds.
    """

    def forward(self, x):
        if not runs_ours(x, precisions):
            return type(self).forward(self, x)
        first, last = (getattr(self, name) for name in names)
        return last(relu_squared(first(x), inplace_backward=outputs_are_unhooked(first)))

    return call_like(forward, argument)
