"""A model's attention: our name in its config, after a proof against the attention function of the model's own file.

Each attention runs on a dummy up to its call of an attention function, to see what it passes. Then the function of its
file, with a mask, and ours, with a plan, run on random queries, keys and values: whole rows, and documents with a
window, as in packed and padded rows. If all attentions with the same config agree, the config gets our name, under
which transformers finds our attention and our masks (`liger_trainer/attention/`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_trainer.attention.continuous_batching import name_of, set_name
from liger_trainer.attention.interface import (
    NAME,
    PROVED,
    UNDERSTOOD,
    OurName,
    additive,
    attention_forward,
    default_implementation,
    eager_function,
)
from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import ATTENTION
from liger_trainer.kernels.attention.attention import attention_reference
from liger_trainer.kernels.attention.attention_launch import MAX_HEAD_DIM, largest_head_dim
from liger_trainer.kernels.attention.plan import AttentionPlan, dense
from liger_trainer.kernels.runtime import TRITON_DEVICES, use_triton
from liger_trainer.parallel.sequences import split_sequences
from liger_trainer.patching.attention_call import INTERFACE, LENGTH, AttentionCall, capture, rotary_widths
from liger_trainer.patching.binding import bind_forward, bind_method, overriding_forward
from liger_trainer.patching.indexer import find_indexer, indexer_forward
from liger_trainer.patching.inputs import ATTENTION as INPUTS
from liger_trainer.patching.labelled_tokens import labelled_forward
from liger_trainer.patching.probe import Probe, class_of, dummy_module, full_shape, identity
from liger_trainer.patching.report import SWITCHED_OFF, Choice, Finding, bind_own_code
from liger_trainer.patching.shared_layers import (
    METHOD,
    cuts_to_last_tokens,
    method_that_keeps,
    shares_keys,
)
from liger_trainer.patching.trial import Agreement

_KERNEL = "attention without masks"
_LABELLED = "labelled tokens alone in training"
_WHERE = "on a GPU, where the labels are known before the forward"
_ALL_TOKENS = "layers that share keys run on all tokens, as nothing of the model cuts what they are given"
_BATCH, _WINDOW = 2, 5
_WHOLE_ROWS = AttentionPlan(0, None, LENGTH)
_OFFSETS = (0, 7, 8, 24, 30, 48)  # of documents in two rows, one of them a single token
_DROPOUT = re.compile("att.*drop|drop.*att")
_USUAL = frozenset({"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"})


def find_attention(
    model: nn.Module, enabled: bool, probe: Probe, others: Sequence[nn.Module] = (), gathers: bool = False
) -> list[Finding]:
    """A finding for each causal attention of `model` that is one of transformers'; not for `others`, linear ones.

    Where the launch splits sequences, attention is the launch's, unless the caller `gathers`: gives forwards parts of
    sequences, with plans that gather keys or exchange heads. Then either all attentions are ours or none.
    """
    split = split_sequences()
    reason = Choice(split) if split and enabled else ""
    if reason and gathers:
        against = reason_against_parts(model)
        reason = Choice(f"{split}; ours is off, as {against}") if against else ""
    findings = list(_of_all_configs(model, enabled, reason, probe, others))
    left = next((each for each in findings if each.forward is None), None)
    if split and left is not None:
        reason = Choice(f"{split}; ours is off, as {left.target} is left alone")
        findings = [
            replace(each, kernel=None, forward=None, error=None, reason=reason) if each.forward else each
            for each in findings
        ]
    return findings


def reason_against_parts(model: nn.Module) -> str:
    """Why our attention cannot gather the keys of `model`, of which processes have parts; empty if it can."""
    configs = {id(each.config): each.config for each in model.modules() if _calls_interface(each)}
    owners = {id(each.config) for each in model.modules() if isinstance(each, PreTrainedModel)}
    if len(owners) > 1 or len(configs) > 1:
        return "it has several models, such as one for images"
    for config in configs.values():
        dropped = sorted(name for name in vars(config) if _DROPOUT.search(name) and getattr(config, name))
        if dropped:
            return f"its attention drops weights (`{dropped[0]}`)"
        if shares_keys(config):
            return "its layers share keys"
    if any(find_indexer(each) is not None for each in model.modules() if _calls_interface(each)):
        return "its attention has an indexer"
    return ""


def _of_all_configs(
    model: nn.Module, enabled: bool, left_to: str, probe: Probe, others: Sequence[nn.Module]
) -> Iterator[Finding]:
    owners = {id(each.config): type(each) for each in model.modules() if isinstance(each, PreTrainedModel)}
    by_config: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if _calls_interface(module):
            by_config.setdefault(id(module.config), []).append(module)
        elif _is_attention(module) and not any(module is other for other in others):
            reason = "it does not call transformers' attention interface" if enabled else SWITCHED_OFF
            yield Finding("attention", type(module).__name__, module, reason=reason)
    images = "a mask that is not causal, as for images, stays" if len(owners) > 1 else ""
    for config, modules in by_config.items():
        if any(_is_causal(module) for module in modules):  # the others are not a language model's
            yield from _of_one_config(model, modules, owners.get(config), enabled, left_to, images, probe)


def _calls_interface(module: nn.Module) -> bool:
    code = getattr(inspect.unwrap(class_of(module).forward), "__code__", None)
    return INTERFACE in getattr(code, "co_names", ()) and getattr(module, "config", None) is not None


def _is_attention(module: nn.Module) -> bool:
    cls = class_of(module)
    inner = (type(child).__name__.endswith("Attention") for child in module.children())
    return cls.__module__.startswith("transformers.models.") and cls.__name__.endswith("Attention") and not any(inner)


def _is_causal(module: nn.Module) -> bool:
    return getattr(module, "is_causal", False) is True


def _of_one_config(
    model: nn.Module,
    modules: list[nn.Module],
    owner: type[PreTrainedModel] | None,
    enabled: bool,
    left_to: str,
    remark: str,
    probe: Probe,
) -> Iterator[Finding]:
    reason = _reason_to_leave(modules[0].config, owner, left_to) if enabled else SWITCHED_OFF
    cutting = [] if reason or owner is None else _cutting(model, modules, default_implementation(owner))
    reason = reason or _looks_at_the_name(model, modules, cutting)
    agreements: list[Agreement] = []
    if not reason:
        assert owner is not None  # or there is a reason to leave it
        known = default_implementation(owner), rotary_widths(model)
        agreements = [probe.once(_kind(each), _prove, each, *known, probe) for each in modules]
    reason = reason or next((each.reason for each in agreements if not each.equal), "")
    if not reason and shares_keys(modules[0].config) and not cutting:
        remark = "; ".join(filter(None, (remark, _ALL_TOKENS)))
    for place, module in enumerate(modules):
        target = class_of(module).__name__
        if reason:
            yield Finding("attention", target, module, reason=reason)
        else:
            error = agreements[place].error
            yield Finding("attention", target, module, _KERNEL, attention_forward, error, remark, _switch)
    for module in () if reason else cutting:
        kind = class_of(module)
        if shares_keys(module.config):
            target = f"{METHOD} in {kind.__name__}"
            yield Finding("attention", target, module, _LABELLED, method_that_keeps(kind), None, _WHERE, _keep_tokens)


def attention_problem(model: PreTrainedModel, probe: Probe) -> str:
    """Why the first attention of `model` would be left alone, whatever its config names; empty if it would not."""
    attention = next((module for module in model.modules() if _calls_interface(module)), None)
    if attention is None:
        return "it does not call the attention interface"
    return _prove(attention, default_implementation(type(model)), rotary_widths(model), probe).reason


def _kind(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for the attentions of all layers with the same proof."""
    cls, attributes, *rest = identity(module)
    return "attention", cls, tuple(each for each in attributes if each[0] != "layer_idx"), *rest


def _reason_to_leave(config: Any, owner: type[PreTrainedModel] | None, left_to: str) -> str:
    if not available(ATTENTION):
        return "this version of transformers names its attention in another way"
    if owner is None:
        return "its config is not that of a transformers model"
    chosen = name_of(config)
    usual = chosen == default_implementation(owner) or isinstance(chosen, OurName)  # of a model with the same config
    return left_to if usual else Choice(f"the model was loaded with attn_implementation={chosen!r}")


def _around(model: nn.Module, attentions: list[nn.Module]) -> Iterator[nn.Module]:
    """The modules of `model` that hold one of `attentions`."""
    inner = set(map(id, attentions))
    holders = (each for each in model.modules() if any(id(part) in inner for part in each.modules()))
    return (each for each in holders if id(each) not in inner)


def _cutting(model: nn.Module, attentions: list[nn.Module], name: str) -> list[nn.Module]:
    """The models around `attentions` that run their last layers on the last tokens, in a method that we know."""
    return [
        each
        for each in _around(model, attentions)
        if METHOD not in each.__dict__ and cuts_to_last_tokens(class_of(each), getattr(each, "config", None), name)
    ]


def _looks_at_the_name(model: nn.Module, attentions: list[nn.Module], cutting: list[nn.Module]) -> str:
    """Why masks may differ under our name: code around the attentions looks at the name; empty if none does.

    Such code makes or cuts masks in a way that only its author's implementations follow. That of `cutting` is replaced.
    What attentions do themselves is looked at in their calls.
    """
    replaced = {vars(base).get(METHOD) for each in cutting for base in class_of(each).__mro__} - {None}
    for cls in dict.fromkeys(class_of(each) for each in _around(model, attentions)):
        for base in cls.__mro__:
            if base.__module__.startswith("transformers.") and not base.__module__.startswith("transformers.models."):
                continue
            for name, function in vars(base).items():
                code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
                known = name == "__init__" or (name == METHOD and function in replaced)
                if not known and "_attn_implementation" in getattr(code, "co_names", ()):
                    return f"{base.__name__}.{name} treats masks by the name of the attention, and does not know ours"
    return ""


def _switch(module: Any, _forward: Callable) -> None:
    name = name_of(module.config)
    if not isinstance(name, OurName):
        name = OurName(name)
        set_name(module.config, name)
    name.users.add(module)
    module.__dict__[PROVED] = True
    indexer = find_indexer(module)
    if indexer is not None:
        bind_forward(indexer, indexer_forward(type(indexer).forward), live=None)
        name.slices = True


def _keep_tokens(model: Any, method: Callable) -> None:
    bind_method(model, METHOD, method)
    if overriding_forward(model) is None:
        bind_own_code(model, labelled_forward(class_of(model).forward))
    name = name_of(model.config)
    if isinstance(name, OurName):
        name.slices = True


def restore_attention(model: nn.Module) -> None:
    """Takes our attention out of `model`, and our name out of its configs where no other model has its attention."""
    if not available(ATTENTION):
        return
    proved = [module for module in model.modules() if module.__dict__.pop(PROVED, False)]
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or name_of(module.config) != NAME:
            continue
        name = name_of(module.config)
        for each in proved if isinstance(name, OurName) else ():
            name.users.discard(each)
        if not getattr(name, "users", None):  # of no other model with the same config
            set_name(module.config, default_implementation(type(module)))


def _prove(module: nn.Module, own_name: str, widths: Sequence[int], probe: Probe) -> Agreement:
    def refused(reason: str) -> Agreement:
        return Agreement(float("inf"), reason=reason)

    if not _is_causal(module):
        return refused("it is not causal")
    indexer = find_indexer(module)
    if indexer is not None and overriding_forward(indexer) is not None:
        return refused(f"the forward of its {class_of(indexer).__name__} is not its class's")
    eager = eager_function(module)
    if eager is None:
        return refused("its file has no attention function with a mask to compare with")
    unknown = sorted(set(inspect.signature(eager).parameters) - _USUAL - UNDERSTOOD)
    if unknown:
        return refused(f"its attention function also takes {', '.join(unknown)}")
    parameters = {name: full_shape(each) for name, each in module._parameters.items() if each is not None}
    call = capture(module, {name: probe.randn(*shape) for name, shape in parameters.items()}, own_name, widths)
    if isinstance(call, str):
        return refused(call)
    largest, on_triton = max(size for _, size in call.shapes), probe.device.type in TRITON_DEVICES
    allowed = largest_head_dim(probe.device, torch.bfloat16) if on_triton else MAX_HEAD_DIM
    if largest > allowed:
        return refused(f"its heads have {largest} dimensions, and our attention has up to {allowed}")
    tensors = [probe.randn(_BATCH, heads, LENGTH, size) for heads, size in call.shapes]
    tensors[0] = _for_usual_scores(tensors[0], call.options.get("scaling"))
    tensors += [probe.randn(*shape) for shape in parameters.values()]
    function = _kernel_or_reference if on_triton else _without_kernels
    offsets = torch.tensor(_OFFSETS, dtype=torch.int32)
    agreements = []
    # No more than these two: on a GPU each compiles kernels of its own.
    for plan in (_WHOLE_ROWS, AttentionPlan(_WINDOW, offsets, LENGTH)):
        mask = dense(plan, _BATCH, LENGTH, probe.device)
        original = _computation(eager, module, list(parameters), call, mask)
        ours = _computation(function, module, list(parameters), call, plan)
        agreements.append(probe.trial(original, tensors, INPUTS).prove(ours))
    return max(agreements, key=lambda each: (not each.equal, each.error))


def _for_usual_scores(q: torch.Tensor, scaling: Any) -> torch.Tensor:
    """`q`, such that scores of normal keys have a deviation of 1 whatever the model's scale.

    Larger ones make the softmax choose a single key, whose gradients are those of rounding.
    """
    if not isinstance(scaling, (int, float)) or scaling <= 0:
        return q
    return (q / (scaling * q.shape[-1] ** 0.5)).to(torch.bfloat16).to(q.dtype)


def _kernel_or_reference(module: nn.Module, query: torch.Tensor, *args: Any, **options: Any) -> Any:
    """Our attention where Triton drives: what runs there, or the reference where operators run in plain torch."""
    if use_triton(query):
        return attention_forward(module, query, *args, **options)
    return _reference(query, *args, **options)


def _without_kernels(module: nn.Module, query: torch.Tensor, key: Any, value: Any, plan: Any, **options: Any) -> Any:
    """Our attention where Triton does not drive: the function that runs there, but for bfloat16 its reference.

    What runs there is torch's, which sums the gradients of a group's keys in bfloat16. The kernels do not, and a model
    that is proved on the meta device will run them.
    """
    if query.dtype == torch.float32:
        return attention_forward(module, query, key, value, plan, **options)
    return _reference(query, key, value, plan, **options)


def _reference(query: torch.Tensor, key: Any, value: Any, plan: Any, **options: Any) -> Any:
    operands = (each.transpose(1, 2) for each in (query, key, value))
    scale, softcap, sinks = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
    return attention_reference(*operands, plan=plan, scale=scale, softcap=softcap, sinks=sinks), None


def _computation(
    function: Callable, module: nn.Module, names: list[str], call: AttentionCall, mask: AttentionPlan | torch.Tensor
) -> Callable:
    """An attention function of queries, keys, values and the parameters of `module`, such as sinks."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *parameters: torch.Tensor, training: bool = True
    ) -> torch.Tensor:
        own = dict(zip(names, parameters))
        options = call.options | {option: own[name] for option, name in call.of_parameter.items()}
        what = additive(mask, q.dtype) if isinstance(mask, torch.Tensor) else mask
        dummy = dummy_module(module, own, {}, training)
        dummy.__dict__[PROVED] = True
        return function(dummy, q, k, v, what, **options)[0]

    return run
