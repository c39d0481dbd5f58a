"""Blocks that run all experts on all tokens, with each input scaled by its router score: Llama 4's.

The score of an expert that was not chosen is 0, and so are its input, output and gradients. Ours scales the inputs of
the k chosen experts and runs `moe_experts` on them with weights of 1. Two forwards are bound: that of the block, which
selects and scales, and that of the experts, which the block, and any adapter around them, still calls as a module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.patching.binding import bind_forward, call_like, overriding_forward
from liger_trainer.patching.inputs import MLP
from liger_trainer.patching.moe.experts import READ, TOKENS, activations_of, weight_shapes
from liger_trainer.patching.moe.experts_formula import ExpertsFormula, formulas, layout_of
from liger_trainer.patching.moe.quantized_experts import declared_weights
from liger_trainer.patching.probe import (
    Probe,
    class_of,
    dummy_module,
    full_shape,
    identity,
    no_formula,
    only_argument,
    projection,
)
from liger_trainer.patching.report import SWITCHED_OFF, Finding
from liger_trainer.patching.side_effects import run_part
from liger_trainer.patching.trial import Agreement, Trial

_KEY = "scaled experts"
_SIZES = 128, 24  # hidden and intermediate size of the dummy module, for a router gradient of many numbers
_FEWER_TOKENS = 96
_BLOCK = ("top_k", "router", "experts", "shared_expert")  # what our forward of the block reads at each call
_Forwards = tuple[Callable, Callable]  # of the block, and of its experts


def find_scaled_experts(module: Any, enabled: Callable[[str], bool], probe: Probe) -> list[Finding]:
    """The findings for `module` and its experts if it is such a block."""
    block, experts = module._modules, module._modules.get("experts")
    experts = experts.get_base_layer() if hasattr(experts, "get_base_layer") else experts
    if experts is None or block.get("router") is None or only_argument(experts) is None:
        return []
    layout = layout_of(experts)
    if layout is None:
        return []
    target = class_of(experts).__name__
    reason = _obstacle(module, experts, layout) if enabled("experts") else SWITCHED_OFF
    if reason:
        return [Finding("experts", target, experts, reason=reason)]
    assert isinstance(layout, ExpertsFormula)
    key = _KEY, identity(module), identity(experts)
    formula, forwards, agreement = probe.once(key, _probe_block, module, experts, layout, probe)
    if formula is None or forwards is None:
        return [Finding("experts", target, experts, error=agreement.error, reason=agreement.reason)]
    found = ((experts, formula.kernel), (module, "moe_experts on the chosen inputs"))
    binds = [functools.partial(bind_forward, live=live) for live in (READ, _BLOCK)]
    return [
        Finding("experts", class_of(part).__name__, part, kernel, forward, agreement.error, bind=bind)
        for (part, kernel), forward, bind in zip(found, reversed(forwards), binds)
    ]


def are_proved(experts: nn.Module, probe: Probe) -> bool:
    """Whether `experts` belong to a block that was found and proved equal to ours."""
    proofs = (proof for key, proof in probe.cache.items() if key[0] == _KEY and key[2] == identity(experts))
    return any(formula is not None for formula, _, _ in proofs)


def _obstacle(block: Any, experts: nn.Module, layout: ExpertsFormula | str) -> str:
    """Why `module` is left alone; empty if nothing prevents the proof."""
    if isinstance(layout, str):
        return layout
    if only_argument(block) is None or not isinstance(getattr(block, "top_k", None), int):
        return f"its {type(block).__name__} chooses experts in another way"
    router = block._modules["router"]
    stateful = [name for name, parameter in router.named_parameters() if name != "weight"]
    stateful += [name for name, tensor in {**block._parameters, **block._buffers}.items() if tensor is not None]
    if stateful or not isinstance(router, nn.Linear):
        return f"its {type(block).__name__} has {', '.join(stateful) or type(router).__name__} to choose with"
    for module in (block, experts):
        foreign = overriding_forward(module)
        if foreign is not None:
            return f"its {type(module).__name__}'s forward is already overridden by {foreign}"
    return ""


def _probe_block(
    block: Any, experts: Any, layout: ExpertsFormula, probe: Probe
) -> tuple[ExpertsFormula | None, _Forwards | None, Agreement]:
    num_experts, (hidden, intermediate) = full_shape(declared_weights(experts)["down_proj"])[0], _SIZES
    shapes = [(num_experts, hidden), (hidden, hidden), *weight_shapes(layout, num_experts, hidden, intermediate)]
    tensors = [probe.randn(TOKENS, hidden).cpu(), *(probe.randn(*shape).cpu() * 0.125 for shape in shapes)]
    others = [name for name in block._modules if name not in ("experts", "router")]

    def on(block_forward: Callable, experts_forward: Callable) -> Callable:
        def computation(
            x: torch.Tensor, of_router: torch.Tensor, other: torch.Tensor, *weights: torch.Tensor, training: bool = True
        ) -> Any:
            children = {"router": dummy_module(block.router, {"weight": of_router, "bias": None}, {}, training)}
            children |= {name: projection(other) for name in others}
            activations = activations_of(experts, training)
            children["experts"] = dummy_module(experts, dict(zip(layout.weights, weights)), activations, training)
            small = dummy_module(block, {}, children, training)
            for module in (small, children["experts"]):
                module.__dict__.update({name: hidden for name in module.__dict__ if name.startswith("hidden_")})
            children["experts"].forward = experts_forward.__get__(children["experts"])
            return run_part(block_forward, small, x)

        return computation

    failures = []
    argument, of_experts = only_argument(block), only_argument(experts)
    assert argument is not None
    assert of_experts is not None
    original = on(type(block).forward, type(experts).forward)
    trial = Trial(original, tensors)
    smaller = Trial(original, [tensors[0][:_FEWER_TOKENS], *tensors[1:]], MLP)  # as the original runs all experts
    with probe.on_cpu():
        for formula in formulas(experts, layout):
            forwards = block_forward(argument), scaled_experts_forward(formula, of_experts)
            ours = on(*forwards)
            agreement = smaller.everywhere(ours, trial.compare(ours))
            if agreement.equal:
                return formula, forwards, agreement
            failures.append(agreement)
    proof = no_formula(failures, "no activation that there is a kernel for, or chooses in another way")
    return None, None, proof.agreement


@functools.cache
def block_forward(argument: str) -> Callable:
    """The forward of a block with children `router`, `experts` and `shared_expert`."""

    def forward(self, x):
        x = x.reshape(-1, x.shape[-1])
        router_scores, router_logits = self.router(x)
        scores, index = router_scores.topk(self.top_k, dim=1)
        inputs = (x.unsqueeze(1) * scores.unsqueeze(2)).flatten(0, 1)
        routed = self.experts(inputs, index.reshape(-1, 1)).view(*index.shape, -1).sum(1)
        return self.shared_expert(x) + routed, router_logits

    return call_like(forward, argument)


@functools.cache
def scaled_experts_forward(formula: ExpertsFormula, argument: str) -> Callable:
    """The forward of the experts, for rows with one expert each; any other call runs the class's own."""

    def forward(self, x, index=None, adapters=None):
        if index is None:
            return type(self).forward(self, x)
        return formula.run(self, x, index, x.new_ones(index.shape), adapters)

    return call_like(forward, argument)
