"""RoPE: rotary embedding of queries and keys, halves rotated as in Llama."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider


@operation("rope")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Queries and keys are transposed views, as in models, and so are their gradients."""
    length = min(tokens, 4096)
    q, k, dq, dk = (
        data.upstream(tokens // length, length, heads, model.head_dim).transpose(1, 2)
        for heads in (model.heads, model.kv_heads) * 2
    )
    cos, sin = rotary_tables(data, length, model.head_dim)
    size = q.numel() + k.numel()
    yield Case(
        {"q": q.requires_grad_(), "k": k.requires_grad_(), "cos": cos, "sin": sin},
        f"{tokens // length}×{length}, {model.heads}+{model.kv_heads} heads of {model.head_dim}",
        Floor(2 * size, 2 * size),
        (dq, dk),
    )


def rates(data: Data, width: int) -> Tensor:
    """Radians per position for each pair of `width` dimensions."""
    return 1e4 ** (-torch.arange(0, 1, 2 / width, device=data.device))


def rotary_tables(data: Data, length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines shaped (1, length, width)."""
    angles = torch.outer(torch.arange(length, device=data.device), rates(data, width))
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos().to(data.dtype), angles.sin().to(data.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One tensor of heads, rotated as in transformers."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-right, left), dim=-1) * sin.unsqueeze(1)


@provider("rope", "torch")
def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin), rotated(k, cos, sin)


library("rope", "liger-kernel", "liger_kernel.transformers.functional:liger_rope")


def rotated_by_quack(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """QuACK's rotation, whose tables are (length, pairs)."""
    from quack.rotary import apply_rotary_emb

    tables = cos[0].contiguous(), sin[0].contiguous()
    rotated_q, rotated_k = (
        apply_rotary_emb(x.transpose(1, 2), *tables, interleaved=interleaved).transpose(1, 2) for x in (q, k)
    )
    return rotated_q, rotated_k


@provider("rope", "quack")
def quack(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    return rotated_by_quack(q, k, cos[..., :half], sin[..., :half])


library("rope", "liger_trainer", "liger_trainer.functional:rope")
