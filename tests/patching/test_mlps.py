"""MLPs beyond the plain gated ones: multipliers, limits, squared ReLU, and gated ones that rebuild their product."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextMLP

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.kernels.activation import GATED
from liger_trainer.patching import mlps
from tests.patching import comparisons, toys
from tests.patching.comparisons import loss_and_gradients
from tests.tiny_models import COMMON, TINY_MODELS, tiny_batch

MLPS = {**dict.fromkeys(KERNEL_KEYS, False), "swiglu": True, "geglu": True, "relu_squared": True}
FALCON = {"mamba_d_ssm": 16, "mamba_n_heads": 4, "mamba_d_head": 4, "mamba_d_state": 4, "mamba_chunk_size": 8}
GRANITE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}
FAMILIES = {
    "falcon_h1": (
        lambda: tf.FalconH1ForCausalLM(tf.FalconH1Config(**COMMON, **FALCON, mlp_multipliers=[0.75, 1.5])),
        "swiglu (multipliers)",
    ),
    "falcon_h1 with biases": (
        lambda: tf.FalconH1ForCausalLM(
            tf.FalconH1Config(**COMMON, **FALCON, mlp_multipliers=[0.75, 1.5], mlp_bias=True)
        ),
        "swiglu (multipliers)",
    ),
    "granitemoehybrid": (
        lambda: tf.GraniteMoeHybridForCausalLM(
            tf.GraniteMoeHybridConfig(
                **COMMON,
                **GRANITE,
                layer_types=["full_attention"] * 2,
                num_local_experts=0,
                shared_intermediate_size=40,
            )
        ),
        "swiglu on fused gate_up",
    ),
    "granitemoeshared": (
        lambda: tf.GraniteMoeSharedForCausalLM(
            tf.GraniteMoeSharedConfig(**COMMON, num_local_experts=4, shared_intermediate_size=40)
        ),
        "swiglu on fused gate_up",
    ),
    "seed_oss": (
        lambda: tf.SeedOssForCausalLM(tf.SeedOssConfig(**COMMON, head_dim=8, attention_dropout=0.0)),
        "swiglu (dropout)",
    ),
    "seed_oss without dropout": (
        lambda: tf.SeedOssForCausalLM(
            tf.SeedOssConfig(**COMMON, head_dim=8, attention_dropout=0.0, residual_dropout=0.0)
        ),
        "swiglu",
    ),
    "nemotron": (lambda: tf.NemotronForCausalLM(tf.NemotronConfig(**COMMON, head_dim=8)), "relu_squared"),
    "arcee": (lambda: tf.ArceeForCausalLM(tf.ArceeConfig(**COMMON, hidden_act="relu2")), "relu_squared"),
    "persimmon": (lambda: tf.PersimmonForCausalLM(tf.PersimmonConfig(**COMMON)), "relu_squared"),
    "nanochat": (lambda: tf.NanoChatForCausalLM(tf.NanoChatConfig(**COMMON)), "relu_squared"),
}
families = pytest.mark.parametrize("family", FAMILIES)
assert_same = functools.partial(comparisons.assert_same, floor=1e-8)
apply_unchanged = functools.partial(comparisons.apply_unchanged, floor=1e-8)


def built(family):
    model = FAMILIES[family][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # biases too, which start at zero
    return model


@families
def test_loss_and_gradients_are_the_models(family):
    model, kernel = built(family).train(), FAMILIES[family][1]
    ids = torch.randint(3, 120, (2, 9))
    batch = {"input_ids": ids, "labels": ids}

    def drawn_from_a_seed():
        torch.manual_seed(0)
        return loss_and_gradients(model, batch)

    expected = drawn_from_a_seed()
    assert {row.kernel: row.count for row in apply_liger_kernel(model, MLPS).applied} == {kernel: 2}
    assert_same(drawn_from_a_seed(), expected)
    assert revert_liger_kernel(model) == 2


@families
def test_a_hook_on_the_activation_is_called(family):
    model = built(family).eval()
    ids = torch.randint(3, 120, (2, 9))
    batch = {"input_ids": ids, "labels": ids}
    activation = next(module for name, module in model.named_modules() if name.rpartition(".")[2].startswith("act"))
    seen = []
    activation.register_forward_hook(lambda module, args, output: seen.append(module) or 1.5 * output + 0.1)
    apply_unchanged(model, batch, MLPS)
    assert len(seen) == 2


@pytest.mark.parametrize("config", [{"relu_squared": False}, {}])
def test_relu_squared_has_a_switch_of_its_own(config):
    (row,) = (row for row in apply_liger_kernel(built("nemotron"), {**MLPS, **config}) if row.target == "NemotronMLP")
    assert (row.component, row.applied) == ("relu_squared", not config)


class Limitless(toys.MLP):
    """It has the attribute and does not clamp."""

    limit = 10.0


class HiddenClamp(toys.MLP):
    """A limit that small inputs do not reach, under no known name."""

    def forward(self, states):
        return self.down_proj(self.act_fn(self.gate_proj(states).clamp(max=12.0)) * self.up_proj(states))


def test_a_limit_counts_though_small_inputs_do_not_reach_it():
    mlp = DeepseekV4MLP(tf.DeepseekV4Config(hidden_size=8, intermediate_size=12, swiglu_limit=10.0))
    assert [row.kernel for row in apply_liger_kernel(toys.Toy(mlp=mlp), MLPS)] == ["swiglu (limit)"]
    x = 40 * torch.randn(5, 8)
    torch.testing.assert_close(mlp(x), DeepseekV4MLP.forward(mlp, x))
    mlp = Glm5NextTextMLP(tf.Glm5NextTextConfig(hidden_size=8, intermediate_size=12, swiglu_limit=10.0))
    assert [row.kernel for row in apply_liger_kernel(toys.Toy(mlp=mlp), MLPS)] == ["swiglu (limit)"]
    torch.testing.assert_close(mlp(x), Glm5NextTextMLP.forward(mlp, x))
    assert [row.kernel for row in apply_liger_kernel(toys.Toy(mlp=Limitless()), MLPS)] == ["swiglu"]
    (row,) = apply_liger_kernel(toys.Toy(mlp=HiddenClamp()), MLPS)
    assert not row.applied


class DroppedOut(toys.MLP):
    """As Seed-OSS's."""

    def __init__(self, dropout=0.25):
        super().__init__()
        self.residual_dropout = dropout

    def forward(self, states):
        return F.dropout(super().forward(states), self.residual_dropout, self.training)


class DroppedInside(DroppedOut):
    """A dropout of the product, which has the same attribute."""

    def forward(self, states):
        product = self.act_fn(self.gate_proj(states)) * self.up_proj(states)
        return self.down_proj(F.dropout(product, self.residual_dropout, self.training))


def test_a_dropout_of_the_result_has_the_masks_of_the_model(used):
    mlp, x = DroppedOut(), torch.randn(5, 8)
    assert [row.kernel for row in apply_liger_kernel(toys.Toy(mlp=mlp), MLPS)] == ["swiglu (dropout)"]
    used.clear()
    for dropout, training in ((0.25, True), (0.5, True), (0.5, False)):
        mlp.residual_dropout = dropout
        mlp.train(training)
        torch.manual_seed(0)
        ours = mlp(x)
        torch.manual_seed(0)
        torch.testing.assert_close(ours, DroppedOut.forward(mlp, x))
        assert bool((ours == 0).any()) == training
    assert len(used) == 3


@pytest.mark.parametrize(("mlp", "config"), [(DroppedInside(), {}), (DroppedOut(), {"tiled_mlp": True})])
def test_another_dropout_is_the_reason(mlp, config):
    (row,) = apply_liger_kernel(toys.Toy(mlp=mlp), {**MLPS, **config})
    assert row.reason == "in training it draws random numbers, as dropout does, which the kernel does not"


class ActivatedUp(toys.MLP):
    def forward(self, states):
        return self.down_proj(self.gate_proj(states) * self.act_fn(self.up_proj(states)))


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()])
def test_an_activation_is_named_where_it_is_the_difference(act):
    (row,) = apply_liger_kernel(toys.Toy(mlp=ActivatedUp(act=act)), MLPS)
    assert row.reason.startswith("it computes neither silu(gate) * up nor gelu_tanh(gate) * up nor gelu(gate) * up")
    assert (f"({type(act).__name__})" in row.reason) == isinstance(act, nn.ReLU)


class Gated(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act = act

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("row", GATED.values(), ids=lambda row: row.name)
def test_every_activation_of_the_table_is_proved(row):
    (found,) = apply_liger_kernel(toys.Toy(mlp=Gated(row.value)), MLPS).applied
    assert found.component == row.component
    assert found.kernel == (f"{row.component} ({row.detail})" if row.detail else row.component)


class Pair(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.up_proj, self.down_proj, self.act = nn.Linear(8, 12), nn.Linear(12, 8), act

    def forward(self, x):
        return self.down_proj(self.act(self.up_proj(x)))


def test_two_projections_with_another_activation_have_no_kernel():
    (row,) = apply_liger_kernel(toys.Toy(mlp=Pair(F.gelu)), MLPS)
    assert not row.applied
    assert row.reason == "there is no kernel for MLPs without a gate, with 100.0 % of the parameters"
    (row,) = apply_liger_kernel(toys.Toy(mlp=Pair(lambda x: F.relu(x) ** 2)), MLPS)
    assert row.applied


@pytest.mark.parametrize("widths", [(8, 12, 9), (8,), (8, 12, 12, 12, 8)])
def test_other_linear_layers_are_no_mlp(widths):
    model = Pair(F.gelu)
    del model.up_proj, model.down_proj
    for place, sizes in enumerate(itertools.pairwise(widths)):
        model.add_module(f"layer_{place}", nn.Linear(*sizes))
    components = {row.component for row in apply_liger_kernel(toys.Toy(mlp=model), MLPS)}
    assert components == ({"other"} if len(widths) > 1 else set())
    assert not len(apply_liger_kernel(toys.Toy(mlp=nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))), MLPS))


# ---------------------------------------------------------------------------------------------------------------------
# recompute_mlp
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def used(calls_of):
    """How often a down projection joined its activation."""
    calls = calls_of(mlps, "glu_down")
    mlps.gated_mlp_forward.cache_clear()
    yield calls
    mlps.gated_mlp_forward.cache_clear()


@pytest.mark.parametrize("family", ["llama", "gemma", "phi3"])
def test_recompute(family, used):
    model = TINY_MODELS[family]()
    batch = tiny_batch(family, model)
    expected = loss_and_gradients(model, batch)
    (row,) = apply_liger_kernel(model, MLPS).applied
    used.clear()
    assert_same(loss_and_gradients(model, batch), expected)
    assert len(used) == row.count


@pytest.mark.parametrize("family", ["falcon_h1", "falcon_h1 with biases"])
def test_recompute_with_multipliers(family, used):
    model = built(family)
    ids = torch.randint(3, 120, (2, 9))
    expected = loss_and_gradients(model, {"input_ids": ids, "labels": ids})
    apply_liger_kernel(model, MLPS)
    used.clear()
    assert_same(loss_and_gradients(model, {"input_ids": ids, "labels": ids}), expected)
    assert len(used) == (2 if family == "falcon_h1" else 0)  # the multiplier does not scale a bias


def test_the_product_is_saved_where_recompute_is_off(used):
    model = TINY_MODELS["llama"]()
    (row,) = apply_liger_kernel(model, {**MLPS, "recompute_mlp": False}).applied
    model(**tiny_batch("llama", model))
    assert row.kernel == "swiglu, product saved"
    assert not used


def test_nothing_is_prepared_for_a_backward_that_does_not_come(used):
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model, MLPS)
    used.clear()
    with torch.no_grad():
        model(**tiny_batch("llama", model))
    assert not used


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_on_all_modules_see_the_down_projection(kind, used):
    model, seen = TINY_MODELS["llama"](), []
    apply_liger_kernel(model, MLPS)
    used.clear()
    register = getattr(nn.modules.module, f"register_module_{kind}_hook")
    with register(lambda module, *_: seen.append(module)):
        loss_and_gradients(model, tiny_batch("llama", model))
    assert {layer.mlp.down_proj for layer in model.model.layers} <= set(seen)
    assert not used


def test_an_adapter_on_the_down_projection_is_called(used):
    model = TINY_MODELS["llama"]()
    apply_liger_kernel(model, MLPS)
    model = get_peft_model(model, LoraConfig(target_modules=["down_proj", "q_proj"], init_lora_weights=False))
    batch = tiny_batch("llama", model)
    used.clear()
    ours = loss_and_gradients(model, batch)
    assert not used
    revert_liger_kernel(model)
    assert_same(ours, loss_and_gradients(model, batch))


def hook(down_proj):
    down_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def forward(down_proj):
    original = down_proj.forward
    down_proj.forward = lambda x: 2 * original(x)


def parametrized(down_proj):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(down_proj, "weight", Double())


@pytest.mark.parametrize("change", [hook, forward, parametrized])
def test_a_down_projection_that_does_more_is_called(change, used):
    toy, x = toys.Toy(mlp=toys.MLP()), torch.randn(3, 8)
    apply_liger_kernel(toy, MLPS)
    before = toy.mlp(x)
    used.clear()
    change(toy.mlp.down_proj)
    torch.testing.assert_close(toy.mlp(x), 2 * before)
    assert not used


def test_recompute_under_autocast(used):
    toy, x = toys.Toy(mlp=toys.MLP()), torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = toy.mlp(x)
        apply_liger_kernel(toy, MLPS)
        used.clear()
        ours = toy.mlp(x)
    assert used
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
