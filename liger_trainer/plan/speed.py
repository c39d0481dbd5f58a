"""The time of a training step, of what one GPU computes and sends.

A token costs, in FLOP of matmuls at the rate that the GPU sustains:

    matrices    6 for each weight that it meets, 4 for a frozen one; experts at `EXPERTS_COST` times that
    attention   3.5 times 4 Q C, where it attends to C tokens in the mean, at `ATTENTION_COST` times that

and in bytes of its memory, `PASSES` over what a layer saves (norms, rotations, activations, residual stream) and
`ADAPTER_PASSES` over what adapters read. Checkpointing adds `RECOMPUTATION` products. A step has besides the
optimizer's bytes, with those of clipping, and `LAUNCH_SECONDS` a micro-batch.

FSDP2 gathers the next layer while one computes, and reduces the gradients of the one before. So a layer takes the
longer of its compute and of its messages, which wait for each other. The first gather of a pass and its last reduction
have nothing to hide behind, nor has the root. Layers wait for the activations that they send.

All constants are of one GPU, Llama-3 8B and Qwen3-30B-A3B (12 layers) at 4 x 4096 tokens on an H200
(docs/performance.md); none is fitted to several.
"""

from __future__ import annotations

import dataclasses

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

RECOMPUTATION = 0.63
"""Cost of recomputing a layer, in products with every matrix: the down projection is left out, and the products of a
forward pass take less time than their share of a step."""

LARGEST_ERROR = 0.06
"""Of tokens/s, over the runs of Llama-3 8B on one to four GPUs that `tests/plan/test_speed_measured.py` lists."""

OFFLOADING_COST = 1.05
TILED_COST = 1.02
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
    layers, micro_batches = run.parameters.layers, setting.accumulation
    messages = traffic(run, setting, cluster)
    layer, head = _compute(run, setting, cluster)
    again = setting.checkpointing * (1 - kept(run, setting).saved) * RECOMPUTATION
    products = 3 if run.shape.trained else 2
    slower = (OFFLOADING_COST if setting.offloading else 1.0) * (TILED_COST if setting.tiled_mlp else 1.0)
    forward = layer / products * slower + 2 * messages.copied / cluster.memory
    backward = layer * (products - 1 + again) / products * slower + 2 * messages.copied / cluster.memory
    computing = micro_batches * (layers * (forward + backward) + head + LAUNCH_SECONDS)
    waiting = micro_batches * (
        _waiting(layers, forward, messages.gather, NOTHING)
        + _waiting(layers, backward, messages.gather, NOTHING)
        + 2 * messages.root_gather.seconds
        + messages.activations.seconds
    )
    with_sums = _waiting(layers, backward, messages.gather, messages.reduce) + messages.root_reduce.seconds
    waiting += messages.reductions * (with_sums - _waiting(layers, backward, messages.gather, NOTHING))
    waiting += messages.at_end.seconds
    tokens = micro_batches * tokens_of(run, setting) / setting.tensor_parallel_size
    sent = messages.step(layers, micro_batches)
    return StepTime(tokens, computing + _optimizer(run, setting, cluster), waiting, sent)


def _waiting(layers: int, compute: float, gather: Sent, reduce: Sent) -> float:
    """Seconds that a pass over the layers waits: of each, what is longer than its compute, and both ends."""
    return gather.seconds + reduce.seconds + (layers - 1) * max(gather.seconds + reduce.seconds - compute, 0.0)


def _compute(run: Run, setting: Setting, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a micro-batch in a layer, forward and backward, and in the head."""
    tokens, matrices, parameters = tokens_of(run, setting), setting.tensor_parallel_size, run.parameters
    shape, groups = run.shape.divided(matrices), run.parameters.groups
    met = shape.experts_per_token / shape.experts if shape.experts else 0.0
    experts = groups["experts"]
    root = parameters.root if parameters.tied else parameters.root + groups["embedding"] * -1
    rest = parameters.total + (parameters.root + experts) * -1
    flop = sum(
        share * (4 * group.elements + 2 * group.trained)
        for group, share in ((rest, 1.0), (experts, met * EXPERTS_COST))
    )
    flop = flop / matrices + ATTENTION_COST * 3.5 * _attention(shape, run.work.length) * parameters.layers
    head = tokens * (4 * root.elements + 2 * root.trained) / matrices / cluster.flops
    head *= run.work.loss_length / run.work.length
    layer = tokens * flop / parameters.layers / cluster.flops
    return layer + _passes(run, setting, shape) / cluster.memory, head


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
