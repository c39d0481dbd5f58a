"""Which weights of a checkpoint are packed, by the names, dtypes and shapes in the headers of its files.

A `quantization_config` says what was meant to be quantised; the headers say what was. The tensors of one matrix, codes
and scales, share an owner, such as ``model.layers.0.mlp.up_proj``. transformers renames tensors that a checkpoint names
differently, and stacks the matrices of experts; its own rules are applied here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import PACKED_CHECKPOINTS
from liger_trainer.packed.formats import HARMLESS

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip

_PACKED = ("weight_packed", "qweight")
_SCALES = ("weight_scale_inv", "weight_scale")
_BESIDE = {"qweight": (("scales",), ("qzeros",)), "weight_packed": (("weight_scale",),), "weight": (_SCALES,)}
"""For codes, the tensors that must be beside them: one of each group."""
_WITHOUT_CODES = (*_SCALES, "weight_global_scale", "weight_scale_2", "qzeros")
_OF_STACKS = ("_blocks", "_scales", "_scale_inv")
ENDING_OF_STACKS = f"({'|'.join(_OF_STACKS)})$"
"""How the names of tensors of stacked experts end, after the name of the parameter."""


class DamagedError(ValueError):
    """A checkpoint lacks some of its tensors, or holds values that no weight can have."""

    def __init__(self, what: str) -> None:
        super().__init__(f"The checkpoint is damaged: {what}. Download or write it again.")


class Tensor(NamedTuple):
    """What a file's header says about a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Stack(NamedTuple):
    """A parameter of experts that transformers stacks from matrices of the checkpoint.

    Args:
        matrix: The tensors of each matrix, by the last parts of their names, after the owner's.
        parts: How many matrices of an expert lie one below the other, such as 2 for gate and up.
        operations: The names of the operations that stack the matrices.
        owners: The owners of the matrices, if they come from a checkpoint.
    """

    matrix: dict[str, Tensor]
    parts: int
    operations: tuple[str, ...]
    owners: tuple[str, ...] = ()


class Packed(NamedTuple):
    """The packed weights of a checkpoint, by the names of the model's modules and parameters.

    Args:
        linears: The tensors of each packed linear layer.
        stacks: The matrices from which each packed parameter of experts is stacked.
        experts: The tensors of each module of experts whose parameters are stacked in the checkpoint.
        beside: The names in the model of tensors of layers that are not packed, such as scales of a KV cache, which
            the model has not, by their names in the checkpoint.
        missing: For each weight of a linear layer or of stacked experts that is not in the checkpoint, the last parts
            of the names of tensors that are there in its place.
    """

    linears: dict[str, dict[str, Tensor]]
    stacks: dict[str, Stack]
    experts: dict[str, dict[str, Tensor]]
    beside: dict[str, str]
    missing: dict[str, list[str]]


def read_headers(files: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint's files, by their names.

    Raises:
        ValueError: For a file in another format.
        DamagedError: For one that is missing or cut short.
    """
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"`packed_base` reads safetensors, but the checkpoint has {file}. Set it to false.")
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    found[name] = Tensor(_DTYPES.get(part.get_dtype(), torch.bool), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise DamagedError(f"{str(file)!r} is no whole safetensors file ({reason})") from error
    return found


def packed_in(model: Any, headers: Mapping[str, Tensor]) -> Packed:
    """The packed weights in `headers` for `model`, which is built as it would be without quantisation.

    Raises:
        DamagedError: If a weight lacks its scales or its codes, or a matrix of a stack is unlike the others.
    """
    rename_source_key, get_model_conversion_mapping, WeightConverter, WeightRenaming, *_ = require(PACKED_CHECKPOINTS)
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_source = {source: rule for rule in converters for source in rule.source_patterns}
    state = model.state_dict()

    def renamed(name: str) -> tuple[str, str | None]:
        return rename_source_key(name, renamings, converters, model.base_model_prefix, state)

    owners: dict[str, dict[str, Tensor]] = {}
    for name, tensor in headers.items():
        owner, _, leaf = name.rpartition(".")
        owners.setdefault(owner, {})[leaf] = tensor
    modules = {path for path, _ in model.named_modules()}
    packed = Packed({}, {}, {}, {}, {})
    present: set[str] = set()
    for owner, tensors in owners.items():
        if _is_packed(tensors):
            name, source = renamed(f"{owner}.weight")
            if name not in state:  # of a part that the model lacks, such as one for multi-token prediction
                continue
            present.add(name)
            _check_beside(owner, tensors)
            if source is None:
                packed.linears[name.removesuffix(".weight")] = tensors
            elif name not in packed.stacks:
                rule = by_source[source]
                operations = tuple(type(operation).__name__ for operation in rule.operations)
                packed.stacks[name] = Stack(tensors, len(rule.source_patterns), operations, (owner,))
            else:
                packed.stacks[name] = _with(packed.stacks[name], owner, tensors)
            continue
        for leaf in tensors:
            name, source = renamed(f"{owner}.{leaf}")
            first, *others = by_source[source].target_patterns if source is not None else [""]
            present |= {name, *(name.replace(first, other) for other in others)}
            # A bias would be of a layer that the model has without one.
            if leaf in HARMLESS and leaf != "bias" and name not in state and name.rpartition(".")[0] in modules:
                packed.beside[f"{owner}.{leaf}"] = name
        if any(leaf in tensors for leaf in _WITHOUT_CODES):
            if renamed(f"{owner}.weight")[0] in state:
                weight = tensors.get("weight")
                no = "neither codes nor a weight" if weight is None else f"no codes: its weight is in {weight.dtype}"
                raise DamagedError(f"{owner!r} has {_listed(tensors)}, and {no}")
        elif any(leaf.endswith(_OF_STACKS) for leaf in tensors):
            names = {renamed(f"{owner}.{re.sub(ENDING_OF_STACKS, '', leaf)}")[0] for leaf in tensors}
            if found := names & state.keys():
                packed.experts[found.pop().rpartition(".")[0]] = tensors
                present |= names
    may_lack = model._keys_to_ignore_on_load_missing or ()
    for name in sorted(_weights(model) - present - model.all_tied_weights_keys.keys()):
        if not any(re.search(pattern, name) for pattern in may_lack):
            beside = (each for each in present - state.keys() if each.startswith(f"{name.rpartition('.')[0]}."))
            packed.missing[name] = sorted({each.rpartition(".")[2] for each in beside})
    return packed


def _weights(model: Any) -> set[str]:
    """The names of the weights of linear layers and stacked experts, without those of a head."""
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    linears = {f"{path}.weight" for path, module in base.named_modules() if isinstance(module, nn.Linear)}
    stacks = {name for name, each in base.named_parameters() if ".experts." in name and each.dim() == 3}
    return {f"{prefix}{name}" for name in linears | stacks}


def _check_beside(owner: str, tensors: Mapping[str, Tensor]) -> None:
    """Checks that codes have their scales, and zeros where these are needed, beside them."""
    codes = next(name for name in _BESIDE if name in tensors)
    for group in _BESIDE[codes]:
        if not any(name in tensors for name in group):
            raise DamagedError(f"{owner!r} has {_listed(tensors)}, and no {' or '.join(map(repr, group))}")


def _with(stack: Stack, owner: str, tensors: dict[str, Tensor]) -> Stack:
    """`stack` with one more matrix, which has the same tensors as the others."""
    first = stack.owners[0]
    for name in [*stack.matrix, *tensors]:
        has, expected = (each.get(name) for each in (tensors, stack.matrix))
        if has != expected and (name == "g_idx" or name not in HARMLESS):
            found, other = (f"{each.dtype} of {each.shape}" if each else "missing" for each in (has, expected))
            raise DamagedError(
                f"{f'{owner}.{name}'!r} is {found}, and {f'{first}.{name}'!r}, with which it is stacked, {other}"
            )
    return stack._replace(owners=(*stack.owners, owner))


def _listed(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(map(repr, sorted(tensors)))


def _is_packed(tensors: Mapping[str, Tensor]) -> bool:
    if any(name in tensors for name in _PACKED):
        return True
    return "weight" in tensors and tensors["weight"].dtype.itemsize == 1
