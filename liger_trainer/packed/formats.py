"""What the tensors of a packed matrix mean: makes the weight that our operators take from those of a checkpoint.

::

    weight (8-bit floats), weight_scale_inv or weight_scale      transformers' `fp8` and `mxfp8`, compressed-tensors,
                                                                 ModelOpt
    weight_packed (bytes), weight_scale, weight_global_scale     compressed-tensors' NVFP4; without the last MXFP4
    weight (bytes), weight_scale, weight_scale_2                 ModelOpt's NVFP4
    weight_packed (int32), weight_scale, weight_zero_point ...   compressed-tensors' INT4
    qweight, qzeros, scales, g_idx                               GPTQ, and AWQ without the last
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from liger_trainer.kernels.lowbit.formats import (
    Int4Weight,
    PackedWeight,
    fp8_weight,
    int4_weight,
    mxfp4_weight,
    nvfp4_weight,
)
from liger_trainer.packed.targets import flat, settings_for

METHODS = ("fp8", "mxfp8", "mxfp4", "compressed-tensors", "modelopt", "gptq", "awq")
"""The `quant_method` of configurations whose checkpoints may stay packed."""

_SEVERAL = {"compressed-tensors": "format", "modelopt": "quant_algo"}
"""The methods that have several formats, and the setting that says which."""

_KINDS = ((8, "float"), (4, "float"), (4, "int"))
"""Bits and type of the numbers of compressed-tensors that may stay packed."""

HARMLESS = (
    *("bias", "weight_shape", "g_idx", "input_scale", "input_global_scale", "input_zero_point", "activation_scale"),
    *("output_scale", "q_scale", "k_scale", "v_scale", "kv_scale"),
)
"""Tensors that may lie beside the codes of a matrix without changing what the codes mean."""

_E4M3 = torch.float8_e4m3fn
_ORDER = "weight_g_idx"  # of compressed-tensors' INT4: the group of each column
_DEFAULT_BLOCK = (128, 128)  # of `FineGrainedFP8Config` of transformers


def format_name(settings: Any) -> str | None:
    """The format that quantisation settings name: the method and, if it has several formats, which; None without any.

    Args:
        settings: Settings of a checkpoint's configuration: a mapping, or an object of transformers.
    """
    if settings is None:
        return None
    named: Mapping[str, Any] = settings if isinstance(settings, Mapping) else settings.to_dict()
    nested = named.get("quantization_config") or {}  # transformers nests those of compressed-tensors
    inside = {**nested, **flat(named)}
    if named.get("load_in_4bit") and "bnb_4bit_quant_type" in named:
        return str(named["bnb_4bit_quant_type"])
    if named.get("quant_method") is None:
        return None
    method = str(getattr(named["quant_method"], "value", named["quant_method"]))
    form = inside.get(_SEVERAL.get(method, ""))
    return f"{method} {form}" if form else method


def bytes_of_weights(settings: Mapping[str, Any]) -> Callable[[str, bool], float | None]:
    """A function that says how many bytes each number of a weight takes in a packed checkpoint; None for 16 bits.

    It takes the name of a linear layer and False, or the name of a parameter of stacked experts and True. Scales for
    rows and tensors are not counted.

    Args:
        settings: The checkpoint's `quantization_config`.
    """

    def width(name: str, stacked: bool) -> float | None:
        found = settings_for(settings, name, stacked)
        return None if found is None or (found.get("quant_method") == "mxfp4" and not stacked) else _width(found)

    return width


def _width(settings: Mapping[str, Any]) -> float:
    """Bytes of each number of a weight with these settings, which have one group at most."""
    method, form = settings.get("quant_method"), f"{settings.get('format')} {settings.get('quant_algo')}".lower()
    if method == "mxfp4" or "mxfp4" in form:
        return 0.5 + 1 / 32
    if "nvfp4" in form:
        return 0.5 + 1 / 16
    if method in ("gptq", "awq") or "pack-quantized" in form:
        group = settings.get("group_size") or _of_weights(settings, "group_size") or 128
        zeros = 0.5 if method in ("gptq", "awq") else 0.0
        # Each group has a scale of 16 bits, and perhaps a zero of 4; -1 is one group of all columns.
        return 0.5 + (2 + zeros) / max(int(group), 32) if int(group) > 0 else 0.5
    return 1.0 + (1 / 32 if method == "mxfp8" or "mxfp8" in form else 0.0)


def packed_matrix(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...], settings: Mapping[str, Any]
) -> tuple[PackedWeight, dict[str, str]]:
    """The weight of a linear layer, or of a stack of experts, and where its tensors come from.

    Args:
        tensors: Tensors of the checkpoint, by their names behind the layer's; those of all experts stacked. They may
            be on the meta device, except `g_idx` and `weight_g_idx`.
        shape: (N, K), the layer's output and input features; (E, N, K) for a stack.
        settings: The checkpoint's `quantization_config`, of several `config_groups` the weight's (`settings_for`).

    Returns:
        The weight; and for each of its tensors, by its name there, the name in `tensors`.

    Raises:
        ValueError: If the format is not known, or its tensors do not fit.
    """
    weight, names = _matrix(tensors, shape, settings)
    if tuple(weight.shape) != shape:
        raise ValueError(f"its packed weight is {tuple(weight.shape)}, but the layer's is {shape}")
    meant = {*HARMLESS, *names.values(), *([_ORDER] if isinstance(weight, Int4Weight) else ())}
    for name in tensors:
        if name not in meant:
            raise ValueError(f"it also has {name!r}, which is not supported, and may change what its codes mean")
    return weight, names


def _matrix(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...], settings: Mapping[str, Any]
) -> tuple[PackedWeight, dict[str, str]]:
    if "qweight" in tensors:
        return _gptq_or_awq(tensors, shape, settings)
    scale = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    codes = "weight_packed" if "weight_packed" in tensors else "weight"
    names = {"codes": codes, "scales": scale}
    packed, scales = tensors[codes], tensors[scale]
    _check_codes(codes, packed, shape)
    if packed.dtype == _E4M3:
        return fp8_weight(packed, scales, fp8_block(scales, shape, settings)), names
    above = next((name for name in ("weight_global_scale", "weight_scale_2") if name in tensors), None)
    if packed.dtype == torch.uint8 and scales.dtype == _E4M3:
        if above is None:
            raise ValueError("it is in NVFP4 without a 'weight_global_scale' or a 'weight_scale_2'")
        if len(shape) == 2 and tensors[above].numel() != 1:
            raise ValueError(f"its {above!r} is {tuple(tensors[above].shape)}, and one number is expected")
        names["global_scale"] = above
        return nvfp4_weight(packed, scales, tensors[above], divides=above == "weight_global_scale"), names
    if packed.dtype == torch.uint8 and scales.element_size() == 1:
        return mxfp4_weight(packed, scales), names
    if packed.dtype == torch.int32 and packed.shape[-1] == -(-shape[-1] // 8):
        group, zeros = group_of_columns(shape[-1], scales.shape[-1], settings), tensors.get("weight_zero_point")
        group_of = tensors.get(_ORDER)
        if group_of is not None and _has_no_order(group_of, shape[-1], group):
            group_of = None
        elif group_of is not None and len(shape) > 2:
            raise ValueError(f"its experts have columns in an order of their own (`{_ORDER}`)")
        if scales.shape[:-1] != shape[:-1]:
            raise ValueError(f"its {scale!r} is {tuple(scales.shape)}; for a weight of {shape} it must have its rows")
        schemes = [*_schemes(settings)]
        if zeros is None and schemes and all(one.get("symmetric") is False for one in schemes):
            raise ValueError("it has no 'weight_zero_point', and its configuration says that it is not `symmetric`")
        names |= {} if zeros is None else {"zeros": "weight_zero_point"}
        names |= {} if group_of is None else {"group_of": _ORDER}
        return int4_weight(packed, scales, zeros, group_of, group=group, columns=shape[-1]), names
    raise ValueError(f"its format is not known: {codes} in {packed.dtype}, {scale} in {scales.dtype}")


def _check_codes(name: str, codes: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Checks the sizes of codes against those of the layer, where the dtype says how many numbers a code holds."""
    held = {_E4M3: 1, torch.uint8: 2}.get(codes.dtype)
    expected = None if held is None else (*shape[:-1], -(-shape[-1] // held))
    if expected not in (None, tuple(codes.shape)):
        raise ValueError(f"its {name!r} is {tuple(codes.shape)}; for a weight of {shape} it must be {expected}")


def fp8_block(scales: torch.Tensor, shape: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns that each of `scales` is for; None for one scale per row or per matrix."""
    rows, columns = shape[-2:]
    if scales.dim() < 2:
        return None
    grid = tuple(scales.shape[-2:])
    named = _named_block(settings)
    blocks = [named] if named is not None else []
    blocks += [(1, 32)] if scales.element_size() == 1 else []
    grids = {(-(-rows // height), -(-columns // width)): (height, width) for height, width in blocks}
    if grid in grids:
        return grids[grid]
    if grid in ((rows, 1), (1, 1)):
        return None
    expected = " or ".join(str(each) for each in dict.fromkeys([*grids, (rows, 1), (1, 1)]))
    given = "not named" if named is None else [*named]
    raise ValueError(
        f"its scales are {tuple(scales.shape)}, and blocks are {given}; for a weight of {shape} they must be {expected}"
    )


def _named_block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block that settings name, a list or text such as "128x128"; None without blocks."""
    default = _DEFAULT_BLOCK if settings.get("quant_method") == "fp8" else None
    named = settings.get("weight_block_size", default) or _of_weights(settings, "block_structure")
    if not named:
        return None
    try:
        height, width = map(int, named.lower().split("x") if isinstance(named, str) else named)
    except (TypeError, ValueError):
        raise ValueError(f"its blocks are {named!r}; they must be rows and columns, such as [128, 128]") from None
    return height, width


def group_of_columns(columns: int, groups: int, settings: Mapping[str, Any]) -> int:
    """The number of columns of a group; -1 for one group. Of several sizes in `settings`, one that gives `groups`."""
    if groups == 1:
        return -1
    named = [int(size) for one in _schemes(settings) if (size := one.get("group_size"))]
    fits = (size for size in named if size > 0 and -(-columns // size) == groups)
    return next(fits, named[0] if named else columns // groups)


def _of_weights(settings: Mapping[str, Any], key: str) -> Any:
    """What compressed-tensors' configuration says about weights, from the first of its groups that says so."""
    return next((found for found in (one.get(key) for one in _schemes(settings)) if found), None)


def _schemes(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for group in (settings.get("config_groups") or {}).values():
        yield group.get("weights") or {}


def _gptq_or_awq(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...], settings: Mapping[str, Any]
) -> tuple[PackedWeight, dict[str, str]]:
    if reason := _against_gptq_or_awq(settings):
        raise ValueError(reason)
    method, form = settings.get("quant_method"), _form_of_gptq_or_awq(settings)
    group = int(settings.get("group_size", settings.get("q_group_size", 128)))
    names = {"codes": "qweight", "scales": "scales", "zeros": "qzeros"}
    order = "awq" if method == "awq" else "gptq_v2" if form == "gptq_v2" else "gptq"
    group_of = tensors.get("g_idx") if order != "awq" else None
    if group_of is None or _is_in_order(group_of, shape[-1], group):
        group_of = None
    elif len(shape) > 2:
        raise ValueError("its experts have columns in an order of their own (`g_idx`)")
    else:
        names["group_of"] = "g_idx"
    return (
        int4_weight(tensors["qweight"], tensors["scales"], tensors["qzeros"], group_of, group=group, order=order),
        names,
    )


def _form_of_gptq_or_awq(settings: Mapping[str, Any]) -> str:
    return str(settings.get("checkpoint_format") or settings.get("format") or settings.get("version") or "").lower()


def _against_gptq_or_awq(settings: Mapping[str, Any]) -> str | None:
    """Why tensors with names of GPTQ and AWQ cannot be decoded with these settings; None if they can."""
    method, bits = settings.get("quant_method"), settings.get("bits", settings.get("w_bit", 4))
    form = _form_of_gptq_or_awq(settings)
    if bits == 4 and form in {"gptq": ("gptq", "gptq_v2", ""), "awq": ("gemm", "")}.get(str(method), ()):
        return None
    named = f"{method} {form}" if form else method
    return f"its format is {named} in {bits} bits; only GPTQ and AWQ (gemm) in 4 bits are supported"


def reason_against(settings: Any) -> str | None:
    """Why no weight of a checkpoint can stay packed, as far as its configuration says; None if nothing there does.

    Args:
        settings: Its `quantization_config`: a mapping, or an object of transformers.
    """
    named = flat(settings if isinstance(settings, Mapping) else settings.to_dict())
    method, algorithm = named.get("quant_method"), str(named.get("quant_algo")).upper()
    if any((named.get("transform_config") or {}).values()):
        return "its `quantization_config` has a `transform_config`, and inputs of packed layers are not transformed"
    if method in ("gptq", "awq"):
        return _against_gptq_or_awq(named)
    if method == "modelopt" and algorithm.startswith(("W4A", "INT")):
        return f"its format is modelopt {algorithm}; of ModelOpt's, FP8, MXFP8 and NVFP4 are supported"
    kinds = [(one.get("num_bits"), one.get("type")) for one in _schemes(named)]
    other = next((kind for kind in kinds if None not in kind and kind not in _KINDS), None)
    if method == "compressed-tensors" and other is not None and all(kind not in _KINDS for kind in kinds):
        return f"its weights are {other[1]}s of {other[0]} bits; floats of 8 and 4 bits and ints of 4 are supported"
    return None


def _has_no_order(group_of: torch.Tensor, columns: int, group: int) -> bool:
    """Whether no matrix of a stack has columns in an order of its own.

    compressed-tensors fills `weight_g_idx` with -1, and leaves it so where columns are consecutive.
    """
    rows = group_of.reshape(-1, columns)
    return _is_in_order(rows[(rows != -1).any(-1)], columns, group)


def _is_in_order(group_of: torch.Tensor, columns: int, group: int) -> bool:
    """Whether groups are consecutive columns, in all matrices of a stack."""
    expected = torch.arange(columns, device=group_of.device) // (group if group > 0 else columns)
    return torch.equal(group_of.long().flatten(), expected.repeat(group_of.numel() // columns))
