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

Checkpointed layers can keep results for the backward pass instead of computing them again (`activation_memory`): those
of their matmuls and of their attention. With the widths of `activations`, elements and FLOP a
token, where a token attends to C tokens in the mean:

    residual    H                       2 Q H           the attention's output projection
    attention   Q, log-sum-exps         4 Q C           C is half the length, less with a window
    q, k, v     Q + 2 K                 2 H (Q + 2 K)
    gate, up    2 I                     4 H I           not with `tiled_mlp`
    experts     2 k E                   4 H k E         gate and up of k experts a token, in our operator
    down        H                       2 I H           where a norm follows; else a recomputation leaves it out
    mixer       its projections         2 H times these; the last one as of attention; and the recurrence's result

Adapters change none of these widths. Norms, rope and
activations come last, as they save little time for their bytes; they are not counted here.

A result with more time a byte is kept before others; where two are equal, in this order. Time is counted in FLOP of
matmuls; attention takes `ATTENTION_TIME` as long for as many. Each is kept in the last layers first: their bytes are
free again before the gradients of the first layers exist.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator

from liger_trainer.kernels.documents import CHUNK
from liger_trainer.plan.activations import LayerMemory, layer_memory
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.splitting import (
    gathered_bytes,
    generating_buffers,
    held,
    here,
    optimizer_memory,
    precision_of,
    trained_share,
)
from liger_trainer.plan.work import HeadMemory, LayerShape, Run, head_memory

ATTENTION_TIME = 1.1
"""Time of attention's FLOP relative to a matmul's: Llama-3 8B at 4096 and 16384 tokens on an H200."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A result that a layer computes again, or keeps."""

    name: str
    bytes: int  # of a token
    time: float  # of a token, which keeping it saves, in FLOP of matmuls
    can_be_kept: bool = True
    share: float = 1.0  # fraction of the layers that have it


@dataclasses.dataclass(frozen=True)
class Kept:
    """The results that layers keep."""

    layers: dict[str, int]  # for each result, in how many of the last layers
    bytes: int  # of all layers
    in_last: int  # bytes of the last layer
    saved: float  # fraction of the recomputation's time that is saved


def layer_results(
    shape: LayerShape, compute: int, length: int, implementation: str = "sdpa", tiled_mlp: bool = False
) -> list[Result]:
    """The results of the layers; `compute` is the bytes per element of outputs of linear layers and attention.

    Eager attention is not one call, which could be kept; experts do not run in tiles.
    """
    found: dict[Result, float] = {}
    for kind in shape.kinds:
        for result in _results_of(kind, compute, length, implementation, tiled_mlp):
            found[result] = found.get(result, 0.0) + kind.share
    return [dataclasses.replace(result, share=min(share, 1.0)) for result, share in found.items()]


def _results_of(shape: LayerShape, compute: int, length: int, implementation: str, tiled_mlp: bool) -> Iterator[Result]:
    """The results of a layer of one kind."""
    hidden, query, projected = shape.hidden, shape.query, shape.query + 2 * shape.key_value
    attended = ATTENTION_TIME * 4 * query * attended_tokens(shape, length)
    chosen = 2 * shape.experts_per_token * shape.expert_intermediate
    tiled = tiled_mlp and not shape.experts_per_token
    found = [
        *_results_of_mixer(shape, compute),
        Result("residual", compute * hidden * (query > 0), 2 * query * hidden),
        Result("attention", compute * query + 4 * shape.heads, attended, implementation != "eager"),
        Result("q, k, v", compute * projected, 2 * hidden * projected),
        Result("gate, up", compute * 2 * shape.intermediate, 4 * hidden * shape.intermediate, not tiled),
        Result("experts", compute * chosen, 2 * hidden * chosen, shape.fused_experts),
        Result("down", compute * hidden * shape.post_norms, 2 * hidden * shape.intermediate, not tiled),
    ]
    yield from (result for result in found if result.bytes)


def _results_of_mixer(shape: LayerShape, compute: int) -> list[Result]:
    mixer, hidden = shape.mixer, shape.hidden
    if mixer is None:
        return []
    found = [
        Result("mixer projections", compute * mixer.projected, 2 * hidden * mixer.projected),
        Result("mixer residual", compute * hidden, 2 * mixer.value * hidden),
    ]
    if mixer.heads:  # products with the states and within chunks
        time = (6 if mixer.delta else 4) * mixer.state + 2 * CHUNK * (2 * mixer.value + mixer.convolved)
        inverse = CHUNK * mixer.heads if mixer.delta else 0
        found.append(Result("recurrence", compute * (mixer.value + inverse), ATTENTION_TIME * time))
    return found


def attended_tokens(shape: LayerShape, length: int) -> float:
    """Tokens that a token attends to, in the mean over a sequence and over the layers, with and without windows."""
    window = min(shape.sliding_window or length, length)
    return shape.full_layers * length / 2 + (1 - shape.full_layers) * window * (1 - window / (2 * length))


def keep(results: Iterable[Result], layers: int, tokens: int, budget: int) -> Kept:
    """What fits into `budget`: bytes that all checkpointed layers may keep of a micro-batch of `tokens` on one GPU."""
    results = list(results)
    left, kept = budget, dict.fromkeys((result.name for result in results), 0)
    best_first = sorted(results, key=lambda result: -result.time / result.bytes)
    for result in best_first:
        if result.can_be_kept:
            kept[result.name] = min(round(layers * result.share), left // (tokens * result.bytes))
            left -= kept[result.name] * tokens * result.bytes
    in_last = tokens * sum(result.bytes for result in results if kept[result.name])
    saved = sum(result.time * kept[result.name] for result in results)
    whole = layers * sum(result.share * result.time for result in results)
    return Kept(kept, budget - left, in_last, saved / max(whole, 1))


def most(results: Iterable[Result], layers: int, tokens: int) -> int:
    """Bytes of everything that can be kept; the arguments are those of `keep`."""
    return tokens * sum(round(layers * result.share) * result.bytes for result in results if result.can_be_kept)


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


def host_bytes(run: Run, setting: Setting, hosts: int = 1) -> float:
    """Pinned memory that all processes of a machine need for offloaded layer inputs."""
    inputs = layer_of(run, setting).input * run.parameters.layers
    return setting.gpus / hosts * setting.offloading * inputs


def kept(run: Run, setting: Setting) -> Kept:
    """What the checkpointed layers keep."""
    return keep(_results(run, setting), _checkpoints(run, setting), tokens_of(run, setting), setting.activation_memory)


def largest_activation_memory(run: Run, setting: Setting, room: float) -> int:
    """Bytes that the layers can keep in `room` bytes of a GPU; 0 if the setting does not fit without."""
    everything = most(_results(run, setting), _checkpoints(run, setting), tokens_of(run, setting))
    budgets = [everything * part // AUTO_STEPS for part in range(AUTO_STEPS + 1)]

    def is_too_large(budget: int) -> bool:
        return estimate(run, dataclasses.replace(setting, activation_memory=budget)).total > room

    return budgets[max(bisect.bisect_left(budgets, True, key=is_too_large) - 1, 0)]


def moments(run: Run, setting: Setting) -> list[Memory]:
    """The memory at each moment that may be the peak."""
    parameters, compute = run.parameters, precision_of(run, setting).compute
    layer, head = layer_of(run, setting), _head(run, setting)
    on_gpu = held(run, setting, head.weight_gradient)
    reference = run.work.reference_bytes / (setting.shards if setting.sharded else 1)
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


def layer_of(run: Run, setting: Setting) -> LayerMemory:
    """The memory of a layer: what it saves in the mean over the kinds of layers, and the peak of the fullest kind.

    GPUs that share sequences gather each other's keys and values, in the backward with their gradients.
    """
    sparse = max(round(run.parameters.layers * run.shape.sparse_share), 1)
    experts = here(run.parameters.groups["experts"], run, setting).trained // sparse
    sharing, shape = setting.expert_parallel_size, run.shape.divided(setting.tensor_parallel_size)
    found = [
        layer_memory(
            dataclasses.replace(kind, experts=kind.experts // sharing, exchanged_experts=sharing > 1),
            precision_of(run, setting),
            tokens_of(run, setting),
            run.work.length,
            run.implementation,
            run.recompute_mlp,
            setting.tiled_mlp,
            experts,
        )
        for kind in shape.kinds
    ]
    saved = sum(kind.share * memory.saved for kind, memory in zip(shape.kinds, found))
    fullest = max(found, key=lambda memory: memory.working)
    others = (setting.sequence_parts - 1) * tokens_of(run, setting) * precision_of(run, setting).compute
    arrived = 4 * max(kind.key_value for kind in shape.kinds) * others
    return dataclasses.replace(fullest, saved=saved, working=fullest.working + arrived)


def _results(run: Run, setting: Setting) -> list[Result]:
    compute = precision_of(run, setting).compute
    shape = run.shape.divided(setting.tensor_parallel_size)
    return layer_results(shape, compute, run.work.length, run.implementation, setting.tiled_mlp)


def _checkpoints(run: Run, setting: Setting) -> int:
    """Layers that are checkpointed."""
    return math.ceil(run.parameters.layers / run.checkpoint_every) if setting.checkpointing else 0


def tokens_of(run: Run, setting: Setting) -> int:
    """Tokens of a micro-batch on one GPU."""
    return run.work.rows * setting.batch * run.work.length // setting.sequence_parts


def _head(run: Run, setting: Setting) -> HeadMemory:
    compute = precision_of(run, setting).compute
    tokens = run.work.rows * setting.batch * run.work.loss_length // setting.sequence_parts
    weight, trained = gathered_bytes(run, setting), run.parameters.head_trained
    vocab = run.shape.divided(setting.tensor_parallel_size).vocab
    return head_memory(run.work.head, tokens, run.shape.hidden, vocab, compute, weight, trained)


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
    """The key/value cache, one layer of it twice while it grows, states, and the fp32 logits of the next token."""
    work, shape, layers = run.work, run.shape, run.parameters.layers
    sequences = work.generated * setting.batch * (setting.accumulation if work.all_micro_batches else 1)
    cache = largest = 0.0
    for kind in shape.kinds:
        a_layer = sequences * 2 * kind.key_value * compute
        full = a_layer * work.length
        part = a_layer * min(work.length, kind.sliding_window or work.length)
        states = 4 * sequences * kind.mixer.state if kind.mixer is not None else 0  # in fp32
        cache += layers * kind.share * (kind.full_layers * full + (1 - kind.full_layers) * part + states)
        largest = max(largest, full)
    return cache + largest + sequences * shape.vocab * (4 + compute)
