"""Routers of a mixture of experts: from hidden states to the logits, the experts of each token and their weights.

The product with the router's weight remains torch's; everything after it is one operator. The correction bias of the
scores is the router's own or, where its forward takes a second argument, that. A proof tries the formulas of known
routers, one after the other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.kernels.moe.router import grouped_topk_sigmoid_routing, topk_softmax_routing
from liger_trainer.kernels.runtime import TRITON_DEVICES, is_dtensor
from liger_trainer.patching.as_written import EVERY_PRECISION, Precisions, runs_ours
from liger_trainer.patching.binding import call_like
from liger_trainer.patching.inputs import BIASES, CLOSE_SCORES, MODES, ROUTER, crowded
from liger_trainer.patching.probe import Probe, Proof, dummy_module, full_shape, identity, no_formula, refused
from liger_trainer.patching.report import Finding, candidate
from liger_trainer.patching.side_effects import run_part
from liger_trainer.patching.trial import Agreement, Computation, Trial, runs

_SCALES = ("routed_scaling_factor", "router_scaling_factor")
_CAP = "router_logit_softcapping"
_FP32 = torch.float32


class RouterFormula(NamedTuple):
    """What a router computes."""

    project: Callable  # computes the logits from hidden states, weight and bias
    # Computes the results of the forward from the module, the hidden states, the logits and the correction bias,
    # (experts,) or None.
    route: Callable
    kernel: str  # the operator inside, for the report
    reads: tuple[str, ...]  # the attributes of the module that `route` reads at each call
    mixed: bool = False  # whether `project` equals the model's own product if hidden states and weight differ in dtype


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


# ---------------------------------------------------------------------------------------------------------------------
# The proof, and the forward
# ---------------------------------------------------------------------------------------------------------------------

_BIAS = "e_score_correction_bias"
_TOKENS = 32
_CANDIDATES = 128
_WIDTH = 64


def find_router(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it looks like a router (a 2-D weight and a `top_k`, no children), else None."""
    weight = module._parameters.get("weight")
    if weight is None or len(full_shape(weight)) != 2 or module._modules:
        return None
    if not isinstance(module.__dict__.get("top_k"), int):
        return None
    return candidate(
        "router", module, enabled("router"), lambda: probe.once(identity(module), _probe_router, module, probe)
    )


class _Verdict(NamedTuple):
    """What is found of a router for calls of one kind: how each formula compares, and the one that equals it, if any.

    That formula may take hidden states of more dimensions as the router does (`flattens`), and equal it under
    `autocast`.
    """

    agreements: dict[RouterFormula, Agreement]
    formula: RouterFormula | None = None
    flattens: bool = False
    autocast: bool = False


def _probe_router(module: nn.Module, probe: Probe) -> Proof:
    names, optional = _arguments(type(module).forward)
    if len(names) not in (1, 2):
        return refused("its forward takes other arguments than hidden states and a correction bias")
    parameters = {name for name, p in module._parameters.items() if p is not None}
    buffers = {name for name, buffer in module._buffers.items() if buffer is not None}
    others = sorted((parameters - {"weight", "bias", _BIAS}) | (buffers - {_BIAS}))
    if others:
        return refused(f"it has {', '.join(others)} besides a router's weight, bias and correction")
    kinds = (False,) if len(names) == 1 else (True, False) if optional else (True,)
    verdicts = {corrected: _verdict(module, probe, names, corrected) for corrected in kinds}
    served = {corrected: each for corrected, each in verdicts.items() if each.formula is not None}
    if not served:
        failures = [agreement for each in verdicts.values() for agreement in each.agreements.values()]
        return no_formula(failures, "none of the known routers")
    formulas = tuple(served[corrected].formula if corrected in served else None for corrected in (False, True))
    precisions = Precisions(all(each.autocast for each in served.values()))
    flattens = all(each.flattens for each in served.values())
    forward = router_forward(type(module).forward, names, formulas, flattens=flattens, precisions=precisions)
    found = [formula for formula in formulas if formula is not None]
    agreement = max((each.agreements[each.formula] for each in served.values()), key=lambda each: each.error)  # type: ignore[index]
    reads = dict.fromkeys(name for formula in found for name in formula.reads)
    return Proof(found[0].kernel, forward, agreement, (*reads, "bias", _BIAS), precisions)


def _arguments(forward: Callable) -> tuple[tuple[str, ...], bool]:
    """The names of the arguments besides `self`, and whether the second may be left out; no names if it takes more."""
    try:
        arguments = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return (), False
    if not all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in arguments):
        return (), False
    return tuple(each.name for each in arguments), arguments[-1].default is None if arguments else False


def _verdict(module: nn.Module, probe: Probe, names: tuple[str, ...], corrected: bool) -> _Verdict:
    """What `module` computes when it is called with a correction bias or without."""
    weight = full_shape(module._parameters["weight"])  # type: ignore[arg-type]
    num_experts, size = weight
    biases = [name for name in ("bias", _BIAS) if getattr(module, name, None) is not None]
    # Not differentiated: the gradient of a bias is a few sums that nearly cancel, which is noise in bfloat16.
    constants = [probe.randn(num_experts) for _ in range(len(biases) + corrected)]
    top_k: int = module.__dict__["top_k"]

    def on(forward: Callable) -> Computation:
        def computation(
            hidden: torch.Tensor, weight: torch.Tensor, *constants: torch.Tensor, training: bool = True
        ) -> tuple[torch.Tensor, ...]:
            dummy = _dummy(module, weight, dict(zip(biases, constants)), training)
            correction = constants[-1] if corrected else None
            given = (hidden,) if len(names) == 1 else (hidden, correction)
            return _by_expert(run_part(forward, dummy, *given))

        return computation

    def ours(formula: RouterFormula, flattens: bool = False) -> Computation:
        formulas = (None, formula) if corrected else (formula, None)
        return on(router_forward(type(module).forward, names, formulas, flattens=flattens))

    original = on(type(module).forward)
    for width in (min(size, _WIDTH), size):  # a narrow one takes less time, if its forward takes it
        bias = dict(zip(biases, constants)).get("bias")
        tensors = _tensors((num_experts, width), top_k, bias, probe)
        if runs(original, tensors, constants):
            break
    trial, on_cpu = Trial(original, tensors, constants=constants), _trial_on_cpu(original, tensors, constants, top_k)
    with probe.on_cpu():
        agreements = {formula: on_cpu.compare(ours(formula)) for formula in ROUTER_FORMULAS}
    equal = sorted((each for each in agreements if agreements[each].equal), key=lambda each: agreements[each].distance)
    ranks_sums = corrected or _BIAS in biases or _groups(module)["num_groups"] > 1
    for formula in equal:
        if probe.device.type != "cpu":
            agreements[formula] = trial.compare(ours(formula))
        with probe.on_cpu():
            agreements[formula] = on_cpu.everywhere(ours(formula), agreements[formula])
            if agreements[formula].equal and ranks_sums:
                agreements[formula] = _choices(original, ours(formula), tensors, constants, agreements[formula])
        if agreements[formula].equal:
            break
    else:
        return _Verdict(agreements)
    hidden, weights = tensors
    both = original, ours(formula, flattens=True)
    flattens = probe.same(*both, [hidden.unflatten(0, (2, -1)), weights], False, constants)
    half = [tensor.to(torch.bfloat16) for tensor in tensors]
    autocast = all(probe.same(*both, given, True, constants) for given in (half, tensors))
    return _Verdict(agreements, formula, flattens, autocast)


def _trial_on_cpu(original: Callable, tensors: list[torch.Tensor], constants: list[torch.Tensor], top_k: int) -> Trial:
    """A trial of all other inputs, on the CPU, where torch ranks equal numbers in the original and in ours."""
    inputs = (crowded(len(tensors[1]), top_k), *ROUTER, *(BIASES if constants else ()))
    if "cpu" in TRITON_DEVICES:  # the interpreter, where the kernel ranks them
        inputs = MODES
    return Trial(original, [each.cpu() for each in tensors], inputs, [each.cpu() for each in constants])


def _choices(
    original: Computation,
    ours: Computation,
    tensors: list[torch.Tensor],
    constants: list[torch.Tensor],
    agreement: Agreement,
) -> Agreement:
    """`agreement` if both choose the same experts in bfloat16, of scores that it hardly tells apart.

    Rounded scores are ranked as the exact ones are, up to ties; their sums, with a correction or of groups, are not.
    """
    if "cpu" in TRITON_DEVICES:  # the interpreter, whose sigmoid is not torch's
        return agreement
    changed = [each.cpu() for each in CLOSE_SCORES.change([*tensors, *constants])]
    half = [each.to(torch.bfloat16) for each in changed[: len(tensors)]]
    with torch.no_grad():
        one, other = (computation(*half, *changed[len(tensors) :])[1] != 0 for computation in (original, ours))
    if torch.equal(one, other):
        return agreement
    return Agreement(agreement.error, reason="in bfloat16 it chooses other experts", case=CLOSE_SCORES.name)


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
    if index.dtype != torch.int64:
        raise ValueError(f"its expert ids are {index.dtype}, the kernel's torch.int64")
    return logits, torch.zeros_like(logits, dtype=weights.dtype).scatter(-1, index, weights)


@functools.cache
def router_forward(
    original: Callable,
    names: tuple[str, ...],
    formulas: tuple[RouterFormula | None, ...],
    *,
    flattens: bool,
    precisions: Precisions = EVERY_PRECISION,
) -> Callable:
    """A forward for one kind of router; the same function for equal arguments.

    Args:
        original: The class's forward, which runs for inputs that the proof does not cover.
        names: Names of the forward's arguments: the hidden states and, if it takes one, the correction bias.
        formulas: The formula of the router, called without a correction bias and with one; None where no proof holds.
            A bias of its own is none that it is called with.
        flattens: Whether hidden states may have more than two dimensions; leading ones are flattened to tokens.
        precisions: Where the proof holds.
    """

    def routed(self, hidden_states, formula, correction):
        """What the formula gives; None where its proof does not hold."""
        weight = self.weight
        if (
            formula is None
            or not runs_ours(hidden_states, precisions)
            or is_dtensor(hidden_states)
            or is_dtensor(weight)
            or (hidden_states.dim() != 2 and not flattens)
            or (hidden_states.dtype != weight.dtype and not formula.mixed)
        ):
            return None
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = formula.project(hidden, weight, getattr(self, "bias", None))
        return formula.route(self, hidden, logits, correction)

    def forward_alone(self, hidden_states):
        result = routed(self, hidden_states, formulas[0], getattr(self, _BIAS, None))
        return original(self, hidden_states) if result is None else result

    def forward_corrected(self, hidden_states, correction):
        formula = formulas[correction is not None]
        one_each = getattr(correction, "shape", None) == self.weight.shape[:1] and not is_dtensor(correction)
        fits = correction is None or one_each
        result = routed(self, hidden_states, formula, correction) if fits else None
        return original(self, hidden_states, correction) if result is None else result

    if len(names) == 1:
        return call_like(forward_alone, *names)
    forward_corrected.__defaults__ = original.__defaults__  # type: ignore[attr-defined]
    return call_like(forward_corrected, *names)
