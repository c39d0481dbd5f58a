"""RoPE, complex: queries and keys as complex numbers times complex factors, as in Llama 4."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.rope import rates
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, wide


@operation("rope_complex")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Queries and keys as projections give them, (batch, seq, heads, head_dim)."""
    length = min(tokens, 4096)
    q, k, dq, dk = (
        data.upstream(tokens // length, length, heads, model.head_dim) for heads in (model.heads, model.kv_heads) * 2
    )
    angles = torch.outer(torch.arange(length, device=data.device), rates(data, model.head_dim))
    arguments = {"q": q.requires_grad_(), "k": k.requires_grad_()}
    arguments["freqs_cis"] = torch.polar(torch.ones_like(angles), angles)[None]
    size = q.numel() + k.numel()
    shape = f"{tokens // length}×{length}, {model.heads}+{model.kv_heads} heads of {model.head_dim}"
    yield Case(arguments, shape, Floor(2 * size, 2 * size), (dq, dk))


def rotated(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """One tensor of heads, rotated as in transformers."""
    pairs = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[:, :, None, :]).flatten(-2).type_as(x)


@provider("rope_complex", "torch")
def eager(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, freqs_cis), rotated(k, freqs_cis)


library("rope_complex", "liger-kernel", "liger_kernel.transformers.llama4_rope:liger_llama4_text_rotary_pos_emb")
library("rope_complex", "liger_trainer", "liger_trainer.functional:rope_complex")
