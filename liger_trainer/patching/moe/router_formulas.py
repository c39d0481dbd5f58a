"""The formulas of known routers, which a proof tries one after the other (`routers.py`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.kernels.moe.router import grouped_topk_sigmoid_routing, topk_softmax_routing

_SCALES = ("routed_scaling_factor", "router_scaling_factor")
_CAP = "router_logit_softcapping"
_FP32 = torch.float32


class RouterFormula(NamedTuple):
    """What a router computes.

    Args:
        project: Computes the logits from hidden states, weight and bias.
        route: Computes the results of the forward from the module, the hidden states, the logits and the correction
            bias, (experts,) or None.
        kernel: The operator inside, for the report.
        reads: The attributes of the module that `route` reads at each call.
        mixed: Whether `project` equals the model's own product if hidden states and weight differ in dtype.
    """

    project: Callable
    route: Callable
    kernel: str
    reads: tuple[str, ...]
    mixed: bool = False


def in_groups(module: nn.Module) -> bool:
    """Whether `module` says that its experts come in groups."""
    return (getattr(module, "num_group", None) or 1) > 1


def _in_fp32(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _to_fp32(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(hidden, weight, bias).float()


def _scale(module: nn.Module) -> float:
    return next((getattr(module, name) for name in _SCALES if hasattr(module, name)), 1.0)


def _groups(module: nn.Module) -> dict[str, int]:
    return {
        "num_groups": getattr(module, "num_group", None) or 1,
        "top_groups": getattr(module, "topk_group", None) or 1,
    }


def _softmax(module, hidden, logits, correction, *, as_hidden=False, grouped=False, **options):
    options = {"normalise": getattr(module, "norm_topk_prob", True), **options}
    if as_hidden:
        options["dtype"] = hidden.dtype
    if grouped:
        options |= _groups(module)
    return logits, *topk_softmax_routing(logits, module.top_k, scale=_scale(module), **options)


def _softmax_after_topk(module, hidden, logits, correction, *, as_hidden=False):
    dtype = hidden.dtype if as_hidden else None
    return logits, *topk_softmax_routing(logits, module.top_k, softmax_after_topk=True, dtype=dtype)


def _sigmoid(module, hidden, logits, correction, **options):
    normalise = getattr(module, "norm_topk_prob", True)
    options = {"normalise": normalise, "correction_bias": correction, **_groups(module), **options}
    return logits, *grouped_topk_sigmoid_routing(logits, module.top_k, scale=_scale(module), **options)


def _sigmoid_of_capped(module, hidden, logits, correction):
    cap = getattr(module, _CAP, 0.0)
    if cap > 0.0:
        logits = torch.tanh(logits / cap) * cap
    return _sigmoid(module, hidden, logits, correction, eps=0.0, dtype=hidden.dtype)


def _sigmoid_of_largest(module, hidden, logits, correction):
    weights, index = grouped_topk_sigmoid_routing(logits, module.top_k, sigmoid_after_topk=True, normalise=False)
    return torch.zeros_like(logits).scatter(1, index, weights), logits


def _formula(kernel: str, project: Callable, route: Callable, *reads: str, **options: Any) -> RouterFormula:
    return RouterFormula(
        project, functools.partial(route, **options), kernel, ("top_k", *reads), mixed=project is _in_fp32
    )


_of_softmax = functools.partial(_formula, "topk_softmax_routing")
_of_sigmoid = functools.partial(_formula, "grouped_topk_sigmoid_routing")

ROUTER_FORMULAS = (
    _of_softmax(F.linear, _softmax, *_SCALES),  # Qwen-MoE, OLMoE, Mistral 4
    _of_softmax(F.linear, _softmax_after_topk),  # GPT-OSS
    _of_softmax(F.linear, _softmax, *_SCALES, dtype=_FP32),  # Mixtral
    _of_softmax(F.linear, _softmax, *_SCALES, normalise=False, as_hidden=True),  # Jamba
    _of_softmax(_to_fp32, _softmax_after_topk, as_hidden=True),  # Granite
    _of_softmax(_in_fp32, _softmax, *_SCALES, as_hidden=True),  # LARA
    _of_softmax(_in_fp32, _softmax, *_SCALES),  # Mistral Large 4
    _of_softmax(_in_fp32, _softmax, *_SCALES, normalise=False),  # DeepSeek-V2
    _of_softmax(_in_fp32, _softmax, *_SCALES, normalise=False, grouped=True),
    _of_sigmoid(_in_fp32, _sigmoid, *_SCALES),  # DeepSeek-V3, GLM-4, HY 3
    _of_sigmoid(_in_fp32, _sigmoid, *_SCALES, eps=0.0),  # Flint
    _of_sigmoid(_in_fp32, _sigmoid, *_SCALES, eps=0.0, sigmoid_after_topk=True),  # Kolibri
    _of_sigmoid(F.linear, _sigmoid, *_SCALES, dtype=_FP32, eps=0.0),  # MiniMax-M2, MiniMax-M3
    _of_sigmoid(F.linear, _sigmoid, *_SCALES, round_scores=True, eps=1e-6),  # LFM2-MoE
    _of_sigmoid(_to_fp32, _sigmoid_of_capped, *_SCALES, _CAP),  # Laguna
    _of_sigmoid(F.linear, _sigmoid_of_largest),  # Llama 4, whose experts all see every token
)
"""Known routers. Some differ only in the dtypes of their results; of those that agree, the closest in bf16 is used."""
