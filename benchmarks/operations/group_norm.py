"""GroupNorm: images of 256 pixels, the hidden size their channels."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider


@operation("group_norm")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    shape = max(1, tokens // 256), model.hidden, 256
    size = shape[0] * shape[1] * shape[2]
    parameters = {"weight": data.normal(model.hidden), "bias": data.normal(model.hidden), "groups": 32, "eps": 1e-5}
    upstream = (data.upstream(*shape),)
    yield Case({"x": data.normal(*shape), **parameters}, "×".join(map(str, shape)), Floor(2 * size, 3 * size), upstream)


@provider("group_norm", "torch")
def eager(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


@provider("group_norm", "liger-kernel")
def liger(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    from liger_kernel.transformers.functional import liger_group_norm

    return liger_group_norm(x, weight, bias, x.shape[1], groups, eps)


@provider("group_norm", "liger_trainer")
def ours(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    from liger_trainer.functional import group_norm

    return group_norm(x, groups, weight, bias, eps)
