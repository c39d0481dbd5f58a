"""Which norms cast their results to fp8, and that a model's loss and gradients do not show it."""

import inspect

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

from liger_trainer import apply_liger_kernel
from liger_trainer.kernels.fp8 import linear, shared_cast
from liger_trainer.kernels.mlp import gated_activation
from liger_trainer.kernels.norms import rms_norm as norms
from liger_trainer.patching import apply, fp8
from liger_trainer.patching import norm_forwards as patched_norms
from liger_trainer.patching.binding import bound_function
from liger_trainer.patching.fp8 import cast_in_norms
from tests.calls import recorded_calls

RECIPE = {"fp8": "rowwise_gw_hp"}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
IDS = torch.arange(8)[None]
CAST = ", cast to fp8"


@pytest.fixture(autouse=True)
def tiny_layers_count(monkeypatch):
    monkeypatch.setattr(fp8, "LEAST_FEATURES", 16)
    monkeypatch.setattr(fp8, "LEAST_ROWS", 8)


def tiny(config, model):
    torch.manual_seed(0)
    return model(config(**SIZES, num_hidden_layers=3, vocab_size=96)).bfloat16()


def casting(model):
    """The norms whose forward, closed over `casts`, casts."""
    norms = ((name, module) for name, module in model.named_modules() if "norm" in name and "forward" in vars(module))
    variables = {name: inspect.unwrap(bound_function(norm)) for name, norm in norms}
    return [
        name
        for name, function in variables.items()
        if dict(zip(function.__code__.co_freevars, function.__closure__))["casts"].cell_contents
    ]


@pytest.mark.parametrize(
    ("config", "model", "expected"),
    [
        (LlamaConfig, LlamaForCausalLM, ["input_layernorm", "post_attention_layernorm"]),
        (Gemma3TextConfig, Gemma3ForCausalLM, ["input_layernorm", "pre_feedforward_layernorm"]),
        (Olmo2Config, Olmo2ForCausalLM, []),  # its norms follow the attention and the MLP
    ],
)
def test_norms_cast_whose_results_layers_read_in_fp8(config, model, expected):
    patched = tiny(config, model)
    report = apply_liger_kernel(patched, RECIPE)
    assert casting(patched) == [f"model.layers.1.{name}" for name in expected]
    assert sum(row.count for row in report if row.kernel and row.kernel.endswith(CAST)) == len(expected)
    apply_liger_kernel(patched)
    assert casting(patched) == []


@pytest.mark.parametrize(
    ("adapted", "expected"),
    [(["q_proj", "k_proj", "v_proj"], "post_attention_layernorm"), (["gate_proj", "up_proj"], "input_layernorm")],
)
def test_norms_before_adapters_do_not_cast(adapted, expected):
    """Though the last projection of the attention or of the MLP multiplies in fp8."""
    model = get_peft_model(tiny(LlamaConfig, LlamaForCausalLM), LoraConfig(target_modules=adapted, r=2))
    apply_liger_kernel(model, RECIPE)
    assert [name.rpartition(".")[-1] for name in casting(model)] == [expected]


def test_one_scale_for_an_input_is_none_for_its_rows(monkeypatch):
    monkeypatch.setattr(apply, "cast_in_norms", lambda *rest: cast_in_norms(*rest[:2], "tensorwise", rest[3]))
    model = tiny(LlamaConfig, LlamaForCausalLM)
    apply_liger_kernel(model, RECIPE)
    assert casting(model) == []


def loss_and_gradients(model, checkpointed):
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    loss = model.model(input_ids=IDS.to(model.device)).last_hidden_state.float().sin().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.model.parameters())]


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("config", "model", "checkpointed"),
    [(LlamaConfig, LlamaForCausalLM, True), (Gemma3TextConfig, Gemma3ForCausalLM, False)],
)
def test_loss_and_gradients_have_the_bits_of_separate_casts(config, model, checkpointed, device, monkeypatch):
    patched = tiny(config, model).to(device)
    apply_liger_kernel(patched, RECIPE)
    passes = 1 + checkpointed
    with pytest.MonkeyPatch.context() as counting:
        own = recorded_calls(counting, shared_cast, "cast_rows")
        by_norms = recorded_calls(counting, norms, "share")
        by_mlps = recorded_calls(counting, gated_activation, "cast_rows")
        ours = loss_and_gradients(patched, checkpointed)
    assert [len(own), len(by_norms), len(by_mlps)] == [passes, 2 * passes, 0]  # o_proj's input has a cast of its own
    assert shared_cast._last is None

    for module in (norms, linear):
        monkeypatch.setattr(module, "may_share", lambda x: False)
    monkeypatch.setattr(gated_activation, "_LONGEST_CAST", 0)
    for mine, theirs in zip(ours, loss_and_gradients(patched, checkpointed), strict=True):
        assert torch.equal(mine, theirs)


def test_few_rows_are_not_cast(monkeypatch):
    patched = tiny(LlamaConfig, LlamaForCausalLM)
    apply_liger_kernel(patched, RECIPE)
    calls = recorded_calls(monkeypatch, patched_norms, "rms_norm")
    norm, x = patched.model.layers[1].input_layernorm, torch.ones(1, 8, 32, dtype=torch.bfloat16)
    norm(x[:, 1:])
    norm(x)
    assert [arguments[-1] for _, _, arguments in calls] == [False, True]
