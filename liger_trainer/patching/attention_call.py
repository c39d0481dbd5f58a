"""What an attention passes to its attention function: its forward runs on a dummy up to that call, and no further.

It runs once under our name, with a plan for a mask, and once under the name that the model has by default, with a mask.
Some models build or cut masks under the names that they know alone. Both masks must arrive as they were given, with the
same options: then the model does under our name what it does under its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.attention.config_names import NAME
from liger_trainer.compat.private import available
from liger_trainer.compat.rebound import forward_calling
from liger_trainer.compat.transformers import ATTENTION
from liger_trainer.kernels.attention.plan import AttentionPlan
from liger_trainer.patching.probe import ProjectionToOnes, class_of, dummy_module

LENGTH = 24
INTERFACE = "ALL_ATTENTION_FUNCTIONS"

_HIDDEN = 8
_COMPUTED = frozenset({"scaling", "softcap", "s_aux"})
# The mask has the window and the packing. Where a model sets `is_causal`, it does so for calls without a mask.
_OF_MASK = frozenset({"sliding_window", "position_ids", "is_causal"})
_SWITCHES = frozenset({"output_attentions", "use_cache"})
_UNDERSTOOD = _COMPUTED | _OF_MASK | _SWITCHES | {"dropout"}

_GIVEN = frozenset(
    {"hidden_states", "attention_mask", "position_embeddings", "position_ids", "layer_idx", "shared_kv_states"}
)
# Not given in training: caches, and what other attentions of the same class, across two sequences, are given.
_LEFT_OUT = frozenset(
    {"self", "past_key_values", "past_key_value", "layer_past", "cache", "cache_position", "head_mask"}
    | {"key_value_states", "encoder_hidden_states", "encoder_attention_mask", "cross_attention_states"}
    | _SWITCHES
)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Uncut(AttentionPlan):
    """A plan that says so if a forward takes parts of it, as it would of a mask."""

    def __getitem__(self, _index: Any) -> Any:
        raise _CutError


class _CutError(Exception):
    pass


_PLAN = _Uncut(0, None, LENGTH)


class AttentionCall(Exception):
    """Ends the forward of an attention, and holds what it passes to its attention function.

    Attributes:
        shapes: Number of heads and their size, of queries, keys and values.
        lengths: Number of rows and of tokens, of queries, keys and values.
        mask: The mask that the call passes.
        options: Keyword arguments that are not None, without the dropout.
        of_parameter: Which of them are parameters of the attention, by the names of both.
    """

    def __init__(self, operands: Sequence[torch.Tensor], mask: Any, options: Mapping[str, Any]) -> None:
        self.shapes = [(each.shape[1], each.shape[-1]) for each in operands]
        self.lengths = [(each.shape[0], each.shape[2]) for each in operands]
        self.mask = mask
        self.options = {name: value for name, value in options.items() if value is not None and name != "dropout"}
        self.of_parameter: dict[str, str] = {}


class _CapturingInterface:
    """Stands in for transformers' registry: the attention function of any name captures its arguments."""

    def get_interface(self, *_names: Any) -> Any:
        def function(module, query, key, value, attention_mask=None, **options):
            raise AttentionCall((query, key, value), attention_mask, options)

        return function

    __getitem__ = get_interface


_INTERFACE = _CapturingInterface()


def capture(
    module: nn.Module, parameters: Mapping[str, torch.Tensor], own_name: str, rotary_widths: Sequence[int]
) -> AttentionCall | str:
    """The call of the attention function under our name, if it is that under the model's own name; else why not."""
    forward = forward_calling(class_of(module).forward, INTERFACE, _INTERFACE) if available(ATTENTION) else None
    if forward is None:
        return "what its forward is wrapped in cannot be run on a dummy"
    arguments = {each.name for each in inspect.signature(forward).parameters.values() if each.kind in _NAMED}
    others = sorted(arguments - _GIVEN - _LEFT_OUT)

    def call(name: str, mask: Any, **more: Any) -> AttentionCall | str:
        return _call(forward, module, parameters, name, mask, arguments & _GIVEN, rotary_widths, more)

    ours = call(NAME, _PLAN)
    if isinstance(ours, str):
        return ours
    unknown = sorted(set(ours.options) - _UNDERSTOOD)
    if unknown:
        return f"its attention passes {', '.join(unknown)}, which our attention does not compute"
    if ours.mask is not _PLAN:
        return "it changes its mask before it calls its attention function"
    if set(ours.lengths) != {(1, LENGTH)}:
        return "its keys are not those of its tokens"
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    if not _same(call(own_name, mask), mask, ours):
        return f"it calls its attention function in another way where the implementation is {own_name!r}"
    # An argument that scales queries changes nothing of the call. One that selects keys does, or is no number.
    if others and not _same(call(NAME, _PLAN, **dict.fromkeys(others, torch.ones(()))), _PLAN, ours):
        return f"its forward also takes {', '.join(others)}"
    for name, parameter in parameters.items():
        ours.of_parameter.update({option: name for option, value in ours.options.items() if value is parameter})
    return ours


def rotary_widths(model: nn.Module) -> list[int]:
    """The widths that rotary tables of `model` may have: as many columns as its frequencies, or twice as many."""
    counts = {
        int(frequencies.shape[-1])
        for module in model.modules()
        for name, frequencies in module._buffers.items()
        if name.endswith("inv_freq") and frequencies is not None and frequencies.dim() and frequencies.shape[-1]
    }
    return sorted({width for count in counts for width in (count, 2 * count)}, reverse=True)


def _same(call: AttentionCall | str, mask: Any, expected: AttentionCall) -> bool:
    """Whether `call` was made with this `mask` and what else is `expected`."""

    def equal(one: Any, other: Any) -> bool:
        tensors = isinstance(one, torch.Tensor), isinstance(other, torch.Tensor)
        return torch.equal(one, other) if all(tensors) else not any(tensors) and bool(one == other)

    if isinstance(call, str) or call.mask is not mask or call.shapes != expected.shapes:
        return False
    options = call.options, expected.options
    return options[0].keys() == options[1].keys() and all(
        equal(value, options[1][name]) for name, value in options[0].items()
    )


def _call(
    forward: Callable,
    module: Any,
    parameters: Mapping[str, torch.Tensor],
    name: str,
    mask: Any,
    names: Collection[str],
    rotary_widths: Sequence[int],
    more: Mapping[str, Any],
) -> AttentionCall | str:
    """What the attention passes to its attention function; why it could not be run."""
    children = {
        child_name: ProjectionToOnes(child.out_features) if hasattr(child, "out_features") else nn.Identity()
        for child_name, child in module._modules.items()
        if child is not None
    }
    given: dict[str, Any] = {
        "hidden_states": torch.ones(1, LENGTH, _HIDDEN),
        "attention_mask": mask,
        "position_ids": torch.arange(LENGTH)[None],
        "layer_idx": getattr(module, "layer_idx", 0),
        "shared_kv_states": _SharedKeys(module),
    }
    failure = ""
    for tables in _tables([*rotary_widths, getattr(module, "head_dim", 8)]):
        dummy: Any = dummy_module(module, parameters, children)
        dummy.config = _Renamed(module.config, name)
        given["position_embeddings"] = tables
        try:
            forward(dummy, **{name: given[name] for name in names}, **more)
        except AttentionCall as call:
            return call
        except _CutError:
            return "it takes parts of its mask, which our attention does not build"
        except Exception as error:
            failure = failure or f"it could not be run on a dummy: {type(error).__name__}: {str(error).strip()[:120]}"
    return failure or "it called no attention function"


def _tables(widths: Sequence[int]) -> Iterator[Any]:
    """Rotary tables of these widths, and complex ones as in Llama 4."""
    for width in dict.fromkeys([*widths, widths[-1] // 2]):
        table = torch.ones(1, LENGTH, width)
        yield table, table
    for width in dict.fromkeys([*widths, widths[-1] // 2]):
        yield torch.ones(1, LENGTH, width, dtype=torch.complex64)


class _SharedKeys(dict):
    """Keys and values of an earlier layer of any type, for attentions that have none of their own."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, _layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._module.head_dim
        heads = self._module.q_proj.out_features // size // self._module.num_key_value_groups
        return torch.ones(1, heads, LENGTH, size), torch.ones(1, heads, LENGTH, size)


class _Renamed:
    """A view of a config with the name of another attention implementation."""

    def __init__(self, config: Any, name: str) -> None:
        self._attn_implementation, self._config = name, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)
