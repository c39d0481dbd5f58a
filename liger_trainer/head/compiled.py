"""The head under `torch.compile`: the causal LM's own few lines run eagerly, the backbone stays compiled.

A `DeferredLogits` cannot be created while tracing, and its loss is one operator anyway. So a compiled training forward
breaks its graph where the causal LM's own forward begins. That calls the backbone, whose frame is compiled, and then
the head, which pauses this thread's compiler until the forward ends.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from liger_trainer.compat.private import available
from liger_trainer.compat.torch import COMPILED_HEAD, WHOLE_GRAPHS

CAN_DEFER_COMPILED = available(COMPILED_HEAD)
"""Whether compiled models can defer their logits with this torch; otherwise they build them."""

if CAN_DEFER_COMPILED:
    from torch._dynamo.eval_frame import set_eval_frame, skip_code


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
