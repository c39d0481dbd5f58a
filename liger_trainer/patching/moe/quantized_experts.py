"""Stacked weights of experts in 4 bits, for QLoRA (arXiv 2305.14314) of a mixture of experts.

bitsandbytes quantises linear layers only, so 55 of the 57 GiB of a model like Qwen3-30B-A3B stay in 16 bits.
`quantize_experts` quantises the stacked weights with bitsandbytes' own function, and a torch parametrisation
dequantises them where a module reads them. So they work with every implementation of the experts. With ours, the 4 bits
are saved for the backward, which dequantises them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize

from liger_trainer.compat.bitsandbytes import QUANTISED_EXPERTS
from liger_trainer.compat.peft import ADAPTERS_ON_FOUR_BITS
from liger_trainer.compat.private import available, require
from liger_trainer.compat.torch import FOUR_BIT_EXPERTS, MODULE_CONTENTS, SAVED_IN_FOUR_BITS
from liger_trainer.kernels.lora.nf4 import NestedAbsmax, NF4Weight, nf4_dequantize
from liger_trainer.kernels.runtime import as_autocast
from liger_trainer.packed.experts import packed_stacks, parts_of_stacks
from liger_trainer.patching.lora.guards import leave_adapters_to_us

require(FOUR_BIT_EXPERTS)
require(MODULE_CONTENTS)

_NOT_INTO_FOUR_BITS = (
    "Adapters cannot be merged into experts in 4 bits. Save them, load them with `PeftModel.from_pretrained` on the "
    "model in 16 bits, and merge there."
)
_OURS_ALONE = (
    "Adapters on experts in 4 bits run in our operator alone, as PEFT's own forward is wrong for them. Call "
    "`apply_liger_kernel(model)` or train with a trainer of liger_trainer, with `experts` and `lora` left on; remove "
    "hooks from the experts; without autocast, give them hidden states in their own dtype."
)

PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
QUANT_TYPES = ("nf4", "fp4")


class FourBits(nn.Module):
    """The parametrisation of one stacked weight: it dequantises the 4 bits.

    The scales of the blocks are frozen parameters, because DDP would broadcast buffers at every forward.
    """

    code: torch.Tensor

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.shape, self.dtype, self.blocksize = tuple(state.shape), state.dtype, state.blocksize
        self.quant_type: str = state.quant_type
        self.nested_blocksize = state.state2.blocksize if state.nested else 0
        statistics = {"absmax": state.absmax, "code": state.code}
        if state.nested:
            inner = state.state2
            statistics |= {"inner_code": inner.code, "inner_absmax": inner.absmax, "offset": state.offset.view(1)}
        for name, tensor in statistics.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """The weight, (experts, ...), in the dtype that it had before quantisation; it has no gradient."""
        absmax, code, *nested = (parameter.data for parameter in self.parameters())
        inner = NestedAbsmax(nested[0], nested[1], nested[2], self.nested_blocksize) if nested else None
        rows = self.shape[0] * self.shape[1]
        weight = NF4Weight(packed, absmax, code, (rows, self.shape[2]), self.blocksize, inner)
        return nf4_dequantize(weight, self.dtype).view(self.shape)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FourBits:
        """Moves with the model. A cast changes the dtype of the dequantised weight, not that of the scales."""
        for parameter in self.parameters():
            moved = fn(parameter.data)
            parameter.data = moved if moved.dtype == parameter.dtype else parameter.data.to(moved.device)
        self.dtype = fn(self.code.new_empty(0, dtype=self.dtype)).dtype
        return self


def quantize_experts(
    model: nn.Module, quant_type: str = "nf4", double_quant: bool = True, device: torch.device | str | None = None
) -> int:
    """Quantises the stacked weights of all experts of `model` to 4 bits, and freezes them.

    It needs bitsandbytes; `from_pretrained` may or may not have quantised the rest of the model. Weights move to
    `device` one by one, so a GPU never holds more than one of them in 16 bits if the model is in host memory. Create or
    load adapters on them first, because PEFT cannot find the names of weights in 4 bits::

        model = get_peft_model(model, LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
        quantize_experts(model)

    The adapters run in our operator only (`apply_liger_kernel`, our trainers). To merge them, load them with
    `PeftModel.from_pretrained` on the model in 16 bits. Save adapters only: `save_pretrained` of the model itself
    leaves out the experts.

    Args:
        model: A model with stacked weights `(experts, ...)` named `gate_up_proj` or `up_proj`, and `down_proj`.
        quant_type: ``"nf4"`` or ``"fp4"``.
        double_quant: Whether the scales of the blocks of 64 are quantised too.
        device: Where the weights are quantised and stay; by default, where they are.

    Returns:
        How many weights were quantised.

    Raises:
        ValueError: for an unknown `quant_type`, a model without stacked experts or with merged adapters, and weights
            with more elements than bitsandbytes supports.
    """
    from bitsandbytes.functional import quantize_4bit

    require(ADAPTERS_ON_FOUR_BITS)  # before anything has changed
    require(QUANTISED_EXPERTS)
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
    # PEFT would merge adapters into a dequantised copy, which is then lost; and its own forward (0.21.2) adds the
    # adapter to the parametrised weight at every call and never removes it.
    leave_adapters_to_us(model, four_bits, _NOT_INTO_FOUR_BITS, _OURS_ALONE)
    return len(found)


def round_experts(model: nn.Module, quant_type: str = "nf4", double_quant: bool = False) -> None:
    """Gives the experts of `model` the numbers of 4 bits, in the dtype that they have, as `quantize_experts` rounds."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for module, name in list(stacked_weights(model)):
        weight = module._parameters[name]
        assert weight is not None
        weight.data.copy_(
            dequantize_4bit(*quantize_4bit(weight.data, compress_statistics=double_quant, quant_type=quant_type))
        )


def check_adapted(model: nn.Module) -> None:
    """Checks that no adapter targets experts that were in 4 bits already when it was created: PEFT skips those."""
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
                        "none. Make or load adapters first, then call `quantize_experts`."
                    )


def stacked_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules with stacked weights of experts in a floating dtype, and the names of these weights."""
    for module in model.modules():
        for name in PARAMETERS:
            weight = module._parameters.get(name)
            if weight is not None and weight.dim() == 3 and weight.is_floating_point():
                yield module, name


def four_bits(module: nn.Module) -> dict[str, FourBits]:
    """The weights of `module` that are in 4 bits and have no other parametrisation."""
    parametrizations: Any = module._modules.get("parametrizations") or {}
    return {name: one for name, (one, *more) in parametrizations.items() if type(one) is FourBits and not more}


def in_few_bits(module: nn.Module) -> set[str]:
    """The names of the stacked weights of `module` that are in 4 bits, or packed as they were published."""
    return {*four_bits(module), *packed_stacks(module)}


def declared_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of `module`; for one in few bits, a tensor of its shape and dtype that takes no memory."""
    parts = parts_of_stacks(module)
    weights: dict[str, torch.Tensor] = {
        name: one for name, one in module._parameters.items() if one is not None and name not in parts
    }
    for name, stack in packed_stacks(module).items():
        weights[name] = torch.empty(1, dtype=stack.dtype, device=stack.weight.device).expand(stack.shape)
    for name, one in four_bits(module).items():
        weights[name] = one.code.new_empty(1, dtype=one.dtype).expand(one.shape)
    return weights


class _Again(NamedTuple):
    """A saved weight that is dequantised again when the backward reads it."""

    module: nn.Module
    name: str
    dtype: torch.dtype


@contextlib.contextmanager
def saved_in_4_bits(module: nn.Module, names: Sequence[str]) -> Iterator[list[torch.Tensor]]:
    """The dequantised weights `names` of `module`; operators inside save them for the backward in 4 bits."""
    quantised = four_bits(module)
    weights = [getattr(module, name) for name in names]
    if quantised:  # a cast inside an operator would be a copy that is not recognised
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

    def unpack(packed: Any) -> torch.Tensor:
        return (
            getattr(packed.module, packed.name).to(packed.dtype) if isinstance(packed, _Again) else unpack_rest(packed)
        )

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield weights


def _hooks_around() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None:
    """The saved-tensor hooks of a checkpoint or of offloading, which torch would otherwise skip in favour of ours.

    None if they are not known, as in a compiled graph; weights are then saved dequantised.
    """
    if torch.compiler.is_compiling() or not available(SAVED_IN_FOUR_BITS):
        return None
    return torch._C._autograd._top_saved_tensors_default_hooks(False) or (_as_it_is, _as_it_is)


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved
