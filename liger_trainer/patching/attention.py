"""A model's attention: our name in its config, after a proof against the attention function of the model's own file.

Each attention runs on a dummy up to its call of an attention function, to see what it passes. Then the function of its
file, with a mask, and ours, with a plan, run on random queries, keys and values: whole rows, and documents with a
window, as in packed and padded rows. If all attentions with the same config agree, the config gets our name, under
which transformers finds our attention and our masks (`liger_trainer/attention/`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_trainer.attention.interface import (
    CAPTURING,
    NAME,
    UNDERSTOOD,
    Captured,
    additive,
    attention_forward,
    default_implementation,
    eager_function,
)
from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import ATTENTION
from liger_trainer.kernels.attention.attention import MAX_HEAD_DIM
from liger_trainer.kernels.attention.plan import AttentionPlan, dense
from liger_trainer.parallel.sequences import split_sequences
from liger_trainer.patching.finding import CHOSEN, SWITCHED_OFF, Finding
from liger_trainer.patching.probe import (
    Agreement,
    Probe,
    ProjectionToOnes,
    class_of,
    dummy_module,
    full_shape,
    identity,
)

_KERNEL = "attention without masks"
_BATCH, _LENGTH, _WINDOW, _HIDDEN = 2, 24, 5, 8
_OFFSETS = (0, 7, 8, 24, 30, 48)  # of documents in two rows, one of them a single token
_WHOLE_ROWS = AttentionPlan(0, None, _LENGTH)
_USUAL = frozenset({"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"})


def find_attention(model: nn.Module, enabled: bool, probe: Probe) -> Iterator[Finding]:
    """A finding for each causal attention of `model` that is one of transformers'."""
    owners = {id(each.config): type(each) for each in model.modules() if isinstance(each, PreTrainedModel)}
    by_config: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if _calls_interface(module):
            by_config.setdefault(id(module.config), []).append(module)
        elif _is_attention(module):
            reason = "it does not call transformers' attention interface" if enabled else SWITCHED_OFF
            yield Finding("attention", type(module).__name__, module, reason=reason)
    images = "a mask that is not causal, as for images, stays" if len(owners) > 1 else ""
    for config, modules in by_config.items():
        if any(_is_causal(module) for module in modules):  # the others are not a language model's
            yield from _of_one_config(modules, owners.get(config), enabled, images, probe)


def _calls_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(class_of(module).forward), "__code__", None)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(code, "co_names", ()) and getattr(module, "config", None) is not None


def _is_attention(module: nn.Module) -> bool:
    cls = class_of(module)
    inner = (type(child).__name__.endswith("Attention") for child in module.children())
    return cls.__module__.startswith("transformers.models.") and cls.__name__.endswith("Attention") and not any(inner)


def _is_causal(module: nn.Module) -> bool:
    return getattr(module, "is_causal", False) is True


def _of_one_config(
    modules: list[nn.Module], owner: type[PreTrainedModel] | None, enabled: bool, remark: str, probe: Probe
) -> Iterator[Finding]:
    reason = _reason_to_leave(modules[0].config, owner) if enabled else SWITCHED_OFF
    agreements = [] if reason else [probe.once(_kind(each), _prove, each, probe) for each in modules]
    reason = reason or next((each.reason for each in agreements if not each.equal), "")
    for place, module in enumerate(modules):
        target = class_of(module).__name__
        if reason:
            yield Finding("attention", target, module, reason=reason)
        else:
            error = agreements[place].error
            yield Finding("attention", target, module, _KERNEL, attention_forward, error, remark, _switch)


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for the attentions of all layers with the same proof."""
    cls, attributes, *rest = identity(module)
    return "attention", cls, tuple(each for each in attributes if each[0] != "layer_idx"), *rest


def _reason_to_leave(config: Any, owner: type[PreTrainedModel] | None) -> str:
    if not available(ATTENTION):
        return "this version of transformers names its attention in another way"
    if owner is None:
        return "its config is not that of a transformers model"
    chosen = config._attn_implementation
    return split_sequences() if chosen == default_implementation(owner) else f"{CHOSEN}{chosen!r}"


def _switch(module: Any, _forward: Callable) -> None:
    module.config._attn_implementation = {"": NAME}  # not that of configs inside it


def restore_attention(model: nn.Module) -> None:
    """Makes the configs of `model` that name our attention name transformers' default again."""
    if not available(ATTENTION):
        return
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == NAME:
            module.config._attn_implementation = {"": default_implementation(type(module))}


def _prove(module: nn.Module, probe: Probe) -> Agreement:
    def refused(reason: str) -> Agreement:
        return Agreement(float("inf"), reason=reason)

    if not _is_causal(module):
        return refused("it is not causal")
    eager = eager_function(module)
    if eager is None:
        return refused("its file has no attention function with a mask to compare with")
    unknown = sorted(set(inspect.signature(eager).parameters) - _USUAL - UNDERSTOOD)
    if unknown:
        return refused(f"its attention function also takes {', '.join(unknown)}")
    parameters = {name: full_shape(each) for name, each in module._parameters.items() if each is not None}
    captured = _captured(module, {name: probe.randn(*shape) for name, shape in parameters.items()})
    if isinstance(captured, str):
        return refused(f"it could not be run on a dummy: {captured}")
    if captured.mask is not _WHOLE_ROWS:
        return refused("it changes its mask before it calls its attention function")
    largest = max(size for _, size in captured.shapes)
    if largest > MAX_HEAD_DIM:
        return refused(f"its heads have {largest} dimensions, and our attention has up to {MAX_HEAD_DIM}")
    tensors = [probe.randn(_BATCH, heads, _LENGTH, size) for heads, size in captured.shapes]
    tensors += [probe.randn(*shape) for shape in parameters.values()]
    offsets = torch.tensor(_OFFSETS, dtype=torch.int32)
    agreements = []
    # No more than these two: on a GPU each compiles kernels of its own.
    for plan in (_WHOLE_ROWS, AttentionPlan(_WINDOW, offsets, _LENGTH)):
        mask = dense(plan, _BATCH, _LENGTH, probe.device)
        original = _computation(eager, module, list(parameters), captured, mask)
        ours = _computation(attention_forward, module, list(parameters), captured, plan)
        with _exact_products():
            agreements.append(probe.compare(original, ours, tensors))
    return max(agreements, key=lambda each: (not each.equal, each.error))


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Multiplies float32 as such, also where TensorFloat-32 is on, which each of the two would round in its own way."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    if before == "tf32":
        products.fp32_precision = "ieee"
    try:
        yield
    finally:
        if before == "tf32":
            products.fp32_precision = before


def _computation(
    function: Callable, module: nn.Module, names: list[str], captured: Captured, mask: AttentionPlan | torch.Tensor
) -> Callable:
    """An attention function of queries, keys, values and the parameters of `module`, such as sinks."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        own = dict(zip(names, parameters))
        options = captured.options | {option: own[name] for option, name in captured.of_parameter.items()}
        what = additive(mask, q.dtype) if isinstance(mask, torch.Tensor) else mask
        return function(dummy_module(module, own, {}), q, k, v, what, **options)[0]

    return run


def _captured(module: Any, parameters: dict[str, torch.Tensor]) -> Captured | str:
    """What the attention passes to its attention function; why it could not be run."""
    children = {
        name: ProjectionToOnes(child.out_features) if hasattr(child, "out_features") else nn.Identity()
        for name, child in module._modules.items()
        if child is not None
    }
    failure = ""
    for tables in _tables(getattr(module, "head_dim", 8)):
        dummy: Any = dummy_module(module, parameters, children)
        dummy.config = _CapturingConfig(module.config)
        try:
            hidden = torch.ones(1, _LENGTH, _HIDDEN)
            class_of(module).forward(
                dummy, hidden_states=hidden, position_embeddings=tables, attention_mask=_WHOLE_ROWS
            )
        except Captured as captured:
            captured.name_parameters(parameters)
            return captured
        except Exception as error:
            failure = failure or f"{type(error).__name__}: {str(error).strip()[:120]}"
    return failure or "it called no attention function"


def _tables(head_dim: int) -> Iterator[Any]:
    """Rotary tables of full and of half width, and complex ones as in Llama 4."""
    for width in (head_dim, head_dim // 2):
        table = torch.ones(1, _LENGTH, width)
        yield table, table
    yield torch.ones(1, _LENGTH, head_dim // 2, dtype=torch.complex64)


class _CapturingConfig:
    """A view of a config that names the attention which captures its arguments."""

    def __init__(self, config: Any) -> None:
        self._attn_implementation, self._config = CAPTURING, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_config"], name)
