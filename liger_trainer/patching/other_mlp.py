"""MLPs that no kernel is for, such as GPT-NeoX's with its GELU between two projections: the report names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from liger_trainer.patching.finding import NO_KERNEL, SWITCHED_OFF, Finding
from liger_trainer.patching.probe import is_stateless, only_argument

_PROJECTIONS = (2, 3)


def find_other_mlp(module: nn.Module, enabled: Callable[[str], bool]) -> Iterator[Finding]:
    """The finding for `module` if it is two or three linear layers that lead from a size back to it."""
    if len(module._modules) < min(_PROJECTIONS) or type(module).__module__.startswith("torch."):
        return
    children = {name: child for name, child in module.named_children() if not is_stateless(child)}
    if len(children) not in _PROJECTIONS or not only_argument(module):
        return
    sizes = [size for child in children.values() if (size := _sizes(child))]
    if len(sizes) < len(children) or sizes[0][0] != sizes[-1][1]:
        return
    reason = f"{NO_KERNEL} an MLP of {', '.join(children)}" if enabled("swiglu") else SWITCHED_OFF
    yield Finding("swiglu", type(module).__name__, module, reason=reason)


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """What goes into a linear layer, one with adapters too, and what comes out: their sizes."""
    linear = getattr(layer, "linear", getattr(layer, "base_layer", layer))
    return (linear.in_features, linear.out_features) if isinstance(linear, nn.Linear) else None
