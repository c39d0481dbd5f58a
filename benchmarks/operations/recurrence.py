"""Recurrences of hybrid models: the gated delta rule, Mamba 2's state space, attention with constant decays.

Rows of 4096 tokens, as one document each and packed from documents of 512. transformers' torch functions know no
documents: they get each document as a row, which only works because all are of one length.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, reference, wide
from liger_trainer.kernels.documents import CHUNK, ROWS, Documents, documents_of
from liger_trainer.kernels.recurrence.decayed_attention import decayed_attention_reference
from liger_trainer.kernels.recurrence.delta_rule import delta_rule_reference
from liger_trainer.kernels.recurrence.state_space import state_space_reference

ROW, DOCUMENT = 4096, 512  # tokens
FLA = "flash-linear-attention"


def layouts(data: Data, tokens: int) -> Iterator[tuple[str, int, int, Documents]]:
    """For each case its variant, its rows, their tokens, and their documents."""
    length = min(tokens, ROW)
    rows, document = tokens // length, min(DOCUMENT, max(length // 4, 1))
    yield "", rows, length, ROWS
    yield "packed", rows, length, documents_of([document] * (rows * length // document), device=data.device)


def described(rows: int, length: int, documents: Documents, more: str) -> str:
    """The shape of a case, as the tables show it."""
    packed = "" if documents.spans is None else f", documents of {rows * length // len(documents.spans)}"
    return f"{rows}×{length}, {more}{packed}"


def by_document(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which knows no documents, of tensors (documents, tokens, ...) in place of (batch, tokens, ...)."""

    @functools.wraps(function)
    def run(documents: Documents, **arguments: Any) -> Any:
        if documents.spans is None:
            return function(**arguments)
        places = next(value for value in arguments.values() if isinstance(value, Tensor)).shape[:2]
        rows = len(documents.spans)
        alone = {
            name: value.reshape(rows, -1, *value.shape[2:])
            if isinstance(value, Tensor) and value.shape[:2] == places
            else value
            for name, value in arguments.items()
        }
        found = function(**alone)
        outputs = tuple(x.reshape(*places, *x.shape[2:]) for x in (found if isinstance(found, tuple) else (found,)))
        return outputs if isinstance(found, tuple) else outputs[0]

    return run


def in_one_row(documents: Documents, *tensors: Tensor) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The tensors, and the keyword with the documents' boundaries, as flash-linear-attention takes them: in one row."""
    if documents.spans is None:
        return list(tensors), {}
    ends = documents.spans[:, 0] + documents.spans[:, 1]
    return [tensor.flatten(0, 1)[None] for tensor in tensors], {"cu_seqlens": F.pad(ends, (1, 0)).long()}


@functools.cache
def of_transformers(family: str, name: str) -> Callable[..., Any]:
    """The torch function of that name in transformers, without the package that may stand before it."""
    return inspect.unwrap(getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name))


def chunk_flops(tokens: int, key_heads: int, heads: int, rows: int, columns: int, delta: bool) -> tuple[float, float]:
    """FLOPs of the products of the chunked form, forward and backward, for keys of `rows` and values of `columns`.

    The products of queries and keys are shared by the value heads of a key head. The backward makes the states again.
    """
    keys, values, state = 2 * CHUNK * rows, 2 * CHUNK * columns, 2 * rows * columns
    if delta:
        forward = key_heads * 2 * keys + heads * (2 * values + 3 * state)
        backward = key_heads * 2 * keys + heads * (4 * keys + 5 * values + 9 * state)
    else:
        forward = key_heads * keys + heads * (values + 2 * state)
        backward = key_heads * keys + heads * (2 * keys + 2 * values + 5 * state)
    return tokens * forward, tokens * backward


def _floor(inputs: list[Tensor], output: Tensor, flops: tuple[float, float]) -> Floor:
    """Inputs read and the output written; in the backward inputs and its gradient read, and the inputs' written."""
    size, least = output.element_size(), 0.0
    for tensor in inputs:
        least += tensor.numel() * tensor.element_size() / size  # decays are in fp32
    return Floor(least + output.numel(), 2 * least + output.numel(), forward_flops=flops[0], backward_flops=flops[1])


def _unit(data: Data, *shape: int) -> Tensor:
    """Vectors of length 1, as the queries and keys of a delta rule."""
    return F.normalize(data.upstream(*shape, dtype=torch.float32), dim=-1).to(data.dtype).requires_grad_()


@operation("delta_rule", "Gated delta rule: of queries, keys and values with a decay a head (Qwen3.5)")
def delta_rule_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Only models with gated delta nets have a case."""
    mixer = model.mixer
    if mixer is None or mixer.kind != "delta_rule":
        return
    heads = mixer.value_heads
    for variant, rows, length, documents in layouts(data, tokens):
        place = rows, length
        q, k = (_unit(data, *place, mixer.key_heads, mixer.key_dim) for _ in range(2))
        v = data.normal(*place, heads, mixer.value_dim)
        g = -0.1 * data.upstream(*place, heads, dtype=torch.float32).exp()
        beta = data.upstream(*place, heads).sigmoid()
        upstream = data.upstream(*v.shape)
        inputs = {"q": q, "k": k, "v": v, "g": g.requires_grad_(), "beta": beta.requires_grad_()}
        sizes = tokens, mixer.key_heads, heads, mixer.key_dim, mixer.value_dim
        floor = _floor(list(inputs.values()), upstream, chunk_flops(*sizes, delta=True))
        shape = described(*place, documents, f"{mixer.key_heads}/{heads} heads of {mixer.key_dim}×{mixer.value_dim}")
        yield Case({**inputs, "documents": documents}, shape, floor, (upstream,), variant)


@provider("delta_rule", "torch")
@by_document
def torch_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return of_transformers("qwen3_5", "torch_chunk_gated_delta_rule")(q, k, v, g, beta)[0]


@provider("delta_rule", FLA)
def fla_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Documents) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    tensors, boundaries = in_one_row(documents, q, k, v, g, beta)
    return chunk_gated_delta_rule(*tensors, **boundaries)[0].view_as(v)


library("delta_rule", "liger_trainer", by_name=["documents"])
reference("delta_rule")(delta_rule_reference)


@operation("state_space", "State space of Mamba 2: with time steps, decays, and the skip of D (Nemotron-H, Granite-4)")
def state_space_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Only models with Mamba 2 layers have a case."""
    mixer = model.mixer
    if mixer is None or mixer.kind != "state_space":
        return
    heads, groups, size = mixer.value_heads, mixer.key_heads, mixer.key_dim
    for variant, rows, length, documents in layouts(data, tokens):
        place = rows, length
        x = data.normal(*place, heads, mixer.value_dim)
        dt = data.normal(*place, heads)
        B, C = (data.normal(*place, groups, size, scale=size**-0.5) for _ in range(2))
        A = (-data.upstream(heads, dtype=torch.float32).exp()).requires_grad_()
        parameters = {"D": data.normal(heads), "dt_bias": data.normal(heads, scale=0.1)}
        floor = _floor([x, dt, B, C], x, chunk_flops(tokens, groups, heads, size, mixer.value_dim, delta=False))
        shape = described(*place, documents, f"{heads} heads of {mixer.value_dim}, {groups} groups of {size}")
        arguments = {"x": x, "dt": dt, "A": A, "B": B, "C": C, **parameters, "documents": documents}
        yield Case(arguments, shape, floor, (data.upstream(*x.shape),), variant)


@provider("state_space", "torch")
@by_document
def torch_state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, chunk: int = 128
) -> Tensor:
    scan = of_transformers("nemotron_h", "mamba2_chunk_scan")
    return scan(x, dt, A, B, C, chunk, D=D, dt_bias=dt_bias, dt_softplus=True).to(x.dtype)


@provider("state_space", "mamba-ssm")
def mamba_state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, documents: Documents
) -> Tensor:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    options = {"D": D, "dt_bias": dt_bias, "dt_softplus": True, "seq_idx": numbers_of(documents, x)}
    return mamba_chunk_scan_combined(x, dt, A, B, C, 128, **options)


def numbers_of(documents: Documents, x: Tensor) -> Tensor | None:
    """int32 (batch, tokens): the number of each token's document, as mamba-ssm and causal-conv1d take it."""
    if documents.spans is None:
        return None
    each = x.shape[0] * x.shape[1] // len(documents.spans)
    return (torch.arange(x.shape[0] * x.shape[1], device=x.device).int() // each).view(x.shape[:2])


@provider("state_space", FLA)
def fla_state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, documents: Documents
) -> Tensor:
    """Its attention with one decay a head, which has a key for each head and neither time steps nor skip."""
    from fla.ops.simple_gla import chunk_simple_gla

    step = F.softplus(dt.float() + dt_bias)
    keys, queries = (each.repeat_interleave(x.shape[2] // B.shape[2], dim=2) for each in (B, C))
    values = (x * step[..., None]).to(x.dtype)
    tensors, boundaries = in_one_row(documents, queries, keys, values, step * A)
    return chunk_simple_gla(*tensors, scale=1.0, **boundaries)[0].view_as(x) + D[:, None] * x


library("state_space", "liger_trainer", by_name=["D", "dt_bias", "documents"])
reference("state_space")(state_space_reference)


@operation("decayed_attention", "Decayed attention: without softmax, with a constant decay a head, as in MiniMax")
def decayed_attention_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """With as many heads as the model's attention, each with keys of its own, and the slopes of ALiBi."""
    if model.latent_attention:
        return
    heads = model.heads
    for variant, rows, length, documents in layouts(data, tokens):
        q, k, v = (data.normal(rows, length, heads, model.head_dim, scale=model.head_dim**-0.5) for _ in range(3))
        slope = torch.exp2(-8 * torch.arange(1, heads + 1, device=data.device) / heads)
        floor = _floor([q, k, v], v, chunk_flops(tokens, heads, heads, model.head_dim, model.head_dim, delta=False))
        shape = described(rows, length, documents, f"{heads} heads of {model.head_dim}")
        arguments = {"q": q, "k": k, "v": v, "slope": slope, "documents": documents}
        yield Case(arguments, shape, floor, (data.upstream(*v.shape),), variant)


@provider("decayed_attention", "torch")
@by_document
def torch_decayed_attention(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, block: int = 256) -> Tensor:
    """The blocks of MiniMax's layer, whose code is a module's: products within a block, and a state between blocks."""
    q, k, v = (wide(tensor).transpose(1, 2) for tensor in (q, k, v))
    rate = slope.to(q.dtype)[:, None, None]
    state, outputs = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for start in range(0, q.shape[2], block):
        each = [tensor[:, :, start : start + block] for tensor in (q, k, v)]
        place = torch.arange(each[0].shape[2], device=q.device, dtype=q.dtype)
        apart = place[:, None] - place
        decay = torch.where(apart >= 0, -rate * apart, -math.inf).exp()
        within = (each[0] @ each[1].mT * decay) @ each[2]
        outputs.append(within + each[0] * (-rate * (place[:, None] + 1)).exp() @ state)
        kept = each[1] * (-rate * (len(place) - 1 - place[:, None])).exp()
        state = state * (-rate * len(place)).exp() + kept.mT @ each[2]
    return torch.cat(outputs, dim=2).transpose(1, 2)


@provider("decayed_attention", FLA)
def fla_decayed_attention(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, documents: Documents) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    tensors, boundaries = in_one_row(documents, q, k, v)
    return chunk_simple_gla(*tensors, g_gamma=-slope, scale=1.0, **boundaries)[0].view_as(v)


library("decayed_attention", "liger_trainer", by_name=["documents"])
reference("decayed_attention")(decayed_attention_reference)
