"""What an attention passes to its attention function: its forward runs on a dummy up to that call, and no further.

It runs once under our name, with a plan for a mask, and once under the name that the model has by default, with a mask.
Some models build or cut masks under the names that they know alone. Both masks must arrive as they were given, with the
same options: then the model does under our name what it does under its own.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.attention.config_names import NAME
from liger_trainer.attention.masks import of_selected, sliced
from liger_trainer.compat.private import available
from liger_trainer.compat.rebound import forward_calling
from liger_trainer.compat.transformers import ATTENTION
from liger_trainer.kernels.attention.plan import AttentionPlan, dense
from liger_trainer.patching.indexer import find_indexer, indexer_forward
from liger_trainer.patching.probe import ProjectionToOnes, class_of, dummy_module

LENGTH = 24
INTERFACE = "ALL_ATTENTION_FUNCTIONS"

_HIDDEN = 8
_COMPUTED = frozenset({"scaling", "softcap", "s_aux"})
# The mask has the window and the packing. Where a model sets `is_causal`, it does so for calls without a mask.
_OF_MASK = frozenset({"sliding_window", "position_ids", "is_causal"})
_SWITCHES = frozenset({"output_attentions", "use_cache"})
_INDICES, _OF_AN_EARLIER_LAYER = "indices", "prev_topk_indices"
_FEW_KEYS = 5
_UNDERSTOOD = _COMPUTED | _OF_MASK | _SWITCHES | {"dropout"}

_GIVEN = frozenset(
    {"hidden_states", "attention_mask", "position_embeddings", "position_ids", "layer_idx", "shared_kv_states"}
    | {_OF_AN_EARLIER_LAYER}
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
_INDEXED_PLAN = sliced(AttentionPlan(0, None, LENGTH), 1, LENGTH, "cpu")


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

    def call(name: str, mask: Any, selected: int, **more: Any) -> AttentionCall | str:
        return _call(forward, module, parameters, name, mask, arguments & _GIVEN, rotary_widths, selected, more)

    indexed = find_indexer(module) is not None or _OF_AN_EARLIER_LAYER in arguments
    plan = _INDEXED_PLAN if indexed else _PLAN
    ours = call(NAME, plan, LENGTH)
    if isinstance(ours, str):
        return ours
    unknown = sorted(set(ours.options) - _UNDERSTOOD - ({_INDICES} if indexed else set()))
    if unknown:
        return f"its attention passes {', '.join(unknown)}, which our attention does not compute"
    if ours.mask is not plan:
        return "it changes its mask before it calls its attention function"
    if set(ours.lengths) != {(1, LENGTH)}:
        return "its keys are not those of its tokens"
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    for selected in (LENGTH, _FEW_KEYS) if indexed else (LENGTH,):
        expected = _selected(call(NAME, plan, selected), mask) if indexed else (mask, ours)
        if expected is None or not _same(call(own_name, mask, selected), *expected):
            return f"it calls its attention function in another way where the implementation is {own_name!r}"
    # An argument that scales queries changes nothing of the call. One that selects keys does, or is no number.
    scaling: Any = dict.fromkeys(others, torch.ones(()))
    if others and not _same(call(NAME, plan, LENGTH, **scaling), plan, ours):
        return f"its forward also takes {', '.join(others)}"
    ours.options.pop(_INDICES, None)
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


def _selected(call: AttentionCall | str, mask: torch.Tensor) -> tuple[torch.Tensor, AttentionCall] | None:
    """The mask with what a call under our name has selected, and the call without it; None if it selects nothing."""
    if isinstance(call, str) or _INDICES not in call.options:
        return None
    indices = call.options.pop(_INDICES)
    if indices.dim() == 2:
        return dense(_INDEXED_PLAN._replace(bits=indices), 1, LENGTH, mask.device), call
    return (of_selected(mask, indices, LENGTH) if indices.shape[-1] else mask), call


def _same(call: AttentionCall | str, mask: Any, expected: AttentionCall) -> bool:
    """Whether `call` was made with this `mask` and what else is `expected`."""

    def equal(one: Any, other: Any) -> bool:
        tensors = isinstance(one, torch.Tensor), isinstance(other, torch.Tensor)
        return torch.equal(one, other) if all(tensors) else not any(tensors) and bool(one == other)

    if isinstance(call, str) or call.shapes != expected.shapes:
        return False
    if call.mask is not mask and not (isinstance(mask, torch.Tensor) and equal(call.mask, mask)):
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
    selected: int,
    more: Mapping[str, Any],
) -> AttentionCall | str:
    """What the attention passes to its attention function; why it could not be run.

    Each query sees `selected` keys at most, of a module that is given such a selection or makes one.
    """
    children, indexer = _stand_ins(module), find_indexer(module)
    if indexer is not None:
        stand_in = _indexer(indexer, selected, name == NAME)
        children |= {each: stand_in for each, child in module._modules.items() if child is indexer}
    of_all = name == NAME and selected == LENGTH
    given: dict[str, Any] = {
        "hidden_states": torch.ones(1, LENGTH, _HIDDEN),
        "attention_mask": mask,
        "position_ids": torch.arange(LENGTH)[None],
        "layer_idx": getattr(module, "layer_idx", 0),
        "shared_kv_states": _SharedKeys(module),
        _OF_AN_EARLIER_LAYER: torch.arange(0 if of_all else selected, dtype=torch.int32).expand(1, LENGTH, -1),
    }
    failure = ""
    for tables in _tables([*rotary_widths, getattr(module, "head_dim", 8)]):
        dummy: Any = dummy_module(module, parameters, children)
        dummy.config = Renamed(module.config, name)
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


def _stand_ins(module: nn.Module) -> dict[str, nn.Module]:
    """What takes the places of the children of `module`, whose weights are not read."""
    stand_ins: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        width = getattr(child, "out_features", getattr(child, "nf", None))  # of a linear layer; GPT-2's have the latter
        if isinstance(child, nn.Dropout):
            stand_ins[name] = nn.Dropout(child.p)  # which some read
        elif child is not None:
            stand_ins[name] = ProjectionToOnes(width) if isinstance(width, int) else _Unchanged()
    return stand_ins


class _Unchanged(nn.Module):
    """A norm, or what scales queries, whatever it is told of them."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The input."""
        return x


def _indexer(indexer: nn.Module, selected: int, ours: bool) -> nn.Module:
    """A dummy of an indexer that selects so many keys, with the forward of its class or ours."""
    children = _stand_ins(indexer)
    for child in children.values():
        child.__dict__["weight"] = torch.ones(())  # some ask for its dtype
    dummy = dummy_module(indexer, {}, children)
    dummy.__dict__["index_topk"] = selected
    if ours:
        dummy.__dict__["forward"] = types.MethodType(indexer_forward(type(indexer).forward), dummy)
    return dummy


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
        if hasattr(self._module, "kv_lora_rank"):  # the latents, and the rotated key of all heads
            sizes = self._module.kv_lora_rank, self._module.qk_rope_head_dim
            return torch.ones(1, 1, LENGTH, sizes[0]), torch.ones(1, 1, LENGTH, sizes[1])
        size = self._module.head_dim
        heads = self._module.q_proj.out_features // size // self._module.num_key_value_groups
        return torch.ones(1, heads, LENGTH, size), torch.ones(1, heads, LENGTH, size)


class Renamed:
    """A view of a config with the name of another attention implementation."""

    def __init__(self, config: Any, name: str) -> None:
        self._attn_implementation, self._config = name, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)
