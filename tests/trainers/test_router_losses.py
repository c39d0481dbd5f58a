"""The routers' auxiliary losses in training: the z-loss on top of each trainer's loss, and the errors without it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig
from trl import SFTTrainer

from liger_trainer import LigerSFTTrainer
from liger_trainer.compat.rebound import forward_calling
from liger_trainer.configs.flags import LigerTrainingArguments
from tests.trainers import builders
from tests.trainers.tiny import COMMON, SIZES, llama, mixtral, text_dataset, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")

COEFFICIENT, RATE = 0.3, 0.1
ONE_STEP = {
    **COMMON, "max_steps": 1, "learning_rate": RATE, "optim": "sgd", "max_grad_norm": 0.0,
    "lr_scheduler_type": "constant", "gradient_accumulation_steps": 2, "seed": 0,
}  # fmt: skip


def plain(tmp_path, model, **options):
    model.config.output_router_logits = True
    return unasked(tmp_path, model, **options)


def unasked(tmp_path, model, **options):
    return builders.causal(tmp_path, model, rows=token_rows(8), **{**ONE_STEP, **options})


def sft(tmp_path, model, trainer_class=LigerSFTTrainer, **options):
    options = {**ONE_STEP, "router_aux_loss_coef": 0.02, **options}
    return builders.sft(tmp_path, model, trainer_class, text_dataset(8), **options)


def dpo(tmp_path, model, **options):
    return builders.dpo(tmp_path, model, mixtral(), **{**ONE_STEP, "router_aux_loss_coef": 0.02, **options})


def deepseek_v3():
    """A mixture of experts whose routers have no load-balancing loss."""
    sizes = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    config = DeepseekV3Config(**{**SIZES, **sizes, **heads, "num_key_value_heads": 4}, moe_intermediate_size=16)
    return DeepseekV3ForCausalLM(config)


def load_balancing_loss_func(logits, num_experts=None, top_k=2, mask=None):
    """A loss that we do not know, under the name that we do."""
    return torch.zeros(())


def mixtral_with_a_loss_of_its_own():
    model = mixtral()
    forward = forward_calling(type(model).forward, "load_balancing_loss_func", load_balancing_loss_func)
    model.__class__ = type("OwnMixtral", (type(model),), {"forward": forward})
    return model


class Recorded:
    """z-loss of every micro-batch of a model in training, from the logits its routers return."""

    def __init__(self, model):
        self.model, self.inputs = model, []
        model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model, args, kwargs):
        if torch.is_grad_enabled():
            self.inputs.append({"input_ids": kwargs["input_ids"], "attention_mask": kwargs["attention_mask"]})

    def mean(self, model):
        values = []
        for inputs in list(self.inputs):
            logits = model(**inputs, output_router_logits=True).router_logits
            mask = inputs["attention_mask"].reshape(-1).float().repeat(len(logits))
            values.append((torch.cat(logits).logsumexp(-1).square() * mask).sum() / mask.sum())
        return torch.stack(values).mean()


@pytest.mark.parametrize("build", [plain, sft, dpo])
def test_z_loss_is_added_to_the_loss_and_logged(build, tmp_path):
    without = build(tmp_path / "without", mixtral())
    recorded = Recorded(without.model)
    without.train()
    with_z = build(tmp_path / "with", mixtral(), router_z_loss_coef=COEFFICIENT)
    with_z.train()
    assert len(recorded.inputs) == 2

    model = mixtral().train()
    z_loss = recorded.mean(model)
    logs = [next(log for log in trainer.state.log_history if "loss" in log) for trainer in (without, with_z)]
    assert "router_z_loss" not in logs[0]
    assert logs[1]["router_z_loss"] == pytest.approx(z_loss.item(), rel=1e-5)
    assert logs[1]["loss"] - logs[0]["loss"] == pytest.approx(COEFFICIENT * z_loss.item(), rel=1e-3)
    assert logs[1].get("aux_loss") == pytest.approx(logs[0].get("aux_loss"))

    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(z_loss, list(parameters.values()), allow_unused=True)
    both = [dict(trainer.model.named_parameters()) for trainer in (without, with_z)]
    for name, gradient in zip(parameters, gradients):
        moved = (both[0][name] - both[1][name]).detach() / (RATE * COEFFICIENT)
        expected = torch.zeros_like(moved) if gradient is None else gradient
        torch.testing.assert_close(moved, expected, rtol=1e-3, atol=2e-5, msg=name)
    assert any("gate" in name and gradient.abs().max() > 1e-3 for name, gradient in zip(parameters, gradients))


def test_evaluation_is_without_it(tmp_path):
    losses = []
    for coefficient in (0.0, COEFFICIENT):
        trainer = plain(tmp_path, mixtral(), router_z_loss_coef=coefficient)
        losses.append(trainer.evaluate(token_rows(4))["eval_loss"])
    assert losses[0] == losses[1]


def test_aux_loss_is_logged_as_by_trl(tmp_path):
    """With the counts of all processes, of which there is one, as well."""
    logs = []
    stock = sft(tmp_path, mixtral(), SFTTrainer, router_aux_loss_coef=0.5)
    ours = sft(tmp_path, mixtral(), router_aux_loss_coef=0.5, liger_kernel_config={"global_load_balancing": True})
    for trainer in (stock, ours):
        trainer.train()
        logs.append(next(log for log in trainer.state.log_history if "aux_loss" in log))
    assert logs[0]["aux_loss"] == pytest.approx(logs[1]["aux_loss"], rel=1e-5)
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (llama, {}, "no load-balancing loss was found in the model"),
        (deepseek_v3, {}, "no load-balancing loss was found in the model"),
        (mixtral_with_a_loss_of_its_own, {}, "its arguments are not gate_logits, num_experts, top_k, attention_mask"),
        (mixtral, {"use_liger_kernel": False}, "`use_liger_kernel` is off"),
        (mixtral, {"liger_kernel_config": {"load_balancing_loss": False}}, "switched off in liger_kernel_config"),
    ],
)
def test_a_z_loss_nobody_computes_is_an_error(model, options, message, tmp_path):
    with pytest.raises(ValueError, match=f"`router_z_loss_coef` is 0.3, but.*{message}"):
        plain(tmp_path, model(), router_z_loss_coef=COEFFICIENT, **options)


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (unasked, r"Set `model\.config\.get_text_config\(\)\.output_router_logits = True` before"),
        (sft, r"Set `router_aux_loss_coef`, which is 0\.0, above 0"),
        (dpo, r"Set `router_aux_loss_coef`, which is 0\.0, above 0"),
    ],
)
def test_a_z_loss_of_logits_nobody_asks_for_is_an_error_before_training(build, remedy, tmp_path):
    options = {} if build is unasked else {"router_aux_loss_coef": 0.0}
    with pytest.raises(ValueError, match=f"`router_z_loss_coef` is 0.3, but .* routers' logits. {remedy}"):
        build(tmp_path, mixtral(), router_z_loss_coef=COEFFICIENT, **options)
    assert build(tmp_path, mixtral(), **options)


def test_the_models_configuration_asks_where_dpo_does_not(tmp_path):
    model = mixtral()
    model.config.output_router_logits = True
    trainer = dpo(tmp_path, model, router_aux_loss_coef=0.0, router_z_loss_coef=COEFFICIENT)
    trainer.train()
    assert trainer.state.log_history[0]["router_z_loss"] > 0


def test_a_configuration_that_does_not_know_the_flag_leaves_it_to_the_first_step(tmp_path):
    model = mixtral()
    model.config = LlamaConfig(**SIZES)
    assert unasked(tmp_path, model, router_z_loss_coef=COEFFICIENT)


class Wrapped(torch.nn.Module):
    """Asks for the logits itself, and has a configuration that is not of transformers."""

    def __init__(self):
        super().__init__()
        self.model, self.config = mixtral(), SimpleNamespace(use_cache=False)

    def forward(self, input_ids, labels, **options):
        return self.model(input_ids, labels=labels, output_router_logits=True, **options)


def test_a_configuration_of_another_kind_leaves_it_to_the_first_step(tmp_path):
    trainer = unasked(tmp_path, Wrapped(), router_z_loss_coef=COEFFICIENT)
    trainer.train()
    assert trainer.state.log_history[0]["router_z_loss"] > 0


def test_without_router_logits_a_step_says_how_to_ask_for_them(tmp_path):
    trainer = plain(tmp_path, mixtral(), router_z_loss_coef=COEFFICIENT)
    trainer.model.config.output_router_logits = False
    with pytest.raises(ValueError, match=r"`model\.config\.output_router_logits = True`"):
        trainer.train()


@pytest.mark.parametrize("value", [-0.1, True, float("inf"), "much"])
def test_a_wrong_coefficient_is_named(value, tmp_path):
    with pytest.raises(ValueError, match=r"`router_z_loss_coef` is .*; it must be a number, 0 or more"):
        LigerTrainingArguments(str(tmp_path), router_z_loss_coef=value)
