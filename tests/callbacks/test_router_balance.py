"""Tokens of each expert, counted while a tiny mixture of experts trains."""

import csv
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM, Trainer

from liger_trainer.callbacks.router_balance import RouterBalanceCallback
from tests.callbacks.test_callbacks import SIZES, arguments, rows, tiny

EXPERTS, TOP_K, LAYERS = 4, 2, 2


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K))


def train(tmp_path, model=None, **options):
    callback = RouterBalanceCallback()
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, **options)
    trainer = Trainer(model or mixtral(), args, train_dataset=rows(), eval_dataset=rows(4))
    trainer.callback_handler.callbacks.insert(0, callback)
    trainer.train()
    return trainer, callback


def chosen_by_hand(monkeypatch, tmp_path):
    """What the routers choose in the training forwards of the same run, taken from their outputs."""
    import transformers.models.mixtral.modeling_mixtral as modeling

    counts = {}
    stock = modeling.MixtralTopKRouter.forward

    def forward(self, hidden_states):
        result = stock(self, hidden_states)
        if torch.is_grad_enabled():
            ones = torch.bincount(result[2].reshape(-1), minlength=EXPERTS)
            counts[self] = counts.get(self, 0) + ones
        return result

    with monkeypatch.context() as patch:
        patch.setattr(modeling.MixtralTopKRouter, "forward", forward)
        train(tmp_path)
    return torch.stack(list(counts.values()))


def test_counts_are_those_of_the_routers_in_training_alone(tmp_path, monkeypatch):
    expected = chosen_by_hand(monkeypatch, tmp_path / "by hand")
    trainer, callback = train(tmp_path)
    assert [step for step, _ in callback.history] == [2, 4]
    total = sum(tokens for _, tokens in callback.history)
    assert total.sum() == LAYERS * 4 * 2 * 8 * TOP_K  # layers x steps x rows x tokens x choices
    assert torch.equal(total, expected)
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())
    assert callback.layers == [f"model.layers.{index}.mlp.experts" for index in range(LAYERS)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_counted_once(reentrant, tmp_path):
    _, plain = train(tmp_path)
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    _, checkpointed = train(tmp_path, **options)
    assert len(plain.history) == len(checkpointed.history)
    for (_, expected), (_, tokens) in zip(plain.history, checkpointed.history):
        assert torch.equal(tokens, expected)


def test_experts_with_adapters(tmp_path):
    adapters = LoraConfig(
        r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    trainer, callback = train(tmp_path, model=get_peft_model(mixtral(), adapters), max_steps=1)
    wrapper = trainer.model.get_submodule(callback.layers[0])
    assert type(wrapper).__name__ == "ParamWrapper"
    assert not wrapper._forward_pre_hooks
    ((_, tokens),) = callback.history
    assert tokens.sum(1).tolist() == [2 * 8 * TOP_K] * LAYERS


def test_logged_numbers_and_files(tmp_path):
    trainer, callback = train(tmp_path, max_steps=3)  # the last step has no log of its own
    first = next(log for log in trainer.state.log_history if "loss" in log)
    share = callback.history[0][1].double() / (2 * 2 * 8 * TOP_K)
    entropy = -(share * share.log()).nansum(1)
    assert first["router/entropy"] == pytest.approx(entropy.mean().item())
    assert first["router/entropy_percent"] == pytest.approx(100 * entropy.mean().item() / math.log(EXPERTS))
    assert first["router/least_entropy_percent"] == pytest.approx(100 * entropy.min().item() / math.log(EXPERTS))
    assert first["router/max_load"] == pytest.approx(EXPERTS * share.amax(1).mean().item())
    assert first["router/worst_max_load"] == pytest.approx(EXPERTS * share.max().item())
    assert first["router/dropped_tokens"] == 0
    with (tmp_path / "router_balance.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [row["step"] for row in table] == ["2"] * LAYERS + ["3"] * LAYERS
    written = [[int(row[f"expert_{index}"]) for index in range(EXPERTS)] for row in table]
    assert written == [row for _, tokens in callback.history for row in tokens.tolist()]
    assert float(table[0]["entropy"]) == pytest.approx(entropy[0].item(), rel=1e-5)
    assert (tmp_path / "router_balance.png").read_bytes()[1:4] == b"PNG"


def test_an_id_that_is_no_expert_is_counted_as_dropped():
    callback = RouterBalanceCallback()
    callback.layers, callback._num_experts = ["experts"], [3]
    callback._count(0, torch.tensor([0, 2, 2, 3, -1]))
    tokens, dropped = callback._take(torch.device("cpu"))
    assert tokens.tolist() == [[1, 0, 2]]
    assert dropped == 2


def test_a_dense_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no module of experts"):
        train(tmp_path, model=tiny())
