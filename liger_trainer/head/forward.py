"""The forward of a patched head; what that of its model tells the head and the masks; and how both run compiled.

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
from torch import nn

from liger_trainer.compat.hooks import is_gradient_hooked
from liger_trainer.compat.private import available
from liger_trainer.compat.torch import COMPILED_HEAD, WHOLE_GRAPHS
from liger_trainer.head.chunked_module import ModuleCall, module_call
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.head.lm_head import (
    PLAIN,
    HeadCall,
    Recorded,
    is_split,
    output_embedding,
    product_dtype,
    sharding_of,
    version_of,
)
from liger_trainer.head.recorded import NOTHING_DONE
from liger_trainer.head.step import Forward, Rows, Step, current_step
from liger_trainer.head.vocab_parallel import VocabParallelCall, vocab_parallel_call
from liger_trainer.head.warn_once import warn_once

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


@contextlib.contextmanager
def compiler_restored() -> Iterator[None]:
    """The compiler runs again afterwards, if a head inside has paused it."""
    if not CAN_DEFER_COMPILED:
        yield
        return
    callback = set_eval_frame(None)
    set_eval_frame(callback)
    try:
        yield
    finally:
        set_eval_frame(callback)


@functools.cache
def make_head_forward(fused: bool, logits_memory: int, whole_module: bool = False, in_fp32: bool = False) -> Callable:
    """A head's forward that defers the logits where the model's forward allows it.

    It is a plain function of `self`, so copies of a patched model are patched models.

    Args:
        fused: Whether cross entropy runs fused with the head, or on logits built for it.
        logits_memory: Bytes that the fused operator may use for a chunk of logits.
        whole_module: Whether the head is not a plain linear layer, so that its own forward runs, chunk by chunk.
        in_fp32: Whether the hidden states are cast to fp32 first.
    """

    def call_of(self: Any, hidden: torch.Tensor) -> tuple[HeadCall | ModuleCall | None, torch.Tensor]:
        if whole_module:
            return module_call(self, hidden, in_fp32, logits_memory)
        weight, bias = self.weight, self.bias
        # FSDP gathers a weight for this forward; one that is still a DTensor is split by tensor parallelism.
        plain = type(hidden) in PLAIN and type(weight) in PLAIN and (bias is None or type(bias) in PLAIN)
        dtype = product_dtype(hidden, weight, bias, in_fp32) if plain else None
        return (None if dtype is None else HeadCall(self, weight, bias, dtype, fused, logits_memory)), hidden

    def native(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return type(self).forward(self, *args, **kwargs)

    return _deferring(call_of, native, in_fp32)


def make_split_head_forward(gathering: Callable, fused: bool, logits_memory: int) -> Callable:
    """As [`make_head_forward`], for one head whose forward `gathering` comes from tensor parallelism."""

    def call_of(self: Any, hidden: torch.Tensor) -> tuple[VocabParallelCall | None, torch.Tensor]:
        return vocab_parallel_call(self, hidden, fused, logits_memory), hidden

    def native(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return gathering(*args, **kwargs)

    return _deferring(call_of, native, in_fp32=False)


def _deferring(call_of: Callable, native: Callable, in_fp32: bool) -> Callable:
    """A head's forward that defers the logits if `call_of` returns a call (with its input), and else runs `native`."""

    @functools.wraps(nn.Linear.forward)
    def forward(self: nn.Module, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        input = input.float() if in_fp32 else input
        if torch.compiler.is_compiling() or args or kwargs:
            return native(self, input, *args, **kwargs)
        context = current_step().forward
        if context is None or is_gradient_hooked(self):
            return native(self, input)
        # The whole weight has to be at hand wherever the logits of this forward are read.
        if (context.read_later or not context.has_labels) and sharding_of(self):
            return native(self, input)
        if context.read_later and is_split(self):
            return native(self, input)
        if CAN_DEFER_COMPILED:
            # Until `compiler_restored` ends: dynamo can trace neither the wrapper nor its functions.
            set_eval_frame(None)
        call, hidden = call_of(self, input)
        if call is not None:
            meta = torch.empty(*hidden.shape[:-1], call.vocab_size, dtype=call.dtype, device="meta")
            return DeferredLogits.create(Recorded(call, hidden, NOTHING_DONE, version_of(hidden)), meta)
        if self.training and is_split(self):
            warn_once(
                "split head",
                "The LM head is split over processes in a way that the fused cross entropy does not support, so its "
                "logits are gathered. The result is right, but takes as much memory as unfused training. Models that "
                "`from_pretrained` splits (`DistributedConfig(tp_size=...)`) train without them. (Shown once.)",
            )
        return native(self, input)

    never_a_frame(forward)  # compiled as a frame of its own, it would never defer
    return forward


for _function in (step_of_forward, rows_of, _is_known_code.__wrapped__, _names.__wrapped__):
    never_a_frame(_function)
