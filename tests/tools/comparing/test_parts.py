"""The parts of a comparison: the rule, sums in halves, recorded completions, gradients, and the stock arguments."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from liger_trainer.errors import UserError
from liger_trainer.recipe.file import RecipeError
from liger_trainer.tools.comparing.measures import Completions, compare_gradients, group_of, save_gradients, split_sums
from liger_trainer.tools.comparing.results import FACTOR, judge
from liger_trainer.tools.comparing.side import AGAIN, OURS, STOCK, Measured


def measured(loss=0.0, norm=0.0, gradient=0.0, **changes):
    """A run that is away from stock by the given numbers: in the second loss and norm, and in a layer's gradient."""
    parts = {"layers.0.mlp": {"norm": 2.0, "difference": 2 * gradient}, "head": {"norm": 1.0, "difference": 1e-6}}
    run = Measured(
        "weights", [3.0, 2.0 + loss], [1.0, 4.0 * (1 + norm)], [8, 8], [1.0, 1.0], 1.0, "cpu", parts, {}, 0, []
    )
    return dataclasses.replace(run, **changes)


NOISE = measured(loss=1e-5, norm=1e-6, gradient=1e-6)


def judged(ours, stock=None, again=NOISE):
    return judge({STOCK: stock or measured(), AGAIN: again, OURS: ours})


@pytest.mark.parametrize(
    ("change", "name"), [("loss", "loss"), ("norm", "gradient norm"), ("gradient", "gradient of layers.0.mlp")]
)
def test_the_rule(change, name):
    noise = {"loss": 1e-5, "norm": 1e-6, "gradient": 1e-6}
    assert judged(measured(**noise)).agrees
    assert judged(measured(**{**noise, change: 0.9 * FACTOR * noise[change]})).agrees
    verdict = judged(measured(**{**noise, change: 1.1 * FACTOR * noise[change]}))
    assert not verdict.agrees
    (reason,) = verdict.reasons
    step = 1 if change == "gradient" else 2
    assert reason.startswith(f"At step {step}, the {name} differs by ")
    assert f"{1.1 * FACTOR:.3g} times {noise[change]:.1e}." in reason


def test_without_noise_a_few_roundings_are_allowed():
    still = measured(gradients={name: {**part, "difference": 0.0} for name, part in NOISE.gradients.items()})
    exact = {"gradients": still.gradients}
    assert judged(measured(loss=1e-6, norm=1e-6, **exact), again=still).agrees
    assert not judged(measured(loss=1e-5, **exact), again=still).agrees
    assert not judged(measured(norm=1e-5, **exact), again=still).agrees


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights": "others"}, "different weights"),
        ({"tokens": [8, 7]}, "different numbers of tokens"),
        ({"loss": [3.0]}, "Ours trained 1 steps, and stock 2."),
        ({"loss": [3.0, math.nan]}, "At step 2, the loss differs by nan"),
        ({"grad_norm": [math.inf, 4.0]}, "At step 1, the gradient norm differs by inf"),
    ],
)
def test_other_reasons(change, reason):
    (found,) = judged(dataclasses.replace(measured(), **change)).reasons
    assert reason in found


def test_a_gradient_that_stock_has_not_differs():
    gradients = {**NOISE.gradients, "frozen": {"norm": 0.0, "difference": 1e-9}}
    assert any("gradient of frozen differs by inf" in one for one in judged(measured(gradients=gradients)).reasons)
    gradients["frozen"]["difference"] = 0.0
    assert judged(measured(gradients=gradients)).agrees


def test_nothing_to_compare():
    with pytest.raises(UserError, match="Every gradient of the stock run is 0"):
        judged(measured(), stock=measured(grad_norm=[0.0, 0.0]))
    with pytest.raises(UserError, match="`stock_again` has losses or gradients that are not finite"):
        judged(measured(), again=measured(loss=math.inf))
    with pytest.raises(UserError, match="does not fill one batch"):
        judged(measured(), stock=dataclasses.replace(measured(), loss=[], grad_norm=[]))


class Scaled(nn.Linear):
    """A linear layer with a forward of its own, as a quantised one has."""

    def forward(self, input):
        return super().forward(input)


@pytest.mark.parametrize("layer", [nn.Linear, Scaled])
@pytest.mark.parametrize("bias", [True, False])
def test_sums_in_halves_are_the_same_linear_layer(layer, bias):
    torch.manual_seed(0)
    model = nn.Sequential(layer(7, 5, bias=bias)).double()
    x = torch.randn(3, 4, 7, dtype=torch.float64, requires_grad=True)

    def results():
        out = model(x)
        return out, *torch.autograd.grad(out.square().sum(), (x, *model.parameters()))

    expected = results()
    assert split_sums(model) == 1
    torch.testing.assert_close(results(), expected, rtol=1e-12, atol=1e-12)
    assert any(not torch.equal(one, other) for one, other in zip(results(), expected))  # but it rounds otherwise


class Policy(nn.Module):
    """Samples two tokens."""

    device = torch.device("cpu")

    def __call__(self, input_ids):
        return torch.cat([input_ids, torch.randint(100, (len(input_ids), 2))], dim=1)


def test_completions_are_recorded_and_repeated(tmp_path):
    policy, prompts = Policy(), torch.arange(6).reshape(3, 2)
    recording, repeating = (Completions(tmp_path / "calls", record=record) for record in (True, False))

    def call(completions, prompts):
        return completions._recorded(policy, lambda model, input_ids: model(input_ids), input_ids=prompts)

    torch.manual_seed(1)
    first, after = call(recording, prompts), torch.rand(1)
    torch.manual_seed(2)
    assert torch.equal(call(repeating, prompts), first)
    assert torch.equal(torch.rand(1), after)  # so that what is drawn next is the same too
    with pytest.raises(RecipeError, match="generated 1 times, and this one once more"):
        call(repeating, prompts)
    call(recording, prompts)
    repeating.calls = 1
    with pytest.raises(RecipeError, match="different prompts"):
        call(repeating, prompts + 1)


def test_gradients_are_compared_by_part(tmp_path):
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": nn.Linear(2, 2)})]), "head": nn.Linear(2, 1)})
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model["head"].bias.grad = None
    save_gradients(model, tmp_path / "gradients")
    model["layers"][0]["mlp"].weight.grad *= 2
    model["head"].weight.grad = None
    model["head"].bias.grad = torch.full((1,), 3.0)
    found = compare_gradients(model, tmp_path / "gradients")
    assert found == {
        "layers.0.mlp": {"norm": 6**0.5, "difference": 2.0},
        "head": {"norm": 2**0.5, "difference": 2**0.5},
        "head.bias": {"norm": 0.0, "difference": 3.0},
    }


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.11.mlp.up_proj.weight", "model.layers.11.mlp"),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
            "base_model.model.model.layers.0.self_attn",
        ),
        ("model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
    ],
)
def test_parts(name, group):
    assert group_of(name) == group


@pytest.mark.parametrize("trainer", ["sft", "causal_lm", "dpo", "kto", "orpo", "cpo", "grpo", "rloo", "reward"])
def test_stock_classes_and_arguments(trainer):
    from liger_trainer.recipe.schema import TRAINERS
    from liger_trainer.tools.comparing.request import own_arguments, stock_class

    kind = TRAINERS[trainer]
    for ours in (kind.trainer_class, kind.config_class):
        stock = stock_class(ours)
        assert stock.__module__.split(".")[0] == ("transformers" if trainer == "causal_lm" else "trl")
        assert trainer == "causal_lm" or f"Liger{stock.__name__}" == ours.__name__
    own = own_arguments(kind.config_class)
    assert {"use_liger_kernel", "liger_kernel_config", "activation_memory", "non_finite"} <= own
    assert not own & {"optim", "learning_rate", "logging_nan_inf_filter"}
    assert ("tokens_per_micro_batch" in own) == (trainer in ("dpo", "kto", "orpo", "cpo", "grpo", "rloo", "reward"))


def test_stock_distillation():
    """Trainers that no recipe names yet."""
    import liger_trainer
    from liger_trainer.tools.comparing.request import stock_class

    for name in ("GKD", "Distillation"):
        for what in ("Trainer", "Config"):
            assert stock_class(getattr(liger_trainer, f"Liger{name}{what}")).__name__ == f"{name}{what}"
