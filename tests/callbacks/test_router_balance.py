"""Tokens of each expert, counted while a tiny mixture of experts trains."""

import csv
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
)

from liger_trainer import apply_liger_kernel
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


def llama4():
    torch.manual_seed(0)
    sizes = {"head_dim": 4, "intermediate_size_mlp": 16, "interleave_moe_layer_step": 1, "attention_chunk_size": 16}
    return Llama4ForCausalLM(
        Llama4TextConfig(**{**SIZES, **sizes}, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
def test_experts_that_see_every_token_are_counted_as_their_routers_choose(kernels, checkpointing, tmp_path):
    model, chosen = llama4(), []
    if kernels:
        assert any(row.kernel == "moe_experts on the chosen inputs" for row in apply_liger_kernel(model).applied)
    for layer in model.model.layers:
        layer.feed_forward.router.register_forward_hook(
            lambda *call: chosen.append(call[2][0].detach()) if torch.is_grad_enabled() else None
        )
    trainer, callback = train(tmp_path, model=model, max_steps=1, gradient_checkpointing=checkpointing)
    ((_, tokens),) = callback.history
    first = chosen[:LAYERS]  # later ones are a checkpoint's
    assert torch.equal(tokens, torch.stack([(scores > 0).sum(0) for scores in first]))
    assert tokens.sum(1).tolist() == [2 * 8 * TOP_K] * LAYERS
    assert callback.layers == [f"model.layers.{index}.feed_forward.experts" for index in range(LAYERS)]
    trainer.callback_handler.callbacks.remove(callback)
    assert all(len(layer.feed_forward.router._forward_hooks) == 1 for layer in model.model.layers)  # the test's


def test_experts_that_no_registry_serves(tmp_path):
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    sizes = {
        "head_dim": 4,
        "num_key_value_heads": 2,
        "ffn_hidden_size": 16,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 0,
        "num_layers": 1,
    }
    torch.manual_seed(0)
    config = LongcatFlashConfig(**{**SIZES, **heads, **sizes}, n_routed_experts=EXPERTS, moe_topk=TOP_K)
    _, callback = train(tmp_path, model=LongcatFlashForCausalLM(config), max_steps=1)
    ((_, tokens),) = callback.history
    assert tokens.sum(1).tolist() == [2 * 8 * TOP_K]


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


def test_the_heat_map_shows_each_expert_beside_its_layers_mean(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, native = [], Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda self, data, **k: drawn.append(data) or native(self, data, **k))
    callback = RouterBalanceCallback()
    callback.layers, callback._num_experts = ["wide", "narrow"], [3, 2]
    callback.history = [(1, torch.tensor([[1, 2, 0], [4, 0, 0]])), (2, torch.tensor([[0, 1, 2], [4, 8, 0]]))]
    callback._draw(tmp_path / "map.png")
    ((wide, narrow),) = drawn
    assert wide.tolist() == pytest.approx([0.5, 1.5, 1.0])
    assert narrow[:2].tolist() == pytest.approx([1.0, 1.0])
    assert math.isnan(narrow[2])  # it has no third


def test_an_id_that_is_no_expert_is_counted_as_dropped():
    callback = RouterBalanceCallback()
    callback.layers, callback._num_experts = ["experts"], [3]
    callback._count(0, torch.tensor([0, 2, 2, 3, -1]))
    tokens, dropped = callback._take(torch.device("cpu"))
    assert tokens.tolist() == [[1, 0, 2]]
    assert dropped == 2


def test_a_dense_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts with stacked weights"):
        train(tmp_path, model=tiny())
