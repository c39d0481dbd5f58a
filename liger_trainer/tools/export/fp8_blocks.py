"""Merged weights in the FP8 blocks or rows that their base was published in, and how much of the change that leaves.

A block, or a row, keeps its published scale, with which a weight that did not change keeps its code, unless the scale
that its largest merged weight asks for rounds the block with less error. Neighbouring codes of e4m3 are 6 to 12 %
apart: a smaller change of a weight is rounded away, or to a larger one. So this is measured, over the weights that
changed: with D the change that the adapters make, and G the one that is left,

::

    share = <G, D> / <D, D>        error = |G - D| / |D|
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import PUBLISHED_NAMES
from liger_trainer.errors import UserError
from liger_trainer.kernels.lowbit.decode import decode
from liger_trainer.kernels.lowbit.formats import BlockFp8Weight
from liger_trainer.packed.experts import packed_stacks
from liger_trainer.packed.loading import method_of, quantization_of
from liger_trainer.packed.modules import PackedLinear

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_FOUR_BITS = ("mxfp4", "nvfp4", "int4", "gptq", "awq")


class Kept(NamedTuple):
    """What is left of a change."""

    share: float  # along the change; 1 is all of it
    error: float  # what is left beside that and what is lost, relative to the change


class Survival(NamedTuple):
    """What is left of the change that adapters make, in a model whose weights were quantised again."""

    model: Kept
    layers: dict[str, Kept]  # by the names of the weights; only those that changed

    @property
    def worst(self) -> str | None:
        """The weight that keeps the smallest share of its change; None if no weight changed."""
        return min(self.layers, key=lambda name: self.layers[name].share, default=None)

    def as_dict(self) -> dict[str, Any]:
        """The numbers, for a file."""
        layers = {name: kept._asdict() for name, kept in self.layers.items()}
        return {**self.model._asdict(), "worst": self.worst, "layers": layers}


def check_form(to: str, settings: Any, given: str) -> None:
    """Refuses to merge into the format `to` where the base, named `given`, was published with other `settings`.

    Raises:
        UserError: Unless `to` is ``"fp8"`` and the base is in transformers' FP8 blocks, or compressed-tensors' FP8 with
            a scale a block or row, whose activations, if they are quantised, have no scales of their own in the files.
    """
    if to in _FOUR_BITS:
        raise UserError(
            f"`--to` is {to!r}: merging into 4 bits would lose most of the adapters. Leave `--to` out, which merges "
            "into 16 bits, or serve the adapters beside their base."
        )
    if to != "fp8":
        raise UserError(f"`--to` is {to!r}; it may be 'fp8', or left out, which merges into 16 bits.")
    named = settings if isinstance(settings, Mapping) or settings is None else settings.to_dict()
    if named is None or not _has_blocks(named):
        form = "without quantisation" if named is None else f"in another format ({_form(named)})"
        raise UserError(
            f"`--to fp8` writes the FP8 that a base was published in: blocks (`quant_method` fp8 with a "
            f"`weight_block_size`), or compressed-tensors with a scale a row or block, and {given} was published "
            f"{form}. Leave `--to` out, which merges into 16 bits."
        )


def _form(settings: Mapping[str, Any]) -> str:
    """The format that quantisation settings name, with what tells it from others of its method."""
    named = settings.get("format") or settings.get("quant_algo")
    groups = (settings.get("config_groups") or {}).values()
    further = [f"{(group.get('weights') or {}).get('strategy')} scales" for group in groups]
    if settings.get("quant_method") == "fp8":
        further = ["a scale a matrix"]
    if any((group.get("input_activations") or {}).get("dynamic") is False for group in groups):
        further.append("fixed scales of activations")
    return ", ".join(map(str, filter(None, (settings.get("quant_method"), named, *dict.fromkeys(further)))))


def _has_blocks(settings: Mapping[str, Any]) -> bool:
    if settings.get("quant_method") == "fp8":
        return bool(settings.get("weight_block_size"))
    groups = (settings.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    inputs = [group.get("input_activations") or {"dynamic": True} for group in groups]
    return bool(
        settings.get("quant_method") == "compressed-tensors"
        and groups
        and all((each.get("num_bits"), each.get("type")) == (8, "float") for each in weights)
        and all(each.get("strategy") in ("channel", "block") for each in weights)
        and all(each.get("dynamic") for each in inputs)
    )


@torch.no_grad()
def in_blocks(weight: torch.Tensor, published: BlockFp8Weight, powers: bool = False) -> BlockFp8Weight:
    """`weight` rounded to e4m3 in the blocks of `published`, each with its scale, or a better one.

    Args:
        weight: (N, K) or (E, N, K), fp32.
        published: The weight that has these blocks and scales, of the same shape.
        powers: Whether scales are powers of two, as those in e8m0 always are.
    """
    rows, columns = published.block
    tiles = F.pad(weight, (0, -weight.shape[-1] % columns, 0, -weight.shape[-2] % rows))
    tiles = tiles.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    reach = tiles.abs().amax((-3, -1)) / _LARGEST
    in_e8m0 = published.scales.dtype == torch.uint8
    if powers or in_e8m0:
        reach = reach.log2().ceil().add(127).clamp(0, 254).to(torch.uint8)
    if powers and not in_e8m0:
        reach = reach.view(torch.float8_e8m0fnu)
    other = reach.to(published.scales.dtype)
    codes, error = _rounded(tiles, published)
    other_codes, other_error = _rounded(tiles, published._replace(scales=other))
    better = other_error < error
    scales = torch.where(better, other, published.scales)
    codes = torch.where(better[..., :, None, :, None], other_codes, codes).flatten(-4, -3).flatten(-2)
    return BlockFp8Weight(codes[..., : weight.shape[-2], : weight.shape[-1]].contiguous(), scales, published.block)


def _rounded(tiles: torch.Tensor, scaled: BlockFp8Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of blocks with the scales of `scaled`, as bytes, and the sum of the squared errors of each."""
    factor = scaled.typed_scales.float()[..., :, None, :, None]
    codes = (tiles / factor.where(factor != 0, 1)).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), (codes.float() * factor - tiles).square().sum((-3, -1))


@torch.no_grad()
def quantise_again(merged: Any, packed: Any, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Survival]:
    """The weights of `merged` that are packed in its base, in the base's blocks, and what is left of their change.

    Args:
        merged: The merged model, in fp32. Its weights become what their codes mean, in `dtype`.
        packed: The base, as it was published, in the dtype of the training.
        dtype: The dtype of the merged model's other weights.

    Returns:
        Codes and scales, by their names in the checkpoint; and the numbers.
    """
    scale = "_scale_inv" if method_of(packed.config) == "fp8" else "_scale"
    published = dict(_other_tensors(merged, packed))
    sums: dict[str, tuple[float, float, float]] = {}
    settings = quantization_of(packed.config)
    named = settings if isinstance(settings, Mapping) else settings.to_dict()
    powers = named.get("scale_fmt") == "ue8m0"
    for name, weight in packed_weights(packed):
        parameter = merged.get_parameter(name)
        before = decode(weight, packed.dtype).float()
        if not torch.equal(parameter.data, before):
            weight = in_blocks(parameter.data, weight, powers)
            change, left = parameter.data - before, decode(weight, dtype).float() - before
            sums[name] = (_dot(left, change), _dot(change, change), _dot(left - change, left - change))
        parameter.data = decode(weight, dtype)
        published |= _named(merged, name, weight, scale)
    total = tuple(sum(column) for column in zip(*sums.values(), strict=True)) or (0.0, 0.0, 0.0)
    return published, Survival(_kept(*total), {name: _kept(*each) for name, each in sums.items()})


def packed_weights(packed: nn.Module) -> Iterator[tuple[str, BlockFp8Weight]]:
    """The packed weights of a model, by the names that they have in the dequantised one."""
    for path, module in packed.named_modules():
        if isinstance(module, PackedLinear):
            yield f"{path}.weight", module.packed  # type: ignore[misc]
        for leaf, stack in packed_stacks(module).items():
            yield f"{path}.{leaf}", stack.weight  # type: ignore[misc]


def _other_tensors(merged: Any, packed: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What the checkpoint has beside codes, scales of weights and what the model holds, by its names there."""
    for path, module in packed.named_modules():
        for own, name, tensor in module.published() if isinstance(module, PackedLinear) else ():
            if own not in BlockFp8Weight._fields:
                (key,) = require(PUBLISHED_NAMES)[0](merged, {f"{path}.weight": tensor})
                yield f"{key.removesuffix('weight')}{name}", tensor
    yield from packed.hf_quantizer.read_left_out().items()


def _named(model: Any, name: str, weight: BlockFp8Weight, scale: str) -> dict[str, torch.Tensor]:
    """Codes and scales by their published names; those of a stack taken apart, as transformers writes a checkpoint."""
    revert_weight_conversion = require(PUBLISHED_NAMES)[0]
    codes = weight.codes.view(torch.float8_e4m3fn)
    found = {key: part.clone() for key, part in revert_weight_conversion(model, {name: codes}).items()}
    for key, part in revert_weight_conversion(model, {name: weight.typed_scales}).items():
        found[f"{key}{scale}"] = part.clone()  # files take no shared memory
    return found


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one * other).sum(dtype=torch.float64).item()


def _kept(along: float, change: float, beside: float) -> Kept:
    return Kept(along / change, math.sqrt(beside / change)) if change else Kept(1.0, 0.0)
