"""One GPU's share of a split model, compared with FSDP2's."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from liger_trainer.plan.estimate import estimate
from liger_trainer.plan.parameters import count_parameters
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.splitting import held
from liger_trainer.plan.work import Run, Work, read_layer_shape
from tests.plan.cases import moment, run_of
from tests.plan.test_experts import QWEN

GPUS = 8
EIGHT = Setting("expert_parallel", GPUS, 2, 2, expert_parallel_size=8)


@pytest.fixture
def mesh():
    """A mesh of eight GPUs with one real process: nothing is sent, and sizes are those of a real mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=GPUS)
    yield init_device_mesh("cpu", (GPUS,))
    dist.destroy_process_group()


def gradient_bytes(model):
    """Of all gradients that FSDP2 holds, whole or split."""
    found = []
    for module in (one for one in model.modules() if isinstance(one, FSDPModule)):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for one in group.fsdp_params:
                found += [one._unsharded_param.grad, one.unsharded_accumulated_grad, one.sharded_param.grad]
    local = (one.to_local() if hasattr(one, "to_local") else one for one in found if one is not None)
    return sum(one.numel() * one.element_size() for one in local)


def test_fsdp2_splits_gradients_in_the_last_micro_batch(mesh):
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    run = Run(count_parameters(model), read_layer_shape(model), Work(length=16, loss_length=16), weight_bytes=4)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)  # accelerate's for bf16
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    planned = held(run, Setting("fsdp2", GPUS), 0.0)
    ids = torch.zeros(1, 16, dtype=torch.long)
    for last, expected in ((False, planned.accumulated), (True, planned.gradients)):
        model.set_requires_gradient_sync(last)
        model(input_ids=ids).logits.sum().backward()
        assert gradient_bytes(model) == expected
    # With a reduction after each, the first of two leaves as much.
    reduced = dataclasses.replace(run, sync_each_batch=True)
    assert held(reduced, Setting("fsdp2", GPUS), 0.0).accumulated == gradient_bytes(model)


@pytest.mark.parametrize("experts", [4, 12, 16])
def test_a_stack_of_experts_is_split_between_them(mesh, experts):
    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_local_experts=experts,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    run = Run(count_parameters(model), read_layer_shape(model), Work(), weight_bytes=4)
    routers = 4 * config.num_hidden_layers * 64 * experts
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    here = sum(4 * parameter.to_local().numel() for parameter in model.parameters())
    planned = held(run, Setting("fsdp2", GPUS), 0.0)
    assert planned.weights == planned.gradients == pytest.approx(here, abs=routers)
    assert planned.states == pytest.approx(2 * here, abs=2 * routers)


def test_experts_that_gpus_share_are_split_between_them_too():
    """Of 16 GPUs and of 32, 8 hold one of 8 experts, and the others none."""
    run = run_of("mixtral-8x7b", 4096)
    total, experts = run.parameters.total.elements, run.parameters.groups["experts"].elements
    for gpus in (16, 32):
        for size in (1, 2, 8):
            setting = Setting("expert_parallel" if size > 1 else "fsdp2", gpus, expert_parallel_size=size)
            each = 4 if size == 1 else 2
            assert held(run, setting, 0.0).weights == pytest.approx(each * ((total - experts) / gpus + experts / 8))


@pytest.mark.parametrize("name", ["loss", "last layer", "first layer", "embedding"])
def test_accumulated_gradients_of_a_split_model_are_whole(name):
    run = run_of(QWEN, 4096)
    whole, experts = run.parameters.total.trained, run.parameters.groups["experts"].trained
    for setting, elements in (
        (EIGHT, whole - experts * 7 / 8),
        (dataclasses.replace(EIGHT, expert_parallel_size=2), whole - experts / 2),
        (Setting("fsdp2", GPUS, 2, 2), whole),
    ):
        assert moment(name, run, setting).gradients == pytest.approx(2 * elements)
        once = dataclasses.replace(setting, accumulation=1)
        assert estimate(run, setting).total > estimate(run, once).total


def test_accumulated_gradients_of_adapters_are_whole():
    run = run_of(QWEN, 4096, rank=16)
    adapters = run.parameters.groups["adapters"].trained
    assert held(run, EIGHT, 0.0).accumulated == 4 * adapters
    assert held(run, Setting("fsdp2", GPUS, 2, 2), 0.0).accumulated == 2 * adapters
