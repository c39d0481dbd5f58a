"""Stacked weights of experts in 4 bits, for QLoRA (arXiv 2305.14314) of a mixture of experts.

bitsandbytes quantises linear layers alone, and of a model like Qwen3-30B-A3B leaves 55 of 57 GiB as they are.
`quantize_experts` gives the stacked weights the same layout with bitsandbytes' own function, and torch's
parametrisation makes them floating where a module reads them. So they run in every implementation of the experts; where
ours reads them, the backward keeps their 4 bits and makes them floating once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from liger_trainer.kernels.nf4 import NestedAbsmax, NF4Weight, nf4_dequantize

PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
QUANT_TYPES = ("nf4", "fp4")


class FourBits(nn.Module):
    """The parametrisation of one stacked weight: makes its 4 bits floating.

    Args:
        state: bitsandbytes' quantisation state.
    """

    code: torch.Tensor

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.shape, self.dtype, self.blocksize = tuple(state.shape), state.dtype, state.blocksize
        self.nested_blocksize = state.state2.blocksize if state.nested else 0
        statistics = {"absmax": state.absmax, "code": state.code}
        if state.nested:
            inner = state.state2
            statistics |= {"inner_code": inner.code, "inner_absmax": inner.absmax, "offset": state.offset}
        for name, tensor in statistics.items():
            self.register_buffer(name, tensor)

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """The weight, (experts, ...), in the dtype that it was quantised from; it has no gradient."""
        absmax, code, *nested = self.buffers()
        inner = NestedAbsmax(nested[0], nested[1], nested[2].view(1), self.nested_blocksize) if nested else None
        rows = self.shape[0] * self.shape[1]
        weight = NF4Weight(packed, absmax, code, (rows, self.shape[2]), self.blocksize, inner)
        return nf4_dequantize(weight, self.dtype).view(self.shape)


def quantize_experts(
    model: nn.Module, quant_type: str = "nf4", double_quant: bool = True, device: torch.device | str | None = None
) -> int:
    """Puts the stacked weights of all experts of `model` in 4 bits, and freezes them.

    It takes bitsandbytes, and a model of which `from_pretrained` has quantised the rest, or not. Weights go to `device`
    one by one, so of a model in the host's memory a GPU never holds more than one of them in 16 bits. Adapters on them
    are made before, as PEFT nests those of weights in 4 bits otherwise, and they would not load on other models::

        model = get_peft_model(model, LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
        quantize_experts(model)

    They run in our operator alone (`apply_liger_kernel`, our trainers), and are merged into the model in 16 bits, on
    which `PeftModel.from_pretrained` loads them.

    Args:
        model: With stacked weights, (experts, ...), called `gate_up_proj` or `up_proj`, and `down_proj`.
        quant_type: ``"nf4"`` or ``"fp4"``.
        double_quant: Whether the scales of the blocks of 64 are quantised too.
        device: Where the weights are quantised and stay; where they are unless given.

    Returns:
        How many weights were quantised.

    Raises:
        ValueError: for an unknown `quant_type`, or a model without stacked experts.
    """
    from bitsandbytes.functional import quantize_4bit

    if quant_type not in QUANT_TYPES:
        raise ValueError(f"`quant_type` is {quant_type!r}; it must be one of {', '.join(QUANT_TYPES)}.")
    found = list(stacked_weights(model))
    if not found:
        raise ValueError(
            f"`model`, {type(model).__name__}, has no experts with stacked weights in 16 or 32 bits "
            f"({', '.join(PARAMETERS)}); `load_in_4bit` quantises linear layers."
        )
    for module, name in found:
        weight = module._parameters[name]
        assert weight is not None
        packed, state = quantize_4bit(
            weight.data.to(device or weight.device), compress_statistics=double_quant, quant_type=quant_type
        )
        module._parameters[name] = nn.Parameter(packed, requires_grad=False)
        parametrize.register_parametrization(module, name, FourBits(state), unsafe=True)  # another shape and dtype
    wrapper: Any
    for wrapper in model.modules():
        if hasattr(wrapper, "get_delta_weight") and four_bits(wrapper.get_base_layer()):
            # PEFT would add them to the floating weight that it reads, and which goes: lost, without a word.
            wrapper.merge = _refuse_to_merge
    return len(found)


def _refuse_to_merge(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "Adapters cannot be merged into experts in 4 bits. Save them, load them with `PeftModel.from_pretrained` on "
        "the model in 16 bits, and merge there."
    )


def stacked_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that hold stacked weights of experts in a floating dtype, and the names of these."""
    for module in model.modules():
        for name in PARAMETERS:
            weight = module._parameters.get(name)
            if weight is not None and weight.dim() == 3:
                yield module, name


def four_bits(module: nn.Module) -> dict[str, FourBits]:
    """The weights of `module` that are in 4 bits and nothing else."""
    parametrizations: Any = module._modules.get("parametrizations") or {}
    return {name: one for name, (one, *more) in parametrizations.items() if type(one) is FourBits and not more}


def declared_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of `module`; for one in 4 bits, a tensor of no memory with its floating shape and dtype."""
    weights: dict[str, torch.Tensor] = {name: one for name, one in module._parameters.items() if one is not None}
    for name, one in four_bits(module).items():
        weights[name] = one.code.new_empty(1, dtype=one.dtype).expand(one.shape)
    return weights


class _Again(NamedTuple):
    """A saved weight: made once more where it is asked for."""

    module: nn.Module
    name: str


@contextlib.contextmanager
def kept_in_4_bits(module: nn.Module, names: Sequence[str]) -> Iterator[list[torch.Tensor]]:
    """The weights `names` of `module`, floating, which a backward of what runs in here keeps in 4 bits."""
    weights, quantised = [getattr(module, name) for name in names], four_bits(module)
    again = {
        (weight.data_ptr(), weight.shape, weight.stride()): _Again(module, name)
        for name, weight in zip(names, weights)
        if name in quantised
    }
    around = _hooks_around() if again else None
    if around is None:
        yield weights
        return
    pack_rest, unpack_rest = around

    def pack(saved: torch.Tensor) -> Any:
        one = again.get((saved.data_ptr(), saved.shape, saved.stride()))
        return pack_rest(saved) if one is None else one

    def unpack(kept: Any) -> torch.Tensor:
        return getattr(kept.module, kept.name) if isinstance(kept, _Again) else unpack_rest(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield weights


def _hooks_around() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """What a checkpoint, or offloading, does with saved tensors: torch would run our hooks in the place of theirs.

    None where that is not known, as in a graph that is compiled; then weights are saved floating.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None or torch.compiler.is_compiling():
        return None
    return top(False) or (_as_it_is, _as_it_is)


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved
