"""LoRA layers for queries, keys and values, which an attention calls on the same hidden states: one operator.

The attention's forward runs once on a dummy module. If it calls each of `q_proj`, `k_proj` and `v_proj` first on its
hidden states, then the first of its LoRA layers among them that is called computes the results of all, and the others
return theirs if they are given the same, unchanged tensor. If one of them has a hook, each computes its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from liger_trainer.head.lm_head import version_of
from liger_trainer.kernels.lora.lora import lora_linears
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.lora.operands import adapted_layers
from liger_trainer.patching.probe import Probe, run_attention
from liger_trainer.patching.report import Finding, bind_own_code

_NAMES = ("q_proj", "k_proj", "v_proj")


class _Group:
    """The LoRA layers of an attention that is running, in the order of their calls."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self.modules = modules
        self._x: torch.Tensor | None = None
        self._state: tuple[int | None, bool] | None = None
        self._results: dict[int, torch.Tensor] = {}

    def result(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The result of `module` for `x`; None if `module` has to compute it."""
        state = version_of(x), torch.is_grad_enabled()
        if module is self.modules[0]:
            layers = adapted_layers(x, *self.modules)
            if layers is None:
                return None
            self._x, self._state = x, state
            self._results = {id(each): y for each, y in zip(self.modules, lora_linears(x, layers))}
        if x is not self._x or state != self._state:
            return None
        return self._results.pop(id(module), None)


# The attentions that are running. The call that adds a group removes it, so threads that run different layers (when
# autograd recomputes checkpoints) do not interfere.
_running: list[_Group] = []


def shared_result(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The result of the LoRA layer `module` for `x`, computed together with its siblings'; None if it has none."""
    for group in _running:
        if any(module is each for each in group.modules):
            return group.result(module, x)
    return None


@functools.cache
def forward_sharing(forward: Callable, names: tuple[str, ...]) -> Callable:
    """`forward` of an attention whose LoRA layers `names` are computed together."""

    @functools.wraps(forward)
    def sharing(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        group = _Group(tuple(self._modules[name] for name in names))
        _running.append(group)
        try:
            return forward(self, *args, **kwargs)
        finally:
            _running.remove(group)

    return sharing


def share_inputs(findings: Iterable[Finding], model: nn.Module, probe: Probe) -> list[Finding]:
    """`findings` with a forward for every attention whose LoRA layers can be computed together."""
    findings = list(findings)
    adapted = {id(each.module) for each in findings if each.component == "lora" and each.forward is not None}
    places = {id(each.module): place for place, each in enumerate(findings) if each.forward is not None}
    for module in model.modules():
        children = {name: module._modules.get(name) for name in _NAMES}
        shared = {name for name, child in children.items() if id(child) in adapted}
        if len(shared) < 2 or None in children.values() or overriding_forward(module) is not None:
            continue
        order = _order_of_calls(module, probe)
        if order is None:
            continue
        names, place = tuple(name for name in order if name in shared), places.get(id(module))
        if place is None:
            forward, kernel = forward_sharing(type(module).forward, names), f"lora_linears ({', '.join(names)})"
            findings.append(Finding("lora", type(module).__name__, module, kernel, forward, bind=bind_own_code))
        else:
            native: Callable = findings[place].forward  # type: ignore[assignment]
            findings[place] = dataclasses.replace(findings[place], forward=forward_sharing(native, names))
    return findings


class _CalledError(Exception):
    """Ends the forward once all projections have been called."""


class _Recorder(nn.Module):
    def __init__(self, name: str, size: int, calls: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.name, self.size, self.calls = name, size, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((self.name, x))
        if len(self.calls) == len(_NAMES):
            raise _CalledError
        return x.new_ones(*x.shape[:-1], self.size)


def _order_of_calls(module: nn.Module, probe: Probe) -> tuple[str, ...] | None:
    """The order in which the attention calls its projections on its hidden states; None if it does not."""
    projections: list[Any] = [module._modules[name] for name in _NAMES]
    sizes = tuple((each.in_features, each.out_features) for each in projections)
    key = ("order of calls", type(module).forward, sizes)
    return probe.once(key, _run_to_projections, module, dict(zip(_NAMES, sizes)))


def _run_to_projections(module: nn.Module, sizes: dict[str, tuple[int, int]]) -> tuple[str, ...] | None:
    calls: list[tuple[str, torch.Tensor]] = []
    children = {
        name: _Recorder(name, sizes[name][1], calls) if name in sizes else nn.Identity() for name in module._modules
    }
    hidden = torch.ones(1, 3, sizes["q_proj"][0])
    try:
        run_attention(type(module).forward, module, children, hidden, getattr(module, "head_dim", 8))
    except _CalledError:
        names = tuple(name for name, _ in calls)
        return names if len(set(names)) == len(_NAMES) and all(x is hidden for _, x in calls) else None
    except Exception:
        return None
    return None
