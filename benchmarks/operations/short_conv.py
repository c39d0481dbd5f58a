"""Short convolutions of hybrid models, alone, between the gates of LFM2, and before a gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.recurrence import (
    FLA,
    by_document,
    described,
    in_one_row,
    layouts,
    numbers_of,
    of_transformers,
)
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, reference, wide
from liger_trainer.kernels.conv.delta_inputs import delta_inputs_reference
from liger_trainer.kernels.conv.gated_short_conv import gated_short_conv_reference
from liger_trainer.kernels.conv.short_conv import short_conv_reference
from liger_trainer.kernels.documents import Documents


@operation(
    "short_conv", "Short convolution: of each channel over a document, with SiLU, in place of a projection's part"
)
def short_conv_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The channels before a recurrence; Mamba 2's have a bias."""
    mixer = model.mixer
    if mixer is None or mixer.kind == "short_conv":
        return
    channels = mixer.channels
    for variant, rows, length, documents in layouts(data, tokens):
        arguments: dict[str, Any] = {"x": data.normal(rows, length, channels)}
        arguments["weight"] = data.normal(channels, mixer.taps, scale=0.5)
        arguments |= {"bias": data.normal(channels) if mixer.kind == "state_space" else None, "activation": "silu"}
        size = tokens * channels  # x and y; then x, dy and dx
        shape = described(rows, length, documents, f"{channels} channels, {mixer.taps} taps")
        upstream = (data.upstream(rows, length, channels),)
        yield Case({**arguments, "documents": documents}, shape, Floor(2 * size, 3 * size), upstream, variant)


def torch_short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Between the transpositions that the layer's projections ask for."""
    convolved = of_transformers("qwen3_5", "causal_conv1d_fn")
    return convolved(x.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)


provider("short_conv", "torch")(by_document(torch_short_conv))


@provider("short_conv", FLA)
def fla_short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, documents: Documents
) -> Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    (row,), boundaries = in_one_row(documents, x)
    return causal_conv1d(row, weight, bias, activation=activation, **boundaries)[0].view_as(x)


@provider("short_conv", "causal-conv1d")
def cuda_short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, documents: Documents
) -> Tensor:
    from causal_conv1d import causal_conv1d_fn

    options = {"seq_idx": numbers_of(documents, x), "activation": activation}
    return causal_conv1d_fn(x.transpose(1, 2), weight, bias, **options).transpose(1, 2)


library("short_conv", "liger_trainer", by_name=["activation", "documents"])
reference("short_conv")(short_conv_reference)


@operation("gated_short_conv", "Gated short convolution: C * conv(B * x) of one projection, as in LFM2")
def gated_short_conv_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Only models with such layers have a case."""
    mixer, channels = model.mixer, model.hidden
    if mixer is None or mixer.kind != "short_conv":
        return
    for variant, rows, length, documents in layouts(data, tokens):
        arguments = {"bcx": data.normal(rows, length, 3 * channels)}
        arguments["weight"] = data.normal(channels, mixer.taps, scale=0.5)
        size = tokens * channels  # three read and one written; then these read with dy, and three written
        shape = described(rows, length, documents, f"3×{channels} channels, {mixer.taps} taps")
        upstream = (data.upstream(rows, length, channels),)
        yield Case({**arguments, "documents": documents}, shape, Floor(4 * size, 7 * size), upstream, variant)


@provider("gated_short_conv", "torch")
@by_document
def torch_gated_short_conv(bcx: Tensor, weight: Tensor) -> Tensor:
    """As the layer does it, on transposed chunks."""
    before, after, x = bcx.transpose(1, 2).chunk(3, dim=1)
    convolved = of_transformers("lfm2", "causal_conv1d_fn")(before * x, weight, None)
    return (after * convolved).transpose(1, 2).contiguous()


@provider("gated_short_conv", FLA)
def fla_gated_short_conv(bcx: Tensor, weight: Tensor, documents: Documents) -> Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    before, after, x = bcx.chunk(3, dim=-1)
    (row,), boundaries = in_one_row(documents, before * x)
    return after * causal_conv1d(row, weight, **boundaries)[0].view_as(x)


library("gated_short_conv", "liger_trainer", by_name=["documents"])
reference("gated_short_conv")(gated_short_conv_reference)


@operation("delta_inputs", "Inputs of a gated delta rule: convolution and SiLU of one projection, q and k of length 1")
def delta_inputs_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Only models with gated delta nets have a case."""
    mixer = model.mixer
    if mixer is None or mixer.kind != "delta_rule":
        return
    heads = {"key_heads": mixer.key_heads, "value_heads": mixer.value_heads}
    heads |= {"key_dim": mixer.key_dim, "value_dim": mixer.value_dim}
    for variant, rows, length, documents in layouts(data, tokens):
        arguments: dict[str, Any] = {"qkv": data.normal(rows, length, mixer.channels)}
        arguments["weight"] = data.normal(mixer.channels, mixer.taps, scale=0.5)
        size = tokens * mixer.channels
        keys = data.upstream(rows, length, mixer.key_heads, mixer.key_dim)
        upstream = keys, data.upstream(*keys.shape), data.upstream(rows, length, mixer.value_heads, mixer.value_dim)
        shape = f"{mixer.key_heads}/{mixer.value_heads} heads of {mixer.key_dim}×{mixer.value_dim}, {mixer.taps} taps"
        shape = described(rows, length, documents, shape)
        yield Case({**arguments, **heads, "documents": documents}, shape, Floor(2 * size, 3 * size), upstream, variant)


def _heads_of(mixed: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> list[Tensor]:
    """Queries, keys and values, with their heads, of the convolution's result."""
    parts = mixed.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], dim=-1)
    return [part.unflatten(-1, (-1, width)) for part, width in zip(parts, (key_dim, key_dim, value_dim))]


@provider("delta_inputs", "torch")
@by_document
def torch_delta_inputs(qkv: Tensor, weight: Tensor, **heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's convolution, and the lengths that its chunk function divides by, in fp32."""
    q, k, v = _heads_of(torch_short_conv(qkv, weight, None, "silu"), **heads)
    unit = of_transformers("qwen3_5", "l2norm")
    return unit(wide(q)), unit(wide(k)), v.contiguous()


@provider("delta_inputs", FLA)
def fla_delta_inputs(qkv: Tensor, weight: Tensor, documents: Documents, **heads: int) -> tuple[Tensor, Tensor, Tensor]:
    from fla.modules.norm.l2norm import l2norm

    q, k, v = _heads_of(fla_short_conv(qkv, weight, None, "silu", documents), **heads)
    return l2norm(q.contiguous()), l2norm(k.contiguous()), v.contiguous()


library("delta_inputs", "liger_trainer", by_name=["key_heads", "value_heads", "key_dim", "value_dim", "documents"])
reference("delta_inputs")(delta_inputs_reference)
