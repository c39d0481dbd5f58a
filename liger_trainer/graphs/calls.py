"""When a graph of a layer is valid: the arguments of a call besides the hidden states, and the layer's own state."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from liger_trainer.attention.masks import SlicedPlan, sliced
from liger_trainer.compat.hooks import has_global_hooks, is_call_hooked
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import CALLS_OF_LAYERS, CHANGED_IN_PLACE, MODULE_CONTENTS
from liger_trainer.kernels.attention.plan import FILLED_BOUNDS, AttentionPlan, SharedKeys
from liger_trainer.kernels.copied_rows import Copies
from liger_trainer.kernels.documents import Documents
from liger_trainer.kernels.runtime import next_power_of_2

tree_flatten, tree_unflatten, dispatch_modes, function_modes, saved_hooks = require(CALLS_OF_LAYERS)
require(CHANGED_IN_PLACE)
with torch.device("cpu"):
    _DefaultDevice = type(function_modes()[-1])  # the mode of `torch.set_default_device` too
require(MODULE_CONTENTS)

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype)
_CONTAINERS = (dict, list, tuple, set, frozenset)


class Offsets(NamedTuple):
    """Where the documents of a packed row begin, in the form that flash-attn and linear attention take.

    Attributes:
        starts: int32 (documents + 1).
    """

    starts: torch.Tensor


class Longest(NamedTuple):
    """The number of tokens of the longest document of a packed row, or an upper bound."""

    tokens: int


_OF_DOCUMENTS = {"cu_seq_lens_q": Offsets, "cu_seq_lens_k": Offsets, "max_length_q": Longest, "max_length_k": Longest}
"""Arguments of layers whose values may differ between the calls that one graph serves."""
_LEAVES = (AttentionPlan, Documents, Offsets, Longest, list, dict, deque)
"""Values that are not taken apart. Containers are among them: a layer may write to one, and its graph would not."""

_METHODS = (
    *("__init__", "__copy__", "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__setitem__"),
    *("get", "items", "keys", "pop", "setdefault", "update", "values"),
)

Store = MutableMapping[str | int, Any]
"""A dict among a layer's arguments, such as the one for keys that layers share. Its values are inputs of a graph, like
other arguments, and what the layer adds to it is a result, like the hidden states."""


class Room(NamedTuple):
    """The size of the copy of a tensor that graphs read. With more rows than the tensor, it serves longer ones too.

    Attributes:
        rows: The rows of the copy.
        filling: The row that fills the copy behind the rows of the tensor; None to repeat the last of these.
    """

    rows: int
    filling: tuple[int, ...] | None = None


_NO_DOCUMENT, _NO_CHUNK = (0, 0, -1, 0, 0, 0), (0, 0, 0)
"""Rows that fill up the tables of `Documents`: no tokens, no parent, no children."""


class Arguments(NamedTuple):
    """The arguments of a layer's call except the hidden states, which come first.

    Attributes:
        key: The parts that are the same in all calls that one graph can serve.
        leaves: Tensors, plans, tables of documents and constants, in the order of `spec`; then the leaves of `store`.
        spec: How the leaves but those of `store` are nested: positional arguments, then keyword arguments.
        names: The names of the keyword arguments.
        store: The dict among the arguments; None without one.
        place: The index of the dict in `leaves`, which hold None there.
        stored: The names in the dict.
        spec_of_stored: How the values of the dict are nested.
    """

    key: Hashable
    leaves: list[Any]
    spec: Any
    names: tuple[str, ...]
    store: Store | None = None
    place: int = 0
    stored: tuple[str | int, ...] = ()
    spec_of_stored: Any = None


def arguments_of(hidden: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments | None:
    """The arguments of a call; None if no graph can serve it.

    Args:
        hidden: The hidden states, (B, S, H).
        args: The positional arguments after the hidden states.
        kwargs: The keyword arguments.
    """
    marked = tuple(_marked(name, value) for name, value in kwargs.items())
    leaves, spec = tree_flatten((tuple(args), marked), is_leaf=_is_leaf)
    key: list[Hashable] = [spec, *kwargs, hidden.shape, hidden.stride(), hidden.dtype, hidden.requires_grad]
    store, place, spec_of_stored = None, 0, None
    for number, leaf in enumerate(leaves):
        if _is_store(leaf):
            if store is not None:
                return None  # two dicts, which may be the same one
            store, place = leaf, number
    if store is not None:
        values, spec_of_stored = tree_flatten(tuple(store.values()), is_leaf=_is_leaf)
        key.append((place, type(store), tuple(store), spec_of_stored))
        leaves[place] = None
        leaves += values
    for leaf in leaves:
        if isinstance(leaf, AttentionPlan):
            if leaf.bits is not None or leaf.spread or (leaf.keys is not None and leaf.keys.copies is None):
                return None
            key.append((type(leaf), getattr(leaf, "rows", None), leaf.window, leaf.whole_rows))
            key += [_longest(leaf.longest, hidden), _longest_keys(leaf)]
            key += [room or each.shape for each, room in _tensors_of_plan(leaf)]
        elif type(leaf) is Documents:
            key.append((_roots(leaf), leaf.padding, leaf.tokens))
            key += [room or each.shape for each, room in _tensors_of_documents(leaf)]
        elif type(leaf) is Offsets:
            if leaf.starts.is_inference() or leaf.starts.device != hidden.device:
                return None
            key.append((_room_of(leaf.starts), leaf.starts.dtype))
        elif type(leaf) is Longest:
            key.append(_longest(leaf.tokens, hidden))
        elif type(leaf) is torch.Tensor:
            if leaf.is_inference() or leaf.device != hidden.device or (leaf is hidden and leaf.requires_grad):
                return None
            key.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
        elif type(leaf) in _CONSTANTS:
            key.append((type(leaf), leaf))
        else:
            return None
    # Which of the tensors are the same object: a graph has one copy of each.
    tensors = [id(tensor) for tensor, _ in tensors_of(leaves)]
    key.append(tuple(map(tensors.index, tensors)))
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind)
    key += [autocast, torch.get_autocast_dtype(kind) if autocast else None, *_settings()]
    return Arguments(tuple(key), leaves, spec, tuple(kwargs), store, place, tuple(store or ()), spec_of_stored)


def operators_are_observed() -> bool:
    """Whether a mode or hook observes all operators, all modules, or what autograd saves: a replay hides all these."""
    modes = any(type(mode) is not _DefaultDevice for mode in function_modes())
    watched = modes or dispatch_modes() or saved_hooks(False) or has_global_hooks()
    return bool(watched or torch._C._are_functorch_transforms_active())


def _settings() -> Iterator[Hashable]:
    """Settings of torch that choose the kernels of a layer, or where its new tensors are."""
    products = torch.backends.cuda.matmul
    # torch's older names of the precision cannot be read once a newer one was set, as `tf32` of the Trainer does.
    yield from (products.fp32_precision, torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]
    yield from (torch.are_deterministic_algorithms_enabled(), *attention_backends())
    yield from (products.allow_fp16_reduced_precision_reduction, products.allow_bf16_reduced_precision_reduction)
    yield from (mode.device for mode in function_modes() if type(mode) is _DefaultDevice)


def attention_backends() -> list[SDPBackend]:
    """The backends among which torch's attention may choose now."""
    cuda = torch.backends.cuda
    found = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
    }
    return [backend for backend, is_on in found.items() if is_on]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, _LEAVES)


def _is_store(value: Any) -> bool:
    """Whether `value` is a dict, or a `UserDict` whose class overrides no method of dicts, with plain names."""
    kind = type(value)
    if kind is not dict:
        if not isinstance(value, UserDict) or [*vars(value)] != ["data"]:
            return False
        if any(getattr(kind, name) is not getattr(UserDict, name) for name in _METHODS):
            return False
    return all(type(name) in (str, int) for name in value)


def _marked(name: str, value: Any) -> Any:
    kind = _OF_DOCUMENTS.get(name)
    if kind is Offsets and type(value) is torch.Tensor and value.dim() == 1 and not value.requires_grad:
        return Offsets(value)
    return Longest(value) if kind is Longest and type(value) is int else value


def _room_of(table: torch.Tensor, filling: tuple[int, ...] | None = None) -> Room:
    """Rows up to the next multiple of `FILLED_BOUNDS`. Offsets have no `filling`: they repeat their last row."""
    return Room(len(table) + -len(table) % FILLED_BOUNDS, filling)


def _longest(tokens: int, hidden: torch.Tensor) -> int:
    """`tokens` rounded up to a power of two, but at most the number of tokens in `hidden`."""
    return min(next_power_of_2(tokens), hidden.shape[:-1].numel()) if tokens else 0


def _longest_keys(plan: AttentionPlan) -> int:
    return 0 if plan.keys is None else next_power_of_2(plan.keys.longest)


def _tensors_of_plan(plan: AttentionPlan) -> list[tuple[torch.Tensor, Room | None]]:
    """The tensors of a plan, each with the room of the copy that graphs read; None for as many rows."""
    if plan.keys is None:
        return [] if plan.offsets is None else [(plan.offsets, _room_of(plan.offsets))]
    # With `keys`, no document may be empty, so a graph serves only rows of as many documents.
    assert plan.offsets is not None
    assert plan.keys.copies is not None
    return [(each, None) for each in (plan.offsets, plan.keys.offsets, *plan.keys.copies)]


def _tensors_of_documents(documents: Documents) -> list[tuple[torch.Tensor, Room | None]]:
    """The same for the tables of layers with a state.

    Documents without a parent come first. If others follow, `spans` has no room: an empty document would come between.
    """
    if documents.spans is None or documents.chunks is None:
        return []
    forked = documents.roots < len(documents.spans)
    room = None if forked else _room_of(documents.spans, _NO_DOCUMENT)
    return [(documents.spans, room), (documents.chunks, _room_of(documents.chunks, _NO_CHUNK))]


def _roots(documents: Documents) -> int:
    """How many documents have no parent, counting the empty ones with which a graph fills the table up."""
    tables = _tensors_of_documents(documents)
    room = tables[0][1] if tables else None
    return documents.roots if room is None else room.rows


class Held:
    """A tensor that graphs read: a copy of the one that a layer is given.

    Layers that are given the same tensor share one copy.

    Args:
        source: The tensor.
        room: Rows of the copy, and what fills it up; None for as many rows as `source` has.
    """

    def __init__(self, source: torch.Tensor, room: Room | None = None) -> None:
        self.room = room
        self.tensor = torch.empty_like(source) if room is None else source.new_empty(room.rows, *source.shape[1:])
        self._filling = None if room is None or room.filling is None else source.new_tensor(room.filling)
        self._source: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self.hold(source)

    @torch.no_grad()
    def hold(self, source: torch.Tensor) -> None:
        """Copies `source`, unless it is the tensor that was copied last, and has not changed since."""
        if self.holds(source):
            return
        tensor = self.tensor.data  # so that autograd does not count this as a change
        if tensor.shape == source.shape:
            tensor.copy_(source)
        else:
            rest = tensor[len(source) :]
            tensor[: len(source)].copy_(source)
            rest.copy_((source[-1:] if self._filling is None else self._filling).expand_as(rest))
        self._source, self._version = weakref.ref(source), source._version

    def forget(self) -> None:
        """Makes the next `hold` copy its tensor, even if it is the one that was copied last."""
        self._source = None

    def holds(self, source: torch.Tensor) -> bool:
        """Whether the copy is that of `source` as it is now."""
        return self._source is not None and self._source() is source and self._version == source._version


def tensors_of(leaves: Sequence[Any]) -> list[tuple[torch.Tensor, Room | None]]:
    """The tensors among the leaves, with those of plans and documents, each with the room of its copy or None."""
    found: list[tuple[torch.Tensor, Room | None]] = []
    for leaf in leaves:
        if isinstance(leaf, AttentionPlan):
            found += _tensors_of_plan(leaf)
        elif type(leaf) is Documents:
            found += _tensors_of_documents(leaf)
        elif type(leaf) is Offsets:
            found.append((leaf.starts, _room_of(leaf.starts)))
        elif isinstance(leaf, torch.Tensor):
            found.append((leaf, None))
    return found


def fixed(arguments: Arguments, tensors: Sequence[torch.Tensor], hidden: torch.Tensor, filled: bool) -> Arguments:
    """`arguments` as they are at every replay of a graph: with `tensors` in place of their own, and an empty dict.

    Args:
        arguments: The arguments of one call.
        tensors: Replacements for the tensors that [`tensors_of`] returns, in the same order.
        hidden: The hidden states, (B, S, H).
        filled: Whether lengths are rounded up, as for a graph; else they are as they were given.
    """
    copies = iter(tensors)
    leaves: list[Any] = []
    for leaf in arguments.leaves:
        if isinstance(leaf, (torch.Tensor, Offsets)):
            leaves.append(next(copies))
        elif isinstance(leaf, Longest):
            leaves.append(_longest(leaf.tokens, hidden) if filled else leaf.tokens)
        elif isinstance(leaf, AttentionPlan):
            offsets = None if leaf.offsets is None else next(copies)
            keys = leaf.keys
            if keys is not None:
                of_keys, *copied = (next(copies) for _ in range(4))
                keys = SharedKeys(Copies(*copied), of_keys, _longest_keys(leaf) if filled else keys.longest)
            longest = _longest(leaf.longest, hidden) if filled else leaf.longest
            plan = AttentionPlan(*leaf)._replace(offsets=offsets, longest=longest, keys=keys)
            leaves.append(sliced(plan, *leaf.rows) if isinstance(leaf, SlicedPlan) else plan)
        elif isinstance(leaf, Documents) and leaf.spans is not None:
            spans, chunks = (next(copies) for _ in range(2))
            leaves.append(leaf._replace(spans=spans, chunks=chunks, roots=_roots(leaf) if filled else leaf.roots))
        else:
            leaves.append(leaf)
    store = copy.copy(arguments.store)
    if store is not None:
        store.clear()
    return arguments._replace(leaves=leaves, store=store)


def nested(
    arguments: Arguments, replaced: dict[int, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any], Store | None]:
    """The positional and keyword arguments after the hidden states, and the dict among them, for the layer to write to.

    Args:
        arguments: Arguments of a call, as [`fixed`] returns them.
        replaced: Tensors that replace leaves, by the `id` of the leaf.
    """
    leaves = [replaced.get(id(leaf), leaf) for leaf in arguments.leaves]
    # Such a plan builds its mask once and keeps it. With a new plan, each graph computes a mask of its own.
    leaves = [sliced(leaf, *leaf.rows) if isinstance(leaf, SlicedPlan) else leaf for leaf in leaves]
    store = copy.copy(arguments.store)
    if store is not None:
        count = arguments.spec.num_leaves
        store.update(zip(arguments.stored, tree_unflatten(leaves[count:], arguments.spec_of_stored)))
        leaves[count:] = []
        leaves[arguments.place] = store
    args, values = tree_unflatten(leaves, arguments.spec)
    return args, dict(zip(arguments.names, values)), store


class LayerState:
    """What a layer's launches depend on: its modules, their attributes, and the addresses of their parameters.

    A graph of the layer is valid as long as all these are unchanged. A module that is replaced, an adapter that is
    switched or merged, another rate or scale, a hook, and another number in a list, a dict or a config are noticed.

    Args:
        layer: The layer.

    Attributes:
        tensors: Its parameters and buffers.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._parts = [*layer.modules()]
        self._weights, self._buffers = [*layer.parameters()], [*layer.buffers()]
        self.tensors = [*self._weights, *self._buffers]
        self._places = self._pointers()
        self._leaves = {each: nn.Parameter(each.data) for each in self._weights if each.requires_grad}
        self._remember()

    def _remember(self) -> None:
        self._held = _containers(self._parts)
        # Each call of the layer checks all containers. Most are empty, such as dicts of hooks: one pass checks these.
        self._empty = [held for held in self._held if not held]
        self._views = [held.values() if isinstance(held, dict) else held for held in self._held if held]
        self._seen = self._values()

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that require a gradient."""
        return [parameter for parameter in self._weights if parameter.requires_grad]

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The leaves that replace the `trained` parameters in [`with_own_leaves`]."""
        return [*self._leaves.values()]

    @contextlib.contextmanager
    def with_own_leaves(self) -> Iterator[list[nn.Parameter]]:
        """In the context, other leaves with the same memory replace the `trained` parameters; yields these leaves.

        Autograd adds to a parameter's gradient on the stream on which the parameter was first used, and a backward
        waits for that stream, which a capture must not do. Hooks of a parameter do not see the gradients of its leaf.
        """
        replaced = [
            (module._parameters, name, parameter)
            for module in self._parts
            for name, parameter in module._parameters.items()
            if parameter in self._leaves
        ]
        for owner, name, parameter in replaced:
            owner[name] = self._leaves[parameter]
        try:
            yield self.leaves
        finally:
            for owner, name, parameter in replaced:
                owner[name] = parameter

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return self._pointers() == self._places and self._has_same_attributes()

    def _has_same_attributes(self) -> bool:
        if any(self._empty):
            return False
        now = self._values()
        if len(now) != len(self._seen):
            return False
        if all(map(operator.is_, now, self._seen)):
            return True
        # PEFT replaces its list of active adapters by an equal one.
        same = all(map(_alike, now, self._seen))
        if same:
            self._remember()
        return same

    @contextlib.contextmanager
    def put_back(self) -> Iterator[Callable[[], str]]:
        """Restores buffers and attributes after the context; yields a function that says which of them have changed."""
        copies = [each.clone() for each in self._buffers]
        attributes = [(held, copy.copy(held)) for held in self._held]

        def changed() -> str:
            # Compares values: running means change in place without a new version.
            if not all(map(torch.equal, self._buffers, copies)):
                return "buffers"
            return "" if self._has_same_attributes() else "attributes"

        try:
            yield changed
        finally:
            if not self._has_same_attributes():
                for held, before in attributes:
                    _refill(held, before)
            for buffer, before in zip(self._buffers, copies):
                if not torch.equal(buffer, before):
                    buffer.data.copy_(before)

    def has_moved(self) -> bool:
        """Whether a parameter or buffer is at another address."""
        return any(now[0] != before[0] for now, before in zip(self._pointers(), self._places))

    def obstacle(self) -> str:
        """Why the layer cannot be captured; empty if it can."""
        for module in self._parts:
            if is_call_hooked(module):
                return f"{type(module).__name__} has a hook"
        if any(type(each) is torch.Tensor for each in self._weights):
            return "a parameter is replaced by a tensor"
        for tensor in self.tensors:
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                return f"a weight is a {type(tensor).__name__}"
            if tensor._backward_hooks:
                return "a parameter has a hook"
        return ""

    def _values(self) -> list[Any]:
        return [*map(type, self._parts), *itertools.chain.from_iterable(self._views)]

    def _pointers(self) -> list[tuple[int, bool, torch.Size, tuple[int, ...]]]:
        return [(each.data_ptr(), each.requires_grad, each.shape, each.stride()) for each in self.tensors]


def _containers(modules: Sequence[nn.Module]) -> list[Any]:
    """The containers that hold the attributes of modules, and of objects that cannot be called, such as configs."""
    found: dict[int, Any] = {}
    waiting: list[tuple[Any, bool]] = [(vars(module), True) for module in modules]
    while waiting:
        held, may_have_objects = waiting.pop()
        if id(held) in found:
            continue
        found[id(held)] = held
        for value in held.values() if isinstance(held, dict) else held:
            if isinstance(value, _CONTAINERS):
                waiting.append((value, may_have_objects))
            elif may_have_objects and hasattr(value, "__dict__") and not _is_known(value):
                waiting.append((vars(value), False))
    return [*found.values()]


def _is_known(value: Any) -> bool:
    """Whether the attributes of `value` are checked elsewhere, or are no state of a layer."""
    return callable(value) or isinstance(value, (nn.Module, torch.Tensor, ModuleType, str, float, int))


def _alike(one: Any, other: Any) -> bool:
    """Whether two attributes are the same object, equal constants, or lists or tuples of such."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) in _CONSTANTS and one == other


def _refill(held: Any, before: Any) -> None:
    """Restores the content of a container."""
    if isinstance(held, list):
        held[:] = before
    elif not isinstance(held, (tuple, frozenset)):
        held.clear()
        held.update(before)
