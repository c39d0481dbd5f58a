"""The ways to run a recipe that a plan compares."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from liger_trainer.plan.parameters import Parameters
from liger_trainer.plan.work import LayerShape

CONFIGS = {"single": "single_gpu", "ddp": "ddp", "zero2": "zero2", "fsdp2": "fsdp2", "expert_parallel": "ddp"}
"""Name of each strategy's accelerate configuration; with `expert_parallel_size`, loading splits the model."""

LAUNCH_TOKENS = 250
"""Cost of launching a micro-step, in tokens."""

COMMUNICATION_TOKENS = {"single": 0, "ddp": 250, "zero2": 500, "fsdp2": 750, "expert_parallel": 750}
"""Cost of communication, in tokens of a dense model with all weights trained: FSDP2 gathers the weights twice and
reduces their gradients, 6 bytes per parameter at about 400 GB/s, against 8 FLOP per parameter and token at about 400
TFLOP/s; ZeRO-2 sends gradients, and weights once per step; DDP sends gradients once per step. Only for ranking."""

FLOP_PER_BYTE = 1000
"""FLOP in the time of sending a byte, at these speeds."""

RECOMPUTATION = 0.58
"""Cost of recomputing a layer, in products with every matrix: the down projection is left out, and the products of a
forward pass take less time than their share of a step. Llama-3 8B, 4 × 4096 tokens on one H200, is 1.195 times as fast
without checkpointing, and 1.289 times with adapters alone trained: 0.585 and 0.578."""

OFFLOADING_COST = 1.05
TILED_COST = 1.02


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run."""

    # ``"single"``, ``"ddp"``, ``"zero2"``, ``"fsdp2"`` (weights, gradients and states split, weights freed after each
    # layer) or ``"expert_parallel"`` (the same, but tokens are sent to the experts).
    strategy: str = "single"
    gpus: int = 1  # number of GPUs
    batch: int = 1  # ``per_device_train_batch_size``
    accumulation: int = 1  # ``gradient_accumulation_steps``
    checkpointing: bool = True  # whether every layer is recomputed in the backward pass
    tiled_mlp: bool = False  # whether gated MLPs run in tiles
    offloading: float = 0.0  # fraction of the layers' inputs that waits in host memory; 0 without checkpointing
    expert_parallel_size: int = 1  # G, the GPUs that share a layer's experts; 1 except for ``"expert_parallel"``
    # Bytes of results that the layers may keep instead of computing them again; 0 without checkpointing.
    activation_memory: int = 0

    @property
    def sharded(self) -> bool:
        """Whether the weights themselves are split."""
        return self.strategy in ("fsdp2", "expert_parallel")


def relative_cost(
    setting: Setting, tokens: int, parameters: Parameters, shape: LayerShape, saved: float = 0.0
) -> float:
    """Time per token, relative to the same model on one GPU without checkpointing; only for ranking.

    A trained matrix costs three matmuls per token, one in the forward and two in the backward pass; a frozen matrix
    with adapters costs two; checkpointing adds `RECOMPUTATION`, less what kept results save. Communication weighs more
    if a token uses few of the parameters (experts), and less if few are trained, although FSDP2 gathers frozen ones
    too. Under expert parallelism, only GPUs with copies of the same experts gather them, and rows of tokens are sent
    instead.
    """
    products = 3 if shape.trained else 2
    cost = 1 + setting.checkpointing * (1 - saved) * RECOMPUTATION / products
    cost *= OFFLOADING_COST if setting.offloading else 1.0
    cost *= TILED_COST if setting.tiled_mlp else 1.0
    total, experts = parameters.total, parameters.groups["experts"].elements
    idle = experts * (1 - shape.experts_per_token / shape.experts) if shape.experts else 0.0
    sent: float = total.elements if setting.sharded else total.trained
    if setting.strategy == "expert_parallel":
        copies = setting.gpus // setting.expert_parallel_size
        sent -= experts - (experts / setting.expert_parallel_size if copies > 1 else 0)
    active = total.elements - idle
    overhead = LAUNCH_TOKENS + COMMUNICATION_TOKENS[setting.strategy] * sent / active
    exchanged = FLOP_PER_BYTE * exchanged_bytes(setting, parameters, shape) / (2 * products * active)
    return cost * (1 + overhead / max(tokens, 1)) + exchanged


def exchanged_bytes(setting: Setting, parameters: Parameters, shape: LayerShape) -> float:
    """Bytes per token that are sent to experts on other GPUs and back, in half precision.

    k rows go there and back in the forward and in the backward pass, and there once more if a layer is recomputed. If
    experts are chosen evenly, 1/G of the rows stay on their GPU.
    """
    ways = 5 if setting.checkpointing else 4
    row = 2 * shape.hidden
    return ways * shape.experts_per_token * row * parameters.layers * (1 - 1 / setting.expert_parallel_size)


def candidates(
    gpus: int,
    batch: int,
    accumulation: int,
    quantised: bool,
    tiles: bool,
    fixed_batch: bool = False,
    experts: int = 0,
    zero2: bool = True,
) -> Iterator[Setting]:
    """All settings to compare; each has the same number of samples per optimizer step.

    A quantised base is not split. `experts` per layer can be shared, 0 for none. DeepSpeed (`zero2`) splits neither
    experts in 4 bits nor for `liger_adamw`.
    """
    strategies = [("single", 1)] if gpus == 1 else [("ddp", 1), ("zero2", 1)] if zero2 else [("ddp", 1)]
    if gpus > 1 and not quantised:
        sizes = [size for size in range(2, gpus + 1) if experts and gpus % size == experts % size == 0]
        strategies += [("fsdp2", 1), *(("expert_parallel", size) for size in sizes)]
    samples = batch * accumulation
    batches = [batch] if fixed_batch else [size for size in range(1, samples + 1) if samples % size == 0]
    ways = [(False, False, 0.0), (True, False, 0.0), (True, False, 1.0)]
    ways += [(True, True, 0.0), (True, True, 1.0)] if tiles else []
    for (strategy, sharing), (checkpointing, tiled, offloading), size in itertools.product(strategies, ways, batches):
        yield Setting(strategy, gpus, size, samples // size, checkpointing, tiled, offloading, sharing)
