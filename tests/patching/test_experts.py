"""Experts: which are recognised, that loss and all gradients stay the model's, and that nothing is left behind."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from pathlib import Path

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextExperts
from transformers.models.inkling2.modeling_inkling2 import Inkling2Experts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.patching.moe import experts_formula
from tests.patching import toys
from tests.tiny_models import COMMON, TINY_MODELS, VOCAB, _build

EXPERTS = {**dict.fromkeys(KERNEL_KEYS, False), "experts": True}
MLPS = {**EXPERTS, "experts": False, "swiglu": True}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}
LLAMA4 = {"head_dim": 8, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1, "attention_chunk_size": 16}


def made(architecture, config, **fields):
    return lambda: _build(architecture, config(**{**COMMON, **fields}))


MODELS = {
    "qwen3_moe": (TINY_MODELS["qwen3_moe"], {"moe_experts (silu)": 2}),
    "qwen3_moe, one dense": (
        lambda: TINY_MODELS["qwen3_moe"](mlp_only_layers=[0]),
        {"moe_experts (silu)": 1},
    ),
    "qwen2_moe": (
        made(tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig, **SPARSE, shared_expert_intermediate_size=40),
        {"moe_experts (silu)": 2},
    ),
    "mixtral": (TINY_MODELS["mixtral"], {"moe_experts (silu)": 2}),
    "olmoe": (
        made(tf.OlmoeForCausalLM, tf.OlmoeConfig, num_experts=4, num_experts_per_tok=2),
        {"moe_experts (silu)": 2},
    ),
    "gpt_oss": (
        TINY_MODELS["gpt_oss"],
        {"moe_experts (silu, interleaved, transposed, biases, limit, alpha)": 2},
    ),
    "deepseek_v3": (
        made(
            *(tf.DeepseekV3ForCausalLM, tf.DeepseekV3Config),
            **{**ROUTED, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 1},
        ),
        {"moe_experts (silu)": 1},
    ),
    "glm4_moe": (
        made(tf.Glm4MoeForCausalLM, tf.Glm4MoeConfig, **ROUTED, head_dim=8, first_k_dense_replace=1),
        {"moe_experts (silu)": 1},
    ),
    "nemotron_h": (
        made(
            *(tf.NemotronHForCausalLM, tf.NemotronHConfig),
            **{**ROUTED, "layers_block_type": ["moe", "attention"], "moe_shared_expert_intermediate_size": 24},
        ),
        {"moe_experts (relu_squared, without gate)": 1},
    ),
    "llama4": (
        made(tf.Llama4ForCausalLM, tf.Llama4TextConfig, **LLAMA4, num_local_experts=4, num_experts_per_tok=1),
        {"moe_experts (silu, transposed)": 2, "moe_experts on the chosen inputs": 2},
    ),
    "llama4, two a token": (
        made(tf.Llama4ForCausalLM, tf.Llama4TextConfig, **LLAMA4, num_local_experts=4, num_experts_per_tok=2),
        {"moe_experts (silu, transposed)": 2, "moe_experts on the chosen inputs": 2},
    ),
}
models = pytest.mark.parametrize("name", MODELS)


def batch():
    ids = torch.randint(3, VOCAB - 8, (2, 11), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def loss_and_gradients(model, inputs=None):
    model.zero_grad(set_to_none=True)
    loss = model(**(inputs or batch())).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_same(ours, expected):
    assert ours.keys() == expected.keys()
    floor = 1e-7 * max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        assert (ours[name] - value).norm() <= 1e-5 * value.norm() + floor, name


@models
def test_loss_and_gradients_are_those_of_the_models_own_loop(name):
    build, kernels = MODELS[name]
    model = build()
    model.set_experts_implementation("eager")
    expected = loss_and_gradients(model)
    report = apply_liger_kernel(model, EXPERTS)
    assert {row.kernel: row.count for row in report.applied} == kernels
    assert all(row.probe_error <= 1e-5 and not row.reason for row in report.applied)
    assert not any(row.component == "experts" for row in report.left_alone)
    assert_same(loss_and_gradients(model), expected)
    assert revert_liger_kernel(model) == sum(kernels.values())
    again = loss_and_gradients(model)
    assert all(torch.equal(value, again[name]) for name, value in expected.items())


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2_moe", "glm4_moe", "llama4"])
def test_shared_experts_and_dense_layers_are_gated_mlps_and_counted_once(name):
    model = MODELS[name][0]()
    mlps = {type(module).__name__ for module in model.modules() if hasattr(module, "gate_proj")}
    projections = [module for module in model.modules() if "gate_proj" in module._modules]
    report = apply_liger_kernel(model, {**EXPERTS, "swiglu": True})
    rows = [row for row in report if row.component == "swiglu"]
    assert {row.target for row in rows} == mlps
    assert sum(row.count for row in rows) == len(projections) > 0
    assert all(row.kernel == "swiglu" for row in rows)


def test_ours_runs_and_the_switch_turns_it_off(monkeypatch):
    calls = []
    original = experts_formula.moe_experts
    monkeypatch.setattr(experts_formula, "moe_experts", lambda *a, **k: calls.append(1) or original(*a, **k))
    model = TINY_MODELS["qwen3_moe"]()
    apply_liger_kernel(model, EXPERTS)
    calls.clear()
    loss_and_gradients(model)
    assert len(calls) == 2
    (row,) = (r for r in apply_liger_kernel(model, {**EXPERTS, "experts": False}) if r.component == "experts")
    assert (row.applied, row.count, row.reason) == (False, 2, "switched off in liger_kernel_config")
    loss_and_gradients(model)
    assert len(calls) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = TINY_MODELS["qwen3_moe"]().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    expected = loss_and_gradients(model)
    apply_liger_kernel(model)
    assert_same(loss_and_gradients(model), expected)


@pytest.mark.parametrize(("name", "block"), [("qwen3_moe", "mlp"), ("llama4", "feed_forward")])
def test_a_block_compiles_to_one_graph(name, block):
    torch.compiler.reset()
    model, x = MODELS[name][0](), torch.randn(2, 5, 32, requires_grad=True)
    apply_liger_kernel(model, EXPERTS)
    block = getattr(model.model.layers[0], block)
    results = []
    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        out = run(x)
        out = out[0] if isinstance(out, tuple) else out
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, *block.experts.parameters()))])
    torch.testing.assert_close(*results)


def test_generation_steps_are_those_that_transformers_chooses_for_them(monkeypatch):
    model = TINY_MODELS["qwen3_moe"]().eval()
    apply_liger_kernel(model, EXPERTS)
    with torch.no_grad():
        ours = model(batch()["input_ids"]).logits
        monkeypatch.setattr(experts_formula, "moe_experts", None)
        model.set_experts_implementation("batched_mm")
        torch.testing.assert_close(model(batch()["input_ids"]).logits, ours)


def test_nothing_of_ours_in_config_checkpoint_pickle_and_copy(tmp_path):
    model = TINY_MODELS["qwen3_moe"]()
    expected = loss_and_gradients(model)
    apply_liger_kernel(model, EXPERTS)
    assert model.config._experts_implementation != "liger_trainer"
    assert "liger_trainer" not in str(model.config.to_dict())
    model.save_pretrained(tmp_path)
    assert "liger_trainer" not in (tmp_path / "config.json").read_text()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert stock.config._experts_implementation == model.config._experts_implementation
    assert_same(loss_and_gradients(stock), expected)
    unpickled = pickle.loads(pickle.dumps(model.model.layers[0].mlp.experts))
    assert type(unpickled.config) is type(model.config)
    copied = copy.deepcopy(model)
    assert revert_liger_kernel(copied) == 2
    assert copied.model.layers[0].mlp.experts.config is copied.config
    assert revert_liger_kernel(model) == 2
    assert model.model.layers[0].mlp.experts.config is model.config


def test_experts_of_a_text_model_inside_another():
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 4}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = tf.Qwen3VLMoeConfig(
        text_config={**COMMON, **SPARSE, "head_dim": 8, "rope_parameters": rope}, vision_config=vision
    )
    model = _build(tf.Qwen3VLMoeForConditionalGeneration, config)
    expected = loss_and_gradients(model)
    (row,) = apply_liger_kernel(model, EXPERTS).applied
    assert (row.target, row.count) == ("Qwen3VLMoeTextExperts", 2)
    assert_same(loss_and_gradients(model), expected)
    assert "liger_trainer" not in str(model.config.to_dict())


@pytest.mark.parametrize("order", ["before", "after"])
def test_peft_adapters_on_parameters(order):
    model = TINY_MODELS["qwen3_moe"]()
    lora = LoraConfig(
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    if order == "before":
        apply_liger_kernel(model, EXPERTS)
    model = get_peft_model(model, lora)
    if order == "after":
        assert apply_liger_kernel(model, EXPERTS).applied
    ours = loss_and_gradients(model)
    revert_liger_kernel(model)
    assert_same(ours, loss_and_gradients(model))
    assert all("lora_" in name for name in ours if name != "loss")
    assert sum("experts" in name for name in ours) == 8


# ---------------------------------------------------------------------------------------------------------------------
# Modules of experts alone
# ---------------------------------------------------------------------------------------------------------------------


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


def normed(experts):
    """With a norm that nothing says is one."""
    experts.post_expert_norm = nn.LayerNorm(8)
    return experts


ALONE = {
    "gelu": (lambda: Gemma4TextExperts(Config(hidden_activation="gelu_pytorch_tanh")), "moe_experts (gelu_tanh)"),
    "exact gelu": (lambda: MixtralExperts(Config(hidden_act="gelu")), "moe_experts (gelu)"),
    "relu": (lambda: MixtralExperts(Config(hidden_act="relu")), "moe_experts (relu)"),
    "no gate": (lambda: NemotronHExperts(Config(mlp_hidden_act="relu2")), "moe_experts (relu_squared, without gate)"),
    "limit and alpha": (lambda: MiniMaxM3VLExperts(Config()), "moe_experts (silu, limit, alpha)"),
    "an infinite limit": (lambda: Step3p7Experts(Config()), "moe_experts (silu)"),
    "undecorated": (lambda: LongcatFlashExperts(Config()), "moe_experts (silu)"),
    "another activation": (lambda: MixtralExperts(Config(hidden_act="tanh")), "moe_experts (the class's activation)"),
    "another one without a gate": (
        lambda: NemotronHExperts(Config(mlp_hidden_act="tanh")),
        "moe_experts (the class's activation, without gate)",
    ),
    "an activation of gate and up": (lambda: Inkling2Experts(Config()), "moe_experts (the class's activation)"),
    "a limit behind the activation": (
        lambda: Step3p7Experts(Config(), swiglu_limit=0.5),
        "moe_experts (the class's activation)",
    ),
    "a norm behind": (lambda: MuseSparkExperts(Config()), "moe_experts (silu, normed)"),
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
    "Inkling2Experts": "the class's activation",
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
    (row,) = (row for row in apply_liger_kernel(nn.ModuleList([experts]), EXPERTS) if row.component == "experts")
    assert row.kernel == f"moe_experts ({KERNELS.get(name, 'silu')})", row.reason
    for ours, its_own in zip(results(), expected):
        assert (ours - its_own).norm() <= 1e-6 * its_own.norm()


@pytest.mark.parametrize("kind", ALONE)
def test_recognised_alone(kind):
    build, kernel = ALONE[kind]
    experts = filled(build())
    inputs = torch.randn(9, 8), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    expected = experts(*inputs)
    (row,) = (row for row in apply_liger_kernel(nn.ModuleList([experts]), EXPERTS) if row.component == "experts")
    assert row.kernel == kernel
    torch.testing.assert_close(experts(*inputs), expected)


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
    (row,) = (row for row in apply_liger_kernel(nn.ModuleList([build()]), EXPERTS) if row.component == "experts")
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
    (row,) = (row for row in apply_liger_kernel(nn.ModuleList([block]), EXPERTS) if row.component == "experts")
    assert not row.applied
    assert row.reason == f"its Llama4TextMoe has {'offset' if change == 'buffer' else 'bias'} to choose with"


def test_a_forward_of_the_users_stays():
    experts = MixtralExperts(Config())
    experts.forward = lambda hidden, index, weights: hidden
    (row,) = apply_liger_kernel(nn.ModuleList([experts]), EXPERTS)
    assert "already overridden" in row.reason


def test_experts_elsewhere_add_nothing():
    """As transformers' expert parallelism calls them: with the number of experts for one of another process."""
    experts = filled(MixtralExperts(Config()))
    experts._is_expert_parallel = True
    hidden, weights = torch.randn(9, 8), torch.rand(9, 2, requires_grad=True)
    index = torch.tensor([[0, 4], [4, 4], [3, 1], [4, 0], [2, 1], [1, 3], [0, 1], [4, 2], [3, 4]])
    expected = experts(hidden, index, weights)
    apply_liger_kernel(nn.ModuleList([experts]), EXPERTS)
    ours = experts(hidden, index, weights)
    torch.testing.assert_close(ours, expected)
    assert torch.equal(ours[1], torch.zeros(8))
    (gradient,) = torch.autograd.grad(ours.square().sum(), weights)
    assert torch.equal(gradient == 0, index == 4)


def test_an_expert_that_is_not_there_is_an_error():
    experts = filled(MixtralExperts(Config()))
    apply_liger_kernel(nn.ModuleList([experts]), EXPERTS)
    with pytest.raises(ValueError, match="`top_k_index` holds 4, but MixtralExperts has 4 experts"):
        experts(torch.randn(1, 8), torch.tensor([[0, 4]]), torch.rand(1, 2))


def test_chosen_by_name_without_a_proof_is_an_error():
    model = TINY_MODELS["qwen3_moe"]()
    model.set_experts_implementation("liger_trainer")
    with pytest.raises(ValueError, match="apply_liger_kernel"):
        model(**batch())
    apply_liger_kernel(model, EXPERTS, strict=True)
    ours = loss_and_gradients(model)
    assert_same(ours, loss_and_gradients(TINY_MODELS["qwen3_moe"](experts_implementation="eager")))


# ---------------------------------------------------------------------------------------------------------------------
# Experts one by one, as in other versions of transformers and in code from the Hub
# ---------------------------------------------------------------------------------------------------------------------


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
