"""Routers of a mixture of experts: from hidden states to the logits, the experts of each token and their weights.

The product with the router's weight remains torch's; everything after it is one operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.kernels.moe.router import grouped_topk_sigmoid_routing, topk_softmax_routing
from liger_trainer.kernels.runtime import is_dtensor, triton_drives
from liger_trainer.patching.as_written import serves_as_written
from liger_trainer.patching.binding import call_like
from liger_trainer.patching.finding import Finding, proved, reason_to_leave
from liger_trainer.patching.inputs import MODES, ROUTER, crowded
from liger_trainer.patching.probe import (
    Probe,
    Proof,
    dummy_module,
    full_shape,
    identity,
    no_formula,
    only_argument,
    refused,
)
from liger_trainer.patching.side_effects import run_part
from liger_trainer.patching.trial import Trial, runs

_BIAS = "e_score_correction_bias"
_READ = ("top_k", "routed_scaling_factor", "bias", _BIAS)
_TOKENS = 32
_CANDIDATES = 128
_WIDTH = 64


class RouterFormula(NamedTuple):
    """What a router computes.

    Args:
        project: Computes the logits from hidden states, weight and bias.
        route: Computes the results of the forward from the module, the hidden states and the logits.
        kernel: The operator inside, for the report.
        mixed: Whether `project` equals the model's own product if hidden states and weight differ in dtype.
    """

    project: Callable
    route: Callable
    kernel: str
    mixed: bool = False


def _in_fp32(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _to_fp32(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(hidden, weight, bias).float()


def _softmax(module, hidden, logits, dtype=None):
    normalise = getattr(module, "norm_topk_prob", True)
    return logits, *topk_softmax_routing(logits, module.top_k, normalise=normalise, dtype=dtype)


def _softmax_after_topk(module, hidden, logits):
    return logits, *topk_softmax_routing(logits, module.top_k, softmax_after_topk=True)


def _softmax_after_topk_as_hidden(module, hidden, logits):
    return logits, *topk_softmax_routing(logits, module.top_k, softmax_after_topk=True, dtype=hidden.dtype)


def _probabilities_as_hidden(module, hidden, logits):
    return logits, *topk_softmax_routing(logits, module.top_k, normalise=False, dtype=hidden.dtype)


def _sigmoid(module, hidden, logits, dtype=None):
    routed = grouped_topk_sigmoid_routing(
        logits,
        module.top_k,
        correction_bias=getattr(module, _BIAS, None),
        num_groups=getattr(module, "num_group", None) or 1,
        top_groups=getattr(module, "topk_group", None) or 1,
        normalise=getattr(module, "norm_topk_prob", True),
        scale=getattr(module, "routed_scaling_factor", 1.0),
        dtype=dtype,
    )
    return logits, *routed


def _sigmoid_of_largest(module, hidden, logits):
    weights, index = grouped_topk_sigmoid_routing(logits, module.top_k, sigmoid_after_topk=True, normalise=False)
    return torch.zeros_like(logits).scatter(1, index, weights), logits


_SOFTMAX, _SIGMOID = "topk_softmax_routing", "grouped_topk_sigmoid_routing"

ROUTER_FORMULAS = (
    RouterFormula(F.linear, _softmax, _SOFTMAX),  # Qwen-MoE, OLMoE
    RouterFormula(F.linear, _softmax_after_topk, _SOFTMAX),  # GPT-OSS
    RouterFormula(F.linear, functools.partial(_softmax, dtype=torch.float32), _SOFTMAX),  # Mixtral
    RouterFormula(F.linear, _probabilities_as_hidden, _SOFTMAX),  # Jamba
    RouterFormula(_to_fp32, _softmax_after_topk_as_hidden, _SOFTMAX),  # Granite
    RouterFormula(_in_fp32, _sigmoid, _SIGMOID, mixed=True),  # DeepSeek-V3, GLM-4
    RouterFormula(F.linear, functools.partial(_sigmoid, dtype=torch.float32), _SIGMOID),  # MiniMax-M3
    RouterFormula(F.linear, _sigmoid_of_largest, _SIGMOID),  # Llama 4, whose experts all see every token
)
"""Known routers. Some differ only in the dtypes of their results; of those that agree, the closest in bf16 is used."""


def find_router(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it looks like a router (a 2-D weight and a `top_k`, no children), else None."""
    weight = module._parameters.get("weight")
    if weight is None or len(full_shape(weight)) != 2 or module._modules:
        return None
    if not isinstance(module.__dict__.get("top_k"), int):
        return None
    target = type(module).__name__
    reason = reason_to_leave(module, enabled("router"))
    if reason:
        return Finding("router", target, module, reason=reason)
    return proved("router", target, module, probe.once(identity(module), _probe_router, module, probe))


def _probe_router(module: nn.Module, probe: Probe) -> Proof:
    argument = only_argument(module)
    if argument is None:
        return refused("its forward takes more than the hidden states")
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    buffers = {name for name, buffer in module._buffers.items() if buffer is not None}
    others = sorted((parameters.keys() - {"weight", "bias", _BIAS}) | (buffers - {_BIAS}))
    if others:
        return refused(f"it has {', '.join(others)} besides a router's weight, bias and correction")
    num_experts, size = full_shape(parameters["weight"])
    biases = [name for name in ("bias", _BIAS) if getattr(module, name, None) is not None]
    # Not differentiated: the gradient of a bias is a few sums that nearly cancel, which is noise in bfloat16.
    constants = [probe.randn(num_experts) for _ in biases]
    top_k: int = module.__dict__["top_k"]

    def on(forward: Callable) -> Callable:
        def computation(
            hidden: torch.Tensor, weight: torch.Tensor, *constants: torch.Tensor, training: bool = True
        ) -> tuple[torch.Tensor, ...]:
            dummy = _dummy(module, weight, dict(zip(biases, constants)), training)
            return _by_expert(run_part(forward, dummy, hidden))

        return computation

    original = type(module).forward
    for width in (min(size, _WIDTH), size):  # a narrow one takes less time, if its forward takes it
        bias = dict(zip(biases, constants)).get("bias")
        tensors = _tensors((num_experts, width), top_k, bias, probe)
        if runs(on(original), tensors, constants):
            break
    ours_of = {
        formula: on(router_forward(original, argument, formula, flattens=False, autocast=True))
        for formula in ROUTER_FORMULAS
    }
    trial = Trial(on(original), tensors, constants=constants)
    agreements = {formula: trial.compare(ours) for formula, ours in ours_of.items()}
    equal = sorted((each for each in agreements if agreements[each].equal), key=lambda each: agreements[each].distance)
    on_cpu = _trial_on_cpu(on(original), tensors, constants, top_k)
    formula = None
    with probe.on_cpu():
        for each in equal:
            agreements[each] = on_cpu.everywhere(ours_of[each], agreements[each])
            if agreements[each].equal:
                formula = each
                break
    if formula is None:
        return no_formula(agreements.values(), "none of the known routers")
    ours = router_forward(original, argument, formula, flattens=True, autocast=True)
    hidden, weight = tensors
    both = on(original), on(ours)
    flattens = probe.same(*both, [hidden.unflatten(0, (2, -1)), weight], False, constants)
    half = [tensor.to(torch.bfloat16) for tensor in tensors]
    autocast = all(probe.same(*both, given, True, constants) for given in (half, tensors))
    forward = router_forward(original, argument, formula, flattens=flattens, autocast=autocast)
    return Proof(formula.kernel, forward, agreements[formula], _READ)


def _trial_on_cpu(original: Callable, tensors: list[torch.Tensor], constants: list[torch.Tensor], top_k: int) -> Trial:
    """A trial of all other inputs, on the CPU, where torch ranks equal numbers in the original and in ours."""
    inputs = (*ROUTER, crowded(len(tensors[1]), top_k))
    if triton_drives(torch.device("cpu")):  # the interpreter, where the kernel ranks them
        inputs = MODES
    return Trial(original, [each.cpu() for each in tensors], inputs, [each.cpu() for each in constants])


def _tensors(shape: tuple[int, int], top_k: int, bias: torch.Tensor | None, probe: Probe) -> list[torch.Tensor]:
    """Hidden states and weight, for the tokens with the largest gap between the k-th logit and the next.

    Some logits are equal in bfloat16, and the order of equal logits is undefined in torch.
    """
    num_experts, size = shape
    hidden = probe.randn(_CANDIDATES, size) * 2.0 ** -(size.bit_length() // 2)  # logits of about 1
    weight = probe.randn(num_experts, size)
    if top_k < num_experts:
        top = F.linear(hidden, weight, bias).topk(top_k + 1).values
        hidden = hidden[(top[:, -2] - top[:, -1]).topk(_TOKENS).indices]
    return [hidden[:_TOKENS], weight]


def _dummy(module: nn.Module, weight: torch.Tensor, biases: dict[str, torch.Tensor], training: bool) -> nn.Module:
    bias = biases.get("bias")
    parameters = {"weight": weight, "bias": None if bias is None else bias.to(weight.dtype)}
    dummy = dummy_module(module, parameters, {}, training)
    size, width = full_shape(module._parameters["weight"])[1], weight.shape[1]  # type: ignore[arg-type]
    sizes = {name: width for name, value in dummy.__dict__.items() if name.startswith("hidden") and value == size}
    dummy.__dict__.update(sizes)
    if _BIAS in biases:
        dummy._buffers[_BIAS] = biases[_BIAS]  # type: ignore[index]
    return dummy


def _by_expert(result: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Logits, and weights of all experts, so that the order of the chosen ones does not matter."""
    if len(result) != 3:
        return result
    logits, weights, index = result
    return logits, torch.zeros_like(logits, dtype=weights.dtype).scatter(-1, index, weights)


@functools.cache
def router_forward(
    original: Callable, argument: str, formula: RouterFormula, *, flattens: bool, autocast: bool
) -> Callable:
    """A forward for one kind of router; the same function for equal arguments.

    Args:
        original: The class's forward, which runs for inputs that the proof does not cover.
        argument: Name of the forward's argument.
        formula: The formula of the router.
        flattens: Whether hidden states may have more than two dimensions; leading ones are flattened to tokens.
        autocast: Whether autocast may be on.
    """

    def forward(self, hidden_states):
        weight = self.weight
        if (
            serves_as_written(hidden_states)
            or is_dtensor(hidden_states)
            or is_dtensor(weight)
            or (hidden_states.dim() != 2 and not flattens)
            or (hidden_states.dtype != weight.dtype and not formula.mixed)
            or (not autocast and torch.is_autocast_enabled(hidden_states.device.type))
        ):
            return original(self, hidden_states)
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        return formula.route(self, hidden, formula.project(hidden, weight, getattr(self, "bias", None)))

    return call_like(forward, argument)
