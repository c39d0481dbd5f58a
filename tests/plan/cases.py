"""Models on meta whose memory was measured, as the benchmarks build them."""

import functools

import torch

from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.training import Task
from liger_trainer.benchmarks.training_providers import Setup
from liger_trainer.plan.estimate import moments
from liger_trainer.plan.parameters import count_parameters
from liger_trainer.plan.work import HeadSettings, Run, Work, read_layer_shape
from liger_trainer.tools.planning.cards import card_named, cluster_of

GIB = 2**30


def cluster(gpus=1, hosts=1, card="H200", network=None):
    """GPUs of a kind, by default in one host."""
    return cluster_of(card_named(card), gpus, hosts, network)


@functools.cache
def counted(name, layers=0, rank=0, bits=None, fused_adapters=True, fused_experts=True, dtype=torch.bfloat16):
    """Parameters and layer shape of a benchmarked model, with the benchmark's adapters if `rank` is not 0."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(MODELS[name], layers), dtype=dtype)
        if rank:
            model = get_peft_model(model, Setup(Task(name, lora=rank), model, {}, []).lora)
    return count_parameters(model, bits, nested=True), read_layer_shape(model, fused_adapters, fused_experts)


def run_of(
    name,
    length,
    layers=0,
    rank=0,
    loss="cross_entropy",
    rows=1,
    prompt=0,
    bits=None,
    fused=True,
    fused_experts=True,
    recompute_mlp=False,
    dtype=torch.bfloat16,
    **work,
):
    """A run of a benchmarked model on sequences of `prompt` + `length` tokens."""
    parameters, shape = counted(name, layers, rank, bits, fused, fused_experts, dtype)
    work = Work(rows=rows, length=prompt + length, loss_length=length, head=HeadSettings(loss=loss), **work)
    return Run(parameters, shape, work, weight_bytes=dtype.itemsize, recompute_mlp=recompute_mlp)


def moment(name, run, setting):
    """The memory at one moment of a step."""
    return next(memory for memory in moments(run, setting) if memory.moment == name)
