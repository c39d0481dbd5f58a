"""Counts the parameters of a model by kind, and which are trained, from a model on the meta device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.lowbit.buffers import LARGEST
from liger_trainer.optim.states import has_whole_blocks

NF4_BYTES = 0.5 + 4 / 64  # bitsandbytes: 4 bits, and an fp32 scale per 64 elements
NESTED_NF4_BYTES = 0.5 + (1 + 4 / 256) / 64  # 8-bit scales, and an fp32 scale per 256 of those
_OF_PEFT = r"^base_model\.model\.|\.base_layer"  # in the names of parameters
ONE_BYTE = 1.0  # int8, and fp8; their scales, one for each row, are not counted


@dataclasses.dataclass(frozen=True)
class Group:
    """A group of parameters."""

    elements: int = 0  # number of elements
    bytes: float = 0.0  # bytes of all elements
    trained: int = 0  # number of trained elements
    trained_bytes: float = 0.0  # bytes of the trained elements; their gradients take as many

    def __add__(self, other: Group) -> Group:
        return Group(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, share: float) -> Group:
        """A fraction of the group."""
        elements, trained = round(share * self.elements), round(share * self.trained)
        return Group(elements, share * self.bytes, trained, share * self.trained_bytes)

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the elements that are not trained."""
        return self.bytes - self.trained_bytes


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a model."""

    # By kind: ``"embedding"``, ``"head"``, ``"experts"``, ``"layers"`` (the rest of the decoder layers), ``"adapters"``
    # (LoRA, and copies of ``modules_to_save``) and ``"other"`` (final norm, vision tower). A head that is tied to the
    # embedding counts as the embedding.
    groups: dict[str, Group]
    layer: Group  # the largest decoder layer, adapters included
    layers: int  # number of decoder layers
    tied: bool  # whether head and embedding are one parameter
    head_trained: bool  # whether the head's weight gets a gradient
    factored: int  # elements of Adafactor's state: rows plus columns of each trained matrix
    largest: int  # elements of the largest trained parameter
    in_blocks: int = 0  # elements of the trained bf16 parameters whose moments `LigerAdamW` keeps in 8 bits
    # Elements of 4-bit and packed weights that are dequantised at once: those of the largest weight, or of all experts
    # of a layer; 0 without such weights.
    dequantised: int = 0

    @property
    def total(self) -> Group:
        """All parameters."""
        return sum(self.groups.values(), Group())

    @property
    def root(self) -> Group:
        """FSDP's outermost unit: all parameters outside the decoder layers."""
        return self.groups["embedding"] + self.groups["head"] + self.groups["other"]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers of a model: the list of modules with the most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers, so its memory cannot be planned.")
    return max(lists, key=lambda found: sum(parameter.numel() for parameter in found.parameters()))


def count_parameters(
    model: Any,
    bits: int | None = None,
    nested: bool = False,
    fp8_base: bool = False,
    packed: Callable[[str, bool], float | None] | None = None,
) -> Parameters:
    """Counts `model`, which may be on the meta device and wrapped by PEFT.

    Args:
        model: A Hugging Face model, or a PEFT model of one.
        bits: 4 or 8 if bitsandbytes will quantise the linear layers, else None. With 4, stacked experts are quantised
            too (`quantize_experts`). The head never is.
        nested: Whether the scales of 4-bit weights are quantised too (double quantisation).
        fp8_base: Whether the linear layers of the decoder, adapters excepted, are stored in fp8; those of a checkpoint
            in fp8 that stays packed are then not decoded.
        packed: For a checkpoint that stays packed, what says the bytes of an element of a weight of the decoder
            (`bytes_of_weights`).
    """
    layers = decoder_layers(model)
    inside = {id(parameter) for parameter in layers.parameters()}
    embedding, head = _weight(model.get_input_embeddings()), _weight(model.get_output_embeddings())
    if packed is not None:
        widths, dequantised = _packed(model, layers, packed, fp8_base)
    else:
        quantised = _quantised(model if bits else layers, head) if bits or fp8_base else {}
        stacked = _stacked(model) if bits == 4 else {}
        width = ONE_BYTE if bits == 8 or fp8_base else NESTED_NF4_BYTES if nested else NF4_BYTES
        widths = dict.fromkeys([*quantised, *stacked], width)
        dequantised = max(*quantised.values(), sum(stacked.values()) // len(layers), 0) if bits == 4 else 0
    groups = dict.fromkeys(("embedding", "head", "experts", "layers", "adapters", "other"), Group())
    factored = largest = in_blocks = 0
    for name, parameter in model.named_parameters():
        kind = _kind(name, parameter, embedding, head, inside)
        groups[kind] += _group(parameter, widths.get(id(parameter)))
        if parameter.requires_grad:
            shape = parameter.shape
            factored += sum(shape[-2:]) * shape[:-2].numel() if len(shape) > 1 else shape.numel()
            largest = max(largest, parameter.numel())
            in_blocks += parameter.numel() * (parameter.dtype == torch.bfloat16 and has_whole_blocks(parameter))
    each = (_sum(layer, widths) for layer in layers)
    return Parameters(
        groups=groups,
        layer=max(each, key=lambda group: group.elements),
        layers=len(layers),
        tied=head is not None and head is embedding,
        head_trained=head is not None and head.requires_grad,
        factored=factored,
        largest=largest,
        in_blocks=in_blocks,
        dequantised=dequantised,
    )


def _weight(module: Any) -> nn.Parameter | None:
    saved = getattr(module, "modules_to_save", None)  # PEFT's trained copy of a whole module
    if saved:
        module = next(iter(saved.values()))
    return getattr(getattr(module, "base_layer", module), "weight", None)


def _kind(name: str, parameter: Any, embedding: Any, head: Any, inside: set[int]) -> str:
    if parameter is embedding:
        return "embedding"
    if parameter is head:
        return "head"
    if ".lora_" in name or ".modules_to_save." in name:
        return "adapters"
    if id(parameter) not in inside:
        return "other"
    stacked = parameter.dim() == 3 and parameter.shape[1] > 1  # and no convolution of each channel
    return "experts" if stacked or ".experts." in name else "layers"


def _quantised(model: nn.Module, head: nn.Parameter | None) -> dict[int, int]:
    """Ids and sizes of the weights that bitsandbytes quantises: linear layers except the head and adapters."""
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    weights = (module.weight for name, module in linear if "lora_" not in name and module.weight is not head)
    return {id(weight): weight.numel() for weight in weights}


def _stacked(model: nn.Module) -> dict[int, int]:
    """Ids and sizes of the frozen stacked weights of experts."""
    from liger_trainer.patching.moe.quantized_experts import stacked_weights

    found = (module.get_parameter(name) for module, name in stacked_weights(model))
    return {id(weight): weight.numel() for weight in found if weight is not None}


def _packed(
    model: nn.Module, layers: nn.Module, width: Callable[[str, bool], float | None], in_fp8: bool
) -> tuple[dict[int, float], int]:
    """The bytes of an element of each packed weight, by its id, and how many elements are decoded at once."""
    names = {id(one): re.sub(_OF_PEFT, "", name) for name, one in model.named_parameters()}
    linears, stacks = _quantised(layers, None), _stacked(model)
    widths = {each: width(names[each].removesuffix(".weight"), each in stacks) for each in linears | stacks}
    found = {each: one for each, one in widths.items() if one is not None}
    decoded = [size for each, size in linears.items() if each in found and not (in_fp8 and found[each] == ONE_BYTE)]
    return found, _decoded_at_once(decoded, [size for each, size in stacks.items() if each in found])


def _decoded_at_once(linears: Sequence[int], stacks: Sequence[int]) -> int:
    """Elements of the buffers that packed weights are decoded in: one, and one more for the experts' second layer.

    Stacks larger than `LARGEST`, in 16 bits, are decoded in parts of that size.
    """
    parts = [min(stack, LARGEST // 2) for stack in stacks] or [0]
    return max([*linears, *parts]) + (min(parts) if stacks else 0)


def _group(parameter: torch.Tensor, width: float | None) -> Group:
    size = parameter.numel() * (parameter.element_size() if width is None else width)
    trained = parameter.requires_grad
    return Group(parameter.numel(), size, parameter.numel() if trained else 0, size if trained else 0.0)


def _sum(module: nn.Module, widths: dict[int, float]) -> Group:
    return sum((_group(parameter, widths.get(id(parameter))) for parameter in module.parameters()), Group())
