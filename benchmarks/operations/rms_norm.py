"""RMSNorm: cast as Llama casts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider, row_case, wide


@operation("rms_norm")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The hidden states and, if the model normalises queries and keys, the heads."""
    yield row_case(data, tokens, model.hidden, weight=data.normal(model.hidden), eps=1e-6)
    if model.qk_norm:
        heads = tokens * (model.heads + model.kv_heads)
        yield row_case(data, heads, model.head_dim, "heads", weight=data.normal(model.head_dim), eps=1e-6)


@provider("rms_norm", "torch")
def eager(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = wide(x)
    return weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


library("rms_norm", "liger-kernel", "liger_kernel.transformers.functional:liger_rms_norm")


@provider("rms_norm", "quack")
def quack(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from quack import rmsnorm

    return rmsnorm(x, weight, eps=eps)


library("rms_norm", "liger_trainer", "liger_trainer.functional:rms_norm")
