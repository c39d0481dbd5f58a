"""Causal attention: every key, a sliding window, packed documents; with soft-capped scores (Gemma2) or sinks (GPT-OSS).

Sparse attention is here, to the keys that an indexer has selected (DeepSeek V3.2, GLM-5).

Multi-token attention is here too: causal weights of given scores, convolved over queries and keys.

Masks are made before the clock starts, for the libraries that need one, as a model makes them once for all layers.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.head import in_parts, soft_capped
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, reference, wide
from liger_trainer.kernels.attention.attention import attention
from liger_trainer.kernels.attention.plan import BLOCK, AttentionPlan, bits_of, dense

_ROW, _DOCUMENT = 4096, 1024  # tokens
_SELECTED = 2048  # keys that an indexer selects
_LATENT_DIMS = (192, 128)  # of queries and keys, and of values, in DeepSeek's latent attention


@dataclasses.dataclass
class Layout:
    """Which keys each query sees: those before it and its own, in its document, at most `window` of them."""

    batch: int
    length: int  # tokens in a row
    document: int  # tokens in a document; the last one of a row may be shorter
    window: int  # 0 for all
    device: torch.device
    dtype: torch.dtype  # of the queries
    softcap: float | None = None  # of the scores

    @property
    def pairs(self) -> int:
        """Queries and keys that meet, in all rows."""
        starts = range(0, self.length, self.document)
        documents = [min(self.document, self.length - start) for start in starts]
        return self.batch * sum(_pairs(length, self.window) for length in documents)

    @property
    def sees(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Whether queries see keys, from their places in the row; a `mask_mod` of flex_attention."""
        document, window = self.document, self.window or self.length

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query - key < window) & (query // document == key // document)

        return sees

    @functools.cached_property
    def mask(self) -> Tensor:
        """bool (length, length), the same for all rows; True where the key counts."""
        places = torch.arange(self.length, device=self.device)
        return self.sees(places, places, places[:, None], places)

    @functools.cached_property
    def bias(self) -> Tensor:
        """The mask as transformers' eager attention adds it to the scores: `dtype` (batch, 1, length, length)."""
        hidden = torch.tensor(torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
        return torch.where(self.mask, torch.zeros_like(hidden), hidden).repeat(self.batch, 1, 1, 1)

    @functools.cached_property
    def blocks(self) -> Any:
        """The `BlockMask` of flex_attention."""
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(self.sees, None, None, self.length, self.length, device=self.device)

    @functools.cached_property
    def offsets(self) -> Tensor:
        """int32 (documents + 1,): where the documents of all rows start, and where the last one ends."""
        starts = torch.arange(0, self.length, self.document, device=self.device)
        rows = torch.arange(0, self.batch * self.length, self.length, device=self.device)
        return F.pad((rows[:, None] + starts).flatten(), (0, 1), value=self.batch * self.length).int()


def _pairs(length: int, window: int) -> int:
    """Queries and keys that meet in one document."""
    window = min(window or length, length)
    return window * (window + 1) // 2 + (length - window) * window


@operation("attention", "Attention: causal, in full, within a window, and within packed documents")
def attention_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Rows of 4096 tokens, in full and within the window; then all tokens as one row, windowed or in 16 documents.

    Gemma2's window of 4096 is narrowed to a quarter of the row, where it leaves something out.
    """
    if model.latent_attention:
        return
    length = min(tokens, _ROW)
    rows = {"batch": tokens // length, "length": length, "document": length}
    row = {"batch": 1, "length": tokens, "document": tokens}
    whole = dataclasses.replace(model, head_dim=model.global_head_dim or model.head_dim)
    yield _case(data, whole, "", **rows, window=0)
    if model.sliding_window is None:
        document = min(_DOCUMENT, max(tokens // 16, 2))
        yield _case(data, model, "packed", **row | {"document": document}, window=0)
        return
    yield _case(data, model, "window", **rows, window=min(model.sliding_window, max(length // 4, 1)))
    if tokens > length:
        yield _case(data, model, "long window", **row, window=min(model.sliding_window, tokens // 4))


def _case(data: Data, model: Model, variant: str, **sizes: int) -> Case:
    layout = Layout(**sizes, device=data.device, dtype=data.dtype, softcap=model.attention_softcap)
    place = (layout.batch, layout.length)
    q = data.normal(*place, model.heads, model.head_dim)
    k, v = (data.normal(*place, model.kv_heads, model.head_dim) for _ in range(2))
    sinks = data.normal(model.heads) if model.sinks else None
    arguments = {"q": q, "k": k, "v": v, "layout": layout, "sinks": sinks}
    shape = f"{layout.batch}×{layout.length}, {model.heads}/{model.kv_heads} heads of {model.head_dim}"
    shape += f", window {layout.window}" if layout.window else ""
    shape += f", documents of {layout.document}" if layout.document < layout.length else ""
    shape += f", soft-cap {model.attention_softcap:g}" if model.attention_softcap else ""
    shape += ", sinks" if model.sinks else ""
    # Scores and their product with the values; the backward makes the scores again and has four such products.
    flops = 4 * layout.pairs * model.heads * model.head_dim
    numbers = 2 * q.numel() + 2 * k.numel()  # queries, keys, values and the result
    floor = Floor(numbers, 2 * numbers, forward_flops=flops, backward_flops=2.5 * flops)
    return Case(arguments, shape, floor, (data.upstream(*q.shape),), variant)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def _repeated(tensor: Tensor, groups: int) -> Tensor:
    """The keys or values, (batch, heads, length, width), of every query head."""
    return tensor.repeat_interleave(groups, dim=1)


@provider("attention", "torch")
def transformers_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, sinks: Tensor | None) -> Tensor:
    """What transformers runs: sdpa, with a mask if it must; Gemma2's and GPT-OSS's own eager attention."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = _heads_first(q, k, v)
    if layout.softcap is None and sinks is None:
        if not layout.window and layout.document == layout.length:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1).transpose(1, 2)
        mask = layout.mask.expand(layout.batch, 1, -1, -1)
        k, v = _repeated(k, groups), _repeated(v, groups)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).contiguous()
    scores = torch.matmul(q, _repeated(k, groups).mT) * q.shape[-1] ** -0.5
    scores = soft_capped(scores, layout.softcap) + layout.bias
    if sinks is None:
        weights = torch.softmax(wide(scores), -1).to(q.dtype)
    else:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
        weights = torch.softmax(scores - scores.amax(-1, keepdim=True), -1)[..., :-1]
    return torch.matmul(weights, _repeated(v, groups)).transpose(1, 2).contiguous()


@reference("attention")
def exact_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, sinks: Tensor | None) -> Tensor:
    """One head at a time; a sink is a part of the sum that has no value."""
    groups = q.shape[2] // k.shape[2]

    def one_head(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Tensor:
        scores = soft_capped(q @ k.mT * q.shape[-1] ** -0.5, layout.softcap).masked_fill(~layout.mask, float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)
        total = total if sink is None else torch.logaddexp(total, sink)
        return (scores - total).exp() @ v

    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    heads = {name: tensor.movedim(2, 0) for name, tensor in {"q": q, "k": k, "v": v}.items()}
    return in_parts(one_head, size=1, **heads, **({} if sinks is None else {"sink": sinks})).movedim(0, 2)


def flex(q: Tensor, k: Tensor, v: Tensor, blocks: Any, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """flex_attention; its result is scaled down by the sinks' part of the sum."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def capped(score: Tensor, *place: Tensor) -> Tensor:
        return soft_capped(score, softcap)

    q, k, v = _heads_first(q, k, v)
    settings: dict[str, Any] = {"block_mask": blocks, "enable_gqa": True}
    settings |= {} if softcap is None else {"score_mod": capped}
    if sinks is None:
        return flex_attention(q, k, v, **settings).transpose(1, 2)
    out, aux = flex_attention(q, k, v, **settings, return_aux=AuxRequest(lse=True))
    kept = torch.sigmoid(aux.lse - sinks.float()[:, None]).unsqueeze(-1)
    return (out * kept).to(q.dtype).transpose(1, 2)


_compiled_flex = torch.compile(flex, dynamic=False)


@provider("attention", "torch.compile")  # in place of the compiled provider "torch"
def compiled_flex(q: Tensor, k: Tensor, v: Tensor, layout: Layout, sinks: Tensor | None) -> Tensor:
    return _compiled_flex(q, k, v, layout.blocks, layout.softcap, sinks)


@provider("attention", "sdpa")
def unmasked_sdpa(q: Tensor, k: Tensor, v: Tensor, layout: Layout, sinks: Tensor | None) -> Tensor:
    """Never with a mask: documents of one length become the rows of a batch."""
    if layout.softcap is not None or sinks is not None:
        raise ValueError("has no soft-cap and no sinks")
    if layout.window or layout.length % layout.document:
        raise ValueError("needs a mask")
    shape = q.shape
    q, k, v = _heads_first(*(tensor.unflatten(1, (-1, layout.document)).flatten(0, 1) for tensor in (q, k, v)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(shape)


@provider("attention", "cudnn")
def cudnn(q: Tensor, k: Tensor, v: Tensor, layout: Layout, sinks: Tensor | None) -> Tensor:
    """The same, in cuDNN's attention."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return unmasked_sdpa(q, k, v, layout, sinks)


@provider("attention", "flash")
def torch_flash(q: Tensor, k: Tensor, v: Tensor, layout: Layout, sinks: Tensor | None) -> Tensor:
    """torch's own flash attention, which also has windows and documents."""
    from torch.nn.attention.varlen import varlen_attn

    if layout.softcap is not None or sinks is not None:
        raise ValueError("has no soft-cap and no sinks")
    settings: dict[str, Any] = {"cu_seq_q": layout.offsets, "cu_seq_k": layout.offsets}
    settings |= {"max_q": layout.document, "max_k": layout.document}
    settings["window_size"] = (layout.window - 1, 0)  # keys before and after the query's own; -1 for all
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # from torch 2.12 on
        settings["enable_gqa"] = True
    found: Any = varlen_attn(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **settings)
    return found.view_as(q)


@provider("attention", "liger_trainer")
def ours(q: Tensor, k: Tensor, v: Tensor, layout: Layout, sinks: Tensor | None) -> Tensor:
    offsets = layout.offsets if layout.document < layout.length else None
    plan = AttentionPlan(layout.window, offsets, layout.document)
    return attention(q, k, v, plan=plan, softcap=layout.softcap, sinks=sinks)


@operation("sparse_attention", "Sparse attention: to the keys that an indexer has selected", tokens=8192)
def sparse_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """One document of all tokens, whose queries have selected keys at random, so that no tile is without one.

    There are 2048 for each, or a quarter of the tokens. The selection is made before the clock starts.
    """
    heads, key_heads, width, value_width = model.heads, model.kv_heads, model.head_dim, model.head_dim
    if model.latent_attention:
        key_heads, (width, value_width) = heads, _LATENT_DIMS
    q, k = (data.normal(1, tokens, count, width) for count in (heads, key_heads))
    v = data.normal(1, tokens, key_heads, value_width)
    selected = max(min(_SELECTED, tokens // 4), 1)
    plan = AttentionPlan(0, None, tokens)
    parts = []
    for start in range(0, tokens, BLOCK):
        seen = dense(plan, 1, tokens, data.device, rows=slice(start, start + BLOCK))[0]
        scores = data.normal(*seen.shape, grad=False).masked_fill(~seen, float("-inf"))
        parts.append(bits_of(plan, scores.topk(selected, -1).indices, tokens, start))
    plan = plan._replace(bits=torch.cat(parts, 2).flatten(1))
    pairs = _pairs(tokens, selected)
    flops = 2 * pairs * heads * (width + value_width)
    out = tokens * heads * value_width
    numbers = q.numel() + k.numel() + v.numel() + out
    # The backward makes the scores again, and two products of each width.
    floor = Floor(numbers, 2 * numbers, forward_flops=flops, backward_flops=2.5 * flops)
    shape = f"1×{tokens}, {heads}/{key_heads} heads of {width} and {value_width}, {selected} keys"
    mask = dense(plan, 1, tokens, data.device)
    yield Case(
        {"q": q, "k": k, "v": v, "plan": plan, "mask": mask},
        shape,
        floor,
        (data.upstream(*v.shape[:2], heads, value_width),),
    )


@provider("sparse_attention", "torch")
def masked_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, mask: Tensor) -> Tensor:
    """What transformers runs: sdpa, with a boolean mask of all pairs."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = _heads_first(q, k, v)
    k, v = _repeated(k, groups), _repeated(v, groups)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).contiguous()


@reference("sparse_attention")
def exact_sparse_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, mask: Tensor) -> Tensor:
    """One head at a time."""
    groups = q.shape[2] // k.shape[2]

    def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask[0], float("-inf")).softmax(-1) @ v

    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    heads = {name: tensor.movedim(2, 0) for name, tensor in {"q": q, "k": k, "v": v}.items()}
    return in_parts(one_head, size=1, **heads).movedim(0, 2)


@provider("sparse_attention", "liger_trainer")
def our_sparse_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, mask: Tensor) -> Tensor:
    return attention(q, k, v, plan=plan)


@operation(
    "multi_token_attention", "Multi-token attention: causal weights, convolved over queries and keys", tokens=2048
)
def multi_token_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """One sequence; the three by three convolution has one head per group."""
    heads = model.heads
    scores = data.normal(1, heads, tokens, tokens)
    parameters = {"weight": data.normal(heads, 1, 3, 3, scale=1 / 3), "bias": data.normal(heads), "groups": heads}
    upstream, floor = (data.upstream(*scores.shape),), Floor(4 * scores.numel(), 6 * scores.numel())
    yield Case({"scores": scores, **parameters}, f"{heads} heads, {tokens}×{tokens}", floor, upstream)


@provider("multi_token_attention", "torch")
def eager_multi_token(scores: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = torch.softmax(wide(scores).masked_fill(future, float("-inf")), -1).to(scores.dtype)
    return F.conv2d(weights, weight, bias, padding=1, groups=groups).masked_fill(future, 0)


library("multi_token_attention", "liger-kernel", "liger_trainer", by_name=["groups"], fixed={"padding": 1})
