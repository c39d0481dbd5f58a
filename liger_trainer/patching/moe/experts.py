"""Modules of experts whose weights are stacked in 3-D parameters: Qwen3-MoE's, Mixtral's, GPT-OSS's and many more.

transformers' own classes ask a registry which function computes them, by a name in their config. Ours is registered
there as ``"liger_trainer"``, and a module that it is proved for gets a view of its config which says so. The model's
config stays as it is, and so does what is saved of it; a forward around the class's own, such as that of expert
parallelism, ends up at ours. Experts of other classes get a forward bound to the instance.

The proof runs the class's own loop over the experts and ours on the CPU, where fp32 products are fp32.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import EXPERTS
from liger_trainer.patching.as_written import serves_as_written
from liger_trainer.patching.binding import (
    IMPLEMENTATION,
    ChosenConfig,
    bind_forward,
    call_like,
    choose,
    is_bound_by_us,
    is_chosen,
    overriding_forward,
)
from liger_trainer.patching.finding import Finding
from liger_trainer.patching.gated_mlp import twin
from liger_trainer.patching.moe.experts_formula import NORM, ExpertsFormula, formulas, layout_of
from liger_trainer.patching.moe.quantized_experts import declared_weights
from liger_trainer.patching.probe import Agreement, Probe, class_of, full_shape, identity, stand_in

_OF_TRANSFORMERS = ("grouped_mm", "batched_mm")
_REPLACED = (None, "eager", *_OF_TRANSFORMERS, IMPLEMENTATION)
SIZES = (16, 24)
"""Hidden and intermediate size of the stand-in."""
TOKENS = 256
"""Of the stand-in, so many that its rounding noise is even."""

_CHOSEN = 6  # experts that the tokens of the stand-in choose from


def liger_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The implementation in transformers' registry.

    Raises:
        ValueError: For a module that [`apply_liger_kernel`] has not proved it for.
    """
    config = self.config
    if not isinstance(config, ChosenConfig):
        raise ValueError(
            f"`experts_implementation={IMPLEMENTATION!r}` is chosen for a {type(self).__name__} by name; leave it "
            "unset and call liger_trainer.apply_liger_kernel(model), which proves it equal first."
        )
    of_model = config.model_config._experts_implementation
    # `generate` switches to "batched_mm" for its steps of few tokens. Weights in 4 bits become floating at every read.
    as_written = serves_as_written(hidden_states) and not is_parametrized(self)
    if as_written or (not torch.is_grad_enabled() and of_model == "batched_mm"):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        chosen = "eager" if of_model in (None, IMPLEMENTATION) else of_model
        theirs = ALL_EXPERTS_FUNCTIONS.get_interface(chosen, _own_loop(self))
        return theirs(self, hidden_states, top_k_index, top_k_weights)
    return config.forward(self, hidden_states, top_k_index, top_k_weights)


def _choose(module: nn.Module, forward: Callable) -> None:
    """Binds `forward` to a module that asks transformers' registry."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, liger_experts_forward)
    choose(module, forward)


def forward_of_ours(module: Any) -> Callable | None:
    """The forward of ours that `module` runs, a function of the module; None if it runs another, or one around it."""
    if getattr(module, "_is_expert_parallel", False):
        return None
    if is_chosen(module):
        return module.config.forward
    return module.forward.__func__ if is_bound_by_us(module) else None


def find_experts(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The verdict on `module` if it holds the stacked weights of experts and is called with a router's choices."""
    layout = layout_of(module)
    if layout is None:
        return None
    arguments = tuple(inspect.signature(_own_loop(module)).parameters)[1:]
    if len(arguments) == 1:
        return None  # the block around it decides, see `scaled_experts`
    target = class_of(module).__name__
    reason = _obstacle(module, layout, arguments) if enabled("experts") else "switched off in liger_kernel_config"
    if reason:
        return Finding("experts", target, module, reason=reason)
    assert isinstance(layout, ExpertsFormula)
    key = "experts", identity(module), layout
    if key not in probe.cache:
        probe.cache[key] = _probe_experts(module, layout, probe)
    formula, agreement = probe.cache[key]
    if formula is None:
        return Finding("experts", target, module, error=agreement.error, reason=agreement.reason)
    bind = _choose if _is_dispatched(module) else bind_forward
    return Finding(
        "experts", target, module, formula.kernel, experts_forward(formula, arguments), agreement.error, bind=bind
    )


def _own_loop(module: nn.Module) -> Callable:
    """The forward that the class was written with, below transformers' choice between implementations."""
    return inspect.unwrap(type(module).forward)


def _is_dispatched(module: Any) -> bool:
    """Whether the class asks transformers' registry."""
    return hasattr(module, "has_gate") and hasattr(getattr(module, "config", None), "_experts_implementation")


def _implementation(module: Any) -> str | None:
    """What the model's config chooses; None where nothing asks it."""
    if not _is_dispatched(module):
        return None
    config = module.config.model_config if is_chosen(module) else module.config
    return config._experts_implementation


def _obstacle(module: Any, layout: ExpertsFormula | str, arguments: tuple[str, ...]) -> str:
    """Why ours is not even tried."""
    if isinstance(layout, str):
        return layout
    if len(arguments) != 3:
        return "its forward does not take hidden states, chosen experts and their weights"
    foreign = overriding_forward(module)
    if foreign is not None and not getattr(module, "_is_expert_parallel", False):
        return f"its forward is already overridden by {foreign}"
    if _is_dispatched(module) and not available(EXPERTS):
        return "the installed transformers chooses how experts run in another way"
    chosen = _implementation(module)
    if chosen not in _REPLACED:
        return f"`experts_implementation={chosen!r}` is chosen, which stays"
    return ""


def _probe_experts(module: Any, layout: ExpertsFormula, probe: Probe) -> tuple[ExpertsFormula | None, Agreement]:
    num_experts = full_shape(declared_weights(module)["down_proj"])[0]
    num_experts = min(num_experts, getattr(module, "num_experts", num_experts))  # of this process
    hidden, intermediate = SIZES
    chosen = min(num_experts, _CHOSEN)
    scores = probe.randn(TOKENS, chosen).cpu()
    top_k_weights, top_k_index = scores.topk(min(2, chosen))
    shapes = weight_shapes(layout, num_experts, hidden, intermediate)
    tensors = [probe.randn(TOKENS, hidden).cpu(), top_k_weights]
    tensors += [probe.randn(*shape).cpu() * 0.25 for shape in shapes]
    # Once more with gates and ups of 16 and beyond, as a clamp that nothing reaches does not show.
    large = [tensors[0] * 16, *tensors[1:]]
    children = activations_of(module)

    def on(forward: Callable) -> Callable:
        def computation(x: torch.Tensor, weights: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
            norm = {NORM: stand_in(module._modules[NORM], {"weight": parameters[-1]}, {})} if layout.normed else {}
            experts = stand_in(module, dict(zip(layout.weights, parameters)), {**children, **norm})
            return forward(experts, x, top_k_index, weights)

        return computation

    failures = []
    with torch.device("cpu"):
        for original, formula in itertools.product(_originals(module), formulas(module, layout)):
            computations = on(original), on(formula.run)
            agreement = probe.compare(*computations, tensors)
            if agreement.equal:
                agreement = probe.compare(*computations, large)
            if agreement.equal:
                return formula, agreement
            failures.append(agreement)
    nearest = min(failures, key=lambda agreement: agreement.error)
    return None, nearest.explained("no activation that there is a kernel for")


def activations_of(module: nn.Module) -> dict[str, nn.Module]:
    """Twins of the children of experts that hold no numbers of theirs."""
    left_out = NORM, "parametrizations"
    return {name: twin(child) for name, child in module._modules.items() if child is not None and name not in left_out}


def _originals(module: Any) -> list[Callable]:
    """What ours may be equal to: the class's own loop, and what transformers runs in its place.

    A loop may compute in a wider dtype than they do.
    """
    own = [_own_loop(module)]
    if _implementation(module) not in _OF_TRANSFORMERS:
        return own
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return [*own, ALL_EXPERTS_FUNCTIONS["grouped_mm"]]


def weight_shapes(layout: ExpertsFormula, num_experts: int, hidden: int, intermediate: int) -> list[tuple[int, ...]]:
    """The shapes of `layout.weights` for these sizes, and of a norm's behind them."""
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
    """The forward, with its arguments named like that; the same function for equal formulas."""

    def forward(self, x, index, weights, adapters=None):
        return formula.run(self, x, index, weights, adapters)

    return call_like(forward, *arguments)
