"""Modules of experts whose stacked weights stay packed, in 8 bits or fewer.

The module keeps its class's forward, which reads its weights by their names, such as `gate_up_proj`. During a call of
the module, such an attribute is the decoded stack, in the layout and dtype that the class declares; it is decoded once
per call. So every implementation of the experts computes the same as with the dequantised weights. Ours reads the
packed stack (`packed_stacks`), and saves that for the backward instead of the decoded one.

At any other time the attribute is a placeholder of that shape and dtype, which takes no memory and has no values: to
read or change these, as PEFT does to merge adapters, is an error. PEFT looks for the names of `target_parameters` among
the module's parameters, and reads sizes, device and dtype of the attribute: it gets the placeholder. The parameter of
that name is a mark of one element, which follows the casts of the model and of FSDP2 as the weight would. Codes and
scales are parameters after all others (`modules.py`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import MODULE_CONTENTS
from liger_trainer.kernels.lowbit.decode import decode
from liger_trainer.kernels.lowbit.formats import PackedWeight
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.packed.modules import as_held, frozen, stay_frozen, without_values

require(MODULE_CONTENTS)


class PackedStack(NamedTuple):
    """A stacked weight of experts that is packed, as a module declares it.

    Args:
        weight: (experts, outputs, inputs).
        transposed: Whether the module has it as (experts, inputs, outputs).
        dtype: The dtype in which the module has it.
    """

    weight: PackedWeight
    transposed: bool
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape that the module declares."""
        experts, outputs, inputs = self.weight.shape
        return torch.Size((experts, inputs, outputs) if self.transposed else (experts, outputs, inputs))

    def decoded(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The stack as the module declares it, without a gradient; in `dtype` where given."""
        dense = decode(self.weight, dtype or self.dtype)
        return dense.mT if self.transposed else dense


class _Layout(NamedTuple):
    """How a stack is put together from the module's parameters."""

    kind: Any
    tensors: dict[str, tuple[str, torch.dtype]]  # by the weight's fields: names of the module's parameters, and dtypes
    numbers: dict[str, Any]
    transposed: bool


OURS_ALONE = (
    "Adapters on packed experts run in our operator alone. Call `apply_liger_kernel(model)` or train with a trainer of "
    "liger_trainer, with `experts` and `lora` left on; remove hooks from the experts; without autocast, give them "
    "hidden states in their own dtype."
)
"""The error where PEFT would run adapters on packed experts in its own forward."""

_NO_VALUES = (
    f"`{{}}` of packed experts is held as codes, which have no values to read or change. {OURS_ALONE} Merge them with "
    "`liger-trainer merge`."
)

_calls = threading.local()


class PackedExperts(nn.Module):
    """What the class of packed experts adds to the model's own class of experts.

    Attributes:
        unpacked_class: The model's own class.
    """

    unpacked_class: type[nn.Module]
    _packed: dict[str, _Layout]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, for which a weight is decoded where it is first read."""
        running: list[tuple[nn.Module, dict[str, torch.Tensor]]] = _calls.__dict__.setdefault("running", [])
        running.append((self, {}))
        try:
            return super().__call__(*args, **kwargs)
        finally:
            running.pop()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """How the module is copied and pickled: its class is made again from `unpacked_class`."""
        reduced: tuple[Any, ...] = super().__reduce_ex__(protocol)  # type: ignore[assignment]
        return _without_state, (self.unpacked_class, tuple(self._packed)), *reduced[2:]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy; PEFT copies the modules that it trains whole (`modules_to_save`)."""
        super().__setstate__(state)
        stay_frozen(self.get_parameter(name) for name in parts_of_stacks(self))

    def __delattr__(self, name: str) -> None:
        """Refuses to parametrise a packed weight, as PEFT does to run adapters; the module is left as it was.

        Raises:
            RuntimeError: For a packed weight.
        """
        if name in self._packed:
            raise RuntimeError(OURS_ALONE)
        super().__delattr__(name)


def packed_stacks(module: nn.Module) -> dict[str, PackedStack]:
    """The packed weights of `module`, by their names; none for any other module."""
    if not isinstance(module, PackedExperts):
        return {}
    return {name: _stack(module, name) for name in module._packed}


def parts_of_stacks(module: nn.Module) -> set[str]:
    """The names of the parameters of `module` that are codes and scales of its packed weights."""
    if not isinstance(module, PackedExperts):
        return set()
    return {name for layout in module._packed.values() for name, _ in layout.tensors.values()}


def unpacked_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The model's own class of packed experts of the class `kind`; `kind` itself for any other class."""
    return kind.unpacked_class if issubclass(kind, PackedExperts) else kind


def _stack(module: PackedExperts, name: str) -> PackedStack:
    kind, tensors, numbers, transposed = module._packed[name]
    weight = kind(
        **{part: as_held(module._parameters[own], dtype) for part, (own, dtype) in tensors.items()}, **numbers
    )
    mark = module._parameters[name]
    assert mark is not None
    return PackedStack(weight, transposed, mark.dtype)


def pack_experts(experts: nn.Module, stacks: dict[str, PackedStack], order: Sequence[str]) -> None:
    """Replaces parameters of `experts` by packed weights.

    Args:
        experts: The module.
        stacks: The packed weights, by the names of the parameters.
        order: The names of all parameters of the module, in the order in which its class registers them.
    """
    layouts, marks = {}, {}
    parts: dict[str, nn.Parameter] = {}
    for name, (weight, transposed, dtype) in stacks.items():
        marks[name] = nn.Parameter(torch.zeros(1, dtype=dtype, device=weight.device), requires_grad=False)
        tensors = {part: value for part, value in weight._asdict().items() if isinstance(value, torch.Tensor)}
        numbers = {part: value for part, value in weight._asdict().items() if part not in tensors}
        parts |= {f"{name}_{part}": frozen(tensor) for part, tensor in tensors.items()}
        dtypes = {part: (f"{name}_{part}", tensor.dtype) for part, tensor in tensors.items()}
        layouts[name] = _Layout(type(weight), dtypes, numbers, transposed)
    others = {name: each for name, each in experts._parameters.items() if name not in stacks}
    experts._parameters.clear()
    for name in order:  # PEFT nests its wrappers, and so names its adapters, in this order
        experts.register_parameter(name, marks[name] if name in marks else others[name])
    for name, part in parts.items():
        experts.register_parameter(name, part)
    experts.__dict__["_packed"] = layouts
    kind: Any = type(experts)
    experts.__class__ = _class_with(kind, tuple(stacks))


def unpack_experts(experts: PackedExperts) -> None:
    """Replaces packed weights of `experts` by decoded parameters, and restores their own class."""
    decoded = {name: stack.decoded().contiguous() for name, stack in packed_stacks(experts).items()}
    module: Any = experts
    for name in parts_of_stacks(experts):
        del module._parameters[name]
    for name, weight in decoded.items():
        module._parameters[name] = nn.Parameter(weight, requires_grad=False)
    module.__class__ = experts.unpacked_class
    del module.__dict__["_packed"]


@functools.cache
def _class_with(unpacked: type[nn.Module], names: tuple[str, ...]) -> type[PackedExperts]:
    """The class of packed experts whose own class is `unpacked`; the same one for the same class and names."""
    contents: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in names}
    contents |= {"unpacked_class": unpacked, "__module__": unpacked.__module__}
    return type(f"Packed{unpacked.__name__}", (PackedExperts, unpacked), contents)


def _without_state(unpacked: type[nn.Module], names: tuple[str, ...]) -> PackedExperts:
    kind: Any = _class_with(unpacked, names)  # type: ignore[arg-type]
    return kind.__new__(kind)


def _read(module: PackedExperts, name: str) -> torch.Tensor:
    mark = module._parameters[name]
    if mark is not None and is_dtensor(mark):  # FSDP2 has split the module, and looks for its shards
        return mark
    stack = _stack(module, name)
    for called, decoded in reversed(getattr(_calls, "running", ())):
        if called is module:
            if name not in decoded:
                decoded[name] = stack.decoded()
            return decoded[name]
    return without_values(stack.shape, stack.weight.device, stack.dtype, name, _NO_VALUES.format(name))
