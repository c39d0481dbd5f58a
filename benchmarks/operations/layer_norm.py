"""LayerNorm: with weight and bias."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider, row_case


@operation("layer_norm")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    weight, bias = data.normal(model.hidden), data.normal(model.hidden)
    yield row_case(data, tokens, model.hidden, weight=weight, bias=bias, eps=1e-5)


@provider("layer_norm", "torch")
def eager(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


library("layer_norm", "liger-kernel", "liger_kernel.transformers.functional:liger_layer_norm")
library("layer_norm", "liger_trainer", "liger_trainer.functional:layer_norm")
