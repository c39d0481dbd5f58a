"""What a module of experts computes, as options of `moe_experts`: read from its parameters, or found by trying."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.activation import NAMES
from liger_trainer.kernels.moe.experts import ExpertLoRA, moe_experts
from liger_trainer.kernels.moe.sort_by_expert import check_ids
from liger_trainer.packed.experts import packed_stacks
from liger_trainer.patching.moe.quantized_experts import declared_weights, four_bits, saved_in_4_bits
from liger_trainer.patching.probe import class_of, full_shape, is_stateless

OWN = "the class's activation"
NORM = "post_expert_norm"
"""transformers' name for a norm of each expert's result, before it is multiplied by its routing weight."""


class ExpertsFormula(NamedTuple):
    """Options of `moe_experts`, and the names of the weights."""

    first: str  # name of the first projection's parameter
    gated: bool  # whether it holds gate and up
    transposed: bool  # whether weights have the layout (experts, in, out)
    biases: bool  # whether both projections have one
    activation: str = "silu"  # name of the activation; `OWN` for the one that transformers' implementations call
    interleaved: bool = False  # whether gate and up alternate
    limit: float | None = None  # clamps gate and up; None for none
    # Multiplies the gate inside SiLU's sigmoid only, with 1 added to up, as in GPT-OSS; None for neither.
    alpha: float | None = None
    normed: bool = False  # whether `NORM` follows each expert

    @property
    def kernel(self) -> str:
        """The name in the report."""
        traits = {"without gate": not self.gated, "interleaved": self.interleaved, "transposed": self.transposed}
        traits |= {"biases": self.biases, "limit": self.limit is not None, "alpha": self.alpha is not None}
        traits |= {"normed": self.normed}
        return f"moe_experts ({', '.join([self.activation, *(name for name, has in traits.items() if has)])})"

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters: both projections', then both biases'."""
        names = self.first, "down_proj"
        return (*names, *(f"{name}_bias" for name in names)) if self.biases else names

    def run(
        self,
        experts: Any,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapters: Mapping[str, Sequence[ExpertLoRA]] | None = None,
    ) -> torch.Tensor:
        """`moe_experts` with the weights of the module `experts`, each of which is read once.

        The adapters of a parameter each add ``scaling * b @ a`` in the parameter's own layout.
        """
        stacks = packed_stacks(experts)  # which the operator decodes
        names = [name for name in self.weights if name not in stacks]
        with saved_in_4_bits(experts, names) as read:
            weights = {name: stack.weight for name, stack in stacks.items()} | dict(zip(names, read))
            dtype = stacks[self.first].dtype if stacks else read[0].dtype
            operands = [weights[name] for name in self.weights]
            weighted_sum = functools.partial(self._sum, experts, operands, dtype, adapters or {})
            if self.normed:
                return _normed_sum(weighted_sum, getattr(experts, NORM), hidden, top_k_index, top_k_weights)
            return weighted_sum(hidden, top_k_index, top_k_weights)

    def _sum(
        self,
        experts: Any,
        weights: Sequence[Any],
        dtype: torch.dtype,
        adapters: Mapping[str, Sequence[ExpertLoRA]],
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, whose weights, packed or not, are those of a module in `dtype`."""
        first, down, *biases = weights
        if not getattr(experts, "_is_expert_parallel", False):
            check_ids(top_k_index, first.shape[0], class_of(experts).__name__)
        first_bias, down_bias = biases or (None, None)
        scale = 1.0 if self.alpha is None else self.alpha
        gate_up_adapters, down_adapters = (self._outwards(adapters.get(name, ())) for name in self.weights[:2])
        # x sigmoid(a x) is silu(a x) / a
        out = moe_experts(
            *(hidden.to(dtype), top_k_index, top_k_weights, first, down),
            gate_up_bias=first_bias,
            down_bias=down_bias,
            gate_up_adapters=gate_up_adapters,
            down_adapters=down_adapters,
            activation=self._own(experts) if self.activation == OWN else self.activation,
            gated=self.gated,
            interleaved=self.interleaved,
            transposed=self.transposed and not packed_stacks(experts),
            limit=self.limit,
            gate_multiplier=scale,
            down_multiplier=1.0 / scale,
            up_offset=0.0 if self.alpha is None else 1.0,
        )
        return out.to(hidden.dtype)

    def _own(self, experts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        return experts._apply_gate if self.gated else experts.act_fn

    def _outwards(self, adapters: Sequence[ExpertLoRA]) -> Sequence[ExpertLoRA]:
        """Adapters in a weight's own layout, converted to the layout (experts, out, in)."""
        return [ExpertLoRA(b.mT, a.mT, scaling) for a, b, scaling in adapters] if self.transposed else adapters


def _normed_sum(
    weighted_sum: Callable[..., torch.Tensor],
    norm: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """As `_sum`, with a norm: each choice is a token for `weighted_sum`, and torch normalises and sums the results."""
    tokens, top_k = index.shape
    rows = hidden.repeat_interleave(top_k, 0), index.reshape(-1, 1), hidden.new_ones(tokens * top_k, 1)
    normed = norm(weighted_sum(*rows)).view(tokens, top_k, -1)
    return (weights.to(normed.dtype).unsqueeze(1) @ normed).squeeze(1).to(hidden.dtype)


def layout_of(experts: Any) -> ExpertsFormula | str | None:
    """The layout of the weights of `experts`, or why `moe_experts` has none for it; None if these are no experts.

    Experts are recognised by their parameters: 3-D ones called `down_proj`, and `gate_up_proj` or `up_proj`.
    """
    parameters = declared_weights(experts)
    first = next((name for name in ("gate_up_proj", "up_proj") if parameters.get(name) is not None), None)
    if first is None or parameters.get("down_proj") is None or "gate_proj" in parameters:
        return None
    shapes = [full_shape(parameters[name]) for name in (first, "down_proj")]
    if any(len(shape) != 3 for shape in shapes):
        return None
    dtypes = {parameters[name].dtype for name in (first, "down_proj")}
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16, torch.float64}:
        return f"its weights are {', '.join(sorted(str(dtype) for dtype in dtypes))}"
    gated = first == "gate_up_proj"
    (num_experts, *sizes), (of_down, *down) = shapes
    factor = 2 if gated else 1
    fitting = [
        transposed
        for transposed, (wide, narrow) in ((False, sizes), (True, sizes[::-1]))
        if (down[::-1] if transposed else down) == [narrow, wide // factor]
    ]
    if num_experts != of_down or not fitting:
        return f"its weights are {tuple(shapes[0])} and {tuple(shapes[1])}, which do not belong together"
    # Without a gate both layouts may fit; an attribute of the module decides.
    transposed = fitting[0] if len(fitting) == 1 else bool(getattr(experts, "is_transposed", False))
    layout = ExpertsFormula(first, gated, transposed, parameters.get("down_proj_bias") is not None)
    others = {name for name, tensor in {**parameters, **experts._buffers}.items() if tensor is not None}
    others -= set(layout.weights)
    children = {name: child for name, child in experts._modules.items() if child is not None}
    if len(four_bits(experts)) == len(children.get("parametrizations", ())):
        children.pop("parametrizations", None)
    others |= {name for name, child in children.items() if not is_stateless(child)}
    if NORM in others and getattr(experts, "has_post_expert_norm", False) and _is_norm(experts._modules[NORM]):
        others, layout = others - {NORM}, layout._replace(normed=True)
    if others:
        return f"it has {', '.join(sorted(others))} besides the projections of experts"
    return layout


def formulas(experts: Any, layout: ExpertsFormula) -> Iterator[ExpertsFormula]:
    """The formulas that `experts` may compute, likely ones first; limits and alphas are attributes of the module."""

    def values(ending: str) -> list[float | None]:
        attributes = [value for name, value in sorted(experts.__dict__.items()) if name.endswith(ending)]
        return [float(value) for value in attributes if type(value) in (int, float) and math.isfinite(value)]

    concatenated = getattr(experts, "is_concatenated", None)
    orders = (False,) if not layout.gated else (False, True) if concatenated is None else (not concatenated,)
    limits, alphas = [*values("limit"), None], values("alpha")
    for interleaved, limit in itertools.product(orders, limits if layout.gated else [None]):
        for alpha in alphas if layout.gated else ():
            yield layout._replace(interleaved=interleaved, limit=limit, alpha=alpha)
        for activation in NAMES:
            yield layout._replace(interleaved=interleaved, limit=limit, activation=activation)
    if hasattr(experts, "_apply_gate") and (layout.gated or hasattr(experts, "act_fn")):
        yield layout._replace(activation=OWN)


def _is_norm(module: Any) -> bool:
    return [name for name, _ in module.named_parameters()] == ["weight"] and not any(module.buffers())
