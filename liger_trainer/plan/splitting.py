"""Weights, gradients and optimizer states on one GPU, by the optimizer and by the way the model is split.

FSDP2 splits weights, gradients and states over the GPUs: in fp32 under mixed precision, where accelerate upcasts
trained weights, else in the dtype in which they are loaded. In the compute dtype, two layers are gathered (one in use,
one being prefetched), with two layers' gradients (one being computed, one being reduced); the embedding, the head and
the head's gradient stay whole for the whole backward pass.

Expert parallelism splits everything in the dtype it is loaded in, and a GPU only ever holds 1/G of a layer's experts.
transformers makes these units: the embedding, the experts of a layer, the rest of the layer, and the final norm with
the head, which stays whole only from the loss to its own backward. So one layer's experts and their gradients are
whole, two layers of the rest, and the embedding being prefetched or the head's gradient being reduced. Adapters, which
are added after the split, are whole on every GPU.

Both split a stack of experts between experts, never through one: with 8 experts on 16 GPUs, 8 GPUs hold one expert
each. HSDP keeps several copies of what FSDP2 splits, each on its own GPUs; GPUs that share sequences hold different
parts of one copy. Tensor parallelism splits in the dtype that is loaded, and a GPU only ever holds 1/T of a matrix.

In all of these, gradients of micro-batches before the last of a step are whole: the Trainer turns
`set_requires_gradient_sync` off, and FSDP2 adds them up before it splits them. With accelerate's `sync_each_batch` they
are split at once.

ZeRO-2 holds half-precision weights whole, splits gradients, and adds a split fp32 master copy of weights and gradients,
and two buckets of 5e8 elements. DDP holds buckets as large as all gradients. The largest weight in 4 bits, or packed,
has a buffer for its dequantised elements; of these, FSDP2 splits packed ones, and gathers their codes.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

from liger_trainer.configs.liger_adamw import LIGER_ADAMW, liger_adamw_options
from liger_trainer.kernels.optim.block_codes import BLOCK
from liger_trainer.plan.activations import Precision
from liger_trainer.plan.parameters import Group, Parameters
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.work import Run

_IN_DTYPE = {  # number of states that torch keeps in the parameter's own dtype
    "adamw_torch": 2,
    "adamw_torch_fused": 2,
    "adamw_torch_xla": 2,
    "adamw_apex_fused": 2,
    "adamw_anyprecision": 2,
    "stable_adamw": 2,
    "rmsprop": 1,
    "adagrad": 1,
    "sgd": 0,
}
_FIXED = {  # bytes per element for any dtype: bitsandbytes and torchao quantise states or keep them in fp32
    "adamw_bnb_8bit": 2.0,
    "adamw_8bit": 2.0,
    "ademamix_8bit": 3.0,
    "rmsprop_bnb_8bit": 1.0,
    "lion_8bit": 1.0,
    "adamw_torch_8bit": 2.0,
    "adamw_torch_4bit": 1.0,
    "adamw": 8.0,
    "ademamix": 12.0,
    "lion": 4.0,
    "lion_32bit": 4.0,
    "ademamix_32bit": 12.0,
    "adamw_32bit": 8.0,
    "rmsprop_bnb": 4.0,
    "rmsprop_bnb_32bit": 4.0,
}
_UNKNOWN = 8.0
_FOREACH = {"adamw_torch": 1, "rmsprop": 1, "adagrad": 1}  # temporaries of a step over all parameters at once


@dataclasses.dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of the states, and of the temporaries of one step."""

    states: float
    step: float


def is_known(optim: str) -> bool:
    """Whether the states of `optim` are known, not assumed."""
    name = optim.removeprefix("paged_")
    return name in ("adafactor", LIGER_ADAMW) or name in _IN_DTYPE or name in _FIXED


def optimizer_memory(
    optim: str, parameters: Parameters, trained_bytes: float | None = None, optim_args: str = ""
) -> OptimizerMemory:
    """The memory of an optimizer over all trained parameters.

    torch's optimizers keep each state in the dtype of its parameter: AdamW takes 8 bytes for an fp32 element and 4 for
    a bf16 element. Adafactor keeps rows and columns of a matrix in fp32, and needs two fp32 copies of the current
    matrix. Pages that a paged optimizer moves to the host are counted as if they had stayed.

    `liger_adamw` keeps a remainder of 2 bytes for a bf16 element (unless ``master`` is another one), and moments as
    its ``states`` say: 2.03 bytes in blocks of 8 bits, 8 where a weight has no whole blocks. For an fp32 element it is
    torch's AdamW.
    """
    total = parameters.total
    size = total.trained_bytes if trained_bytes is None else trained_bytes
    name = optim.removeprefix("paged_")
    if name == "adafactor":
        return OptimizerMemory(4.0 * parameters.factored, 8.0 * parameters.largest)
    if name == LIGER_ADAMW:
        return OptimizerMemory(_liger_states(parameters, size, optim_args), 0.0)
    if name in _IN_DTYPE:
        return OptimizerMemory(_IN_DTYPE[name] * size, _FOREACH.get(name, 0) * size)
    return OptimizerMemory(_FIXED.get(name, _UNKNOWN) * total.trained, 0.0)


def _liger_states(parameters: Parameters, size: float, optim_args: str) -> float:
    options = {"states": "8bit", "master": "remainder"}
    options |= liger_adamw_options(SimpleNamespace(optim_args=optim_args, seed=0))
    trained = parameters.total.trained
    wide = size / 2 - trained  # elements in fp32; the others are in bf16
    half = trained - wide
    remainders = 2.0 * half if options["master"] == "remainder" else 0.0
    in_blocks = min(parameters.in_blocks, half) if options["states"] == "8bit" else 0
    others = 4.0 if options["states"] == "bf16" else 8.0
    return 8.0 * wide + remainders + (2 + 8 / BLOCK) * in_blocks + others * (half - in_blocks)


ZERO_BUCKET = 500_000_000  # elements, DeepSpeed's default


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes on one GPU."""

    weights: float  # weights that stay allocated
    states: float  # optimizer states
    buffers: float  # communication buffers, with gathered weights and unreduced gradients
    loss_buffers: float  # the same at the loss
    first_gradients: float  # gradients at the time of the first layer's backward
    gradients: float  # all gradients
    accumulated: float  # gradients of earlier micro-batches while another one runs


def precision_of(run: Run, setting: Setting) -> Precision:
    """Bytes per element of activations: FSDP2 and ZeRO-2 compute with half-precision weights and residual stream."""
    compute = 2 if run.mixed else run.weight_bytes
    return Precision(compute, compute if setting.strategy in ("zero2", "fsdp2") else run.weight_bytes)


def gathered_bytes(run: Run, setting: Setting) -> int:
    """Bytes per element of a gathered trained weight, and of its whole gradient."""
    return precision_of(run, setting).compute if setting.strategy in ("zero2", "fsdp2") else run.weight_bytes


def trained_share(run: Run, setting: Setting) -> float:
    """The fraction of the trained weights whose gradients and states one GPU holds."""
    groups, total = run.parameters.groups, run.parameters.total
    if setting.strategy == "zero2":
        return 1 / setting.gpus
    if not setting.sharded or (setting.strategy == "expert_parallel" and groups["adapters"].trained):
        return 1.0
    return _split(run, setting).trained / total.trained if total.trained else 1.0


def _split(run: Run, setting: Setting) -> Group:
    """One GPU's shard of a model that is split by rows; stacked experts have only as many rows as experts."""
    total, experts = run.parameters.total, run.parameters.groups["experts"]
    copies = setting.shards // setting.expert_parallel_size
    count = run.shape.experts // setting.expert_parallel_size
    part = math.ceil(count / copies) / run.shape.experts if run.shape.experts else 0.0
    return total * (1 / setting.shards) + experts * (part - 1 / setting.shards)


def held(run: Run, setting: Setting, head_gradient: float) -> Held:
    """The memory of a model on one GPU; `head_gradient` is the bytes of the whole gradient of the head's weight."""
    parameters, total = run.parameters, run.parameters.total
    if setting.sharded:
        return _sharded(run, setting, head_gradient)
    compute = precision_of(run, setting).compute
    buffers = float(compute * parameters.dequantised)
    if setting.strategy == "zero2":
        master = 4.0 * total.trained if compute < 4 else 0.0
        states = optimizer_memory(run.optim, parameters, 4.0 * total.trained, run.optim_args).states + master
        gradients = (compute + 4.0) * total.trained / setting.gpus  # in fp32 too, for the master copy
        buffers += 2.0 * compute * min(ZERO_BUCKET, total.trained)
        weights = total.frozen_bytes + compute * total.trained
        return Held(weights, states / setting.gpus, buffers, buffers, gradients, gradients, gradients)
    buffers += total.trained_bytes if setting.strategy == "ddp" else 0.0
    states = optimizer_memory(run.optim, parameters, optim_args=run.optim_args).states
    first, gradients = total.trained_bytes - _last_gradients(parameters), total.trained_bytes
    return Held(total.bytes, states, buffers, buffers, first, gradients, gradients)


def _sharded(run: Run, setting: Setting, head_gradient: float) -> Held:
    parameters, total, share = run.parameters, run.parameters.total, trained_share(run, setting)
    upcast = run.mixed and setting.strategy == "fsdp2"
    trained = 4.0 * total.trained if upcast else total.trained_bytes
    states = optimizer_memory(run.optim, parameters, trained, run.optim_args).states
    number = gathered_bytes(run, setting)
    first = share * trained * (1 - _last_gradients(parameters) / max(total.trained_bytes, 1.0))
    weights = _split(run, setting).frozen_bytes + share * trained
    whole = here(total, run, setting)
    accumulated = number * whole.trained if setting.strategy == "fsdp2" else whole.trained_bytes
    accumulated /= setting.tensor_parallel_size
    if run.sync_each_batch:
        accumulated = share * trained
    if setting.strategy != "expert_parallel":
        layer = parameters.layer
        buffers = 2 * gathered(layer, number) + 2 * number * layer.trained + gathered(parameters.root, number)
        buffers = buffers / setting.tensor_parallel_size + head_gradient
        buffers += precision_of(run, setting).compute * parameters.dequantised
        at_loss = buffers
    else:
        buffers, at_loss = _buffers_of_experts(run, setting, number, head_gradient)
    return Held(weights, share * states, buffers, at_loss, first, share * trained, accumulated)


def _buffers_of_experts(run: Run, setting: Setting, number: int, head_gradient: float) -> tuple[float, float]:
    """Whole weights and gradients under expert parallelism: in the backward of a layer, and at the loss."""
    parameters = run.parameters
    every_expert = parameters.groups["experts"] * (1 / parameters.layers)
    experts, rest = every_expert * (1 / setting.expert_parallel_size), parameters.layer + every_expert * -1
    layer = gathered(experts, number) + number * experts.trained
    layer += 2 * (gathered(rest, number) + number * rest.trained)
    embedding, root = (gathered(group, number) for group in (parameters.groups["embedding"], parameters.root))
    if parameters.tied:  # the head's unit holds it
        return layer + root + head_gradient, root + head_gradient
    return layer + max(embedding, head_gradient), root - embedding + head_gradient


def here(group: Group, run: Run, setting: Setting, layers: int = 1) -> Group:
    """`group`, the whole model or one of `layers` layers, without the experts of other GPUs."""
    return group + run.parameters.groups["experts"] * ((1 / setting.expert_parallel_size - 1) / layers)


def generating_buffers(run: Run, setting: Setting, buffers: float) -> float:
    """Buffers during `generate`: accelerate's FSDP2 gathers all weights for it."""
    whole = setting.strategy == "fsdp2"
    return gathered(run.parameters.total, precision_of(run, setting).compute) if whole else buffers


def gathered(group: Group, number: int) -> float:
    """Bytes of the whole weights of `group`, with `number` bytes for a trained element."""
    return group.frozen_bytes + number * group.trained


def _last_gradients(parameters: Parameters) -> float:
    """Gradients of the first layer, and of an embedding that is not tied."""
    embedding = 0.0 if parameters.tied else parameters.groups["embedding"].trained_bytes
    return parameters.layer.trained_bytes + embedding
