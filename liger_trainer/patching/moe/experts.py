"""Modules of experts whose weights are stacked in 3-D parameters: Qwen3-MoE's, Mixtral's, GPT-OSS's and many more.

transformers' own classes look up the function that computes them in a registry, by a name in their config. Ours is
registered as ``"liger_trainer"``, and a module for which it is proved gets a view of its config with that name. So the
model's config does not change, nor does what is saved of it, and a forward around the class's own, such as that of
expert parallelism, still calls ours. Experts of other classes get a forward bound to the instance.

The proof compares the class's own loop over the experts with ours on the CPU, where fp32 products are fp32.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import DECORATOR_OF_EXPERTS, EXPERTS, SHARED_EXPERTS, STACKED_EXPERTS
from liger_trainer.patching.as_written import is_as_proved, is_bound_by_us, runs_ours
from liger_trainer.patching.binding import (
    IMPLEMENTATION,
    ChosenConfig,
    bind_forward,
    bound_function,
    call_like,
    choose,
    is_chosen,
    overriding_forward,
)
from liger_trainer.patching.inputs import EXPERTS as INPUTS
from liger_trainer.patching.moe.experts_formula import NORM, ExpertsFormula, formulas, layout_of
from liger_trainer.patching.moe.quantized_experts import declared_weights, four_bits
from liger_trainer.patching.probe import Probe, class_of, dummy_child, dummy_module, full_shape, identity, no_formula
from liger_trainer.patching.report import SWITCHED_OFF, Finding
from liger_trainer.patching.side_effects import run_part
from liger_trainer.patching.trial import Agreement, Trial

_HAS_REGISTRY = available(EXPERTS) and (not SHARED_EXPERTS.applies or available(SHARED_EXPERTS))
if _HAS_REGISTRY:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_OF_TRANSFORMERS = ("grouped_mm", "batched_mm")
_REPLACED = (None, "eager", *_OF_TRANSFORMERS, IMPLEMENTATION)
SIZES = (16, 24)
"""Hidden and intermediate size of the dummy module."""
TOKENS = 256
"""Tokens of the probe: enough for an even rounding noise."""

READ = ("parametrizations", NORM)
"""What our forward of experts calls, besides reading the weights."""

_CHOSEN = 64  # most experts that the tokens of the probe choose from, as a loop runs once for each
_TOP_K = 4


def liger_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The implementation in transformers' registry."""
    config = self.config
    if not isinstance(config, ChosenConfig):
        raise ValueError(
            f"`experts_implementation={IMPLEMENTATION!r}` is chosen for a {type(self).__name__} by name; leave it "
            "unset and call liger_trainer.apply_liger_kernel(model), which proves it equal first."
        )
    of_model = config.model_config._experts_implementation
    # `generate` switches to "batched_mm" for its steps of few tokens. Weights in 4 bits are dequantised at every read.
    as_written = not runs_ours(hidden_states) and not four_bits(self)
    if as_written or not is_as_proved(self) or (not torch.is_grad_enabled() and of_model == "batched_mm"):
        chosen = "eager" if of_model in (None, IMPLEMENTATION) else of_model
        theirs = ALL_EXPERTS_FUNCTIONS.get_interface(chosen, _own_loop(self))
        return theirs(self, hidden_states, top_k_index, top_k_weights)
    return config.forward(self, hidden_states, top_k_index, top_k_weights)


if _HAS_REGISTRY:
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, liger_experts_forward)


def forward_of_ours(module: Any) -> Callable | None:
    """Our forward for `module`, a function of the module; None if another forward runs, or one around ours."""
    if getattr(module, "_is_expert_parallel", False) or not is_as_proved(module):
        return None
    if is_chosen(module):
        return module.config.forward
    return bound_function(module) if is_bound_by_us(module) else None


def find_experts(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it has stacked weights of experts and is called with a router's choices."""
    layout = layout_of(module)
    if layout is None:
        if is_dispatched(module):  # experts of transformers', by other names?
            available(STACKED_EXPERTS)
        return None
    arguments = tuple(inspect.signature(_own_loop(module)).parameters)[1:]
    if len(arguments) == 1:
        return None  # see `scaled_experts`, which looks at the block around it
    target = class_of(module).__name__
    reason = _obstacle(module, layout, arguments) if enabled("experts") else SWITCHED_OFF
    if reason:
        return Finding("experts", target, module, reason=reason)
    assert isinstance(layout, ExpertsFormula)
    key = "experts", identity(module), layout
    formula, agreement = probe.once(key, _probe_experts, module, layout, probe)
    if formula is None:
        return Finding("experts", target, module, error=agreement.error, reason=agreement.reason)
    bind = functools.partial(choose if is_dispatched(module) else bind_forward, live=READ)
    return Finding(
        "experts", target, module, formula.kernel, experts_forward(formula, arguments), agreement.error, bind=bind
    )


def _own_loop(module: nn.Module) -> Callable:
    """The forward that the class was written with, without transformers' choice between implementations."""
    forward: Any = type(module).forward
    return forward.__wrapped__ if is_dispatched(module) else forward  # nothing else that wraps it is left out


def is_dispatched(module: Any) -> bool:
    """Whether the class looks its implementation up in transformers' registry.

    A subclass with a forward of its own inherits the attributes of one that does, but not the look-up.
    """
    decorated = getattr(type(module).forward, "__globals__", {}).get("__name__") == DECORATOR_OF_EXPERTS
    return decorated and hasattr(module, "has_gate") and hasattr(module.config, "_experts_implementation")


def _implementation(module: Any) -> str | None:
    """The implementation that the model's config names; None for a class that does not look it up."""
    if not is_dispatched(module):
        return None
    config = module.config.model_config if is_chosen(module) else module.config
    return config._experts_implementation


def _obstacle(module: Any, layout: ExpertsFormula | str, arguments: tuple[str, ...]) -> str:
    """Why `module` is left alone; empty if nothing prevents the proof."""
    if isinstance(layout, str):
        return layout
    if len(arguments) != 3:
        return "its forward does not take hidden states, chosen experts and their weights"
    foreign = overriding_forward(module)
    if foreign is not None and not getattr(module, "_is_expert_parallel", False):
        return f"its forward is already overridden by {foreign}"
    if is_dispatched(module) and not _HAS_REGISTRY:
        return "the installed transformers chooses how experts run in another way"
    chosen = _implementation(module)
    if chosen not in _REPLACED:
        return f"`experts_implementation={chosen!r}` is chosen, which stays"
    return ""


def _probe_experts(module: Any, layout: ExpertsFormula, probe: Probe) -> tuple[ExpertsFormula | None, Agreement]:
    num_experts = full_shape(declared_weights(module)["down_proj"])[0]
    num_experts = min(num_experts, getattr(module, "num_experts", num_experts))  # those of this process
    hidden, intermediate = SIZES
    last = num_experts - 1
    chosen = torch.linspace(0, last, min(num_experts, _CHOSEN), dtype=torch.float64, device="cpu").round().long()
    scores = probe.randn(TOKENS, len(chosen)).cpu()
    top_k_weights, places = scores.topk(min(_TOP_K, len(chosen)))
    top_k_index = chosen[places]
    shapes = weight_shapes(layout, num_experts, hidden, intermediate)
    tensors = [probe.randn(TOKENS, hidden).cpu(), top_k_weights]
    tensors += [probe.randn(*shape).cpu() * 0.25 for shape in shapes]

    def on(forward: Callable) -> Callable:
        def computation(
            x: torch.Tensor, weights: torch.Tensor, *others: torch.Tensor, training: bool = True
        ) -> torch.Tensor:
            *parameters, index = others
            children = activations_of(module, training)
            if layout.normed:
                children[NORM] = dummy_module(module._modules[NORM], {"weight": parameters[-1]}, {}, training)
            experts = dummy_module(module, dict(zip(layout.weights, parameters)), children, training)
            return run_part(forward, experts, x, index, weights)

        return computation

    failures = []
    with probe.on_cpu():
        trials = [Trial(on(original), tensors, INPUTS, [top_k_index]) for original in _originals(module)]
        for trial, formula in itertools.product(trials, formulas(module, layout)):
            agreement = trial.prove(on(formula.run))
            if agreement.equal:
                return formula, agreement
            failures.append(agreement)
    return None, no_formula(failures, "no activation that there is a kernel for").agreement


def activations_of(module: nn.Module, training: bool) -> dict[str, nn.Module]:
    """Dummies of the stateless children of experts."""
    left_out = NORM, "parametrizations"
    return {
        name: dummy_child(child, training)
        for name, child in module._modules.items()
        if child is not None and name not in left_out
    }


def _originals(module: Any) -> list[Callable]:
    """The computations that ours may equal: the class's own loop, and transformers' implementation instead of it.

    The loop may compute in a wider dtype than that one.
    """
    own = [_own_loop(module)]
    if _implementation(module) not in _OF_TRANSFORMERS:
        return own
    return [*own, ALL_EXPERTS_FUNCTIONS["grouped_mm"]]


def weight_shapes(layout: ExpertsFormula, num_experts: int, hidden: int, intermediate: int) -> list[tuple[int, ...]]:
    """The shapes of `layout.weights` for these sizes, followed by that of a norm's weight."""
    wide = intermediate * (2 if layout.gated else 1)
    projections = [(wide, hidden), (hidden, intermediate)]
    shapes: list[tuple[int, ...]] = [
        (num_experts, *(size[::-1] if layout.transposed else size)) for size in projections
    ]
    if layout.biases:
        shapes += [(num_experts, wide), (num_experts, hidden)]
    return [*shapes, (hidden,)] if layout.normed else shapes


@functools.cache
def experts_forward(formula: ExpertsFormula, arguments: tuple[str, ...]) -> Callable:
    """The forward, with these names for its arguments; the same function for equal formulas."""

    def forward(self, x, index, weights, adapters=None):
        return formula.run(self, x, index, weights, adapters)

    return call_like(forward, *arguments)
