"""The forward of a model with a patched head: what it tells the head and the masks, and how it runs compiled.

A `DeferredLogits` cannot be created while tracing, and its loss is one operator anyway. So a compiled training forward
breaks its graph where the causal LM's own forward begins. That calls the backbone, whose frame is compiled, and then
the head, which pauses this thread's compiler until the forward ends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from liger_trainer.compat.private import available
from liger_trainer.compat.torch import COMPILED_HEAD, WHOLE_GRAPHS
from liger_trainer.head.lm_head import output_embedding, version_of
from liger_trainer.head.step import Forward, Rows, Step, current_step

CAN_DEFER_COMPILED = available(COMPILED_HEAD)
"""Whether compiled models can defer their logits with this torch; otherwise they build them."""

if CAN_DEFER_COMPILED:
    from torch._dynamo.eval_frame import set_eval_frame, skip_code

# Arguments of a forward that tell nothing of padding or packing.
_SILENT = frozenset(
    {
        "input_ids", "inputs_embeds", "labels", "shift_labels", "use_cache", "return_dict", "num_items_in_batch",
        "output_router_logits", "output_attentions", "output_hidden_states", "logits_to_keep",
    }
)  # fmt: skip


def step_of_forward(
    model: Any, native: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], forward: Forward
) -> Step:
    """The step in which ``native(model, *args, **kwargs)`` runs: its head is told of `forward`, its masks of the rows.

    Where FSDP1 has the head, or a part of it, in a unit of its own, its weight is freed after its forward, and the head
    must not defer the logits.
    """
    step = current_step()
    deferring: Forward | None = forward
    for module in output_embedding(model).modules():
        for kind in type(module).__mro__:  # subclasses too, without an import
            if kind.__name__ == "FullyShardedDataParallel":
                deferring = None
    rows = step.rows if torch.compiler.is_compiling() else rows_of(step, model, native, args, kwargs)
    return replace(step, forward=deferring, rows=rows)


def rows_of(step: Step, model: Any, native: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    """The rows of ``native(model, *args, **kwargs)``, as far as its arguments and the step's padding mask tell.

    Padding shows in the attention mask and packing in the position ids, and both are on the device. Reading them back
    ends the host's lead over it. But a forward that is given neither has whole rows. None where code other than
    transformers' runs before the masks, as it may make position ids or a mask.
    """
    if not (_is_known_code(native) and _is_known_code(type(getattr(model, "base_model", model)).forward)):
        return None
    given = {**dict(zip(_names(native), args, strict=False)), **kwargs}
    mask = given.pop("attention_mask", None)
    for name, value in given.items():
        if value is not None and name not in _SILENT:
            return None
    if mask is None:
        return Rows()
    read = step.padding
    if read is None or read.mask is not mask or read.version != version_of(mask):
        return None
    return Rows(read.bounds)


@functools.cache
def _is_known_code(function: Any) -> bool:
    """Whether the function and what it wraps are transformers', or pass on what they are given."""
    library = getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]
    inner = getattr(function, "__wrapped__", None)
    return library in ("transformers", "torch", "liger_trainer") and (inner is None or _is_known_code(inner))


@functools.cache
def _names(forward: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def never_a_frame(function: Any) -> None:
    """Keeps the compiler from compiling `function` as a frame of its own; traces still go through it."""
    if CAN_DEFER_COMPILED:
        skip_code(function.__code__)


def _copy(function: types.FunctionType, replaced: dict[int, Callable]) -> types.FunctionType:
    """`function` with its own code object, so that the compiler's notes on it concern this copy only."""
    cells = function.__closure__
    if cells is not None:
        swapped = (replaced.get(id(cell.cell_contents)) if _filled(cell) else None for cell in cells)
        cells = tuple(cell if new is None else types.CellType(new) for cell, new in zip(cells, swapped))
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_uncompiled")
    copied = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, cells)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update({key: value for key, value in function.__dict__.items() if key != "__wrapped__"})
    return copied


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@functools.cache
def uncompiled(function: Callable) -> Callable:
    """`function` and the decorators around it, run eagerly under `torch.compile`; what they call is still compiled."""
    chain: list[Any] = [function]
    while isinstance(getattr(chain[-1], "__wrapped__", None), types.FunctionType):
        chain.append(chain[-1].__wrapped__)
    replaced: dict[int, Callable] = {}
    for layer in reversed(chain):
        if not isinstance(layer, types.FunctionType):
            return torch.compiler.disable(function, recursive=False)
        replaced[id(layer)] = torch.compiler.disable(_copy(layer, replaced), recursive=False)
    return replaced[id(function)]


@torch.compiler.assume_constant_result
def whole_graph_wanted() -> bool:
    """Whether the current trace must not break its graph (`fullgraph=True`, export); called while tracing."""
    if not available(WHOLE_GRAPHS):
        return True
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = InstructionTranslator.current_tx()
    return bool(translator.one_graph or translator.error_on_graph_break)


def pause_compiler() -> None:
    """Pauses the compiler in this thread until the enclosing `compiler_restored` ends."""
    if CAN_DEFER_COMPILED:
        set_eval_frame(None)


@contextlib.contextmanager
def compiler_restored() -> Iterator[None]:
    """Ends a `pause_compiler` inside."""
    if not CAN_DEFER_COMPILED:
        yield
        return
    callback = set_eval_frame(None)
    set_eval_frame(callback)
    try:
        yield
    finally:
        set_eval_frame(callback)


for _function in (step_of_forward, rows_of, _is_known_code.__wrapped__, _names.__wrapped__):
    never_a_frame(_function)
