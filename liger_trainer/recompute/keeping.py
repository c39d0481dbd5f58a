"""Checkpointing a layer but for the results of some calls of operators, and the proof that this changes no bit.

The layers are those that transformers or FSDP checkpoints, by the function that checkpoints them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import CHECKPOINT_WRAPPERS, OPERATOR_CALLS
from liger_trainer.compat.transformers import CHECKPOINTED_LAYERS
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.recompute.budget import Call

Checkpoint = Callable[..., Any]
"""``checkpoint(function, *args, **kwargs)``, as `torch.utils.checkpoint.checkpoint`."""

Layers = MutableMapping[nn.Module, tuple[str, str]]
"""Modules, each with its name and the attribute that holds the function which checkpoints it."""

CHECKPOINTED, OF_TRANSFORMERS = "gradient_checkpointing", "_gradient_checkpointing_func"
_OF_FSDP = "checkpoint_fn"


class Replaced:
    """Checkpoints a layer by `instead`, which may call the `checkpoint` that the layer had."""

    def __init__(self, name: str, checkpoint: Checkpoint, instead: Callable[..., Any]) -> None:
        self.name, self.checkpoint, self.instead = name, checkpoint, instead

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """The result of ``function(*args)``, checkpointed."""
        return self.instead(self.name, self.checkpoint, function, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable, tuple[Checkpoint]]:
        return itself, (self.checkpoint,)  # a copy of the model is not the one that is trained


def itself(function: Callable) -> Callable:
    """`function`, for the `__reduce__` of what stands for it."""
    return function


def layers_of(model: nn.Module) -> Layers:
    """The layers of `model`, with its wrappers, that transformers can checkpoint, or FSDP does."""
    require(CHECKPOINTED_LAYERS)
    wrappers = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    found: Layers = weakref.WeakKeyDictionary()
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            found[module] = name, OF_TRANSFORMERS
        elif wrappers is not None and isinstance(module, wrappers.CheckpointWrapper):
            require(CHECKPOINT_WRAPPERS)
            found[module] = name, _OF_FSDP
    return found


def replace_checkpoints(layers: Layers, instead: Callable[..., Any]) -> None:
    """Has the `layers` that are checkpointed call `instead`, where they do not yet.

    Their own functions come back whenever somebody enables checkpointing again.
    """
    for module, (name, attribute) in layers.items():
        if attribute == OF_TRANSFORMERS and not module.gradient_checkpointing:
            continue
        checkpoint = getattr(module, attribute)
        if not isinstance(checkpoint, Replaced) or checkpoint.instead != instead:
            own = checkpoint.checkpoint if isinstance(checkpoint, Replaced) else checkpoint
            setattr(module, attribute, Replaced(name, own, instead))


@contextlib.contextmanager
def put_back(layers: Iterable[nn.Module], names: Sequence[str]) -> Iterator[None]:
    """After the context, `layers` have what they have now as attributes of these `names`, or none again."""
    before = [(layer, {name: vars(layer).get(name) for name in names}) for layer in layers]
    try:
        yield
    finally:
        for layer, values in before:
            for name, value in values.items():
                vars(layer).pop(name, None) if value is None else setattr(layer, name, value)


def is_reentrant(checkpoint: Checkpoint) -> bool:
    """Whether `checkpoint` is torch's with ``use_reentrant=True``, which takes no contexts."""
    while isinstance(checkpoint, Replaced):
        checkpoint = checkpoint.checkpoint
    keywords = checkpoint.keywords if isinstance(checkpoint, functools.partial) else {}
    return bool(keywords.get("use_reentrant", False))


TorchDispatchMode, tree_leaves, *_ = require(OPERATOR_CALLS)

_Contexts = tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]

NOT_COUNTED = ("aten::detach", "prim::device")
"""Operators that torch's checkpointing does not count, as autograd calls them by itself."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def keeping_contexts(calls: frozenset[Call]) -> _Contexts:
    """The contexts of the forward and of the recomputation of one layer, for `torch.utils.checkpoint.checkpoint`.

    The forward keeps the results of `calls`, and the recomputation takes them from it. None of them may draw random
    numbers: those of later calls would be others in the recomputation.
    """
    seen: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    operators = {call.operator for call in calls}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator_name(operator) not in operators:
            return CheckpointPolicy.PREFER_RECOMPUTE
        keep = next_call(operator, seen[context.is_recompute]) in calls  # torch 2.11 asks in the recomputation too
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Proof:
    """Keeps results and computes them again nevertheless, to see whether the two are the same, bit for bit.

    They are not where a kernel that torch does not see wrote to a result after its operator had returned it, or where
    the recomputation calls other operators than the forward did.
    """

    def __init__(self) -> None:
        self._differs: list[tuple[str, Call, torch.Tensor | bool]] = []

    def contexts(self, name: str, calls: frozenset[Call]) -> _Contexts:
        """The contexts of the forward and of the recomputation of the layer `name`, as `keeping_contexts`."""
        kept: dict[Call, list[torch.Tensor]] = {}
        return _Keeping(calls, kept), _Comparing(name, kept, self._differs)

    def failed(self) -> set[tuple[str, Call]]:
        """The layers and calls whose results were not the same; waits for the device."""
        return {(name, call) for name, call, differs in self._differs if bool(differs)}


class _Keeping(TorchDispatchMode):  # type: ignore[misc, valid-type]
    def __init__(self, calls: frozenset[Call], kept: dict[Call, list[torch.Tensor]]) -> None:
        super().__init__()
        self._calls, self._kept, self._count = calls, kept, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = next_call(func, self._count)
        if call in self._calls:
            self._kept[call] = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


class _Comparing(TorchDispatchMode):  # type: ignore[misc, valid-type]
    def __init__(
        self, name: str, kept: dict[Call, list[torch.Tensor]], differs: list[tuple[str, Call, torch.Tensor | bool]]
    ) -> None:
        super().__init__()
        self._layer, self._kept, self._differs, self._count = name, kept, differs, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = next_call(func, self._count)
        kept = self._kept.pop(call, None)
        if kept is not None:
            again = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._differs.append((self._layer, call, _differ(kept, again)))
        return result


def _differ(kept: list[torch.Tensor], again: list[torch.Tensor]) -> torch.Tensor | bool:
    """Whether any bit differs, as a bool on the device if the shapes and dtypes are the same.

    Single numbers do not count: attention without dropout returns a seed that nobody has written.
    """
    found: list[torch.Tensor] = []
    for one, other in zip(map(plain, kept), map(plain, again), strict=False):
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            return True
        if one.numel() > 1:
            bits = _BITS.get(one.element_size(), one.dtype)  # of numbers of 16 bytes, NaN is not the same
            found.append((one.view(bits) != other.view(bits)).any())
    return len(kept) != len(again) or (bool(found) and torch.stack(found).any())


def next_call(operator: Any, count: Counter[str]) -> Call:
    """The call of `operator` that is counted now."""
    name = operator_name(operator)
    count[name] += 1
    return Call(name, count[name] - 1)


@functools.cache
def operator_name(operator: Any) -> str:
    """The operator as ``namespace::name.overload``."""
    return operator.name()


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor with the memory of `tensor`, the local one of a DTensor; None for other subclasses."""
    tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else None


def memory_of(tensor: torch.Tensor) -> int:
    """Bytes of `tensor` on this process; 0 where they are not known."""
    own = plain(tensor)
    return 0 if own is None else own.nbytes
