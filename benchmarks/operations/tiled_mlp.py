"""Tiled MLP: tiles of the sequence, recomputed in backward one by one."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, operation, provider


@operation("tiled_mlp")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """One long sequence. The floor: three matmuls forward, six backward, and gate and up once more."""
    narrow, scale = (model.intermediate, model.hidden), model.hidden**-0.5
    hidden = data.normal(1, tokens, model.hidden)
    weights = {name: data.normal(*narrow, scale=scale) for name in ("gate_weight", "up_weight")}
    weights["down_weight"] = data.normal(model.hidden, model.intermediate, scale=model.intermediate**-0.5)
    weights = {name: torch.nn.Parameter(weight.detach()) for name, weight in weights.items()}
    upstream = data.upstream(1, tokens, model.hidden)
    rows, gradient = hidden.detach()[0], upstream[0]
    gate_weight, down_weight = weights["gate_weight"].detach(), weights["down_weight"].detach()

    def matmuls() -> None:
        for _ in range(4):  # gate and up, forward and again
            inner = rows @ gate_weight.T
        inner @ down_weight.T
        gradient @ down_weight
        gradient.T @ inner
        for _ in range(2):  # the gradients of gate and up
            inner @ gate_weight
            inner.T @ rows

    shape = f"{tokens}×{model.hidden}×{model.intermediate}"
    yield Case({"hidden": hidden, **weights}, shape, Floor(matmuls=matmuls), (upstream,))


def mlp(hidden: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """The MLP itself."""
    return F.linear(F.silu(F.linear(hidden, gate_weight)) * F.linear(hidden, up_weight), down_weight)


@provider("tiled_mlp", "torch")
def eager(hidden: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    return checkpoint(mlp, hidden, gate_weight, up_weight, down_weight, use_reentrant=False)


def linear(weight: Tensor) -> torch.nn.Linear:
    """A linear layer with `weight`."""
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = weight
    return layer


class MLP(torch.nn.Module):
    """The weights as a module, for the tiled versions of other libraries."""

    def __init__(self, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = map(linear, (gate_weight, up_weight, down_weight))


@provider("tiled_mlp", "liger-kernel")
def liger(hidden: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp
    from liger_kernel.transformers.functional import liger_swiglu

    def tile(mlp: Any, x: Tensor) -> Tensor:
        return mlp.down_proj(liger_swiglu(mlp.gate_proj(x), mlp.up_proj(x)))

    return apply_tiled_mlp(tile, MLP(gate_weight, up_weight, down_weight), hidden)


@provider("tiled_mlp", "liger_trainer")
def ours(hidden: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    from liger_trainer.functional import swiglu, tiled_mlp

    def tile(mlp: Any, x: Tensor) -> Tensor:
        return mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))

    return tiled_mlp(tile, MLP(gate_weight, up_weight, down_weight), hidden, preserve_rng_state=False)
