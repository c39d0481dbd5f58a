"""The proof of a layer that mixes tokens: its class's forward, with torch's own functions, against each of ours.

Both run on a dummy of the layer, with small projections, and on a CPU few of its heads: two rows of a chunk and a half.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.patching.as_written import EVERY_PRECISION, Precisions
from liger_trainer.patching.inputs import SEQUENCES
from liger_trainer.patching.norms import eps_name
from liger_trainer.patching.probe import (
    Probe,
    Proof,
    dummy_child,
    dummy_module,
    identity,
    no_formula,
    projection,
    refused,
)
from liger_trainer.patching.recurrent.mixers import (
    Compute,
    arguments,
    is_depthwise,
    mask_name,
    mixer_forward,
    torch_forward,
)
from liger_trainer.patching.side_effects import run_part
from liger_trainer.patching.trial import OF_RECURRENCES, Agreement, Slack

HIDDEN = 16
"""The size of the hidden states in a proof."""

_ROWS, _LENGTH = 2, 96
_DRAWS, _ROUNDING = 8, 1e-3  # what differs by more is no rounding
_OF_PLACES = ("layer_idx", "layer_type", "conv_idx")


def key_of(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for the layers with the same proof, wherever they are in the model."""

    def plain(part: nn.Module) -> tuple[Any, ...]:
        cls, attributes, *rest = identity(part)
        return cls, tuple(each for each in attributes if each[0] not in _OF_PLACES), *rest

    biased = tuple(name for name, child in module.named_children() if getattr(child, "bias", None) is not None)
    taps = tuple((each.kernel_size, each.weight.dtype) for each in module.children() if isinstance(each, nn.Conv1d))
    others = (child for child in module.children() if not {*child._parameters} <= {"weight", "bias"})
    norms = (child for child in module.children() if eps_name(child))
    return plain(module), biased, taps, tuple(map(plain, (*norms, *others)))


def few(heads: int, most: int, probe: Probe) -> int:
    """How many heads a layer of so many has in a proof: at most `most` on a CPU.

    Elsewhere it has all. Kernels are compiled for the number of heads, and the first step then finds them compiled.
    """
    return min(heads, most) if probe.device.type == "cpu" else heads


def prove(
    module: nn.Module,
    probe: Probe,
    draw: Callable[[], Mapping[str, torch.Tensor]],
    candidates: Sequence[tuple[str, Compute]],
    what: str,
    slack: Slack = OF_RECURRENCES,
    buffers: Mapping[str, torch.Tensor] = types.MappingProxyType({}),
    sizes: Mapping[str, int] = types.MappingProxyType({}),
) -> Proof:
    """The proof of the first of `candidates` that equals the layer.

    In a small layer a few numbers make most of the rounding error, so errors and their quotients scatter. If one is a
    little too large, others are drawn: for the proof itself, and for the one under autocast.

    Args:
        module: The layer.
        probe: Draws the hidden states.
        draw: Draws what its parameters are in the proof, by their names, such as ``"in_proj.weight"``. Matrices are
            those of projections.
        candidates: The names of kernels, and what the layer computes by them.
        what: The formula in the reason of the report if the layer computes none of the candidates.
        slack: How far ours may be from the layer.
        buffers: Buffers of the layer, by their names.
        sizes: Attributes of the layer and its children in the proof; see [`few`].
    """
    original, theirs = type(module).forward, torch_forward(module)
    if theirs is None or mask_name(original) is None:
        return refused("its forward is not of the kind that we know")
    conv = next((name for name, child in module.named_children() if is_depthwise(child)), None)
    best = refused("")
    for _ in range(_DRAWS):
        proof = _proof(module, probe, draw(), (original, theirs), conv, candidates, what, slack, buffers, sizes)
        if best.forward is None or (proof.forward is not None and proof.precisions.autocast):
            best = proof
        if proof.agreement.error > _ROUNDING or (best.forward is not None and best.precisions.autocast):
            break
    half = conv is not None and module.get_submodule(conv).weight.dtype == torch.float16
    if best.forward is not None and half and not best.precisions.fp16:
        return refused("in float16, large numbers overflow elsewhere than in its class's own forward")
    return best


def _proof(
    module: nn.Module,
    probe: Probe,
    values: Mapping[str, torch.Tensor],
    forwards: tuple[Callable, Callable],
    conv: str | None,
    candidates: Sequence[tuple[str, Compute]],
    what: str,
    slack: Slack,
    buffers: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
) -> Proof:
    """As [`prove`], with these values; `forwards` are the class's, and that with torch's own functions."""
    original, theirs = forwards
    names, mask_at = arguments(original), mask_name(original)
    biased = conv is not None and module.get_submodule(conv).bias is not None
    assert mask_at is not None
    between = [None] * (names.index(mask_at) - 1)
    tensors = [probe.randn(_ROWS, _LENGTH, HIDDEN), *values.values()]
    mask = torch.ones(_ROWS, _LENGTH, dtype=torch.long, device=probe.device)

    def on(forward: Callable) -> Callable:
        def computation(x: torch.Tensor, *given: torch.Tensor, training: bool = True) -> torch.Tensor:
            dummy = _dummy(module, dict(zip(values, given)), training, sizes)
            dummy._buffers.update({name: each.to(x.dtype) for name, each in buffers.items()})
            result = run_part(forward, dummy, x, *between, given[-1])
            return result[0] if isinstance(result, tuple) else result

        return computation

    trial = probe.trial(on(theirs), tensors, SEQUENCES, [mask], slack)
    failures: list[Agreement] = []
    for kernel, compute in candidates:
        ours = on(mixer_forward(original, compute, conv, EVERY_PRECISION, biased))
        agreement = trial.prove(ours)
        if agreement.equal:
            native, own = (functools.partial(_with_mask, each, mask) for each in (on(theirs), ours))
            precisions = Precisions(trial.under_autocast(ours), probe.in_float16(native, own, tensors))
            forward = mixer_forward(original, compute, conv, precisions, biased)
            live = tuple(name for name, _ in module.named_children())
            return Proof(kernel, forward, agreement, live, precisions)
        failures.append(agreement)
    return no_formula(failures, what)


def _with_mask(computation: Callable, mask: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
    return computation(*given, mask)


def _dummy(
    module: nn.Module, values: Mapping[str, torch.Tensor], training: bool, sizes: Mapping[str, int]
) -> nn.Module:
    """A dummy of `module` whose parameters are `values`, by their names, and whose attributes are `sizes`."""
    children = {}
    for name, child in module._modules.items():
        held = {each.removeprefix(f"{name}."): value for each, value in values.items() if each.startswith(f"{name}.")}
        if child is None:
            continue
        if not held:
            children[name] = dummy_child(child, training)
        elif "weight" in held and held["weight"].dim() == 2:
            children[name] = projection(held["weight"], nn.Linear, held.get("bias"))
        else:
            children[name] = _dummy(child, held, training, sizes)
    own = {name: value for name, value in values.items() if "." not in name}
    dummy = dummy_module(module, {**dict.fromkeys(module._parameters), **own}, children, training)
    dummy.__dict__.update({name: size for name, size in sizes.items() if name in dummy.__dict__})
    return dummy


def values_of(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], probe: Probe) -> dict[str, torch.Tensor]:
    """Random weights of these shapes for the children of these names, with a bias for those that have one.

    What they give is about as large as 1.
    """
    values = {}
    for name, (rows, *others) in shapes.items():
        columns = max(others, default=1)
        values[f"{name}.weight"] = probe.randn(rows, *others) / 2 ** round(max(columns.bit_length() - 1, 0) / 2)
        if getattr(module.get_submodule(name), "bias", None) is not None:
            values[f"{name}.bias"] = probe.randn(rows)
    return values
