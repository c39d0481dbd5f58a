"""Experts one by one, as in other versions of transformers and in code from the Hub."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from liger_trainer import apply_liger_kernel
from tests.patching import toys
from tests.patching.test_experts import EXPERTS, MLPS


class Expert(nn.Module):
    """Mixtral's, before its weights were stacked."""

    def __init__(self, act=F.silu):
        super().__init__()
        self.w1, self.w3 = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.w2, self.act_fn = nn.Linear(12, 8, bias=False), act

    def forward(self, hidden_states):
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


class Swapped(Expert):
    """The same names for something else."""

    def forward(self, hidden_states):
        return self.w2(self.act_fn(self.w3(hidden_states)) * self.w1(hidden_states))


class Block(nn.Module):
    def __init__(self, expert):
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3, bias=False), nn.ModuleList([expert() for _ in range(3)])

    def forward(self, x):
        weights, index = self.gate(x).softmax(-1).topk(2)
        return sum(
            expert(x) * (weights * (index == number)).sum(-1, keepdim=True)
            for number, expert in enumerate(self.experts)
        )


@pytest.mark.parametrize("expert", [Expert, toys.MLP])
def test_lists_of_experts_run_their_gated_mlps(expert):
    block, x = Block(expert), torch.randn(7, 8)
    expected = block(x)
    (row,) = apply_liger_kernel(block, MLPS)
    assert (row.target, row.count, row.kernel) == (expert.__name__, 3, "swiglu")
    torch.testing.assert_close(block(x), expected)


def test_the_names_alone_prove_nothing():
    (row,) = apply_liger_kernel(Block(Swapped), MLPS)
    assert not row.applied


def test_adapters_of_experts_in_a_list():
    """These are adapters on linear layers, of a gated MLP."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False, r=3)
    model = get_peft_model(Block(toys.MLP).double(), config, autocast_adapter_dtype=False)
    x = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)

    def gradients():
        leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
        return torch.autograd.grad(model(x).square().sum(), leaves, allow_unused=True)

    expected = gradients()
    report = apply_liger_kernel(model, {**EXPERTS, "lora": True, "swiglu": True})
    applied = {(row.component, row.target, row.count) for row in report.applied}
    assert {("lora", "lora.Linear", 9), ("swiglu", "MLP", 3)} <= applied
    torch.testing.assert_close(gradients(), expected)
