"""RMSNorm, cast as Llama casts."""

from collections.abc import Iterator

import torch

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider, wide


@operation("rms_norm")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The hidden states and, where the model has norms of queries and keys, the heads."""
    shapes = [("", tokens, model.hidden)]
    if model.qk_norm:
        shapes.append(("heads", tokens * (model.heads + model.kv_heads), model.head_dim))
    for variant, rows, width in shapes:
        yield Case(
            {"x": data.normal(rows, width), "weight": data.normal(width), "eps": 1e-6},
            f"{rows}×{width}",
            Floor(forward=4 * rows * width, backward=6 * rows * width),
            (data.upstream(rows, width),),
            variant,
        )


@provider("rms_norm", "torch")
def eager(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    exact = wide(x)
    return weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@provider("rms_norm", "liger-kernel")
def liger(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(x, weight, eps)


@provider("rms_norm", "quack")
def quack(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from quack import rmsnorm

    return rmsnorm(x, weight, eps=eps)


@provider("rms_norm", "liger_trainer")
def ours(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    from liger_trainer.functional import rms_norm

    return rms_norm(x, weight, eps)
