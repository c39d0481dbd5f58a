"""An out-of-memory error of training: its class and text stay, and what would take less memory follows."""

import dataclasses
import re
import types

import pytest
import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import TrainingArguments

from liger_trainer.plan.estimate import estimate
from liger_trainer.plan.running import running
from liger_trainer.trainers.checks import out_of_memory
from liger_trainer.trainers.checks.out_of_memory import advice, budgets
from liger_trainer.trainers.generation_trainers import LigerGRPOTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.builders import causal, sft
from tests.trainers.tiny import COMMON, llama, token_rows

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB."


def poison(model, most=0, message=CUDA):
    """Makes the model's forward run out of memory for batches of more than `most` rows."""
    sizes = []

    def full(module, args, kwargs):
        sizes.append(kwargs["input_ids"].shape[0])
        if sizes[-1] > most:
            raise torch.OutOfMemoryError(message)

    model.register_forward_pre_hook(full, with_kwargs=True)
    return sizes


def failure(trainer, message=CUDA):
    poison(trainer.model, message=message)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    assert type(raised.value.__cause__) is torch.OutOfMemoryError
    assert str(raised.value.__cause__) == message
    text = str(raised.value)
    assert text.startswith(message)
    return raised.value, text


def test_what_failed_what_helps_and_what_it_would_take(tmp_path):
    trainer = causal(tmp_path, gradient_checkpointing=True, gradient_accumulation_steps=3)
    error, text = failure(trainer)
    assert should_reduce_batch_size(error)
    assert "An allocation of 2.50 GiB failed, in or after a micro-batch of 4 × 10 tokens." in text
    assert "Estimated at its peak" in text
    off, on = text.split("Already set:")
    for budget in (
        "logits_memory: 256MiB", 'liger_kernel_config: {"tiled_mlp": true}', "activation_offloading: true",
        "per_device_train_batch_size: 2, gradient_accumulation_steps: 6",
        "--accelerate_config zero2 on 2 GPUs", "--accelerate_config fsdp2 on 2 GPUs",
    ):  # fmt: skip
        assert budget in off
    assert on.splitlines()[0] == " gradient_checkpointing: true."
    assert "`liger-trainer plan RECIPE --gpus 1`" in text


def test_what_saves_most_comes_first_and_what_saves_nothing_apart(tmp_path):
    trainer = causal(tmp_path)
    text = advice(torch.OutOfMemoryError(CUDA), trainer, (4, 20_000))
    now = float(re.search(r"peak \(.+\): ([\d.]+) GiB", text).group(1))
    helps = re.findall(r"^  (.+)  \(([\d.]+) GiB\)$", text, re.MULTILINE)
    sizes = [float(size) for _, size in helps]
    assert sizes == sorted(sizes)
    assert sizes[-1] <= now
    assert {"gradient_checkpointing: true", "per_device_train_batch_size: 2, gradient_accumulation_steps: 2"} <= {
        name for name, _ in helps
    }
    # As the whole logits take 40 MB of these 512 MiB.
    assert "logits_memory: 256MiB" in text.split("By these estimates no help here:")[1].splitlines()[0]


def test_what_is_on_is_not_proposed(tmp_path):
    trainer = causal(tmp_path, per_device_train_batch_size=1, liger_kernel_config={"tiled_mlp": True})
    trainer.args.activation_offloading, trainer.args.activation_offloading_fraction = True, 0.5
    _, text = failure(trainer)
    off, on = text.split("Already set:")
    assert "gradient_checkpointing: true" in off
    assert "activation_offloading_fraction: 1.0" in off
    for budget in ("tiled_mlp", "per_device_train_batch_size: 1", "activation_offloading: true"):
        assert budget not in off
        assert budget in on


@pytest.mark.parametrize(
    ("size", "proposed"),
    [
        ("2GiB", ["activation_memory: 1073741824", "activation_memory: 0"]),
        ("auto", ["activation_memory: 0, or a size in place of auto"]),
        ("0", []),
        (None, []),
    ],
)
def test_kept_results_are_proposed_to_be_fewer(tmp_path, size, proposed):
    trainer = causal(tmp_path, gradient_checkpointing=True)
    trainer.args.activation_memory = size
    found = [budget for budget in budgets(trainer) if "activation_memory" in budget.text]
    assert [budget.text for budget in found] == proposed
    assert not any(budget.on for budget in found)
    text = advice(torch.OutOfMemoryError(CUDA), trainer, (4, 200_000))
    assert all(f"  {one}" in text for one in proposed) or size == "auto"  # there is nothing to keep on a CPU
    trainer.args.gradient_checkpointing = trainer.args.activation_checkpointing = False
    assert not [budget for budget in budgets(trainer) if "activation_memory" in budget.text]


def test_layers_that_fsdp_checkpoints(tmp_path, monkeypatch):
    trainer = causal(tmp_path)
    plugin = types.SimpleNamespace(activation_checkpointing=True)
    monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", plugin, raising=False)
    text = advice(torch.OutOfMemoryError(CUDA), trainer, (4, 1000))
    assert "gradient_checkpointing" not in text  # transformers refuses both
    assert "fsdp_activation_checkpointing: true" in text.split("Already set:")[1]
    assert running(trainer, (4, 1000))[1].checkpointing


def test_the_plan_of_a_trainer_counts_what_it_keeps(tmp_path, monkeypatch):
    trainer = causal(tmp_path, gradient_checkpointing=True)
    run, without = running(trainer, (4, 1000))
    for size, bytes_ in ((2**20, 2**20), ("auto", 0), ("0", 0)):
        trainer.args.activation_memory = size
        assert running(trainer, (4, 1000)) == (run, dataclasses.replace(without, activation_memory=bytes_))
    trainer.args.activation_memory = "auto"
    everything = estimate(run, dataclasses.replace(without, activation_memory=2**40)).total
    card = types.SimpleNamespace(total_memory=everything)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(type(trainer.args), "device", torch.device("cuda", 0))
    _, setting = running(trainer, (4, 1000))
    assert setting.activation_memory > 0
    assert estimate(run, without).total < estimate(run, setting).total <= 0.92 * card.total_memory


def test_stock_arguments_and_no_kernels(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), **COMMON)
    _, text = failure(LigerTrainer(llama(), args, train_dataset=token_rows()), "XPU out of memory.")
    assert "An allocation failed, in or after" in text
    assert "offloading" not in text  # Hugging Face's arguments have none
    assert "use_liger_kernel: true" in failure(causal(tmp_path, use_liger_kernel=False))[1]


def test_a_model_that_is_not_planned_gets_the_advice_without_estimates(tmp_path):
    trainer = causal(tmp_path)
    trainer.model.config.__dict__["num_attention_heads"] = None  # past its own check
    _, text = failure(trainer)
    assert "  gradient_checkpointing: true\n" in text
    assert "Estimated" not in text


def test_a_mistake_in_the_advice_does_not_hide_the_error(tmp_path, monkeypatch):
    trainer = causal(tmp_path)
    poison(trainer.model)
    monkeypatch.setattr(out_of_memory, "budgets", lambda trainer: 1 / 0)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    assert str(raised.value) == CUDA


def test_the_batch_of_grpo_is_left_alone(tmp_path):
    trainer = object.__new__(LigerGRPOTrainer)
    other = causal(tmp_path)
    trainer.args, trainer.accelerator = other.args, other.accelerator
    assert not [budget for budget in budgets(trainer) if "per_device" in budget.text]


def test_sft_too(tmp_path):
    assert "Estimated at its peak" in failure(sft(tmp_path))[1]


def test_auto_find_batch_size_still_finds_one(tmp_path):
    trainer = causal(tmp_path, auto_find_batch_size=True)
    sizes = poison(trainer.model, most=3)
    trainer.train()
    assert sizes[0] == 4
    assert set(sizes[1:]) == {3}
    assert trainer.state.global_step == COMMON["max_steps"]


def test_the_plan_of_a_trainer_is_that_of_its_sizes(tmp_path):
    trainer = causal(tmp_path, gradient_checkpointing=True)
    run, setting = running(trainer, (4, 10))
    assert run.parameters.total.elements == sum(p.numel() for p in trainer.model.parameters())
    assert (run.work.rows, run.work.length, run.weight_bytes, run.mixed) == (1, 10, 4, False)
    assert (setting.strategy, setting.batch, setting.checkpointing) == ("single", 4, True)
    # Weights, gradients and two moments, all in fp32.
    assert estimate(run, setting).total >= 16 * run.parameters.total.elements
    assert estimate(*running(trainer, (4, 1000))).total > 4 * estimate(run, setting).total


@pytest.mark.parametrize("ours", [True, False])
def test_only_our_mlps_rebuild_their_product(tmp_path, ours):
    run, _ = running(causal(tmp_path, use_liger_kernel=ours), (4, 10))
    assert run.recompute_mlp is ours


@pytest.mark.parametrize("ours", [True, False])
def test_the_attention_that_a_plan_counts_is_that_of_the_model(tmp_path, ours):
    run, _ = running(causal(tmp_path, liger_kernel_config={"attention": ours}), (4, 10))
    assert run.implementation == ("liger_trainer" if ours else "sdpa")


@pytest.mark.parametrize("sync", [True, False])
def test_when_gradients_are_reduced(tmp_path, sync):
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": sync}}
    run, _ = running(causal(tmp_path, accelerator_config=config), (4, 10))
    assert run.sync_each_batch is sync
