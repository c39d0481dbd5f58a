"""RoPE, half-width tables: one cosine and sine per pair, as in GPT-OSS."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.rope import cases as full_width_cases
from liger_trainer.benchmarks.operations.rope import rotated_by_quack
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider


@operation("rope_half_width")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The cases of RoPE, with half of the tables."""
    for case in full_width_cases(data, model, tokens):
        for name in ("cos", "sin"):
            table = case.arguments[name]
            case.arguments[name] = table[..., : table.shape[-1] // 2].contiguous()
        yield case


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One tensor of heads, rotated as in transformers."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


@provider("rope_half_width", "torch")
def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin), rotated(k, cos, sin)


library("rope_half_width", "liger-kernel", "liger_kernel.transformers.rope:liger_rotary_pos_emb_gpt_oss")


@provider("rope_half_width", "quack")
def quack(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated_by_quack(q, k, cos, sin)


@provider("rope_half_width", "liger_trainer")
def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_trainer.functional import rope

    return rope(q, k, cos, sin, rotary_dim=q.shape[-1])
