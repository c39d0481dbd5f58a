"""The load-balancing loss that a model's forward computes by calling transformers' function by its global name.

The instance gets a copy of its class's forward in which that name refers to ours, as attentions do for the rotary
function; the modelling module does not change. Ours computes the router's z-loss in the same pass, for training steps
that ask for it (`Step.z_losses`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.rebound import called_global, forward_calling
from liger_trainer.compat.transformers import LOAD_BALANCING
from liger_trainer.configs.kernel_config import KernelConfig
from liger_trainer.head.step import current_step
from liger_trainer.parallel.router_losses import router_losses
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.inputs import BALANCE
from liger_trainer.patching.model_forward import forward_layers
from liger_trainer.patching.probe import Probe, Proof
from liger_trainer.patching.report import SWITCHED_OFF, Finding, proved
from liger_trainer.patching.rope import HIDDEN_CALL
from liger_trainer.patching.trial import Agreement

COMPONENT = "load_balancing_loss"
NAME = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@functools.cache
def make_load_balancing_loss(native: Callable, over_processes: bool) -> Callable:
    """Our function instead of `native`, transformers', which still runs for inputs that ours does not support.

    With `over_processes`, a loss with a gradient counts the tokens of all processes.
    """

    @functools.wraps(native)
    def load_balancing_loss_func(
        gate_logits: Any, num_experts: int | None, top_k: int, attention_mask: torch.Tensor | None
    ) -> Any:
        if not _is_known(gate_logits, num_experts, attention_mask):
            return native(gate_logits, num_experts, top_k, attention_mask)
        has_gradient = torch.is_grad_enabled() and any(logits.requires_grad for logits in gate_logits)
        together = over_processes and has_gradient and dist.is_available() and dist.is_initialized()
        losses = router_losses(gate_logits, top_k, attention_mask, process_group=dist.group.WORLD if together else None)
        if has_gradient and not torch.compiler.is_compiling():
            collected = current_step().z_losses
            if collected is not None:
                collected.append(losses.z)
        return losses.load_balancing

    load_balancing_loss_func.__defaults__ = getattr(native, "__defaults__", None)  # type: ignore[attr-defined]
    return load_balancing_loss_func


def _is_known(gate_logits: Any, num_experts: int | None, mask: torch.Tensor | None) -> bool:
    if not isinstance(gate_logits, tuple) or not gate_logits:
        return False
    if any(type(logits) is not torch.Tensor or logits.dim() != 2 for logits in gate_logits):  # such as a DTensor
        return False
    tokens = [len(logits) if mask is None else mask.numel() for logits in gate_logits]
    return [tuple(logits.shape) for logits in gate_logits] == [(count, num_experts) for count in tokens]


def find_load_balancing_loss(module: nn.Module, config: KernelConfig, probe: Probe) -> Iterator[Finding]:
    """The finding for the load-balancing function that `module`'s forward calls, if it calls one."""
    forward = type(module).forward
    native = called_global(forward, NAME)
    if native is None:
        if hasattr(module, "router_aux_loss_coef"):  # a model that computes such a loss, by another name?
            available(LOAD_BALANCING)
        return
    target = f"{NAME} in {type(module).__name__}"
    if not config.load_balancing_loss:
        yield Finding(COMPONENT, target, module, reason=SWITCHED_OFF)
        return
    kernel = "router_losses, over all processes" if config.global_load_balancing else "router_losses"
    ours = make_load_balancing_loss(native, config.global_load_balancing)
    foreign = overriding_forward(module)
    if foreign is not None:
        if any(called_global(layer, NAME) is ours for layer in forward_layers(module)):
            yield Finding(COMPONENT, target, module, kernel)  # inside the fused head of an earlier trainer
        else:
            yield Finding(COMPONENT, target, module, reason=f"its forward is already overridden by {foreign}")
        return
    agreement = probe.once((COMPONENT, native), _prove, native, probe)
    copy = forward_calling(forward, NAME, ours)
    if agreement.equal and copy is None:
        agreement = Agreement(agreement.error, reason=HIDDEN_CALL)
    yield proved(COMPONENT, target, module, Proof(kernel, copy, agreement, live=None))


def _prove(native: Callable, probe: Probe) -> Agreement:
    """Compares `native` with ours: two layers of 12 tokens, with and without padding."""
    if list(inspect.signature(native).parameters) != _ARGUMENTS:
        return Agreement(float("inf"), reason=f"its arguments are not {', '.join(_ARGUMENTS)}")
    mask = torch.ones(3, 4, device=probe.device)
    mask[0, :2] = 0.0

    def both(function: Callable, *layers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return function(layers, 8, 2, mask), function(layers, 8, 2, None)

    alone = make_load_balancing_loss(native, False)  # without the other processes, which may not run a probe
    layers = [probe.randn(12, 8) for _ in range(2)]
    trial = probe.trial(functools.partial(both, native), layers, BALANCE)
    return trial.prove(functools.partial(both, alone)).explained("another loss")
