"""Causal attention inside documents, with windows, soft-capped scores and sinks, without a mask or a score matrix.

For a query i and the keys j that it sees (see `plan.py`), with sink b of its head::

    s_ij = scale q_i.k_j                               or softcap tanh(scale q_i.k_j / softcap)
    L_i = log(sum_j exp(s_ij) + exp(b))                without exp(b) if there are no sinks
    o_i = sum_j exp(s_ij - L_i) v_j

The backward is that of FlashAttention-2 (arXiv 2307.08691, section 3.1), which recomputes exp(s - L) from L::

    D_i = do_i.o_i     dv_j = sum_i p_ij do_i     ds_ij = p_ij (do_i.v_j - D_i)     db = -sum_i exp(b - L_i) D_i

Documents whose queries also see tokens of other documents (`SharedKeys`) have copies of these among their keys, made in
the forward and again in the backward, which sums the gradients of a token's copies. So do documents whose tokens are
spread over processes: the keys of all are gathered, and each process copies those that its queries see. Or processes
exchange heads, and each has all tokens of some. Where only the last tokens of documents are queries, the keys are all
tokens, without copies.

A sink is one more key, without a value. So a kernel that knows none gives o' and L' over the keys, the sink enters as
L = log(exp(L') + exp(b)) and o = exp(L' - L) o', and the kernel's own backward is right if it is given this o and L.

Plain causal attention of whole rows is torch's, which has cuDNN for it. Else there are two backends: torch's flash
operator, called with windows and documents, in float16 and bfloat16; and our kernels (`attention_kernel.py`) for
soft-capped scores, for selected keys, for float32 and where torch has no flash operator. Both save q, k, v, o and L,
and the bits of a selection, which layers may share. Flash adds up dq with atomics, in any order, unless
`torch.use_deterministic_algorithms` is set; ours never does.

Heads of more than 256 columns have neither cuDNN nor flash. Ours take them, up to 512, whole rows too in float16 and
bfloat16; in float32 torch multiplies whole rows faster. The sizes that a device has no tiles for
(`attention_launch.largest_head_dim`) run the reference, and whole rows torch's SDPA.

Shapes: q (batch, seq, heads, head_dim); k and v with key_heads, which divide heads; T = batch * seq tokens of all
documents, K keys of all documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.compat.private import available
from liger_trainer.compat.torch import FLASH_OPERATOR
from liger_trainer.kernels.attention import attention_launch
from liger_trainer.kernels.attention.attention_launch import Spans, largest_head_dim
from liger_trainer.kernels.attention.exchanged_heads import exchanged_heads, exchanged_tokens
from liger_trainer.kernels.attention.gathered_keys import gathered_keys
from liger_trainer.kernels.attention.plan import AttentionPlan, dense
from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative
from liger_trainer.kernels.copied_rows import Copies, sum_of_copies
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast, cdiv, use_triton

FLASH_HEAD_DIM = 256
"""The columns of the widest heads that torch has fast kernels for, flash and cuDNN's, and groups of heads in all."""

_MAX_DOCUMENTS = 65535  # of the flash operator, whose grid has them in its second dimension


def _flash_runs(q: torch.Tensor, spans: Spans) -> bool:
    """Whether torch's flash operator computes this."""
    if spans.bits is not None or (spans.offsets is not None and spans.offsets.numel() - 1 > _MAX_DOCUMENTS):
        return False
    if q.device.type != "cuda" or torch.version.hip is not None or not available(FLASH_OPERATOR):
        return False
    computes = q.dtype in (torch.float16, torch.bfloat16) and not spans.softcap
    computes = computes and q.shape[-1] % 8 == 0 and q.shape[-1] <= FLASH_HEAD_DIM
    return computes and torch.cuda.get_device_capability(q.device)[0] >= 8


def _flash_arguments(spans: Spans) -> tuple[tuple[Any, ...], dict[str, Any]]:
    longest, longest_keys = spans.longest, spans.longest_keys or spans.longest
    if spans.offsets is not None:
        # The operator takes a longest document of one token for decoding, which ignores documents.
        longest, longest_keys = max(longest, 2), max(longest_keys, 2)
    left = {"window_size_left": spans.window - 1, "window_size_right": 0} if spans.window else {}
    key_offsets = spans.offsets if spans.key_offsets is None else spans.key_offsets
    return (spans.offsets, key_offsets, longest, longest_keys, 0.0, True), {"scale": spans.scale, **left}


def _for_flash(x: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
    """`x`, or (batch * seq, heads, head_dim) of it, by which documents are counted."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if offsets is None else x.flatten(0, 1)


def _copied(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """`x`, (batch, seq, heads, head_dim), or (1, keys, heads, head_dim) of it."""
    return x if index is None else x.flatten(0, 1)[index][None]


@operator("liger_trainer::attention")
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    key_index: torch.Tensor | None,
    key_order: torch.Tensor | None,
    key_begins: torch.Tensor | None,
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, seq, heads, head_dim) o, and float32 L, whose shape is `_lse_shape`.

    The arguments of the keys are all None, or all tensors: the copies of `SharedKeys`.
    """
    k, v = _copied(k, key_index), _copied(v, key_index)
    if _flash_runs(q, spans):
        places, options = _flash_arguments(spans)
        by_document = [_for_flash(x, spans.offsets) for x in (q, k, v)]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(*by_document, *places, False, **options)
        out = out.contiguous()  # its strides are those of q
    else:
        out, lse = attention_launch.forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), spans)
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks)
    return out.view(q.shape), lse


def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The merge of the module's docstring; overwrites `out`."""
    b = sinks.float()[:, None]
    factor = torch.sigmoid(lse - b).movedim(-2, -1)[..., None]  # exp(L' - L)
    return out.mul_(factor), torch.logaddexp(lse, b)


@_attention.register_fake
def _(q, k, v, sinks, key_index, key_order, key_begins, spans):
    return q.new_empty(q.shape), q.new_empty(_lse_shape(q, spans), dtype=torch.float32)


def _lse_shape(q: torch.Tensor, spans: Spans) -> tuple[int, ...]:
    """The flash operator's for whole rows, (batch, heads, seq); else (heads, batch * seq)."""
    batch, length, heads, _ = q.shape
    whole = spans.offsets is None and _flash_runs(q, spans)
    return (batch, heads, length) if whole else (heads, batch * length)


@operator("liger_trainer::attention_backward")
def _attention_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    key_index: torch.Tensor | None,
    key_order: torch.Tensor | None,
    key_begins: torch.Tensor | None,
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v and the sinks (empty without sinks)."""
    shapes = q.shape, k.shape, v.shape
    k, v = _copied(k, key_index), _copied(v, key_index)
    if _flash_runs(q, spans):
        places, options = _flash_arguments(spans)
        by_document = [_for_flash(x, spans.offsets) for x in (d_out, q, k, v, out)]
        # The seed and offset of dropout: without it, nothing writes them in the forward or reads them here.
        state, unused = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)
        gradients = torch.ops.aten._flash_attention_backward(*by_document, lse, *places, state, unused, **options)
    else:
        tokens = d_out.flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), out.flatten(0, 1)
        gradients = attention_launch.backward(*tokens, lse, spans)
    dq, dk, dv = gradients
    if key_index is not None:
        assert key_order is not None
        assert key_begins is not None
        copies = Copies(key_index, key_order, key_begins)
        dk, dv = sum_of_copies(dk, copies), sum_of_copies(dv, copies)
    dq, dk, dv = (gradient.contiguous().view(shape) for gradient, shape in zip((dq, dk, dv), shapes))
    db = q.new_empty(0) if sinks is None else _sinks_gradient(d_out, out, lse, sinks)
    return dq, dk, dv, db


def _sinks_gradient(d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    batch, length, heads, _ = out.shape
    dots = attention_launch.row_dots(d_out.flatten(0, 1), out.flatten(0, 1))
    by_head = lse if lse.dim() == 2 else lse.transpose(0, 1).reshape(heads, batch * length)
    return -(torch.exp(sinks.float()[:, None] - by_head) * dots).sum(1).to(sinks.dtype)


@_attention_backward.register_fake
def _(d_out, q, k, v, out, lse, sinks, *documents_and_options):
    db = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), db


refuse_second_derivative(_attention_backward, "attention")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *others, spans = inputs
    ctx.spans = spans._replace(offsets=None, key_offsets=None, bits=None)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, *others, spans.offsets, spans.key_offsets, spans.bits)


def _backward(ctx: Any, d_out: torch.Tensor, _d_lse: None) -> tuple[Any, ...]:
    # Read once: checkpointing unpacks them only once.
    q, k, v, out, lse, sinks, *copies, offsets, key_offsets, bits = ctx.saved_tensors
    spans = ctx.spans._replace(offsets=offsets, key_offsets=key_offsets, bits=bits)
    dq, dk, dv, db = _attention_backward(d_out, q, k, v, out, lse, sinks, *copies, spans)
    return input_gradients(ctx, dq, dk, dv, None if sinks is None else db)


_attention.register_autograd(_backward, setup_context=_setup_context)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: AttentionPlan,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of every query to the keys that `plan` lets it see.

    Args:
        q: (batch, seq, heads, head_dim), of any strides. float16, bfloat16 or float32 for the kernels, which take a
            head_dim of up to 512, or 256 on devices with less memory (`attention_launch.largest_head_dim`); all else
            runs the reference, if `plan` is not plain causal attention, which torch's SDPA computes. Under autocast,
            all three are cast to its dtype.
        k: (batch, seq, key_heads, head_dim); `heads` is a multiple of `key_heads`. With `plan.keys`, (1, tokens,
            key_heads, head_dim) of any number of tokens.
        v: As `k`, or of a smaller head_dim.
        plan: The keys that each query sees, which are one or more. If they are of several processes, all of these have
            to call this, with those of their own tokens; `exchanged_heads` says what numbers of heads they can share.
        scale: Factor of the scores; None for head_dim ** -0.5.
        softcap: Scores become softcap * tanh(score / softcap), as in Gemma2; None for none.
        sinks: (heads,), a score for each head that takes part in the softmax without a value, as in GPT-OSS.

    Returns:
        A new contiguous (batch, seq, heads, head_dim of `v`).

    Raises:
        ValueError: if shapes do not fit.
    """
    q, k, v = as_autocast(q), as_autocast(k), as_autocast(v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if plan.exchanged is not None:
        rank, ranks, group, _ = plan.exchanged
        some = None if sinks is None else sinks.tensor_split(ranks)[rank]
        q, k, v = exchanged_heads(q, k, v, ranks, group)
        return exchanged_tokens(_of_keys(q, k, v, plan, scale, softcap, some), ranks, group)
    if plan.keys is None or plan.keys.ranks == 1:
        return _of_keys(q, k, v, plan, scale, softcap, sinks)
    k, v = gathered_keys(k, v, plan.keys.ranks, plan.keys.group)
    out = _of_keys(q.flatten(0, 1)[None], k, v, plan, scale, softcap, sinks)
    return out.view(*q.shape[:2], *out.shape[2:])


def _of_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`attention` to keys that are all at hand, those of all processes."""
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    _check_shapes(q, k, v, sinks, plan)
    ours = use_triton(q) and (head_dim <= FLASH_HEAD_DIM or head_dim <= _largest_head_dim(q.device, q.dtype))
    faster = ours and head_dim > FLASH_HEAD_DIM and q.dtype != torch.float32
    if plan.masks_nothing and not softcap and sinks is None and not faster:
        return _causal_rows(q, k, v, scale)
    if not ours:
        return attention_reference(q, k, v, plan=plan, scale=scale, softcap=softcap, sinks=sinks)
    if value_dim < head_dim:
        v = F.pad(v, (0, head_dim - value_dim))
    length = q.shape[1]
    longest = length if plan.offsets is None else plan.longest
    copies, key_offsets = (None, None) if plan.keys is None else plan.keys[:2]
    seen = key_offsets, plan.longest_keys(length), plan.bits
    spans = Spans(plan.offsets, longest, plan.window, float(scale), float(softcap or 0.0), *seen)
    out, _ = _attention(q, k, v, sinks, *(copies or (None, None, None)), spans)
    return out if value_dim == head_dim else out[..., :value_dim].contiguous()


@torch.compiler.assume_constant_result
def _largest_head_dim(device: torch.device, dtype: torch.dtype) -> int:
    return largest_head_dim(device, dtype)


def _causal_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """What torch computes. Beyond `FLASH_HEAD_DIM` not all of its operators take groups of heads: keys are repeated."""
    if q.shape[-1] > FLASH_HEAD_DIM and q.shape[2] > k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] > k.shape[1])
    return out.transpose(1, 2).contiguous()


def _check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, plan: AttentionPlan
) -> None:
    batch, length, heads, head_dim = q.shape
    keys = length if plan.keys is None else k.shape[1]
    key_heads = k.shape[2]
    if k.shape != (batch, keys, key_heads, head_dim) or v.shape[:-1] != k.shape[:-1] or heads % key_heads:
        raise ValueError(
            f"`q` is {tuple(q.shape)}, `k` {tuple(k.shape)} and `v` {tuple(v.shape)}; keys and values need the "
            "batch and length of `q`, `k` its head_dim, and `q` a number of heads that is a multiple of theirs."
        )
    if v.shape[-1] > head_dim:
        raise ValueError(f"`v` has head_dim {v.shape[-1]}; it must not exceed that of `q`, {head_dim}.")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"`sinks` is {tuple(sinks.shape)}; it must be ({heads},), one number for each head of `q`.")
    if plan.bits is None:
        return
    words, tokens, bits = cdiv(plan.longest_keys(length), 32), batch * length, plan.bits
    if bits.dtype != torch.int32 or bits.dim() != 2 or len(bits) < words or bits.shape[1] != tokens:
        raise ValueError(
            f"`plan.bits` is {bits.dtype} {tuple(bits.shape)}; it must be torch.int32 ({words}, {tokens}): words of 32 "
            "keys of a document, by the tokens of `q`."
        )


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: AttentionPlan,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention` in plain torch, with a matrix of scores in float32, as the kernels have them; float64 for float64.

    Keys of several processes are given gathered, (1, ranks * seq, ...), with all queries in one row.
    """
    batch, length, heads, head_dim = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    groups = heads // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
    scores = (q.to(dtype) @ k.to(dtype).mT) * (head_dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense(plan, batch, length, q.device, tokens=k.shape[2]), float("-inf"))
    if sinks is not None:
        column = sinks.to(dtype).view(1, heads, 1, 1).expand(batch, heads, length, 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights.to(q.dtype) @ v).transpose(1, 2).contiguous()
