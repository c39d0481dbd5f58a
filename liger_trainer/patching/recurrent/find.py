"""Which modules of a model mix tokens without attention, and whether all of them are ours."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.patching.as_written import is_as_proved, is_bound_by_us
from liger_trainer.patching.binding import bound_function, unbind_forward
from liger_trainer.patching.fp8 import decoder_layers
from liger_trainer.patching.probe import Probe
from liger_trainer.patching.recurrent.channel_delta import find_channel_delta
from liger_trainer.patching.recurrent.delta import find_delta_net
from liger_trainer.patching.recurrent.documents import carries_documents, carry_documents, owners
from liger_trainer.patching.recurrent.lightning import find_lightning
from liger_trainer.patching.recurrent.mixers import is_depthwise, precisions_of, torch_forward
from liger_trainer.patching.recurrent.short_conv import find_short_conv
from liger_trainer.patching.recurrent.state_space import find_state_space
from liger_trainer.patching.report import Finding


def find_mixer(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it mixes tokens by a recurrence or a short convolution, else None."""
    return (
        find_short_conv(module, enabled, probe)
        or find_delta_net(module, enabled, probe)
        or find_channel_delta(module, enabled, probe)
        or find_state_space(module, enabled, probe)
        or find_lightning(module, enabled, probe)
    )


def mixers_of(model: Any) -> list[nn.Module]:
    """The modules of a transformers model for text that have a state or a convolution along its tokens.

    In a decoder with a list of layers they are in these; there may be encoders of sound beside them.
    """
    if layers := decoder_layers(model):
        return [module for layer in layers for module in layer.modules() if is_mixer(module)]
    config = model.config.get_text_config()
    found: dict[nn.Module, None] = {}
    for inside in model.modules():
        if getattr(inside, "config", None) is config and hasattr(inside, "base_model_prefix"):
            found.update(dict.fromkeys(filter(is_mixer, inside.modules())))
    return [*found]


def is_mixer(module: nn.Module) -> bool:
    """Whether a layer has a state or a convolution along the tokens."""
    return (
        any(map(is_depthwise, module._modules.values()))
        or ("A_log" in module._parameters and "D" in module._parameters)
        or "slope_rate" in module._buffers
    )


def reason_against_mixers(model: Any) -> str:
    """Why layers of a transformers model would mix the documents of a packed row; empty if they would not."""
    mixers = mixers_of(model)
    if not all(map(carries_documents, owners(model, mixers).values())):
        return reason_against(mixers) or "its forward does not tell its layers of documents"
    return reason_against(mixers)


def reason_against(mixers: Iterable[nn.Module]) -> str:
    """Which of a model's layers that mix tokens is not ours; empty if all are."""
    for module in mixers:
        if not is_bound_by_us(module) or not is_as_proved(module):
            return f"its {type(module).__name__} is not ours"
        if not precisions_of(bound_function(module)).autocast:
            return f"its {type(module).__name__} was not proved under autocast"
    return ""


def reason_against_float16(model: Any) -> str:
    """Which of the layers of a transformers model that mix tokens was not proved in float16; empty if all were."""
    ours = (module for module in mixers_of(model) if is_bound_by_us(module))
    wrong = next((module for module in ours if not precisions_of(bound_function(module)).fp16), None)
    return "" if wrong is None else f"its {type(wrong).__name__} was not proved in float16"


@contextlib.contextmanager
def mixers_in_torch(model: Any) -> Iterator[None]:
    """Layers of a transformers model, on the CPU, that mix tokens call no package inside: most are for GPUs alone."""
    forwards = [(module, torch_forward(module)) for module in mixers_of(model)]
    for module, forward in forwards:
        if forward is not None:
            module.forward = types.MethodType(forward, module)
    try:
        yield
    finally:
        for module, _ in forwards:
            module.__dict__.pop("forward", None)


@contextlib.contextmanager
def mixers_patched(model: nn.Module) -> Iterator[None]:
    """The layers of `model`, on the CPU, that mix tokens are ours inside."""
    probe = Probe(torch.device("cpu"))
    with probe.isolated():
        found = (find_mixer(module, lambda component: True, probe) for module in model.modules())
        findings = [each for each in found if each is not None and each.forward is not None]
    for each in findings:
        assert each.forward is not None
        each.bind(each.module, each.forward)
    mixers = [each.module for each in findings]
    carry_documents(model, mixers)
    try:
        yield
    finally:
        for bound in (*mixers, *owners(model, mixers).values()):
            if bound is not None:
                unbind_forward(bound)
