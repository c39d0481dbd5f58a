"""Whether a module has hooks, which torch has no public function for."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import MODULE_HOOKS

require(MODULE_HOOKS)


def has_global_hooks() -> bool:
    """Whether a hook runs at the calls of all modules."""
    return torch_module._has_any_global_hook()


def is_call_hooked(module: nn.Module, of_all: bool = True) -> bool:
    """Whether a hook runs when `module` is called: its own or, with `of_all`, one of all modules."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or (of_all and torch_module._has_any_global_hook())


def is_output_hooked(module: nn.Module) -> bool:
    """Whether a hook may get the output of `module` in the forward."""
    return bool(module._forward_hooks) or torch_module._has_any_global_hook()


def is_gradient_hooked(module: nn.Module) -> bool:
    """Whether a backward hook needs the gradient of the output of `module`, which must then exist."""
    of_all = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    return bool(module._backward_hooks or module._backward_pre_hooks or of_all)


def outputs_are_unhooked(projection: nn.Module, other: nn.Module | None = None) -> bool:
    """Whether nobody but the MLP sees the projections' outputs, so that the backward may write over them."""
    hooked = projection._forward_hooks or (other is not None and other._forward_hooks)
    return not (hooked or torch_module._has_any_global_hook())


def is_linear_without_bias(projection: nn.Module) -> bool:
    """Whether scaling what goes in is scaling what comes out, with nobody looking on."""
    plain = isinstance(projection, nn.Linear) and projection.bias is None
    return plain and not projection._forward_hooks and not projection._forward_pre_hooks


_UNSEEING = ("torch.distributed.fsdp.", "deepspeed.", "transformers.utils.output_capturing")


def is_watched(module: nn.Module) -> bool:
    """Whether a hook may look at what a call of `module` is given or gives, in the forward or backward.

    Hooks that gather weights do not, and those of transformers that record outputs do so only where they are asked for.
    A module that is compiled by itself looks as well: it is compiled for shapes.
    """
    if module._compiled_call_impl is not None:
        return True
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    own = (hook for each in hooks for hook in each.values())
    origins = (getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in own)
    return torch_module._has_any_global_hook() or not all(origin.startswith(_UNSEEING) for origin in origins)
