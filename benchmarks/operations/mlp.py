"""Gated activations, and the MLPs that they are in."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_trainer import functional
from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, case_of_rows, library, operation, provider


@operation("geglu", "GeGLU: gelu_tanh(gate) * up, given apart")
@operation("swiglu", "SwiGLU: silu(gate) * up, given apart")
def gated_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """A gate and an up projection of one MLP."""
    yield case_of_rows(data, (tokens, model.intermediate), ("gate", "up"))


provider("swiglu", "torch")(lambda gate, up: F.silu(gate) * up)
provider("geglu", "torch")(lambda gate, up: F.gelu(gate, approximate="tanh") * up)
for name in ("swiglu", "geglu"):
    library(name, "liger-kernel", "liger_trainer")
    library(name, "liger_trainer", inplace_backward=True)


@operation("clamped_swiglu", "Clamped SwiGLU: GPT-OSS's gate, gate and up in turns")
def clamped_swiglu_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    size, gate_up = tokens * model.intermediate, data.normal(tokens, 2 * model.intermediate, scale=4.0)
    upstream = (data.upstream(tokens, model.intermediate),)
    yield Case({"gate_up": gate_up}, f"{tokens}×{model.intermediate}", Floor(3 * size, 5 * size), upstream)


@provider("clamped_swiglu", "torch")
def eager_clamped_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


library("clamped_swiglu", "liger_trainer")


@operation("relu_squared", "ReLU²: the squared ReLU")
def relu_squared_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield case_of_rows(data, (tokens, model.intermediate))


provider("relu_squared", "torch")(lambda x: F.relu(x).square())
library("relu_squared", "liger-kernel", "liger_trainer")


@operation(
    "swiglu_down",
    "SwiGLU + down projection: `liger_trainer` recomputes the product in the backward pass instead of saving it",
)
def swiglu_down_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The floor is that of three matmuls."""
    (gated,) = gated_cases(data, model, tokens)
    weight = data.normal(model.hidden, model.intermediate, scale=model.intermediate**-0.5)
    product, gradient = gated.arguments["gate"].detach(), data.upstream(tokens, model.hidden)

    def matmuls() -> None:
        matrix = weight.detach()
        product @ matrix.T
        gradient @ matrix
        gradient.T @ product

    yield Case({**gated.arguments, "weight": weight}, gated.shape, Floor(matmuls=matmuls), (gradient,))


provider("swiglu_down", "torch")(lambda gate, up, weight: F.linear(F.silu(gate) * up, weight))


@provider("swiglu_down", "liger-kernel")
def liger_swiglu_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    return F.linear(liger_swiglu(gate, up), weight)


@provider("swiglu_down", "liger_trainer", recompute=False)
def our_saved_product(gate: Tensor, up: Tensor, weight: Tensor, recompute: bool) -> Tensor:
    return F.linear(functional.swiglu(gate, up), weight)


library("swiglu_down", "liger_trainer")


@operation("tiled_mlp", "Tiled MLP: tiles of the sequence, recomputed in backward one by one")
def tiled_mlp_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """One long sequence. The floor: three matmuls forward, six backward, and gate and up once more."""
    hidden = data.normal(1, tokens, model.hidden)
    gate, up = (data.normal(model.intermediate, model.hidden, scale=model.hidden**-0.5) for _ in range(2))
    down = data.normal(model.hidden, model.intermediate, scale=model.intermediate**-0.5)
    weights = {"gate_weight": gate, "up_weight": up, "down_weight": down}
    upstream = data.upstream(1, tokens, model.hidden)

    def matmuls() -> None:
        rows, gradient, gate_weight, down_weight = hidden.detach()[0], upstream[0], gate.detach(), down.detach()
        for _ in range(4):  # gate and up, forward and again
            inner = rows @ gate_weight.T
        inner @ down_weight.T
        gradient @ down_weight
        gradient.T @ inner
        for _ in range(2):  # the gradients of gate and up
            inner @ gate_weight
            inner.T @ rows

    parameters = {name: torch.nn.Parameter(weight.detach()) for name, weight in weights.items()}
    shape = f"{tokens}×{model.hidden}×{model.intermediate}"
    yield Case({"hidden": hidden, **parameters}, shape, Floor(matmuls=matmuls), (upstream,))


def gated_mlp(hidden: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(hidden, gate_weight)) * F.linear(hidden, up_weight), down_weight)


@provider("tiled_mlp", "torch")
def eager_tiled_mlp(hidden: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    return checkpoint(gated_mlp, hidden, gate_weight, up_weight, down_weight, use_reentrant=False)


class MLP(torch.nn.Module):
    """The weights as a module, for tiled versions."""

    def __init__(self, **weights: Tensor) -> None:
        super().__init__()
        for name, weight in weights.items():
            layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer.weight = weight
            self.add_module(name.replace("weight", "proj"), layer)


def tile_of(swiglu: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The MLP on a tile, with this activation."""
    return lambda mlp, x: mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))


@provider("tiled_mlp", "liger-kernel")
def liger_tiled_mlp(hidden: Tensor, **weights: Tensor) -> Tensor:
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp
    from liger_kernel.transformers.functional import liger_swiglu

    return apply_tiled_mlp(tile_of(liger_swiglu), MLP(**weights), hidden)


@provider("tiled_mlp", "liger_trainer")
def our_tiled_mlp(hidden: Tensor, **weights: Tensor) -> Tensor:
    return functional.tiled_mlp(tile_of(functional.swiglu), MLP(**weights), hidden, preserve_rng_state=False)
