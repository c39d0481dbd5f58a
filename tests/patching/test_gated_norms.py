"""Norms with a gate, and LayerNorms that models write themselves: whole models, calls, switches, what is left alone."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.patching import norm_forwards
from liger_trainer.patching.binding import call_like
from tests.patching import comparisons, toys
from tests.patching.comparisons import LAYERS
from tests.tiny_models import COMMON

DELTA_NET = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
    **{"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]},
}
MAMBA = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "chunk_size": 8, "vocab_size": 128}
MODELS = {  # the norms that the report has, with their number
    "qwen3_next": (
        lambda: tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**COMMON, **DELTA_NET)),
        {"Qwen3NextRMSNormGated": ("rms_norm (casting=llama, silu gate last)", 1)},
    ),
    "mamba2": (
        lambda: tf.Mamba2ForCausalLM(tf.Mamba2Config(**MAMBA, num_hidden_layers=2, n_groups=2)),
        {"MambaRMSNormGated": ("rms_norm (casting=llama, silu gate first, groups of 32)", 2)},
    ),
    "cohere": (
        lambda: tf.CohereForCausalLM(tf.CohereConfig(**COMMON, use_qk_norm=True)),
        {"CohereLayerNorm": ({("layer_norm", 3), ("layer_norm of heads", 4)})},
    ),
}
models = pytest.mark.parametrize("name", MODELS)


def built(name):
    model = MODELS[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # the weights of norms start at one
    return model


@models
def test_loss_and_gradients_are_the_models(name):
    model, ids = built(name), torch.randint(3, 120, (2, 9))
    batch = {"input_ids": ids, "labels": ids}
    expected = comparisons.loss_and_gradients(model, batch)
    report = apply_liger_kernel(model, LAYERS)
    for target, kernels in MODELS[name][1].items():
        found = {(row.kernel, row.count) for row in report if row.target == target}
        if isinstance(kernels, set):  # heads of queries and of keys are two kinds, where their numbers differ
            assert {kernel for kernel, _ in found} == {kernel for kernel, _ in kernels}
            assert sum(count for _, count in found) == sum(count for _, count in kernels)
        else:
            assert found == {kernels}
    # The gradients of Qwen3-Next's A_log and dt_bias are small sums, over all tokens, of larger terms.
    comparisons.assert_same(comparisons.loss_and_gradients(model, batch), expected, floor=5e-8)
    assert revert_liger_kernel(model) > 0
    comparisons.assert_same(comparisons.loss_and_gradients(model, batch), expected)


@pytest.fixture
def calls(monkeypatch):
    """How often each function of ours is called outside of proofs."""
    counts = collections.Counter()
    for name in ("layer_norm", "gated_rms_norm"):
        ours = getattr(norm_forwards, name)

        def counting(*arguments, name=name, ours=ours):
            counts[name] += 1
            return ours(*arguments)

        monkeypatch.setattr(norm_forwards, name, counting)
    return counts


def pair(build, calls):
    """A norm with our forward, and the same without."""
    norm = build()
    norm.weight.data = torch.rand_like(norm.weight) + 0.5
    plain = copy.deepcopy(norm)
    apply_liger_kernel(toys.Toy(norm=norm), LAYERS)
    calls.clear()
    return norm, plain


@pytest.mark.parametrize("build", [lambda: MambaRMSNormGated(32, 8), lambda: Qwen3NextRMSNormGated(32)])
def test_every_way_to_call_one_with_a_gate(build, calls):
    norm, plain = pair(build, calls)
    x, gate = torch.randn(2, 2, 5, 32)
    for call in (
        lambda each: each(x, gate),
        lambda each: each(x, gate=gate),
        lambda each: each(hidden_states=x, gate=gate),
        lambda each: each(x[0], gate[0]),
    ):
        torch.testing.assert_close(call(norm), call(plain))
    assert calls["gated_rms_norm"] == 4
    torch.testing.assert_close(norm(x, gate[..., :1]), plain(x, gate[..., :1]))  # one number a row
    assert calls["gated_rms_norm"] == 4


def test_no_gate_runs_the_classes_own_forward(calls):
    norm, plain = pair(lambda: MambaRMSNormGated(32, 8), calls)
    x = torch.randn(2, 5, 32)
    assert torch.equal(norm(x), plain(x))
    assert torch.equal(norm(x, None), plain(x, None))
    norm, _ = pair(lambda: Qwen3NextRMSNormGated(32), calls)
    with pytest.raises(TypeError, match="'gate'"):
        norm(x)
    assert calls["gated_rms_norm"] == 0


def test_rows_of_another_size_than_proved_run_the_classes_own_forward(calls):
    """As of a process that has a part of them; its groups may be others."""
    norm, plain = pair(lambda: MambaRMSNormGated(32, 8), calls)
    for each in (norm, plain):
        each.weight.data = torch.ones(16)
    x, gate = torch.randn(2, 2, 5, 16)
    assert torch.equal(norm(x, gate), plain(x, gate))
    assert calls["gated_rms_norm"] == 0


def test_a_weight_of_one_number_runs_the_classes_own_forward(calls):
    norm, plain = pair(lambda: MambaRMSNormGated(32, 8), calls)
    for each in (norm, plain):
        each.weight = torch.nn.Parameter(torch.tensor([2.0]))
    x, gate = torch.randn(2, 2, 5, 32)
    assert torch.equal(norm(x, gate), plain(x, gate))
    assert calls["gated_rms_norm"] == 0


@pytest.mark.parametrize(("attribute", "value"), [("group_size", 16), ("variance_epsilon", 0.5)])
def test_a_change_counts(attribute, value, calls):
    norm, plain = pair(lambda: MambaRMSNormGated(32, 8), calls)
    x, gate = torch.randn(2, 2, 5, 32)
    before = norm(x, gate)
    for each in (norm, plain):
        setattr(each, attribute, value)
    torch.testing.assert_close(norm(x, gate), plain(x, gate))
    assert not torch.allclose(norm(x, gate), before, rtol=1e-3)


@pytest.mark.parametrize("shape", [(32,), (4, 8)])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_norm_keeps_the_dtype_of_its_input(shape, inputs, weights, autocast, calls):
    norm, plain = (each.to(weights) for each in pair(lambda: CohereLayerNorm(shape), calls))
    x = torch.randn(2, 5, *shape).to(inputs)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, expected = norm(x), plain(x)
    assert got.dtype == expected.dtype == inputs
    torch.testing.assert_close(got, expected)
    assert calls["layer_norm"] == 1


def test_heads_that_are_not_beside_each_other(calls):
    norm, plain = pair(lambda: CohereLayerNorm((4, 8)), calls)
    x = torch.randn(2, 4, 5, 8).transpose(1, 2)  # of another layout
    torch.testing.assert_close(norm(x), plain(x))
    assert calls["layer_norm"] == 1
    one = torch.randn(2, 5, 1, 8)  # broadcast to all heads
    assert torch.equal(norm(one), plain(one))
    assert calls["layer_norm"] == 1


@pytest.mark.parametrize(
    ("build", "key"), [(lambda: CohereLayerNorm(32), "layer_norm"), (lambda: MambaRMSNormGated(32, 8), "rms_norm")]
)
def test_switches(build, key):
    for off in ("layer_norm", "rms_norm"):
        (row,) = apply_liger_kernel(toys.Toy(norm=build()), {**LAYERS, off: False})
        assert row.applied == (off != key)
        assert row.component == key
        assert row.reason == ("" if row.applied else "switched off in liger_kernel_config")


def test_several_groups_are_told_apart():
    model = toys.Toy(a=toys.GatedNorm(groups=4), b=toys.GatedNorm(groups=2, gate_first=True), c=nn.LayerNorm(8))
    kernels = [row.kernel for row in apply_liger_kernel(model, LAYERS)]
    assert kernels == [
        "rms_norm (casting=llama, silu gate last, groups of 16)",
        "rms_norm (casting=llama, silu gate first, groups of 32)",
        "layer_norm",
    ]


def test_an_argument_that_an_inner_function_uses_is_not_renamed():
    def forward(self, x):
        return [x for _ in range(2)], (lambda: x)

    with pytest.raises(ValueError, match="use its x, which gets a new name"):
        call_like(forward, "states")
