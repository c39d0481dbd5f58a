"""Gated MLPs: `down_proj(act(gate_proj(x)) * up_proj(x))`, with separate or fused gate and up projections.

The projections are called as modules, so adapters, quantised layers and hooks on them go on working; only the
activation and the product between them become one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from liger_trainer.kernels.geglu import geglu, geglu_fused
from liger_trainer.kernels.swiglu import swiglu, swiglu_fused
from liger_trainer.patching.binding import call_like, overriding_forward
from liger_trainer.patching.finding import Finding
from liger_trainer.patching.probe import (
    Agreement,
    Probe,
    identity,
    is_stateless,
    only_argument,
    projection,
    stand_in,
)

_SEPARATE = ("gate_proj", "up_proj", "down_proj")
_FUSED = ("gate_up_proj", "down_proj")

# (component, approximate); what `approximate` is None for has no choice of it.
_ACTIVATIONS = (("swiglu", None), ("geglu", "tanh"), ("geglu", "none"))
_SIZES = (16, 24)  # hidden and intermediate size of the stand-in


def find_gated_mlp(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The verdict on `module` if it has a gated MLP's projections as children, else None."""
    children = {name for name, child in module._modules.items() if child is not None}
    names = _SEPARATE if children.issuperset(_SEPARATE) else _FUSED if children.issuperset(_FUSED) else None
    if names is None:
        return None
    target = type(module).__name__
    guess = "geglu" if any("gelu" in type(module._modules[name]).__name__.lower() for name in children) else "swiglu"
    if not enabled("swiglu") and not enabled("geglu"):
        return Finding(guess, target, module, reason="switched off in liger_kernel_config")
    foreign = overriding_forward(module)
    if foreign is not None:
        return Finding(guess, target, module, reason=f"its forward is already overridden by {foreign}")
    key = identity(module)
    if key not in probe.cache:
        probe.cache[key] = _probe_gated_mlp(module, names, probe)
    component, kernel, forward, agreement = probe.cache[key]
    component = component or guess
    if not enabled(component):
        return Finding(component, target, module, reason="switched off in liger_kernel_config")
    return Finding(component, target, module, kernel, forward, agreement.error, agreement.reason)


def _probe_gated_mlp(
    module: nn.Module, names: tuple[str, ...], probe: Probe
) -> tuple[str | None, str | None, Callable | None, Agreement]:
    def refused(reason: str) -> tuple[None, None, None, Agreement]:
        return None, None, None, Agreement(float("inf"), reason=reason)

    argument = only_argument(module)
    if argument is None:
        return refused("its forward takes more than the hidden states")
    others = {name: child for name, child in module._modules.items() if child is not None and name not in names}
    stateful = [name for name, child in others.items() if not is_stateless(child)]
    own = [name for name, tensor in {**module._parameters, **module._buffers}.items() if tensor is not None]
    if stateful or own:
        return refused(f"it has {', '.join(sorted(stateful + own))} besides a gated MLP's projections")

    hidden, intermediate = _SIZES
    widths = {"gate_proj": (intermediate, hidden), "up_proj": (intermediate, hidden)}
    widths |= {"gate_up_proj": (2 * intermediate, hidden), "down_proj": (hidden, intermediate)}
    tensors = [probe.randn(4, 16, hidden), *(probe.randn(*widths[name]) * 0.25 for name in names)]

    def on(forward: Callable) -> Callable:
        def computation(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            children = {name: _twin(child) for name, child in others.items()}
            children |= {name: projection(weight) for name, weight in zip(names, weights)}
            return forward(stand_in(module, {}, children), x)

        return computation

    failures = []
    for component, approximate in _ACTIVATIONS:
        forward = gated_mlp_forward(argument, names == _FUSED, approximate)
        agreement = probe.compare(on(type(module).forward), on(forward), tensors)
        if agreement.equal:
            kernel = (
                component if approximate is None else f"{component} ({'tanh' if approximate == 'tanh' else 'exact'})"
            )
            return component, kernel + (" on fused gate_up" if names == _FUSED else ""), forward, agreement
        failures.append(agreement)
    nearest = min(failures, key=lambda agreement: agreement.error)
    named = f" ({', '.join(type(child).__name__ for child in others.values())})" if others else ""
    return None, None, None, nearest.explained(f"neither SiLU(gate) * up nor GELU(gate) * up{named}")


def _twin(module: nn.Module) -> nn.Module:
    """A stand-in of a stateless child, so that hooks on the real one do not see the probe."""
    return stand_in(module, {}, {name: _twin(child) for name, child in module._modules.items() if child is not None})


@functools.cache
def gated_mlp_forward(argument: str, fused: bool, approximate: str | None) -> Callable:
    """A forward for one kind of gated MLP; the same function for equal arguments.

    Args:
        argument: Name of the forward's argument.
        fused: Whether one `gate_up_proj` gives both halves.
        approximate: GELU's approximation, ``"tanh"`` or ``"none"``; None for SiLU.
    """
    gated = swiglu if approximate is None else functools.partial(geglu, approximate=approximate)
    gated_fused = swiglu_fused if approximate is None else functools.partial(geglu_fused, approximate=approximate)

    def forward_separate(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.dtype != up.dtype:  # an adapter on one of the two may widen it; the product promotes
            dtype = torch.promote_types(gate.dtype, up.dtype)
            gate, up = gate.to(dtype), up.to(dtype)
        return self.down_proj(gated(gate, up, inplace_backward=_unseen(self.gate_proj, self.up_proj)))

    def forward_fused(self, x):
        return self.down_proj(gated_fused(self.gate_up_proj(x), inplace_backward=_unseen(self.gate_up_proj)))

    return call_like(forward_fused if fused else forward_separate, argument)


def _unseen(*projections: nn.Module) -> bool:
    """Whether nobody but the MLP sees the projections' outputs, so that the backward may write over them."""
    return not any(projection._forward_hooks for projection in projections)
