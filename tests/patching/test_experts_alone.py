"""Modules of experts alone: every class of transformers, and what is left alone."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from liger_trainer import apply_liger_kernel
from tests.patching.test_experts import EXPERTS, MODELS


class Config:
    """What the constructors of experts ask of a config."""

    _experts_implementation = "eager"
    hidden_size = moe_hidden_size = 8
    moe_intermediate_size = intermediate_size = expert_ffn_hidden_size = 12
    num_experts = num_local_experts = n_routed_experts = 4
    hidden_act = hidden_activation = mlp_hidden_act = "silu"
    swiglu_limit, swiglu_alpha, moe_latent_size, zero_expert_num, post_norm_eps = 7.0, 1.7, None, 0, 1e-6
    mlp_gate_softcap = mlp_up_softcap = 3.0

    def __init__(self, **fields):
        self.__dict__.update(fields)


def filled(experts):
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return experts


def row_of(module):
    """The row of the report for the experts of `module`, which is patched."""
    (row,) = (row for row in apply_liger_kernel(nn.ModuleList([module]), EXPERTS) if row.component == "experts")
    return row


def normed(experts):
    """With a norm that nothing says is one."""
    experts.post_expert_norm = nn.LayerNorm(8)
    return experts


ALONE = {
    "gelu": (lambda: Gemma4TextExperts(Config(hidden_activation="gelu_pytorch_tanh")), "moe_experts (gelu_tanh)"),
    "exact gelu": (lambda: MixtralExperts(Config(hidden_act="gelu")), "moe_experts (gelu)"),
    "relu": (lambda: MixtralExperts(Config(hidden_act="relu")), "moe_experts (relu)"),
    "no gate": (lambda: NemotronHExperts(Config(mlp_hidden_act="relu2")), "moe_experts (relu_squared, without gate)"),
    "an infinite limit": (lambda: Step3p7Experts(Config()), "moe_experts (silu)"),
    "undecorated": (lambda: LongcatFlashExperts(Config()), "moe_experts (silu)"),
    "another activation": (lambda: MixtralExperts(Config(hidden_act="tanh")), "moe_experts (the class's activation)"),
    "another one without a gate": (
        lambda: NemotronHExperts(Config(mlp_hidden_act="tanh")),
        "moe_experts (the class's activation, without gate)",
    ),
    "a limit after the activation": (
        lambda: Step3p7Experts(Config(), swiglu_limit=0.5),
        "moe_experts (the class's activation)",
    ),
}


class AnyConfig(Config):
    """With something for every other name as well."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        kinds = {"act": "silu", "limit": 7.0, "cap": 7.0, "alpha": 1.7, "experts": 4, "intermediate": 12}
        return next((value for kind, value in kinds.items() if kind in name), 8)


def decorated_classes():
    """All of transformers that ask its registry."""
    for path in sorted(Path(tf.models.__path__[0]).glob("*/modeling_*.py")):
        text = path.read_text()
        names = re.findall(r"^@use_experts_implementation.*\nclass (\w+)", text, re.MULTILINE)
        assert len(names) == len(re.findall(r"^@use_experts_implementation", text, re.MULTILINE))
        for name in names:
            yield pytest.param(f"transformers.models.{path.parent.name}.{path.stem}", name, id=name)


CLASSES = list(decorated_classes())
# Of those that are not `moe_experts (silu)`.
KERNELS = {
    "AriaExperts": "silu, transposed",
    "DeepseekV4Experts": "silu, limit",
    "Glm5NextTextExperts": "silu, limit",
    "GptOssExperts": "silu, interleaved, transposed, biases, limit, alpha",
    "HYV4Experts": "silu, limit",
    "HYV4VLExperts": "silu, limit",
    "Inkling2Experts": "the class's activation",
    "Inkling2LoopExperts": "the class's activation",
    "MiniMaxM3VLExperts": "silu, limit, alpha",
    "MuseSparkExperts": "silu, normed",
    "NemotronHExperts": "silu, without gate",
    "OpenAIPrivacyFilterExperts": "silu, transposed, biases, limit, alpha",
}


def test_there_are_classes():
    assert len(CLASSES) >= 60


@pytest.mark.parametrize(("module", "name"), CLASSES)
def test_every_class_of_transformers_computes_and_learns_as_its_own_loop(module, name):
    experts = filled(getattr(importlib.import_module(module), name)(AnyConfig()))
    hidden, weights = torch.randn(19, 8, requires_grad=True), torch.rand(19, 2, requires_grad=True)
    index = torch.rand(19, 4).argsort(1)[:, :2]

    def results():
        out = experts(hidden, index, weights)
        upstream = torch.arange(out.numel()).view(out.shape).cos()
        return [out.detach(), *torch.autograd.grad(out, (hidden, weights, *experts.parameters()), upstream)]

    expected = results()
    experts.config._experts_implementation = "grouped_mm"  # what transformers chooses
    row = row_of(experts)
    assert row.kernel == f"moe_experts ({KERNELS.get(name, 'silu')})", row.reason
    for ours, its_own in zip(results(), expected):
        assert (ours - its_own).norm() <= 2e-6 * its_own.norm()


@pytest.mark.parametrize("kind", ALONE)
def test_recognised_alone(kind):
    build, kernel = ALONE[kind]
    experts = filled(build())
    inputs = torch.randn(9, 8), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    expected = experts(*inputs)
    row = row_of(experts)
    assert row.kernel == kernel
    assert (experts(*inputs) - expected).norm() <= 2e-6 * expected.norm()


LEFT_ALONE = {
    "an activation that is no method": (
        lambda: LongcatFlashExperts(Config(hidden_act="tanh")),
        "computes no activation that there is a kernel for",
    ),
    "a loop in fp32": (lambda: OpenAIPrivacyFilterExperts(Config()), "in bfloat16 it rounds differently"),
    "a norm of its own": (lambda: normed(MixtralExperts(Config())), "it has post_expert_norm besides"),
    "experts that do nothing": (lambda: LongcatFlashExperts(Config(zero_expert_num=2)), "do not belong together"),
    "another implementation": (lambda: MixtralExperts(Config(_experts_implementation="sonicmoe")), "'sonicmoe'"),
    "weights of 8 bits": (lambda: MixtralExperts(Config()).to(torch.float8_e4m3fn), "float8"),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_left_alone_with_a_reason(kind):
    build, reason = LEFT_ALONE[kind]
    row = row_of(build())
    assert not row.applied
    assert reason in row.reason
    with pytest.raises(ValueError, match="experts: 1 x"):
        apply_liger_kernel(nn.ModuleList([build()]), EXPERTS, strict=True)


@pytest.mark.parametrize("change", ["buffer", "router"])
def test_a_block_that_chooses_in_another_way_is_left_alone(change):
    block = MODELS["llama4"][0]().model.layers[0].feed_forward
    if change == "buffer":
        block.register_buffer("offset", torch.zeros(4))
    else:
        block.router.bias = nn.Parameter(torch.zeros(4))
    row = row_of(block)
    assert not row.applied
    assert row.reason == f"its Llama4TextMoe has {'offset' if change == 'buffer' else 'bias'} to choose with"


def test_a_forward_of_the_users_stays():
    experts = MixtralExperts(Config())
    experts.forward = lambda hidden, index, weights: hidden
    assert "already overridden" in row_of(experts).reason


def test_experts_elsewhere_add_nothing():
    """As transformers' expert parallelism calls them: with the number of experts for one of another process."""
    experts = filled(MixtralExperts(Config()))
    experts._is_expert_parallel = True
    hidden, weights = torch.randn(9, 8), torch.rand(9, 2, requires_grad=True)
    index = torch.tensor([[0, 4], [4, 4], [3, 1], [4, 0], [2, 1], [1, 3], [0, 1], [4, 2], [3, 4]])
    expected = experts(hidden, index, weights)
    apply_liger_kernel(nn.ModuleList([experts]), EXPERTS)
    ours = experts(hidden, index, weights)
    assert (ours - expected).norm() <= 2e-6 * expected.norm()
    assert torch.equal(ours[1], torch.zeros(8))
    (gradient,) = torch.autograd.grad(ours.square().sum(), weights)
    assert torch.equal(gradient == 0, index == 4)


def test_an_expert_that_is_not_there_is_an_error():
    experts = filled(MixtralExperts(Config()))
    apply_liger_kernel(nn.ModuleList([experts]), EXPERTS)
    with pytest.raises(ValueError, match="`top_k_index` holds 4, but MixtralExperts has 4 experts"):
        experts(torch.randn(1, 8), torch.tensor([[0, 4]]), torch.rand(1, 2))


def test_what_is_reported_runs_in_a_subclass_with_a_forward_of_its_own():
    """The forward of such a class does not look up which implementation to run."""
    calls = []

    class Own(MixtralExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            if len(hidden_states) == 5:  # not in a proof, to which it would be part of what the forward does
                calls.append(1)
            return inspect.unwrap(MixtralExperts.forward)(self, hidden_states, top_k_index, top_k_weights)

    experts = filled(Own(Config()))
    x, index, weights = torch.randn(5, 8), torch.tensor([[0, 3]] * 5), torch.rand(5, 2)
    expected = experts(x, index, weights)
    del calls[:]
    assert row_of(experts).applied
    torch.testing.assert_close(experts(x, index, weights), expected)
    assert calls == []
