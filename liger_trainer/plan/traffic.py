"""What one GPU sends in a training step, by the way the model is split.

    FSDP2       each unit's weights gathered for each forward, and again for the backward, of every micro-batch; its
                gradients reduced and split once a step (`sync_each_batch`: every micro-batch)
    HSDP        the same among the GPUs of one copy; then the gradients' shards are summed over the copies
    DDP         the trained weights' gradients summed once a step
    ZeRO-2      gradients reduced with every micro-batch; the new weights gathered at the end of the step
    expert      as FSDP2; experts among the GPUs that have the same ones. Rows of tokens go to the experts and back, and
                so do their gradients; once more there in a recomputation
    tensor      as FSDP2 among the GPUs that have the same part. The results of attention and MLP are summed in each
                layer of the forward, of a recomputation, and their gradients in the backward; those of embedding and
                head once
    context     as FSDP2; the GPUs that share sequences gather keys and values in the forward, in a recomputation, and
                in the backward, whose gradients of keys and values are summed and split

Weights and gradients are in the dtype of the gathered weight, rows and keys in that of the activations.
"""

from __future__ import annotations

import dataclasses

from liger_trainer.plan.cluster import NOTHING, Cluster, Sent
from liger_trainer.plan.estimate import tokens_of
from liger_trainer.plan.parameters import Group
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.splitting import gathered, gathered_bytes, precision_of
from liger_trainer.plan.work import Run


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one GPU sends; a layer is the mean over the layers, the root everything outside of them."""

    gather: Sent = NOTHING  # a layer's weights, once
    reduce: Sent = NOTHING  # a layer's gradients, once
    root_gather: Sent = NOTHING
    root_reduce: Sent = NOTHING
    activations: Sent = NOTHING  # of all layers in a micro-batch: rows, sums, or keys and values
    at_end: Sent = NOTHING  # once a step, after the optimizer
    reductions: int = 1  # how often a step reduces gradients
    copied: float = 0.0  # bytes of a layer's gathered weights, which are copied out of the buffer of a gather

    def step(self, layers: int, micro_batches: int, scored: float = 0.0) -> Sent:
        """Everything of a step; a micro-batch has `scored` forwards without gradients."""
        gathers, reductions = (2 + scored) * micro_batches, self.reductions
        weights = (self.gather * layers + self.root_gather) * gathers
        gradients = (self.reduce * layers + self.root_reduce) * reductions
        return weights + gradients + self.activations * micro_batches + self.at_end


def traffic(run: Run, setting: Setting, cluster: Cluster) -> Traffic:
    """What one GPU of `cluster` sends in this setting."""
    parameters, number = run.parameters, gathered_bytes(run, setting)
    root = parameters.root
    layer = (parameters.total + root * -1) * (1 / parameters.layers)
    activations = _activations(run, setting, cluster)
    if setting.strategy == "ddp":
        every = cluster.group(setting.gpus)
        sums = (cluster.all_reduce(group.trained_bytes, every) for group in (layer, root))
        return Traffic(reduce=next(sums), root_reduce=next(sums))
    if setting.strategy == "zero2":
        every = cluster.group(setting.gpus)
        layer_size, root_size, whole = (number * group.trained for group in (layer, root, parameters.total))
        return Traffic(
            reduce=cluster.gather(layer_size, every),
            root_reduce=cluster.gather(root_size, every),
            at_end=cluster.gather(whole, every),
            reductions=setting.accumulation,
        )
    if not setting.sharded:
        return Traffic()
    sharing = setting.expert_parallel_size
    experts = parameters.groups["experts"] * (int(sharing > 1) / parameters.layers)
    gather, reduce = _split_weights(setting, cluster, layer, experts, number)
    root_gather, root_reduce = _split_weights(setting, cluster, root, Group(), number)
    reductions = setting.accumulation if run.sync_each_batch else 1
    copied = gathered(layer, number) / setting.tensor_parallel_size
    return Traffic(gather, reduce, root_gather, root_reduce, activations, reductions=reductions, copied=copied)


def _split_weights(setting: Setting, cluster: Cluster, part: Group, experts: Group, number: int) -> tuple[Sent, Sent]:
    """A gather of the weights of `part` and a reduction of its gradients; its `experts` are not on every GPU."""
    matrices, sharing = setting.tensor_parallel_size, setting.expert_parallel_size
    group = cluster.group(setting.shards // matrices, matrices)
    same, copies = cluster.group(setting.gpus // sharing, sharing), cluster.group(setting.replicas, setting.shards)
    rest = part + experts * -1
    gather = cluster.gather(gathered(rest, number) / matrices, group)
    gather += cluster.gather(gathered(experts, number) / sharing, same)
    reduce = cluster.gather(number * rest.trained / matrices, group)
    reduce += cluster.gather(number * experts.trained / sharing, same)
    return gather, reduce + cluster.all_reduce(number * part.trained / setting.shards, copies)


def _activations(run: Run, setting: Setting, cluster: Cluster) -> Sent:
    """What the layers of a micro-batch send of their activations; they wait for it."""
    shape, layers, again = run.shape, run.parameters.layers, int(setting.checkpointing)
    scored = run.work.scored
    tokens, compute = tokens_of(run, setting), precision_of(run, setting).compute
    if setting.expert_parallel_size > 1:
        rows = tokens * shape.experts_per_token * shape.hidden * compute
        sent = cluster.exchange(rows, cluster.group(setting.expert_parallel_size))
        return sent * (layers * shape.sparse_share * (4 + again + 2 * scored))
    if setting.tensor_parallel_size > 1:
        states = tokens * shape.hidden * compute
        return cluster.all_reduce(states, cluster.group(setting.tensor_parallel_size)) * (layers * (4 + 2 * again) + 2)
    if setting.sequence_parts > 1:
        width = sum(kind.share * kind.key_value for kind in shape.kinds)
        size = 2 * width * compute * tokens * setting.sequence_parts
        return cluster.gather(size, cluster.group(setting.sequence_parts)) * (layers * (3 + again + scored))
    return NOTHING
