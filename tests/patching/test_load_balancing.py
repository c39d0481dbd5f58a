"""The load-balancing loss of a model runs as ours: values, gradients, what is left alone, and the way back."""

import pytest
import torch
from torch import nn
from transformers import DogeConfig, DogeForCausalLM
from transformers.models.mixtral import modeling_mixtral

from liger_trainer import apply_liger_kernel, revert_liger_kernel
from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.patching.moe import load_balancing
from tests.steps import step_with
from tests.tiny_models import TINY_MODELS

ALONE = {key: key == "load_balancing_loss" for key in KERNEL_KEYS}
MODELS = ["qwen3_moe", "mixtral", "gpt_oss"]


def build(name, **options):
    return TINY_MODELS[name](router_aux_loss_coef=0.5, output_router_logits=True, **options).train()


def padded_batch():
    ids = torch.randint(3, 100, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 4] = -100  # padding, which sees no token, would predict it
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model):
    model.zero_grad()
    outputs = model(**padded_batch())
    outputs.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return outputs.loss.detach(), outputs.aux_loss.detach(), gradients


def row_of(report):
    (row,) = [row for row in report if row.component == "load_balancing_loss"]
    return row


@pytest.mark.parametrize("config", [ALONE, None], ids=["alone", "all kernels"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_same_losses_and_gradients(name, config, calls_of):
    model = build(name)
    loss, aux_loss, gradients = step(model)
    row = row_of(apply_liger_kernel(model, config))
    assert row.applied
    assert row.probe_error < 1e-6
    calls = calls_of(load_balancing, "router_losses")
    ours = step(model)
    assert len(calls) == 1
    torch.testing.assert_close(ours[:2], (loss, aux_loss), rtol=1e-5, atol=1e-6)
    routers = [key for key in gradients if "gate.weight" in key or "router.weight" in key]
    assert len(routers) == 2
    for key in gradients if config is ALONE else routers:
        torch.testing.assert_close(ours[2][key], gradients[key], rtol=1e-4, atol=1e-6, msg=key)


def test_the_module_stays_as_it_is_and_the_model_gets_its_forward_back():
    stock = modeling_mixtral.load_balancing_loss_func
    model, other = build("mixtral"), build("mixtral")
    apply_liger_kernel(model, ALONE)
    assert modeling_mixtral.load_balancing_loss_func is stock
    assert "forward" in model.__dict__
    assert "forward" not in other.__dict__
    assert revert_liger_kernel(model) == 1
    assert "forward" not in model.__dict__


def test_switched_off():
    row = row_of(apply_liger_kernel(build("mixtral"), {"load_balancing_loss": False}))
    assert not row.applied
    assert row.reason == "switched off in liger_kernel_config"
    with pytest.raises(ValueError, match="`load_balancing_loss`, the kernel that sums"):
        apply_liger_kernel(build("mixtral"), {"load_balancing_loss": False, "global_load_balancing": True})


def load_balancing_loss_func(gate_logits, num_experts=None, top_k=2, attention_mask=None):
    """Another loss under the same name: the sum over the layers."""
    stock = modeling_mixtral.load_balancing_loss_func
    return sum(stock((logits,), num_experts, top_k, attention_mask) for logits in gate_logits)


class SumOfLayers(nn.Module):
    def forward(self, gate_logits):
        return load_balancing_loss_func(gate_logits, 4)


def test_another_loss_is_left_alone():
    row = row_of(apply_liger_kernel(SumOfLayers(), ALONE))
    assert not row.applied
    assert "it computes another loss" in row.reason


def test_other_arguments_are_left_alone():
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    config = DogeConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    row = row_of(apply_liger_kernel(DogeForCausalLM(config), ALONE))
    assert not row.applied
    assert "its arguments are not gate_logits" in row.reason


def test_what_ours_does_not_know_is_the_models_own():
    ours = load_balancing.make_load_balancing_loss(modeling_mixtral.load_balancing_loss_func, False)
    assert ours(None) == 0
    assert ours(torch.ones(3, 4), 4) == 0  # not a tuple
    subclass = torch.rand(3, 4).as_subclass(type("Spread", (torch.Tensor,), {}))
    assert type(ours((subclass,), 4)) is type(subclass)
    with pytest.raises(RuntimeError):  # as in transformers, a mask of other tokens
        ours((torch.ones(3, 4),), 4, 2, torch.ones(2))


def test_z_losses_are_recorded_where_there_is_a_gradient():
    model = build("qwen3_moe")
    apply_liger_kernel(model, ALONE)
    ids = torch.randint(3, 100, (2, 6), generator=torch.Generator().manual_seed(0))
    z_losses = []
    with step_with(z_losses=z_losses):
        outputs = model(input_ids=ids)
        with torch.no_grad():
            model(input_ids=ids)
    (z_loss,) = z_losses
    logits = torch.cat(outputs.router_logits)
    torch.testing.assert_close(z_loss, logits.logsumexp(-1).square().mean())
    assert z_loss.requires_grad


def test_applied_again_inside_the_fused_head_of_an_earlier_trainer():
    from liger_trainer.trainers.fused_forward import StatisticsOptions
    from liger_trainer.trainers.trl_mixin import install_fused_forward

    model = build("mixtral")
    apply_liger_kernel(model)
    install_fused_forward(model, StatisticsOptions(("log_probs",), 1.0, False, None))
    assert row_of(apply_liger_kernel(model)).applied
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = build("mixtral")(input_ids=ids).aux_loss
    for options in ({}, {"fused_lm_head": True, "labels": ids}):
        z_losses = []
        with step_with(z_losses=z_losses):
            torch.testing.assert_close(model(input_ids=ids, **options).aux_loss, expected)
        assert len(z_losses) == 1


def test_a_model_that_has_no_auxiliary_loss_is_given_none(caplog):
    """Llama 4's text model and Doge are asked for router logits, and compute no loss of them."""
    from liger_trainer.trainers.fused_forward import StatisticsOptions
    from liger_trainer.trainers.trl_mixin import install_fused_forward

    model = TINY_MODELS["llama"]()
    model.config.output_router_logits = True
    install_fused_forward(model, StatisticsOptions(("log_probs",), 1.0, False, None))
    ids = torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    aux_loss = model(input_ids=ids, fused_lm_head=True, labels=ids).aux_loss
    assert aux_loss == 0
    assert "its routers are not balanced" in caplog.text
    model.config.output_router_logits = False
    assert model(input_ids=ids, fused_lm_head=True, labels=ids).aux_loss is None


def test_a_compiled_model_gives_the_same_loss():
    torch.compiler.reset()
    model = build("mixtral", num_hidden_layers=1)
    loss, aux_loss, _ = step(model)
    apply_liger_kernel(model)
    compiled = torch.compile(model, backend="eager")
    z_losses = []
    with step_with(z_losses=z_losses):
        outputs = compiled(**padded_batch())
    torch.testing.assert_close((outputs.loss, outputs.aux_loss), (loss, aux_loss), rtol=1e-5, atol=1e-6)
    assert len(z_losses) == 1
