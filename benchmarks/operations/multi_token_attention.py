"""Multi-token attention: causal weights, convolved over queries and keys."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_trainer import functional
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, wide


@operation(
    "multi_token_attention", "Multi-token attention: causal weights, convolved over queries and keys", tokens=2048
)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """One sequence; the three by three convolution has one head per group."""
    heads = model.heads
    scores = data.normal(1, heads, tokens, tokens)
    parameters = {"weight": data.normal(heads, 1, 3, 3, scale=1 / 3), "bias": data.normal(heads), "groups": heads}
    upstream = (data.upstream(1, heads, tokens, tokens),)
    size = scores.numel()
    yield Case(
        {"scores": scores, **parameters}, f"{heads} heads, {tokens}×{tokens}", Floor(4 * size, 6 * size), upstream
    )


@provider("multi_token_attention", "torch")
def eager(scores: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = torch.softmax(wide(scores).masked_fill(future, float("-inf")), -1).to(scores.dtype)
    return F.conv2d(weights, weight, bias, padding=1, groups=groups).masked_fill(future, 0)


@provider("multi_token_attention", "liger-kernel")
def liger(scores: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    from liger_kernel.transformers.functional import liger_multi_token_attention

    return liger_multi_token_attention(scores, weight, bias, padding=1, groups=groups)


@provider("multi_token_attention", "liger_trainer")
def ours(scores: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    return functional.multi_token_attention(scores, weight, bias, padding=1, groups=groups)
