"""MLPs that no kernel is for, such as GPT-NeoX's with its GELU between two projections: the report names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from liger_trainer.patching.finding import NO_KERNEL, SWITCHED_OFF, Finding
from liger_trainer.patching.probe import is_stateless, only_argument

_PROJECTIONS = (2, 3)


def find_other_mlp(module: nn.Module, enabled: Callable[[str], bool]) -> Iterator[Finding]:
    """The finding for `module` if it is two or three linear layers that lead from a size back to it."""
    children = {name: child for name, child in module.named_children() if not is_stateless(child)}
    if len(children) not in _PROJECTIONS or type(module).__module__.startswith("torch.") or not only_argument(module):
        return
    sizes = [_sizes(child) for child in children.values()]
    if None in sizes or sizes[0][0] != sizes[-1][1]:  # type: ignore[index]
        return
    reason = f"{NO_KERNEL} an MLP of {', '.join(children)}" if enabled("swiglu") else SWITCHED_OFF
    yield Finding("swiglu", type(module).__name__, module, reason=reason)


def _sizes(layer: nn.Module) -> tuple[int, int] | None:
    """The sizes of what goes into a linear layer, LitGPT's with adapters included, and of what comes out."""
    linear = getattr(layer, "linear", layer)
    sizes = getattr(linear, "in_features", None), getattr(linear, "out_features", None)
    return None if None in sizes else sizes  # type: ignore[return-value]
