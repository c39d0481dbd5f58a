"""A reference under FSDP2: each process has its share of every layer, and gathers one layer at a time."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from trl.models import prepare_fsdp

from liger_trainer.trainers.splitting import split_layers
from tests.trainers.tiny import llama


@pytest.fixture
def accelerator():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    yield SimpleNamespace(
        is_fsdp2=True, state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"), parallelism_config=None
    )
    dist.destroy_process_group()


def _units(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def test_layers_are_units(accelerator):
    model = llama()
    split_layers(model, accelerator)
    prepare_fsdp(model, accelerator)
    layers = model.get_decoder().layers
    assert _units(model) == [model, *layers]
    split_layers(model, accelerator)  # a model that is split already stays


def test_trl_alone_has_one_unit(accelerator):
    """If this fails, TRL splits layers too, and `split_layers` may go."""
    model = llama()
    prepare_fsdp(model, accelerator)
    assert _units(model) == [model]


def test_without_fsdp2_nothing_is_split(accelerator):
    model = llama()
    accelerator.is_fsdp2 = False
    split_layers(model, accelerator)
    assert not _units(model)
