"""RoPE, interleaved: neighbours rotated, as in GLM-4 and Cohere."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.operations.rope import cases as half_split_cases
from liger_trainer.benchmarks.operations.rope import rotated_by_quack
from liger_trainer.benchmarks.registry import Case, Data, operation, provider


@operation("rope_interleaved")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The cases of RoPE, with tables that give two neighbours the same angle."""
    for case in half_split_cases(data, model, tokens):
        for name in ("cos", "sin"):
            table = case.arguments[name]
            case.arguments[name] = table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)
        yield case


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One tensor of heads, rotated as in transformers."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


@provider("rope_interleaved", "torch")
def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, cos, sin), rotated(k, cos, sin)


@provider("rope_interleaved", "quack")
def quack(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotated_by_quack(q, k, cos[..., ::2], sin[..., ::2], interleaved=True)


@provider("rope_interleaved", "liger_trainer")
def ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_trainer.functional import rope

    return rope(q, k, cos, sin, interleaved=True)
