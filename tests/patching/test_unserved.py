"""The rows of what no kernel is for: which modules have one, in which order, and that `strict` does not mind them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from liger_trainer import apply_liger_kernel

NAMED = {
    "recurrent_gemma": {"RecurrentGemmaRecurrentBlock", "RecurrentGemmaRglru"},
    "lfm2": set(),
    "jetmoe": {"JetMoeParallelExperts", "JetMoeTopKGating"},
    "apertus": {"ApertusMLP", "XIELUActivation"},
    "gpt2": {"GPT2MLP"},
    "starcoder2": {"Starcoder2MLP"},
    "phi": {"PhiMLP"},
    "gpt_neox": {"GPTNeoXMLP"},
    "codegen": {"CodeGenMLP"},
    "llama": set(),
    "mixtral": set(),
}
WITHOUT_A_GATE = {"GPT2MLP", "Starcoder2MLP", "PhiMLP", "GPTNeoXMLP", "CodeGenMLP"}
FIELDS = {"lfm2": {"full_attn_idxs": [0]}}


def report_of(name, **options):
    config = AutoConfig.for_model(name, **FIELDS.get(name, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return apply_liger_kernel(model, **options)


@pytest.mark.parametrize("name", NAMED)
def test_rows_of_published_sizes(name):
    rows = [row for row in report_of(name) if row.component == "other"]
    assert {row.target for row in rows} == NAMED[name]
    shares = [row.share for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert all(0 < share < 1 for share in shares)
    assert not any(row.applied for row in rows)
    named = {row.target for row in rows if row.reason.startswith("there is no kernel for MLPs without a gate, with ")}
    assert named == WITHOUT_A_GATE & NAMED[name]
    assert all(row.reason.startswith("there is no kernel for it, with ") for row in rows if row.target not in named)


class _Mixes(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.decay = nn.Parameter(torch.ones(size))
        self.inner = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, size))

    def forward(self, x):
        return self.inner(x).cumsum(-2) * self.decay


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.mixes = _Mixes(8)
        self.more = nn.ModuleList([_Mixes(2), _Mixes(2)])
        self.proj = nn.Linear(8, 8)


def test_shares_are_those_of_the_parameters():
    model = _Model()
    (row,) = (row for row in apply_liger_kernel(model) if row.component == "other")
    total = sum(each.numel() for each in model.parameters())
    expected = 8 + 2 * (64 + 8) + 2 * (2 + 2 * (4 + 2))
    assert (row.component, row.target, row.count) == ("other", "_Mixes", 3)
    assert row.share == pytest.approx(expected / total)
    assert row.reason == f"there is no kernel for it, with {100 * expected / total:.1f} % of the parameters"


@pytest.mark.parametrize("target_modules", [["c_fc"], ["c_fc", "c_proj"]])
def test_adapters_do_not_hide_that_an_mlp_has_no_gate(target_modules):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("starcoder2", **sizes, num_hidden_layers=1, vocab_size=64)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(target_modules=target_modules))
    (row,) = (row for row in apply_liger_kernel(model) if row.target == "Starcoder2MLP")
    assert row.reason.startswith("there is no kernel for MLPs without a gate")


def test_strict_is_about_kernels_that_there_are():
    assert any(row.component == "other" for row in report_of("apertus", strict=True))


def test_adapters_on_plain_layers_hide_nothing():
    config = AutoConfig.for_model("apertus", num_hidden_layers=1, hidden_size=64, intermediate_size=64, vocab_size=64)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(target_modules=["up_proj"]))
    assert "ApertusMLP" in {row.target for row in apply_liger_kernel(model)}
