"""MLPs: gated ones, `down_proj(act(gate_proj(x)) * up_proj(x))`, and those with a squared ReLU.

The gate and up projections of a gated MLP may be separate, or fused in one.

The projections may also be called w1, w3 and w2, as in Mixtral's list of experts and in Llama's own code, or fc_1, fc_2
and proj, as in LitGPT; those of fused ones input_linear and output_linear, as in Granite.

The activation and the product between the projections become one kernel. The projections are called as modules, so
adapters, quantised layers and hooks on them keep working, with two exceptions that nobody else can observe.

1. Projections with PEFT's LoRA adapters: gate and up are one operator on their common input, and the down projection
   is another, which recomputes its input instead of saving it (`lora/layers.py`).
2. A plain down projection, with `recompute_mlp` (the default): activation, product and projection are one operator,
   which recomputes the product in the backward instead of saving it. In bf16 this saves 2 bytes for each token and
   intermediate feature, a third of what a gated MLP saves, for one more store an element, well under a hundredth of a
   layer's time. In a checkpointed layer it saves the product while the layer runs, and one pass of the recomputation.
   Without a gradient nothing would be saved, and the projection is called. Checkpoint policies that select operators
   do not see this projection's matmul.

With `tiled_mlp` the whole forward runs on tiles of tokens and saves its input only (`tiling/tiled_mlp.py`), so the
memory for intermediate results does not grow with the sequence.

An MLP with a squared ReLU is `down_proj(relu(up_proj(x)) ** 2)`, as in Nemotron, Arcee, Persimmon and nanochat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.compat.hooks import is_linear_without_bias, outputs_are_unhooked
from liger_trainer.kernels.activation import GATED, SILU, Activation
from liger_trainer.kernels.lora.lora import lora_linears
from liger_trainer.kernels.lora.lora_mlp import lora_down, lora_mlp
from liger_trainer.kernels.mlp.gated_down import glu, glu_down
from liger_trainer.kernels.mlp.relu_squared import relu_squared
from liger_trainer.patching.as_written import EVERY_PRECISION, Precisions, is_plain_linear, project, runs_ours
from liger_trainer.patching.binding import call_like
from liger_trainer.patching.fp8 import mode_for
from liger_trainer.patching.inputs import MLP
from liger_trainer.patching.lora.operands import adapted_layers
from liger_trainer.patching.probe import (
    Probe,
    Proof,
    dummy_child,
    dummy_module,
    identity,
    is_stateless,
    no_formula,
    only_argument,
    projection,
    refused,
)
from liger_trainer.patching.report import SWITCHED_OFF, Finding, proved, reason_to_leave
from liger_trainer.patching.side_effects import run_part
from liger_trainer.tiling.tiled_mlp import tiled_mlp

# In the order in which they are used: gate and up, or both in one, and down.
_NAMES = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),  # Llama's and Mixtral's own
    ("fc_1", "fc_2", "proj"),  # LitGPT's
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),  # Granite's shared experts
)


_LIMITS = ("limit", "swiglu_limit")
_DROPOUT = "residual_dropout"


class _Variant(NamedTuple):
    """One kind of gated MLP."""

    activation: Activation
    multipliers: bool = False  # `gate_multiplier` and `down_multiplier` are attributes of the module
    limit: str = ""  # the attribute that holds one
    dropout: bool = False  # of the result, by the attribute `residual_dropout`

    @property
    def reads(self) -> tuple[str, ...]:
        """The attributes of the module that the forward reads at each call."""
        multipliers = ("gate_multiplier", "down_multiplier") if self.multipliers else ()
        return (*multipliers, *([self.limit] if self.limit else ()), *([_DROPOUT] if self.dropout else ()))

    @property
    def kernel(self) -> str:
        """The name in the report."""
        component, detail = self.activation.component, self.activation.detail
        options = {detail: bool(detail), "multipliers": self.multipliers}
        options |= {"limit": bool(self.limit), "dropout": self.dropout}
        named = [name for name, has in options.items() if has]
        return f"{component} ({', '.join(named)})" if named else str(component)


_VARIANTS = tuple(map(_Variant, GATED.values()))
_SIZES = (16, 24)  # hidden and intermediate size of the dummy module
_LARGER_SIZES = (64, 96)  # those of one that is compared once
_MORE_ROWS = 20
_PROBED_TILES = 3  # which do not divide the probe's 64 tokens


def find_gated_mlp(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if its children are the projections of a gated MLP, else None."""
    children = {name for name, child in module._modules.items() if child is not None}
    names = next((names for names in _NAMES if children.issuperset(names)), None)
    if names is None or isinstance(module, nn.ModuleDict):  # which is never called
        return None
    target = type(module).__name__
    guess = "geglu" if any("gelu" in type(module._modules[name]).__name__.lower() for name in children) else "swiglu"
    reason = reason_to_leave(module, enabled("swiglu") or enabled("geglu"))
    if reason:
        return Finding(guess, target, module, reason=reason)
    proof = probe.once((identity(module), _biased(module, names)), _probe_gated_mlp, module, names, probe, enabled)
    component = next(name for name in ("swiglu", "geglu") if (proof.kernel or guess).startswith(name))
    if not enabled(component):
        return Finding(component, target, module, reason=SWITCHED_OFF)
    return proved(component, target, module, proof)


def _variants(module: nn.Module, tiled: bool) -> tuple[_Variant, ...]:
    """The kinds of MLP that the module may be, judging by its attributes; in tiles, a dropout has other masks."""

    def has(*names: str) -> bool:
        return all(isinstance(getattr(module, name, None), (int, float)) for name in names)

    own = [_Variant(SILU, multipliers=True)] if has("gate_multiplier", "down_multiplier") else []
    own += [_Variant(SILU, limit=name) for name in _LIMITS if has(name)]
    dropped = [each._replace(dropout=True) for each in _VARIANTS] if has(_DROPOUT) and not tiled else []
    return (*own, *_VARIANTS, *dropped)


def _probe_gated_mlp(module: nn.Module, names: tuple[str, ...], probe: Probe, enabled: Callable[[str], bool]) -> Proof:
    argument = only_argument(module)
    if argument is None:
        return refused("its forward takes more than the hidden states")
    besides = _state_besides(module, names)
    if besides:
        return refused(f"it has {', '.join(besides)} besides a gated MLP's projections")

    fused = len(names) == 2
    first = {names[0]: 2} if fused else dict.fromkeys(names[:2], 1)
    tensors = _dummy_tensors(module, first, names[-1], probe)
    trial = probe.trial(_on_projections(module, names, type(module).forward), tensors, MLP)
    recompute, tiled, lora = enabled("recompute_mlp"), enabled("tiled_mlp"), enabled("lora")
    failures = []
    for variant in _variants(module, tiled):
        options = argument, names, variant, recompute, lora
        forward = gated_mlp_forward(*options)
        probed = in_tiles(forward, argument, _PROBED_TILES) if tiled else forward
        agreement = trial.prove(_on_projections(module, names, probed))
        precisions = _precisions_of(module, first, names[-1], probed, probe) if agreement.equal else None
        if agreement.equal and precisions is None:
            return refused("it computes another formula at other sizes")
        if precisions is not None:
            forward = gated_mlp_forward(*options, precisions)
            kernel = variant.kernel + (" on fused gate_up" if fused else "")
            kernel += ("" if recompute else ", product saved") + (", in tiles" if tiled else "")
            forward = in_tiles(forward, argument) if tiled else forward
            return Proof(kernel, forward, agreement, names + variant.reads, precisions)
        failures.append(agreement)
    children = _other_children(module, names).values()
    others = ", ".join(type(child).__name__ for child in children if not _is_known_activation(child, probe))
    tried = " nor ".join(f"{name}(gate) * up" for name in GATED)
    return no_formula(failures, f"neither {tried}" + (f" ({others})" if others else ""))


def _is_known_activation(module: nn.Module, probe: Probe) -> bool:
    """Whether a stateless module alone is an activation of ours, so that what differs is elsewhere."""
    known = [activation.value for activation in GATED.values()]
    dummy, x = dummy_child(module, training=True), probe.randn(64)
    return any(probe.same(lambda x: type(dummy).forward(dummy, x), each, [x], False) for each in known)


def _other_children(module: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    return {name: child for name, child in module._modules.items() if child is not None and name not in names}


def _state_besides(module: nn.Module, names: tuple[str, ...]) -> list[str]:
    """What an MLP has besides its projections `names` that may hold state; our forwards know no such thing."""
    children = [name for name, child in _other_children(module, names).items() if not is_stateless(child)]
    tensors = [name for name, tensor in {**module._parameters, **module._buffers}.items() if tensor is not None]
    return sorted(children + tensors)


def _biased(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Which of the projections `names` have a bias."""
    return tuple(name for name in names if getattr(module._modules[name], "bias", None) is not None)


def _dummy_tensors(
    module: nn.Module,
    first: Mapping[str, int],
    last: str,
    probe: Probe,
    sizes: tuple[int, int] = _SIZES,
    rows: int = 16,
) -> list[torch.Tensor]:
    """An input, weights and biases for `_on_projections`.

    Args:
        module: The MLP.
        first: Names of its first projections, and how many times the intermediate size each gives.
        last: Name of the last projection.
        probe: Draws them.
        sizes: Hidden and intermediate size.
        rows: Tokens of each of 4 sequences.
    """
    hidden, intermediate = sizes
    shapes = {name: (times * intermediate, hidden) for name, times in first.items()} | {last: (hidden, intermediate)}
    scale = 0.25 * (_SIZES[0] / hidden) ** 0.5
    weights = [probe.randn(*shape) * scale for shape in shapes.values()]
    return [
        probe.randn(4, rows, hidden),
        *weights,
        *(probe.randn(shapes[name][0]) for name in _biased(module, [*shapes])),
    ]


def _precisions_of(
    module: nn.Module, first: Mapping[str, int], last: str, ours: Callable, probe: Probe
) -> Precisions | None:
    """Where our forward equals the module's besides the proof; None where they differ at other sizes.

    Projections are torch's own here, which autocast knows; other arguments are those of `_dummy_tensors`.
    """
    names = (*first, last)
    original = _on_projections(module, names, type(module).forward, nn.Linear)
    tensors = _dummy_tensors(module, first, last, probe, _LARGER_SIZES, _MORE_ROWS)
    ours = _on_projections(module, names, ours, nn.Linear)
    return probe.precisions(original, ours, tensors) if probe.same(original, ours, tensors, False) else None


def _on_projections(
    module: nn.Module, names: tuple[str, ...], forward: Callable, kind: type[nn.Linear] | None = None
) -> Callable:
    """`forward` as a function of the input and the parameters of the projections `names`, on a dummy of `module`.

    Args:
        module: The MLP.
        names: Its projections.
        forward: The function of the dummy and the input.
        kind: Class of the projections; None for one without a matrix product.
    """
    with_bias = _biased(module, names)

    def computation(x: torch.Tensor, *parameters: torch.Tensor, training: bool = True) -> torch.Tensor:
        biases = dict(zip(with_bias, parameters[len(names) :]))
        options = {} if kind is None else {"kind": kind}
        children = {name: dummy_child(child, training) for name, child in _other_children(module, names).items()}
        children |= {
            name: projection(weight, bias=biases.get(name), **options) for name, weight in zip(names, parameters)
        }
        return run_part(forward, dummy_module(module, {}, children, training), x)

    return computation


@functools.cache
def gated_mlp_forward(
    argument: str,
    names: tuple[str, ...],
    variant: _Variant,
    recompute: bool,
    lora: bool,
    precisions: Precisions = EVERY_PRECISION,
) -> Callable:
    """A forward for one kind of gated MLP; the same function for equal arguments.

    Args:
        argument: Name of the forward's argument.
        names: Names of the projections: gate, up and down, or gate and up in one, and down.
        variant: The activation and its options.
        recompute: Recompute the product of gate and up in the backward wherever `down_proj` is a plain linear layer
            without hooks when it is called.
        lora: Run projections with adapters as `lora_linears` and `lora_down` wherever PEFT's layers are plain.
        precisions: Where the proof holds.
    """
    activation = variant.activation

    def apply(self, gate, up, unhooked):
        options: dict[str, Any] = {"inplace_backward": unhooked}
        down_proj, scale = getattr(self, names[-1]), None
        if variant.limit:
            options["limit"] = getattr(self, variant.limit)
        if variant.multipliers:
            options["gate_multiplier"], scale = self.gate_multiplier, self.down_multiplier
            if is_linear_without_bias(down_proj):
                options["down_multiplier"], scale = scale, None
        if lora and not variant.multipliers and type(down_proj) is not nn.Linear:
            (down,) = adapted_layers(gate if up is not None else gate.chunk(2, -1)[0], down_proj) or (None,)
            if down is not None:
                return lora_down(gate, up, down, activation.name, **options)
        if recompute and torch.is_grad_enabled() and scale is None and is_plain_linear(down_proj, gate):
            fp8 = mode_for(down_proj, gate) if "forward" in down_proj.__dict__ else None
            return glu_down(gate, up, down_proj.weight, down_proj.bias, activation, fp8=fp8, **options)
        h = glu(gate, up, activation, **options)
        return down_proj(h) if scale is None else down_proj(h) * scale

    def forward_separate(self, x):
        if not runs_ours(x, precisions):
            return type(self).forward(self, x)
        gate_proj, up_proj = getattr(self, names[0]), getattr(self, names[1])
        layers = None
        if lora and not (type(gate_proj) is type(up_proj) is nn.Linear):
            layers = adapted_layers(x, gate_proj, up_proj)
        if layers is not None:
            # With the shape of h, for the dropout mask; it takes no memory.
            h = x.new_empty(()).expand(*x.shape[:-1], layers[0].weight.shape[0])
            (down,) = (not variant.multipliers and adapted_layers(h, getattr(self, names[2]))) or (None,)
            if down is not None:
                limit = getattr(self, variant.limit) if variant.limit else None
                return lora_mlp(x, layers[0], layers[1], down, activation.name, limit=limit)
            gate, up = lora_linears(x, layers)
            return apply(self, gate, up, True)
        gate, up = project(x, gate_proj, up_proj)
        if gate.dtype != up.dtype:  # an adapter on one of them may give it a wider dtype
            dtype = torch.promote_types(gate.dtype, up.dtype)
            gate, up = gate.to(dtype), up.to(dtype)
        return apply(self, gate, up, outputs_are_unhooked(gate_proj, up_proj))

    def forward_fused(self, x):
        if not runs_ours(x, precisions):
            return type(self).forward(self, x)
        gate_up_proj = getattr(self, names[0])
        return apply(self, gate_up_proj(x), None, outputs_are_unhooked(gate_up_proj))

    undropped = forward_fused if len(names) == 2 else forward_separate

    def forward_dropped(self, x):
        if not runs_ours(x, precisions):
            return type(self).forward(self, x)
        return F.dropout(undropped(self, x), getattr(self, _DROPOUT), self.training)

    return call_like(forward_dropped if variant.dropout else undropped, argument)


@functools.cache
def in_tiles(forward: Callable, argument: str, num_tiles: int | None = None) -> Callable:
    """`forward` on tiles of the tokens, by default of half a GiB each; see [`tiled_mlp`]."""

    def tiled(self, x):
        return tiled_mlp(forward, self, x, num_tiles)

    return call_like(tiled, argument)


# ---------------------------------------------------------------------------------------------------------------------
# A squared ReLU
# ---------------------------------------------------------------------------------------------------------------------

_NAMES_OF_TWO = (("up_proj", "down_proj"), ("fc1", "fc2"), ("dense_h_to_4h", "dense_4h_to_h"))


def find_relu_squared_mlp(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it is such an MLP, else None; two projections alone do not make one."""
    children = {name for name, child in module._modules.items() if child is not None}
    names = next((names for names in _NAMES_OF_TWO if children.issuperset(names)), None)
    if names is None or "gate_proj" in children:
        return None
    proof = probe.once((identity(module), _biased(module, names)), _probe_relu_squared_mlp, module, names, probe)
    if proof is None:
        return None
    if reason := reason_to_leave(module, enabled("relu_squared")):
        return Finding("relu_squared", type(module).__name__, module, reason=reason)
    return proved("relu_squared", type(module).__name__, module, proof)


def _probe_relu_squared_mlp(module: nn.Module, names: tuple[str, str], probe: Probe) -> Proof | None:
    """The proof of our forward; None where the module computes something else."""
    argument = only_argument(module)
    if argument is None or _state_besides(module, names):
        return None
    first, last = {names[0]: 1}, names[1]
    forward = relu_squared_mlp_forward(argument, names)
    original, ours = (_on_projections(module, names, each) for each in (type(module).forward, forward))
    agreement = probe.trial(original, _dummy_tensors(module, first, last, probe), MLP).prove(ours)
    precisions = _precisions_of(module, first, last, forward, probe) if agreement.equal else None
    if precisions is None:
        return None
    return Proof("relu_squared", relu_squared_mlp_forward(argument, names, precisions), agreement, names, precisions)


@functools.cache
def relu_squared_mlp_forward(
    argument: str, names: tuple[str, str], precisions: Precisions = EVERY_PRECISION
) -> Callable:
    """The forward, for where the proof holds; the same function for equal arguments.

    Args:
        argument: Name of the forward's argument.
        names: Names of the projections.
        precisions: Where the proof holds.
    """

    def forward(self, x):
        if not runs_ours(x, precisions):
            return type(self).forward(self, x)
        first, last = (getattr(self, name) for name in names)
        return last(relu_squared(first(x), inplace_backward=outputs_are_unhooked(first)))

    return call_like(forward, argument)
