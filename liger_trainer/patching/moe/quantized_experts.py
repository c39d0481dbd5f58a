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

from liger_trainer.compat.peft import ADAPTERS_ON_FOUR_BITS
from liger_trainer.compat.private import available, require
from liger_trainer.compat.torch import FOUR_BIT_EXPERTS, SAVED_IN_FOUR_BITS
from liger_trainer.kernels.autocast import as_autocast
from liger_trainer.kernels.lora.nf4 import NestedAbsmax, NF4Weight, nf4_dequantize

require(FOUR_BIT_EXPERTS)

PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
QUANT_TYPES = ("nf4", "fp4")


class FourBits(nn.Module):
    """The parametrisation of one stacked weight: makes its 4 bits floating.

    What bitsandbytes keeps of the blocks are frozen parameters: buffers DDP would send at every forward.

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
            statistics |= {"inner_code": inner.code, "inner_absmax": inner.absmax, "offset": state.offset.view(1)}
        for name, tensor in statistics.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """The weight, (experts, ...), in the dtype that it was quantised from; it has no gradient."""
        absmax, code, *nested = (parameter.data for parameter in self.parameters())
        inner = NestedAbsmax(nested[0], nested[1], nested[2], self.nested_blocksize) if nested else None
        rows = self.shape[0] * self.shape[1]
        weight = NF4Weight(packed, absmax, code, (rows, self.shape[2]), self.blocksize, inner)
        return nf4_dequantize(weight, self.dtype).view(self.shape)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FourBits:
        """Moves with the model; a cast changes the dtype that is handed out, as the statistics belong to the bits."""
        for parameter in self.parameters():
            moved = fn(parameter.data)
            parameter.data = moved if moved.dtype == parameter.dtype else parameter.data.to(moved.device)
        self.dtype = fn(self.code.new_empty(0, dtype=self.dtype)).dtype
        return self


def quantize_experts(
    model: nn.Module, quant_type: str = "nf4", double_quant: bool = True, device: torch.device | str | None = None
) -> int:
    """Puts the stacked weights of all experts of `model` in 4 bits, and freezes them.

    It takes bitsandbytes, and a model of which `from_pretrained` has quantised the rest, or not. Weights go to `device`
    one by one, so of a model in the host's memory a GPU never holds more than one of them in 16 bits. Adapters on them
    are made, or loaded, before: on weights in 4 bits PEFT finds none of their names::

        model = get_peft_model(model, LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
        quantize_experts(model)

    They run in our operator alone (`apply_liger_kernel`, our trainers), and are merged into the model in 16 bits, on
    which `PeftModel.from_pretrained` loads them. Adapters are all that is saved: `save_pretrained` of the model itself
    leaves out what its experts are.

    Args:
        model: With stacked weights, (experts, ...), called `gate_up_proj` or `up_proj`, and `down_proj`.
        quant_type: ``"nf4"`` or ``"fp4"``.
        double_quant: Whether the scales of the blocks of 64 are quantised too.
        device: Where the weights are quantised and stay; where they are unless given.

    Returns:
        How many weights were quantised.

    Raises:
        ValueError: for an unknown `quant_type`, a model without stacked experts, one whose adapters are merged, and
            weights of more numbers than bitsandbytes counts.
    """
    from bitsandbytes.functional import quantize_4bit

    require(ADAPTERS_ON_FOUR_BITS)  # before anything has changed
    if quant_type not in QUANT_TYPES:
        raise ValueError(f"`quant_type` is {quant_type!r}; it must be one of {', '.join(QUANT_TYPES)}.")
    found = list(stacked_weights(model))
    if not found:
        raise ValueError(
            f"`model`, {type(model).__name__}, has no experts with stacked weights in 16 or 32 bits "
            f"({', '.join(PARAMETERS)}); `load_in_4bit` quantises linear layers."
        )
    if any(getattr(module, "merged", False) for module in model.modules()):
        raise ValueError("`model` has merged adapters; call its `unmerge_adapter()` first.")
    largest = max(module._parameters[name].numel() for module, name in found)  # type: ignore[union-attr]
    if largest >= 2**31:
        raise ValueError(f"`model` has a weight of {largest} numbers; bitsandbytes quantises fewer than 2**31 at once.")
    for module, name in found:
        weight = module._parameters[name]
        assert weight is not None
        packed, state = quantize_4bit(
            weight.data.to(device or weight.device), compress_statistics=double_quant, quant_type=quant_type
        )
        module._parameters[name] = nn.Parameter(packed, requires_grad=False)
        parametrize.register_parametrization(module, name, FourBits(state), unsafe=True)  # another shape and dtype
    _leave_adapters_to_us(model)
    return len(found)


def _leave_adapters_to_us(model: nn.Module) -> None:
    """Makes PEFT refuse what it would get wrong without a word, on the instances of this model.

    It merges into the floating weight that it reads, which is gone then; and its own forward puts an adapter on the
    parametrised weight at every call, and never takes it off (0.21.2).
    """
    BaseTuner, ParamWrapper, *_ = require(ADAPTERS_ON_FOUR_BITS)
    for module in model.modules():
        if isinstance(module, BaseTuner):
            module._check_merge_allowed = _refuse_to_merge
        if isinstance(module, ParamWrapper) and four_bits(module.get_base_layer()):
            module._activate_lora = _refuse_to_activate


def _refuse_to_merge(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "Adapters cannot be merged into experts in 4 bits. Save them, load them with `PeftModel.from_pretrained` on "
        "the model in 16 bits, and merge there."
    )


def _refuse_to_activate(active_adapters: Sequence[str]) -> contextlib.AbstractContextManager[None]:
    if active_adapters:
        raise RuntimeError(
            "Adapters on experts in 4 bits run in our operator alone, as PEFT's own forward is wrong for them. Call "
            "`apply_liger_kernel(model)` or train with a trainer of liger_trainer, with `experts` and `lora` left on; "
            "take hooks off the experts; without autocast, give them hidden states in their own dtype."
        )
    return contextlib.nullcontext()


def check_adapted(model: nn.Module) -> None:
    """Checks that no adapter was meant for experts that were in 4 bits already, where PEFT makes none.

    Raises:
        ValueError: naming it.
    """
    _, ParamWrapper, *_ = require(ADAPTERS_ON_FOUR_BITS)
    experts = {path.replace(".base_layer", ""): four_bits(module) for path, module in model.named_modules()}
    wrapped = {
        (path.replace(".base_layer", ""), wrapper.parameter_name, adapter)
        for path, wrapper in model.named_modules()
        if isinstance(wrapper, ParamWrapper)
        for adapter in wrapper.lora_A
    }
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        for target in getattr(config, "target_parameters", None) or ():
            for path, weights in experts.items():
                meant = [name for name in weights if f"{path}.{name}".endswith(f".{target}")]
                if any((path, name, adapter) not in wrapped for name in meant):
                    raise ValueError(
                        f"The adapter {adapter!r} names {target!r}, but {path} was in 4 bits when it was made, and has "
                        "none. Make or load adapters first, and call `quantize_experts` after."
                    )


def stacked_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that hold stacked weights of experts in a floating dtype, and the names of these."""
    for module in model.modules():
        for name in PARAMETERS:
            weight = module._parameters.get(name)
            if weight is not None and weight.dim() == 3 and weight.is_floating_point():
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
    dtype: torch.dtype


@contextlib.contextmanager
def kept_in_4_bits(module: nn.Module, names: Sequence[str]) -> Iterator[list[torch.Tensor]]:
    """The weights `names` of `module`, floating, which a backward of what runs in here keeps in 4 bits."""
    quantised = four_bits(module)
    weights = [getattr(module, name) for name in names]
    if quantised:  # what an operator would make of them is a copy that is not known for what it is
        weights = [as_autocast(weight) if name in quantised else weight for name, weight in zip(names, weights)]
    again = {
        (weight.data_ptr(), weight.shape, weight.stride()): _Again(module, name, weight.dtype)
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
        return getattr(kept.module, kept.name).to(kept.dtype) if isinstance(kept, _Again) else unpack_rest(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield weights


def _hooks_around() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """What a checkpoint, or offloading, does with saved tensors: torch would run our hooks in the place of theirs.

    None where that is not known, as in a graph that is compiled; then weights are saved floating.
    """
    if torch.compiler.is_compiling() or not available(SAVED_IN_FOUR_BITS):
        return None
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or (_as_it_is, _as_it_is)


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved
