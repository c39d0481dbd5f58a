"""The ways to run a recipe that a plan compares."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

CONFIGS = {"single": "single_gpu", "ddp": "ddp", "zero2": "zero2", "fsdp2": "fsdp2"}
"""Strategy to the name of its accelerate configuration."""

STEP_OVERHEAD_TOKENS = {"single": 250, "ddp": 500, "zero2": 750, "fsdp2": 1000}
"""What a micro-step costs beside its tokens, in tokens: launches, and for FSDP2 two gathers and one reduction of the
weights, 6 bytes a parameter at some 300 GB/s against 8 FLOP a parameter and token at some 400 TFLOP/s. For ranking."""

OFFLOADING_COST = 1.05
TILED_COST = 1.02


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run.

    Args:
        strategy: ``"single"``, ``"ddp"``, ``"zero2"`` or ``"fsdp2"`` (weights, gradients and states split, weights
            freed after each layer).
        gpus: How many GPUs.
        batch: ``per_device_train_batch_size``.
        accumulation: ``gradient_accumulation_steps``.
        checkpointing: Whether every layer is computed again in the backward.
        tiled_mlp: Whether gated MLPs run in tiles.
        offloading: Of the layers' inputs, the fraction that waits in the host's memory; 0 without checkpointing.
    """

    strategy: str = "single"
    gpus: int = 1
    batch: int = 1
    accumulation: int = 1
    checkpointing: bool = True
    tiled_mlp: bool = False
    offloading: float = 0.0

    @property
    def sharded(self) -> bool:
        """Whether the weights themselves are split."""
        return self.strategy == "fsdp2"


def relative_cost(setting: Setting, tokens: int, weights_trained: bool) -> float:
    """Time a token takes, relative to the same model on one GPU without checkpointing; for ranking alone.

    A trained matrix costs three products a token, one in the forward and two in the backward; a frozen one under
    adapters costs two; checkpointing adds one.

    Args:
        setting: How it runs.
        tokens: Of a micro-batch on one GPU.
        weights_trained: Whether the layers' own weights are trained.
    """
    products = 3 if weights_trained else 2
    cost = (products + setting.checkpointing) / products
    cost *= OFFLOADING_COST if setting.offloading else 1.0
    cost *= TILED_COST if setting.tiled_mlp else 1.0
    return cost * (1 + STEP_OVERHEAD_TOKENS[setting.strategy] / max(tokens, 1))


def candidates(
    gpus: int, batch: int, accumulation: int, quantised: bool, tiles: bool, fixed_batch: bool = False
) -> Iterator[Setting]:
    """All settings worth a look; each keeps the samples of an optimizer step.

    Args:
        gpus: How many GPUs.
        batch: The recipe's ``per_device_train_batch_size``.
        accumulation: The recipe's ``gradient_accumulation_steps``.
        quantised: Whether the base is quantised, which is not split.
        tiles: Whether the model has gated MLPs to tile.
        fixed_batch: Whether the batch stays what it is.
    """
    strategies = ["single"] if gpus == 1 else ["ddp", "zero2", *([] if quantised else ["fsdp2"])]
    samples = batch * accumulation
    batches = [batch] if fixed_batch else [size for size in range(1, samples + 1) if samples % size == 0]
    ways = [(False, False, 0.0), (True, False, 0.0), (True, False, 1.0)]
    ways += [(True, True, 0.0), (True, True, 1.0)] if tiles else []
    for strategy, (checkpointing, tiled, offloading), size in itertools.product(strategies, ways, batches):
        yield Setting(strategy, gpus, size, samples // size, checkpointing, tiled, offloading)
