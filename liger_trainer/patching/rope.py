"""Rotary position embedding: the function an attention's forward calls by its global name.

The function is probed against ours. Where they agree, the attention instance gets a copy of its class's forward that
finds ours under that name: the copy has the same code, defaults and closure, and globals of its own, so the modelling
module, and with it every other model of the process, stays as it is. Those globals are a snapshot of the module's.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.rope import rope
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.finding import Finding
from liger_trainer.patching.probe import Agreement, Probe

_BATCH, _HEADS, _KV_HEADS, _LENGTH, _HEAD_DIM = 2, 4, 2, 5, 16

# What a call looks like: (dimensions of q, unsqueeze_dim, tables as wide as a head, tables as long as the batch).
Layout = tuple[int, int, bool, bool]


def find_rope(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Iterator[Finding]:
    """The verdict on every rotary function that `module`'s forward calls by a global name."""
    forward = type(module).forward
    key = ("rope", forward)
    if key not in probe.cache:
        probe.cache[key] = list(_rotary_globals(forward))
    for name, function in probe.cache[key]:
        target = f"{name} in {type(module).__name__}"
        if not enabled("rope"):
            yield Finding("rope", target, module, reason="switched off in liger_kernel_config")
            continue
        foreign = overriding_forward(module)
        if foreign is not None:
            yield Finding("rope", target, module, reason=f"its forward is already overridden by {foreign}")
            continue
        proof = ("rope", forward, name, id(function))
        if proof not in probe.cache:
            probe.cache[proof] = _probe_rope(forward, name, function, probe)
        kernel, patched, agreement = probe.cache[proof]
        yield Finding("rope", target, module, kernel, patched, agreement.error, agreement.reason)


def _rotary_globals(forward: Callable) -> Iterator[tuple[str, Callable]]:
    function = _python_function(forward)
    while function is not None:
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if not callable(value) or isinstance(value, type):
                continue
            if _arguments(value)[:4] == ["q", "k", "cos", "sin"] or ("apply" in name and "rotary" in name):
                yield name, value
        function = _python_function(getattr(function, "__wrapped__", None))


def _python_function(function: Any) -> types.FunctionType | None:
    return function if isinstance(function, types.FunctionType) else None


def _arguments(function: Callable) -> list[str]:
    # Hugging Face's kernels library makes such a function a module, whose forward has the signature.
    call = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return []


def _probe_rope(
    forward: Callable, name: str, function: Callable, probe: Probe
) -> tuple[str | None, Callable | None, Agreement]:
    def refused(reason: str) -> tuple[None, None, Agreement]:
        return None, None, Agreement(float("inf"), reason=reason)

    arguments = _arguments(function)
    if arguments[:4] != ["q", "k", "cos", "sin"]:
        return refused(f"it takes ({', '.join(arguments)}), not (q, k, cos, sin)")
    call = function.forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(call).parameters
    needed = [p.name for p in list(parameters.values())[4:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if needed:
        return refused(f"it also takes {', '.join(needed)}")

    has_dim = "unsqueeze_dim" in parameters
    for precise in (False, True):
        agreements = {layout: _compare(function, has_dim, layout, precise, probe) for layout in _layouts()}
        proven = {layout: agreement for layout, agreement in agreements.items() if agreement.equal}
        if proven:
            break
    used = (
        [layout for layout in proven if layout[1] == parameters["unsqueeze_dim"].default] if has_dim else list(proven)
    )
    if not any(full_width and full_batch for _, _, full_width, full_batch in used):
        nearest = min(agreements.values(), key=lambda agreement: agreement.error)
        return None, None, nearest.explained("another rotation than the half-split one of q and k")
    position = arguments.index("unsqueeze_dim") - 4 if has_dim else None
    default = parameters["unsqueeze_dim"].default if has_dim else used[0][1]
    mixed = _mixed_result(function, has_dim, used[0], precise, probe)
    rotary = rotary_function(function, default, position, frozenset(proven), mixed, precise)
    patched = forward_calling(forward, name, rotary)
    if patched is None:
        return refused("its forward is decorated in a way that hides the call")
    error = max(agreement.error for agreement in proven.values())
    return "rope", patched, Agreement(error)


def _layouts() -> Iterator[Layout]:
    for full_width in (True, False):
        for full_batch in (True, False):
            yield 4, 1, full_width, full_batch
            yield 4, 2, full_width, full_batch
        # Without a batch the dimension says nothing; a function that takes none is called with its default.
        yield 3, 1, full_width, True
        yield 3, 2, full_width, True


def _tensors(layout: Layout, probe: Probe) -> list[torch.Tensor]:
    dimensions, unsqueeze_dim, full_width, full_batch = layout
    width = _HEAD_DIM if full_width else _HEAD_DIM // 2
    batch = _BATCH if full_batch else 1
    # The two halves of the tables differ on purpose: nothing in the function's contract makes them equal.
    tables = [probe.randn(batch, _LENGTH, width) for _ in range(2)]
    rows = [probe.randn(_BATCH, heads, _LENGTH, _HEAD_DIM) for heads in (_HEADS, _KV_HEADS)]
    if unsqueeze_dim == 2 or dimensions == 3:
        rows = [row.transpose(1, 2) for row in rows]
    if dimensions == 3:  # no batch dimension: (tokens, heads, head_dim)
        return [tensor[0] for tensor in (*rows, *tables)]
    return [*rows, *tables]


def _compare(function: Callable, has_dim: bool, layout: Layout, precise: bool, probe: Probe) -> Agreement:
    q, k, cos, sin = _tensors(layout, probe)
    dim = layout[1]

    def original(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return function(q, k, cos, sin, unsqueeze_dim=dim) if has_dim else function(q, k, cos, sin)

    def ours(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return _rotate(q, k, cos, sin, dim, precise)

    return probe.compare(_fixed_tables(original, cos, sin), _fixed_tables(ours, cos, sin), [q, k])


def _fixed_tables(function: Callable, cos: torch.Tensor, sin: torch.Tensor) -> Callable:
    """`function` of q and k alone: the tables are not trained, and have q's dtype."""
    return lambda q, k: function(q, k, cos.to(q.dtype), sin.to(q.dtype))


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int, precise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.dim() == 3:  # (tokens, heads, head_dim) is one sequence
        q, k = _rotate(q.unsqueeze(0), k.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0), 2, precise)
        return q.squeeze(0), k.squeeze(0)
    if not precise:
        return rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    q_rotated, k_rotated = rope(q.float(), k.float(), cos.float(), sin.float(), unsqueeze_dim=unsqueeze_dim)
    return q_rotated.to(q.dtype), k_rotated.to(k.dtype)


def _mixed_result(function: Callable, has_dim: bool, layout: Layout, precise: bool, probe: Probe) -> str | None:
    """With float32 tables and bfloat16 heads: ``"promoted"``, ``"kept"`` (in the heads' dtype), or None for neither."""
    q, k, cos, sin = _tensors(layout, probe)
    half = [q.to(torch.bfloat16), k.to(torch.bfloat16)]

    def original(q: torch.Tensor, k: torch.Tensor) -> Any:
        return function(q, k, cos, sin, unsqueeze_dim=layout[1]) if has_dim else function(q, k, cos, sin)

    for mixed in ("promoted", "kept"):

        def ours(q: torch.Tensor, k: torch.Tensor, keep: bool = mixed == "kept") -> Any:
            rotated = _rotate(q, k, cos, sin, layout[1], precise)
            return tuple(x.to(q.dtype) for x in rotated) if keep else rotated

        if all(probe.same(original, ours, half, autocast) for autocast in (False, True)):
            return mixed
    return None


@functools.cache
def rotary_function(
    original: Callable,
    default_dim: int,
    dim_position: int | None,
    proven: frozenset[Layout],
    mixed: str | None,
    precise: bool,
) -> Callable:
    """Our rotary function with the signature of `original`, which still runs what is not proved equal.

    Args:
        original: The model's function.
        default_dim: Its `unsqueeze_dim` where the call does not say.
        dim_position: Where `unsqueeze_dim` comes among the arguments after `sin`; None if there is no such argument.
        proven: The layouts on which the two agree.
        mixed: What tables of another dtype than q give: ``"promoted"`` as the kernel does, ``"kept"`` in q's dtype, or
            None to let the original run.
        precise: Give the kernel everything in float32, for an original that computes in float32 and rounds once. On an
            accelerator the kernel does so anyway, and this is only tried where the plain call does not agree.
    """

    def rotary(q, k, cos, sin, *args, **kwargs):
        if not args and not kwargs:
            dim: Any = default_dim
        elif not args and len(kwargs) == 1 and dim_position is not None:
            dim = kwargs.get("unsqueeze_dim")
        else:
            dim = args[0] if dim_position == 0 and len(args) == 1 and not kwargs else None
        layout = (q.dim(), dim, cos.shape[-1] == q.shape[-1], cos.shape[0] == q.shape[0])
        as_probed = layout in proven and cos.dim() == q.dim() - 1 and k.dtype == q.dtype
        if not as_probed or (mixed is None and cos.dtype != q.dtype):
            return original(q, k, cos, sin, *args, **kwargs)
        q_rotated, k_rotated = _rotate(q, k, cos, sin, dim, precise)
        if mixed == "kept" and cos.dtype != q.dtype:
            return q_rotated.to(q.dtype), k_rotated.to(q.dtype)
        return q_rotated, k_rotated

    return rotary


@functools.cache
def forward_calling(forward: Callable, name: str, function: Callable) -> Callable | None:
    """A copy of `forward` whose global `name` is `function`; None if the function that uses the name is out of reach.

    A decorated forward is rebuilt around the copy of what it wraps, which its closure must hold.
    """
    if not isinstance(forward, types.FunctionType):
        return None
    closure = forward.__closure__
    namespace = forward.__globals__
    inner = getattr(forward, "__wrapped__", None)
    if name in forward.__code__.co_names and name in namespace:
        # Without a module name in its globals, torch.compile looks the names up in these globals, and not in the
        # module of that name, where it would find the original.
        hidden = () if "__name__" in forward.__code__.co_names else ("__name__",)
        namespace = {key: value for key, value in namespace.items() if key not in hidden} | {name: function}
    else:
        copied = forward_calling(inner, name, function) if inner is not None else None
        cells = closure or ()
        if copied is None or not any(_holds(cell, inner) for cell in cells):
            return None
        closure = tuple(types.CellType(copied) if _holds(cell, inner) else cell for cell in cells)
        inner = copied
    copy = types.FunctionType(forward.__code__, namespace, forward.__name__, forward.__defaults__, closure)
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__dict__.update(forward.__dict__)
    for attribute in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(copy, attribute, getattr(forward, attribute))
    if inner is not None:
        copy.__wrapped__ = inner  # type: ignore[attr-defined]
    return copy


def _holds(cell: types.CellType, function: Any) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # an empty cell
        return False
