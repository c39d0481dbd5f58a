"""Learning rates that half-precision weights cannot follow are found before the first step."""

import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer.callbacks.rounded_updates import changed_share, expected_share
from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.trainers.trainer import LigerTrainer

RATES = {5e-7: (0.0034, 0.0097), 5e-6: (0.033, 0.078), 1e-5: (0.067, 0.155)}
"""Learning rate to the share that 50 steps of a Llama changed, as measured, and what an update of that size can."""

OURS = {"optim": "liger_adamw"}


def share_of(rate, dtype=torch.bfloat16, std=0.02):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(2000, 2000, generator=generator) * std).to(dtype)
    return weight, changed_share([{"params": [weight], "lr": 0.0, "initial_lr": rate}])


@pytest.mark.parametrize("rate", RATES)
def test_the_share_is_that_of_small_weights(rate):
    weight, share = share_of(rate)
    measured, bound = RATES[rate]
    assert measured < share < 4 * measured
    assert share == pytest.approx(bound, rel=0.12)  # 4 million weights of any draw: up to 0.03
    assert (weight.abs() < 2**8 * rate).float().mean() < share < (weight.abs() < 2**9 * rate).float().mean() + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [*RATES, 3.1e-6, 1e-4])
def test_the_share_without_the_weights(rate, dtype):
    assert expected_share(rate, 0.02, dtype) == pytest.approx(share_of(rate, dtype)[1], rel=0.12)


@pytest.mark.parametrize("rate", RATES)
def test_an_adam_that_runs_changes_no_more(rate):
    """Noisy gradients of any size: the updates are of the learning rate's size or less."""
    weight, share = share_of(rate)
    before, trained = weight.clone(), torch.nn.Parameter(weight)
    optimizer = torch.optim.AdamW([trained], lr=rate)
    for step in range(10):
        trained.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()
    changed = (trained != before).float().mean().item()
    assert share / 4 < changed <= 1.05 * share


def test_every_dtype():
    assert share_of(5e-7, torch.float32)[1] > 0.99
    assert share_of(5e-7, torch.float16)[1] > share_of(5e-7)[1]
    assert share_of(1e-3)[1] > 0.99
    assert changed_share([]) is None
    assert changed_share([{"params": [torch.zeros(0, dtype=torch.bfloat16)], "lr": 1e-3}]) is None


def test_groups_have_rates_of_their_own():
    weight = torch.full((4,), 0.5, dtype=torch.bfloat16)
    assert changed_share([{"params": [weight], "lr": 1.0}, {"params": [weight[:2]], "lr": 1e-9}]) == 4 / 6


def train(tmp_path, dtype, rate, adapters=None, **settings):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = LlamaForCausalLM(config).to(dtype)
    if adapters is not None:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, lora, autocast_adapter_dtype=adapters == torch.float32)
    row = {"input_ids": list(range(8)), "labels": list(range(8))}
    args = LigerTrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=rate, warmup_steps=1, use_cpu=True, report_to="none",
        save_strategy="no", kernel_report=False, **settings,
    )  # fmt: skip
    LigerTrainer(model=model, args=args, train_dataset=[row] * 8).train()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "rounded away" in record.getMessage()]


@pytest.mark.parametrize(
    ("dtype", "settings", "advice"),
    [
        (torch.bfloat16, {}, "Set `optim: liger_adamw`, which trains bf16 weights as fp32 weights, or train fp32"),
        (torch.bfloat16, {"adapters": torch.bfloat16}, "Set `optim: liger_adamw`, which"),
        (torch.bfloat16, {**OURS, "optim_args": "master=none"}, "Set `optim: liger_adamw`, without `master=none`, or"),
        (torch.float16, {"adam_epsilon": 1e-4}, "away. Train fp32 weights"),
        (torch.float16, OURS, "away. Train fp32 weights"),
    ],
)
def test_it_is_one_warning(tmp_path, caplog, dtype, settings, advice):
    with caplog.at_level(logging.WARNING):
        train(tmp_path, dtype, 5e-7, **settings)
    (warning,) = warnings_of(caplog)
    assert "`learning_rate` 5e-07 changes at most" in warning
    assert f"in {str(dtype).removeprefix('torch.')}:" in warning
    assert advice in warning
    assert "`dtype: float32`" in warning
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("dtype", "rate", "settings"),
    [
        (torch.float32, 5e-7, {}),
        (torch.float32, 1e-12, {}),  # as few arrive, but no other dtype would help
        (torch.bfloat16, 0.0, {}),
        (torch.bfloat16, 1e-2, {}),
        (torch.bfloat16, 5e-7, {"optim": "sgd"}),  # whose updates are not of the learning rate's size
        (torch.bfloat16, 5e-7, {"adapters": torch.float32}),
        (torch.bfloat16, 5e-7, OURS),
        (torch.bfloat16, 5e-7, {**OURS, "optim_args": "master=stochastic"}),
    ],
)
def test_no_warning_where_updates_arrive(tmp_path, caplog, dtype, rate, settings):
    train(tmp_path, dtype, rate, **settings)
    assert not warnings_of(caplog)
