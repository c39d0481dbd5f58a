"""The memory of one GPU through a training step, moment by moment; the fullest moment is the estimate.

A step is at its fullest at one of these moments, and which one depends on the model:

    loss            every checkpoint (or all activations), and the head
    last layer      every checkpoint, one layer at work, the head's gradient; gradients of earlier micro-batches
    first layer     one layer at work, the gradients of all others but the embedding
    embedding       all gradients, and the embedding's once more where it is added to one that is there
    optimizer       all gradients, and what the optimizer's step adds
    generation      the key/value cache of GRPO, without gradients or activations

FSDP2 (accelerate upcasts trained weights to fp32 under mixed precision) splits fp32 weights, gradients and states over
the GPUs; whole, in the compute dtype, are two layers (one at work, one on its way), two layers' gradients (one being
made, one being reduced), and for the whole backward what is in no layer: embedding and head, and the head's gradient.
ZeRO-2 keeps half-precision weights whole, splits gradients, and adds an fp32 master copy of weights and gradients,
split, and two buckets of 5e8 numbers. DDP keeps buckets as large as all gradients. Autocast over fp32 weights that
nobody splits caches half-precision copies for the forward. The largest weight in 4 bits has a buffer when floating.

The allocator's own slack is no part of the estimate; `ALLOCATOR_SLACK` of the GPU is kept free for it.
"""

from __future__ import annotations

import dataclasses

from liger_trainer.plan.activations import LayerMemory, Precision, layer_memory
from liger_trainer.plan.head import HeadMemory, HeadSettings, head_memory
from liger_trainer.plan.optimizers import optimizer_memory
from liger_trainer.plan.parameters import Group, Parameters
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.shapes import LayerShape

ALLOCATOR_SLACK = 0.08
"""Fraction of a GPU's memory that is left free: CUDA's and NCCL's own, and blocks that no longer fit anything."""

OFFLOAD_STASH = 5  # inputs of layers that TRL's offloading keeps on their way to the host
ZERO_BUCKET = 500_000_000  # numbers, DeepSpeed's default


@dataclasses.dataclass(frozen=True)
class Work:
    """What one micro-batch of a trainer is, beside its size.

    Args:
        rows: Sequences for each unit of the batch size: 2 for the trainers of pairs.
        length: Tokens of a sequence.
        loss_length: Of these, the tokens with a loss.
        head: How the head runs.
        reference_bytes: Of a reference model's weights; 0 for none.
        generated: Sequences generated at once on each GPU with ``generate``, for one micro-batch of one sample; 0 for
            none.
        all_micro_batches: Whether those of all accumulation steps are generated together.
        reserved_fraction: Of the GPU, what vLLM takes for itself beside the training.
    """

    rows: int = 1
    length: int = 1024
    loss_length: int = 1024
    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)
    reference_bytes: float = 0.0
    generated: int = 0
    all_micro_batches: bool = True
    reserved_fraction: float = 0.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A model and what is done with it: all that a setting leaves open.

    Args:
        parameters: Counted.
        shape: Of its largest layer.
        work: Of a micro-batch.
        weight_bytes: Of a number of the trained weights as they are loaded; adapters are fp32 whatever this is.
        mixed: Whether bf16 or fp16 autocast is on.
        optim: The Trainer's ``optim``.
        implementation: Of the attention.
        recompute_mlp: As in ``liger_kernel_config``.
    """

    parameters: Parameters
    shape: LayerShape
    work: Work
    weight_bytes: int = 2
    mixed: bool = True
    optim: str = "adamw_torch_fused"
    implementation: str = "sdpa"
    recompute_mlp: bool = False


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes at one moment, by what they are for."""

    moment: str
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    reference: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    generation: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return sum(dataclasses.astuple(self)[1:])


def estimate(run: Run, setting: Setting) -> Memory:
    """The fullest moment of a step."""
    return max(moments(run, setting), key=lambda memory: memory.total)


def host_bytes(run: Run, setting: Setting) -> float:
    """Pinned memory that all processes of this machine take for offloaded inputs of layers."""
    inputs = _layer(run, setting).input * run.parameters.layers
    return setting.gpus * setting.offloading * inputs


def precision_of(run: Run, setting: Setting) -> Precision:
    """Bytes of activations: FSDP2 and ZeRO-2 hand out half-precision weights, so the residual stream is that too."""
    compute = 2 if run.mixed else run.weight_bytes
    whole = setting.strategy in ("single", "ddp")
    return Precision(compute, run.weight_bytes if whole else compute)


def moments(run: Run, setting: Setting) -> list[Memory]:
    """All the moments at which a step may be at its fullest."""
    parameters, compute = run.parameters, precision_of(run, setting).compute
    layer, head = _layer(run, setting), _head(run, setting)
    kept = _kept(run, setting)
    first, step = _gradients(run, setting)
    accumulated = step if setting.accumulation > 1 else 0.0
    stored, during_forward, loading = _activations(layer, setting, parameters.layers)
    embedding = parameters.groups["embedding"].trained_bytes
    idle = 0.0 if setting.sharded else kept.buffers
    late = head.weight_gradient if not setting.sharded else 0.0  # of a sharded head it is a buffer, below
    copies = 2.0 * parameters.total.trained if precision_of(run, setting).autocast else 0.0
    backward = kept.buffers + (copies if not setting.checkpointing else 0.0)
    made = layer.gradients * (0 if setting.sharded else run.weight_bytes)
    again = embedding if (setting.accumulation > 1 or parameters.tied) and not setting.sharded else 0.0
    states = optimizer_memory(run.optim, parameters).step / _split(setting, "optimizer")
    found = [
        kept.at(
            "loss",
            gradients=accumulated,
            activations=during_forward,
            logits=head.peak - (head.weight_gradient - late),  # that of a sharded head is a buffer
            buffers=kept.buffers + copies,
        ),
        kept.at(
            "last layer",
            gradients=accumulated,
            activations=stored + loading + layer.working,
            logits=late,
            buffers=backward,
        ),
        kept.at(
            "first layer",
            gradients=max(first, accumulated) + made,
            activations=layer.input + layer.working,
            logits=late if parameters.tied and accumulated else 0.0,
            buffers=backward,
        ),
        kept.at("embedding", gradients=step + again, activations=layer.input),
        kept.at("optimizer", gradients=step, buffers=idle + states),
    ]
    if run.work.generated:
        found.append(kept.at("generation", generation=_generation(run, setting, compute), buffers=_whole(run, setting)))
    return found


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What is there at every moment."""

    weights: float
    optimizer: float
    reference: float
    buffers: float

    def at(self, moment: str, generation: float = 0.0, buffers: float | None = None, **sizes: float) -> Memory:
        return Memory(
            moment,
            self.weights,
            optimizer=self.optimizer,
            reference=self.reference,
            buffers=self.buffers if buffers is None else buffers,
            generation=generation,
            **sizes,
        )


def _split(setting: Setting, what: str) -> int:
    splits = {"weights": ("fsdp2",), "reference": ("fsdp2",), "optimizer": ("fsdp2", "zero2")}
    return setting.gpus if setting.strategy in splits[what] else 1


def _upcast(run: Run) -> float:
    """Bytes of the trained weights under FSDP2: fp32 in mixed precision."""
    total = run.parameters.total
    return 4.0 * total.trained if run.mixed else total.trained_bytes


def _kept(run: Run, setting: Setting) -> _Kept:
    parameters, total, gpus = run.parameters, run.parameters.total, setting.gpus
    compute = precision_of(run, setting).compute
    weights, states = total.bytes, optimizer_memory(run.optim, parameters).states
    buffers = float(compute * parameters.dequantised)
    if setting.strategy == "ddp":
        buffers += total.trained_bytes
    elif setting.strategy == "zero2":
        weights = total.frozen_bytes + compute * total.trained
        master = 4.0 * total.trained if compute < 4 else 0.0
        states = (optimizer_memory(run.optim, parameters, 4.0 * total.trained).states + master) / gpus
        buffers += 2.0 * compute * min(ZERO_BUCKET, total.trained)
    elif setting.strategy == "fsdp2":
        weights = (total.frozen_bytes + _upcast(run)) / gpus
        states = optimizer_memory(run.optim, parameters, _upcast(run)).states / gpus
        layer, root = parameters.layer, parameters.root
        buffers = 2 * _gathered(layer, compute) + 2 * compute * layer.trained + _gathered(root, compute)
        buffers += _head(run, setting).weight_gradient
    reference = run.work.reference_bytes / _split(setting, "reference")
    return _Kept(weights, states, reference, buffers)


def _gathered(group: Group, compute: int) -> float:
    return group.frozen_bytes + compute * group.trained


def _gradients(run: Run, setting: Setting) -> tuple[float, float]:
    """Gradients when the first layer's are made, and all of them."""
    parameters, total, gpus = run.parameters, run.parameters.total, setting.gpus
    if setting.strategy == "fsdp2":
        return _upcast(run) / gpus, _upcast(run) / gpus
    if setting.strategy == "zero2":
        whole = (precision_of(run, setting).compute + 4.0) * total.trained / gpus  # in fp32 too, for the master copy
        return whole, whole
    missing = parameters.layer.trained_bytes
    if not parameters.tied:
        missing += parameters.groups["embedding"].trained_bytes
    return total.trained_bytes - missing, total.trained_bytes


def _tokens(run: Run, setting: Setting) -> int:
    return run.work.rows * setting.batch * run.work.length


def _layer(run: Run, setting: Setting) -> LayerMemory:
    experts = run.parameters.groups["experts"].trained // run.parameters.layers
    return layer_memory(
        run.shape,
        precision_of(run, setting),
        _tokens(run, setting),
        run.work.length,
        run.implementation,
        run.recompute_mlp,
        setting.tiled_mlp,
        experts,
    )


def _head(run: Run, setting: Setting) -> HeadMemory:
    compute = precision_of(run, setting).compute
    tokens = run.work.rows * setting.batch * run.work.loss_length
    # A gathered head is in the compute dtype, and so is its gradient until it is reduced.
    weight = compute if setting.strategy != "single" and setting.strategy != "ddp" else run.weight_bytes
    trained = run.parameters.head_trained
    return head_memory(run.work.head, tokens, run.shape.hidden, run.shape.vocab, compute, weight, trained)


def _activations(layer: LayerMemory, setting: Setting, layers: int) -> tuple[float, float, float]:
    """Activations when the last layer's backward begins, at the loss, and one that is loaded from the host."""
    if not setting.checkpointing:
        stored = layers * layer.saved  # the layer at work is among them
        return stored - (layer.saved - layer.input), stored, 0.0
    stored = layers * layer.input * (1 - setting.offloading)
    stash = min(layers, OFFLOAD_STASH) * layer.input * setting.offloading
    return max(stored, layer.input), stored + stash, layer.input if setting.offloading else 0.0


def _generation(run: Run, setting: Setting, compute: int) -> float:
    """The cache of keys and values, one layer of it twice while it grows, and the logits of the next token in fp32."""
    work, shape, layers = run.work, run.shape, run.parameters.layers
    sequences = work.generated * setting.batch * (setting.accumulation if work.all_micro_batches else 1)
    a_layer = sequences * 2 * shape.key_value * compute
    full = a_layer * work.length
    part = a_layer * min(work.length, shape.sliding_window or work.length)
    cache = layers * (shape.full_layers * full + (1 - shape.full_layers) * part)
    return cache + full + sequences * shape.vocab * (4 + compute)


def _whole(run: Run, setting: Setting) -> float:
    """The weights that generation gathers, where they are split, and the buffers it finds."""
    total = run.parameters.total
    if setting.sharded:
        return _gathered(total, precision_of(run, setting).compute)
    return _kept(run, setting).buffers
