"""Liger's helpers, and what needs a process group, of one process here."""

from __future__ import annotations

import operator
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel

from liger_trainer.liger import helpers
from liger_trainer.liger.functional import liger_fused_linear_scaled_cross_entropy_tp
from tests.liger.test_functions import HEAD, LABELS, VALID, agree, draw


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_log_likelihoods_of_a_split_head(group):
    hidden = draw(len(LABELS), HEAD.shape[1])

    def ours(x, w):
        return liger_fused_linear_scaled_cross_entropy_tp(x, w, LABELS, group, 2.0, return_entropy=True)

    def plain(x, w):
        logits = x @ w.t() / 2
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        return F.cross_entropy(logits, LABELS, reduction="none"), entropy * VALID

    agree(ours, plain, (hidden, HEAD))
    without = liger_fused_linear_scaled_cross_entropy_tp(hidden, HEAD, LABELS, group, 2.0)
    torch.testing.assert_close(without, ours(hidden, HEAD)[0])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def test_a_part_of_a_sharded_module(group):
    plain = Model()
    wrapped = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        wrapped.module.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4)
    redirection = helpers._FSDPForwardRedirection()
    torch.testing.assert_close(redirection(wrapped, wrapped.module.body, x), plain.body(x))
    torch.testing.assert_close(redirection(wrapped, wrapped.module, x), plain(x))  # which calls the forward itself
    torch.testing.assert_close(wrapped(x), plain(x))  # the forward is the model's again
    with pytest.raises(RuntimeError, match="broken"):
        redirection(wrapped, lambda x: (_ for _ in ()).throw(RuntimeError("broken")), x)
    torch.testing.assert_close(wrapped(x), plain(x))
    with pytest.raises(TypeError, match="`wrapper_module` is a Model"):
        redirection(plain, plain.body, x)


def test_what_there_is(monkeypatch):
    assert helpers.PEFT_AVAILABLE
    assert helpers.is_peft_available()
    assert helpers.is_transformers_available()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert helpers.infer_device() == "cpu"
    assert not helpers.is_npu_available()
    assert helpers.infer_comm_backend() == "gloo"
    with pytest.raises(RuntimeError, match="no accelerator"):
        helpers.get_total_gpu_memory()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: types.SimpleNamespace(type="npu"))
    assert helpers.infer_device() == "npu"
    assert helpers.is_npu_available()
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert helpers.is_hip()


def test_versions():
    assert helpers.compare_version("torch", operator.ge, "2.0")
    assert not helpers.compare_version("torch", operator.lt, "2.0")
    assert not helpers.compare_version("no_such_package", operator.ge, "0")
    new = helpers.transformers_version_dispatch("4.0", None, lambda a, b: (a, b), (), (1,), None, {"b": 2})
    old = helpers.transformers_version_dispatch("99.0", lambda a, b: (a, b), None, (3,), (), {"b": 4})
    assert (new, old) == ((1, 2), (3, 4))


def test_contiguous_arguments():
    seen = helpers.ensure_contiguous(lambda ctx, *tensors, **named: (ctx, tensors, named))
    strided = torch.arange(6).reshape(2, 3).t()
    ctx, (tensor, number), named = seen(strided, strided, 2, key=strided)
    assert ctx is strided
    assert number == 2
    assert tensor.is_contiguous()
    assert torch.equal(tensor, strided)
    assert named["key"].is_contiguous()
