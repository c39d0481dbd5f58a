"""The time of a training step, of what one GPU computes and sends.

A token costs, in FLOP of matmuls at the rate that the GPU sustains:

    products    2 for each weight that it meets in the forward, and for each of two gradients, of which a frozen weight
                has one; experts at `EXPERTS_COST` times that, a forward at `FORWARD` times
    attention   4 Q C in the forward and 2.5 times that in the backward, where it attends to C tokens in the mean, at
                `ATTENTION_COST` times that

and in bytes of its memory, `PASSES` over what a layer saves (norms, rotations, activations, residual stream) and
`ADAPTER_PASSES` over what adapters read, half of them in the forward. Autocast over fp32 weights casts them, and their
gradients: 6 bytes each. Checkpointing runs the forward again, but for what is kept, and for the down projection where
no norm follows it. `Work.scored` forwards have no gradients. A step has besides the optimizer's bytes, with those of
clipping, and `LAUNCH_SECONDS` a micro-batch.

In fp8 a product takes `FP8_COST` of its time. A weight is cast for each, in `CAST` bytes; the codes of an input
are 1 byte more, a gradient is read and written again, and so are both by columns for the gradient of a weight.

FSDP2 gathers the next layer while one computes, and reduces the gradients of the one before. So a layer takes the
longer of its compute and of its messages, which wait for each other. The first gather of a pass and its last reduction
have nothing to hide behind, nor has the root. Layers wait for the activations that they send.

All constants are of one H200: of Llama-3 8B and Qwen3-30B-A3B (12 layers) at 4 x 4096 tokens (docs/performance.md), and
those of fp8 of single products and casts (docs/guides/fp8.md); none is fitted to several GPUs.
"""

from __future__ import annotations

import dataclasses

from liger_trainer.kernels.fp8.modes import products_of
from liger_trainer.patching.fp8 import LEAST_FEATURES, LEAST_ROWS
from liger_trainer.plan.cluster import NOTHING, Cluster, Sent
from liger_trainer.plan.estimate import attended_tokens, kept, layer_of, tokens_of
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.splitting import held, precision_of
from liger_trainer.plan.traffic import traffic
from liger_trainer.plan.work import LayerShape, Run

EXPERTS_COST = 1.6
"""Time of the experts' FLOP relative to other matmuls', with sorting and sums: they are small, and many."""

ATTENTION_COST = 1.2
"""Time of attention's FLOP, forward and backward, relative to matmuls'."""

PASSES, ADAPTER_PASSES = 4, 10
"""How often the GPU's memory is read or written for what a layer saves, and for what its adapters read."""

FORWARD = 0.86
"""Time of a product of the forward, relative to the mean of the forward's and both gradients'."""

FP8_COST, CAST = 1 / 1.8, 8.7
"""Time of a product in fp8 relative to one in bf16, and bytes that the cast of a weight's element takes."""

LARGEST_ERROR = 0.08
"""Of tokens/s, over the runs on one to four GPUs that `tests/plan/test_speed_measured.py` finds."""

OFFLOADING_COST, TILED_COST = 0.02, 0.02
"""Of the time of layers: more where every input is offloaded, and where MLPs run in tiles."""

LAUNCH_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step of one GPU."""

    tokens: float  # of all micro-batches; of GPUs that share sequences or matrices, each its part
    computing: float  # seconds without communication
    waiting: float  # seconds of communication that computing does not hide
    sent: Sent  # everything that the GPU sends, with the seconds of all messages

    @property
    def token(self) -> float:
        """Seconds a token and GPU."""
        return (self.computing + self.waiting) / self.tokens

    @property
    def hidden(self) -> float:
        """The fraction of the messages' time that is hidden; 1 without messages."""
        return 1 - self.waiting / self.sent.seconds if self.sent.seconds else 1.0


def step_time(run: Run, setting: Setting, cluster: Cluster) -> StepTime:
    """The time of an optimizer step."""
    layers, micro_batches, scored = run.parameters.layers, setting.accumulation, run.work.scored
    messages, layer = traffic(run, setting, cluster), _layer(run, setting, cluster)
    slower = (1 + OFFLOADING_COST * setting.offloading) * (1 + TILED_COST * setting.tiled_mlp)
    copies = 2 * messages.copied / cluster.memory
    forward, backward = layer.forward * slower + copies, (layer.backward + layer.again) * slower + copies
    head = _head(run, setting, cluster)
    computing = layers * (forward + backward) + head + scored * (layers * (layer.forward + copies) + head / 3)
    computing = micro_batches * (computing + LAUNCH_SECONDS)
    waiting = micro_batches * (
        (1 + scored) * _waiting(layers, forward, messages.gather, NOTHING)
        + _waiting(layers, backward, messages.gather, NOTHING)
        + (2 + scored) * messages.root_gather.seconds
        + messages.activations.seconds
    )
    with_sums = _waiting(layers, backward, messages.gather, messages.reduce) + messages.root_reduce.seconds
    waiting += messages.reductions * (with_sums - _waiting(layers, backward, messages.gather, NOTHING))
    waiting += messages.at_end.seconds
    tokens = micro_batches * tokens_of(run, setting) / setting.tensor_parallel_size
    sent = messages.step(layers, micro_batches, scored)
    return StepTime(tokens, computing + _optimizer(run, setting, cluster), waiting, sent)


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Seconds of a layer in a micro-batch, in the mean over the layers."""

    forward: float
    backward: float
    again: float  # of the recomputation


def _layer(run: Run, setting: Setting, cluster: Cluster) -> _Layer:
    """The time of products, of attention, and of the bytes between them."""
    tokens, matrices, layers = tokens_of(run, setting), setting.tensor_parallel_size, run.parameters.layers
    shape, groups = run.shape.divided(matrices), run.parameters.groups
    met = EXPERTS_COST * shape.experts_per_token / shape.experts if shape.experts else 0.0
    rest = run.parameters.total + (run.parameters.root + groups["experts"]) * -1
    each = 2 * tokens / layers / matrices / cluster.flops  # seconds of a product for an element
    every = each * (rest.elements + met * groups["experts"].elements)
    trained = each * (rest.trained + met * groups["experts"].trained)
    inner = shape.intermediate + EXPERTS_COST * shape.experts_per_token * shape.expert_intermediate
    down = 0.0 if shape.post_norms else 2 * tokens * shape.hidden * inner / cluster.flops
    attention = ATTENTION_COST * tokens * _attention(shape, run.work.length) / cluster.flops
    between = (_passes(run, setting, shape) / 2 + _casts(run, setting)) / cluster.memory
    low = _in_fp8(run, setting) if cluster.fp8 else _InFp8()
    mlp = shape.intermediate > 0
    read = tokens * (shape.hidden * (1 + mlp) + shape.query + shape.intermediate)  # numbers that linear layers read,
    made = tokens * (shape.hidden * (1 + mlp) + shape.query + 2 * (shape.key_value + shape.intermediate))  # and make
    in_fp8 = low.layers * (1 - FP8_COST)  # of the products of a forward, less
    faster = in_fp8 * each * groups["layers"].elements
    weights = low.weights * CAST * groups["layers"].elements / layers / matrices
    casts = low.layers * (weights + read) / cluster.memory
    forward = FORWARD * (every - faster) + attention + between + casts
    casts = low.layers * (weights + 3 * made + CAST * (made + read) * low.gradients) / cluster.memory
    products = every + trained - faster * (1 + low.gradients)
    backward = (3 - FORWARD) / 2 * products + 2.5 * attention + between + casts
    again = forward - FORWARD * down * (1 - in_fp8)
    again *= setting.checkpointing / run.checkpoint_every * (1 - kept(run, setting).saved)
    return _Layer(forward, backward, again)


@dataclasses.dataclass(frozen=True)
class _InFp8:
    """What of the linear layers is multiplied in fp8."""

    layers: float = 0.0  # the share of the layers
    weights: bool = False  # whether weights are cast for each product
    gradients: bool = False  # whether the weights' gradients are computed so too


def _in_fp8(run: Run, setting: Setting) -> _InFp8:
    if run.fp8_base:
        return _InFp8(1.0)
    if not run.fp8 or tokens_of(run, setting) < LEAST_ROWS or run.shape.hidden < LEAST_FEATURES:
        return _InFp8()
    return _InFp8(1 - 2 / run.parameters.layers, True, products_of(run.fp8).weight_gradient is not None)


def _casts(run: Run, setting: Setting) -> float:
    """Bytes of a layer that autocast moves over fp32 weights: it reads them, or their gradients, and writes others."""
    layers = run.parameters.total + run.parameters.root * -1
    return 6 * layers.trained / run.parameters.layers if precision_of(run, setting).autocast else 0.0


def _head(run: Run, setting: Setting, cluster: Cluster) -> float:
    """Seconds of the head in a micro-batch."""
    parameters, work = run.parameters, run.work
    root = parameters.root if parameters.tied else parameters.root + parameters.groups["embedding"] * -1
    tokens = tokens_of(run, setting) * work.loss_length / work.length
    return tokens * (4 * root.elements + 2 * root.trained) / setting.tensor_parallel_size / cluster.flops


def _waiting(layers: int, compute: float, gather: Sent, reduce: Sent) -> float:
    """Seconds that a pass over the layers waits: of each, what is longer than its compute, and both ends."""
    return gather.seconds + reduce.seconds + (layers - 1) * max(gather.seconds + reduce.seconds - compute, 0.0)


def _attention(shape: LayerShape, length: int) -> float:
    """FLOP a token of a layer's forward, in the mean over the layers."""
    return sum(kind.share * 4 * kind.query * attended_tokens(kind, length) for kind in shape.kinds)


def _passes(run: Run, setting: Setting, shape: LayerShape) -> float:
    """Bytes that a layer moves between its matmuls, in a micro-batch."""
    adapted = shape.adapted_attention + shape.adapted_output + shape.adapted_mlp + shape.adapted_down
    adapters = ADAPTER_PASSES * adapted * precision_of(run, setting).compute * tokens_of(run, setting)
    whole = dataclasses.replace(setting, tiled_mlp=False)  # tiles save less, and move as much
    return PASSES * layer_of(run, whole).saved + adapters


def _optimizer(run: Run, setting: Setting, cluster: Cluster) -> float:
    """Seconds of the optimizer's step: weights, as large as gradients, and states both ways; clipping three passes."""
    on_gpu = held(run, setting, 0.0)
    return (2 * (on_gpu.gradients + on_gpu.states) + 4 * on_gpu.gradients) / cluster.memory
