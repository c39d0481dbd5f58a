"""The ways to run a recipe that a plan compares."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

CONFIGS = {
    "single": "single_gpu",
    "ddp": "ddp",
    "zero2": "zero2",
    "fsdp2": "fsdp2",
    "expert_parallel": "ddp",
    "tensor_parallel": "ddp",
}
"""Name of each strategy's accelerate configuration; loading splits the model for the last two."""

MOST_PARTS = 64  # GPUs that share a sequence


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to run."""

    # ``"single"``, ``"ddp"``, ``"zero2"``, ``"fsdp2"`` (weights, gradients and states split, weights freed after each
    # layer), ``"expert_parallel"`` (the same, but tokens are sent to the experts) or ``"tensor_parallel"`` (the same,
    # but every matrix is split too).
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
    replicas: int = 1  # copies of the split model, as of HSDP; 1 except for ``"fsdp2"``
    sequence_parts: int = 1  # GPUs that share a sequence (context parallelism); 1 except for ``"fsdp2"``
    tensor_parallel_size: int = 1  # GPUs that share a matrix; 1 except for ``"tensor_parallel"``

    @property
    def sharded(self) -> bool:
        """Whether the weights themselves are split."""
        return self.strategy in ("fsdp2", "expert_parallel", "tensor_parallel")

    @property
    def shards(self) -> int:
        """GPUs that hold one copy of the model together, if it is split."""
        return self.gpus // self.replicas

    @property
    def sharing(self) -> int:
        """GPUs that work on the same sequences."""
        return self.sequence_parts * self.tensor_parallel_size


def splits(
    gpus: int,
    hosts: int = 1,
    *,
    quantised: bool = False,
    zero2: bool = True,
    experts: int = 0,
    parts: Iterable[int] = (),
    matrices: Iterable[int] = (),
) -> list[Setting]:
    """The ways to split a model over `gpus` of `hosts`; batches and recomputation are left open.

    A quantised base is not split. DeepSpeed (`zero2`) splits neither experts in 4 bits nor for `liger_adamw`. `experts`
    per layer can be shared, 0 for none; `parts` are the sizes of a group that can share sequences, `matrices` those of
    one that can share matrices. Copies of a split model (HSDP) are for several hosts: each has whole hosts, or whole
    parts of one.
    """
    if gpus == 1:
        return [Setting()]
    found = [Setting("ddp", gpus), *([Setting("zero2", gpus)] if zero2 else [])]
    if quantised:
        return found
    each = gpus // hosts
    sizes = [size for size in range(2, gpus + 1) if gpus % size == 0]
    copies = [size for size in sizes if hosts > 1 and size < gpus and 0 in (gpus // size % each, each % (gpus // size))]
    found.append(Setting("fsdp2", gpus))
    found += [Setting("fsdp2", gpus, replicas=size) for size in copies]
    found += [Setting("fsdp2", gpus, sequence_parts=size) for size in parts if size in sizes]
    shared = [size for size in sizes if experts and experts % size == 0]
    found += [Setting("expert_parallel", gpus, expert_parallel_size=size) for size in shared]
    inside = [size for size in matrices if size in sizes and each % size == 0]
    return found + [Setting("tensor_parallel", gpus, tensor_parallel_size=size) for size in inside]


def candidates(
    ways: Iterable[Setting], batch: int, accumulation: int, tiles: bool, fixed_batch: bool = False
) -> Iterator[Setting]:
    """All settings to compare, of each of the `ways` to split; each has the same samples in an optimizer step.

    `batch` and `accumulation` are those of a GPU with sequences of its own; GPUs that share a sequence have more.
    """
    options = [(False, False, 0.0), (True, False, 0.0), (True, False, 1.0)]
    options += [(True, True, 0.0), (True, True, 1.0)] if tiles else []
    for split, (checkpointing, tiled, offloading) in itertools.product(ways, options):
        samples = batch * accumulation * split.sharing
        sizes = [batch] if fixed_batch else [size for size in range(1, samples + 1) if samples % size == 0]
        for size in sizes:
            yield dataclasses.replace(
                split,
                batch=size,
                accumulation=samples // size,
                checkpointing=checkpointing,
                tiled_mlp=tiled,
                offloading=offloading,
            )
