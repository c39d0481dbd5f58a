"""The memory of one GPU during a training step, at each moment that may be the peak.

The peak is at one of these moments, depending on the model:

    loss            every checkpoint (or all activations), and the head
    last layer      every checkpoint, one layer in use, the head's gradient; gradients of earlier micro-batches
    first layer     one layer in use, the gradients of all others except the embedding
    embedding       all gradients, and the embedding's twice if it is added to an existing one
    optimizer       all gradients, and the temporaries of the optimizer's step
    generation      the key/value cache of GRPO, without gradients or activations

`splitting` has the memory that is allocated at every moment, by the way the model is split. Autocast over fp32 weights
caches half-precision copies in the forward pass; our experts make theirs layer by layer.

Results that checkpointed layers keep are all there at the loss, and in a layer's backward those of the layers before
it. The memory between the last and the first layer is never above that of both: the gradients and the inputs change by
the same bytes with each layer, and what is kept shrinks fastest at the start, as the last layers keep most.

The estimate does not contain the allocator's slack; `ALLOCATOR_SLACK` of the GPU is left free for it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

from liger_trainer.plan.activations import LayerMemory, layer_memory
from liger_trainer.plan.head import HeadMemory, head_memory
from liger_trainer.plan.kept import Kept, Result, keep, layer_results, most
from liger_trainer.plan.optimizers import optimizer_memory
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.splitting import gathered_bytes, generating_buffers, held, here, precision_of, trained_share
from liger_trainer.plan.work import Run

ALLOCATOR_SLACK = 0.08
"""Fraction of a GPU's memory that is left free, for CUDA, NCCL and fragmentation."""

AUTO_STEPS = 4096  # how finely `largest_activation_memory` divides all that can be kept
OFFLOAD_STASH = 5  # layer inputs that TRL's offloading holds while they are copied to the host


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes at one moment, by purpose."""

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
    """The peak of a step."""
    return max(moments(run, setting), key=lambda memory: memory.total)


def host_bytes(run: Run, setting: Setting) -> float:
    """Pinned memory that all processes of this machine need for offloaded layer inputs."""
    inputs = _layer(run, setting).input * run.parameters.layers
    return setting.gpus * setting.offloading * inputs


def kept(run: Run, setting: Setting) -> Kept:
    """What the checkpointed layers keep."""
    return keep(_results(run, setting), _checkpoints(run, setting), _tokens(run, setting), setting.activation_memory)


def largest_activation_memory(run: Run, setting: Setting, room: float) -> int:
    """Bytes that the layers can keep in `room` bytes of a GPU; 0 if the setting does not fit without."""
    everything = most(_results(run, setting), _checkpoints(run, setting), _tokens(run, setting))
    budgets = [everything * part // AUTO_STEPS for part in range(AUTO_STEPS + 1)]

    def is_too_large(budget: int) -> bool:
        return estimate(run, dataclasses.replace(setting, activation_memory=budget)).total > room

    return budgets[max(bisect.bisect_left(budgets, True, key=is_too_large) - 1, 0)]


def moments(run: Run, setting: Setting) -> list[Memory]:
    """The memory at each moment that may be the peak."""
    parameters, compute = run.parameters, precision_of(run, setting).compute
    layer, head = _layer(run, setting), _head(run, setting)
    on_gpu = held(run, setting, head.weight_gradient)
    reference = run.work.reference_bytes / (setting.gpus if setting.sharded else 1)
    always = Memory("", on_gpu.weights, optimizer=on_gpu.states, reference=reference, buffers=on_gpu.buffers)
    first, step = on_gpu.first_gradients, on_gpu.gradients
    accumulated = on_gpu.accumulated if setting.accumulation > 1 else 0.0
    stored, during_forward, loading = _activations(layer, setting, run)
    results = kept(run, setting)
    waiting = results.bytes - (results.in_last if run.checkpoint_every == 1 else 0)  # the last layer's are at work
    embedding = parameters.groups["embedding"].trained_bytes
    idle = 0.0 if setting.sharded else always.buffers
    late = head.weight_gradient if not setting.sharded else 0.0  # for a sharded head it is a buffer
    copies = _autocast_copies(run, setting)
    backward = always.buffers + (copies if not setting.checkpointing else 0.0)
    made = layer.gradients * (0 if setting.sharded else run.weight_bytes)
    again = embedding if (setting.accumulation > 1 or parameters.tied) and not setting.sharded else 0.0
    states = optimizer_memory(run.optim, parameters).step * trained_share(run, setting)
    changes: dict[str, dict[str, float]] = {
        "loss": {
            "gradients": accumulated,
            "activations": during_forward + results.bytes,
            "logits": head.peak - (head.weight_gradient - late),
            "buffers": on_gpu.loss_buffers + copies,
        },
        "last layer": {
            "gradients": accumulated,
            "activations": stored + loading + layer.working + waiting,
            "logits": late,
            "buffers": backward,
        },
        "first layer": {
            "gradients": max(first, accumulated) + made,
            "activations": layer.input + layer.working,
            "logits": late if parameters.tied and accumulated else 0.0,
            "buffers": backward,
        },
        "embedding": {"gradients": max(step, accumulated) + again, "activations": layer.input},
        "optimizer": {"gradients": step, "buffers": idle + states},
    }
    if run.work.generated:
        buffers = generating_buffers(run, setting, always.buffers)
        changes["generation"] = {"generation": _generation(run, setting, compute), "buffers": buffers}
    return [dataclasses.replace(always, moment=moment, **sizes) for moment, sizes in changes.items()]


def _layer(run: Run, setting: Setting) -> LayerMemory:
    experts = here(run.parameters.groups["experts"], run, setting).trained // run.parameters.layers
    sharing = setting.expert_parallel_size
    return layer_memory(
        dataclasses.replace(run.shape, experts=run.shape.experts // sharing, exchanged_experts=sharing > 1),
        precision_of(run, setting),
        _tokens(run, setting),
        run.work.length,
        run.implementation,
        run.recompute_mlp,
        setting.tiled_mlp,
        experts,
    )


def _results(run: Run, setting: Setting) -> list[Result]:
    compute = precision_of(run, setting).compute
    return layer_results(run.shape, compute, run.work.length, run.implementation, setting.tiled_mlp)


def _checkpoints(run: Run, setting: Setting) -> int:
    """Layers that are checkpointed."""
    return math.ceil(run.parameters.layers / run.checkpoint_every) if setting.checkpointing else 0


def _tokens(run: Run, setting: Setting) -> int:
    return run.work.rows * setting.batch * run.work.length


def _head(run: Run, setting: Setting) -> HeadMemory:
    compute = precision_of(run, setting).compute
    tokens = run.work.rows * setting.batch * run.work.loss_length
    weight, trained = gathered_bytes(run, setting), run.parameters.head_trained
    return head_memory(run.work.head, tokens, run.shape.hidden, run.shape.vocab, compute, weight, trained)


def _autocast_copies(run: Run, setting: Setting) -> float:
    if not precision_of(run, setting).autocast:
        return 0.0
    experts = run.parameters.groups["experts"]
    cast = here(experts, run, setting).trained
    if setting.checkpointing and run.shape.fused_experts:
        cast //= run.parameters.layers
    return 2.0 * (run.parameters.total.trained - experts.trained + cast)


def _activations(layer: LayerMemory, setting: Setting, run: Run) -> tuple[float, float, float]:
    """Activations at the start of the last layer's backward, at the loss, and one being loaded from the host."""
    layers, checkpoints = run.parameters.layers, _checkpoints(run, setting)
    whole = (layers - checkpoints) * layer.saved
    stored = checkpoints * layer.input * (1 - setting.offloading) + whole
    stash = min(checkpoints * setting.offloading, OFFLOAD_STASH) * layer.input
    at_work = layer.saved - layer.input if whole else 0.0  # the last layer is among those that save everything
    return max(stored - at_work, layer.input), stored + stash, layer.input if setting.offloading else 0.0


def _generation(run: Run, setting: Setting, compute: int) -> float:
    """The key/value cache, one layer of it twice while it grows, and the fp32 logits of the next token."""
    work, shape, layers = run.work, run.shape, run.parameters.layers
    sequences = work.generated * setting.batch * (setting.accumulation if work.all_micro_batches else 1)
    a_layer = sequences * 2 * shape.key_value * compute
    full = a_layer * work.length
    part = a_layer * min(work.length, shape.sliding_window or work.length)
    cache = layers * (shape.full_layers * full + (1 - shape.full_layers) * part)
    return cache + full + sequences * shape.vocab * (4 + compute)
