"""The trainers on an accelerator: parity with stock, no host syncs of ours, updates left out on the device."""

import math

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer.callbacks.non_finite import NonFiniteError, NonFiniteGuardCallback
from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.configs.trl_configs import LigerSFTConfig
from liger_trainer.head import forward
from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.attention.training import left_padded
from tests.device import one_gpu
from tests.trainers.parity import build
from tests.trainers.tiny import COMMON, llama, logged, text_dataset, token_rows, tokenizer

pytestmark = [pytest.mark.gpu, one_gpu]

ON_DEVICE = {**COMMON, "use_cpu": False}


class Poison(LigerTrainer):
    def _clip_grad_norm(self, model):
        if self.state.global_step == 2:
            model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = float("nan")
        return super()._clip_grad_norm(model)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_the_update_is_left_out(optim, tmp_path):
    snapshots = []

    class Snapshot(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
            moments = [v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
            snapshots.append([p.detach().clone() for p in model.parameters()] + moments)

    args = LigerTrainingArguments(
        output_dir=str(tmp_path), **{**ON_DEVICE, "max_steps": 5}, optim=optim, non_finite="skip"
    )
    trainer = Poison(llama(), args, train_dataset=token_rows(), callbacks=[Snapshot()])
    trainer.train()
    (guard,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, NonFiniteGuardCallback)]
    assert len(guard.findings) == 1
    assert "Step 3: the gradient of 'model.layers.0.mlp.up_proj.weight'" in guard.findings[0]
    assert all(torch.equal(a, b) for a, b in zip(snapshots[1], snapshots[2]))
    assert not all(torch.equal(a, b) for a, b in zip(snapshots[2], snapshots[3]))
    assert all(torch.isfinite(tensor).all() for tensor in snapshots[-1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_parameters_are_looked_at_before_a_save(value, dtype, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(1000, 700), torch.nn.Linear(700, 3, dtype=dtype)).cuda()
    args = LigerTrainingArguments(output_dir=str(tmp_path), **ON_DEVICE)
    guard, state = NonFiniteGuardCallback(), TrainerState(global_step=7)
    guard.check_before_save(model, args, state, alike=True)
    with torch.no_grad():
        model[1].weight[2, 699] = value
    with pytest.raises(NonFiniteError, match=r"Stopped at step 7: parameter '1\.weight' is not finite"):
        guard.check_before_save(model, args, state, alike=True)


def test_a_nan_at_the_last_step_is_read_and_saved(tmp_path):
    args = LigerTrainingArguments(output_dir=str(tmp_path), **{**ON_DEVICE, "max_steps": 3})
    trainer = Poison(llama(), args, train_dataset=token_rows())
    trainer.train()
    assert trainer._guard.stopped
    assert (tmp_path / "checkpoint-3").is_dir()


def test_it_stops_with_a_checkpoint(tmp_path):
    args = LigerTrainingArguments(output_dir=str(tmp_path), **{**ON_DEVICE, "max_steps": 6})
    trainer = Poison(llama(), args, train_dataset=token_rows())
    trainer.train()
    assert trainer.state.global_step == 4  # the finding is read one step later
    assert (tmp_path / "checkpoint-4").is_dir()
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bf16", [False, True])
def test_losses_are_those_of_stock(bf16, tmp_path):
    pairs = [
        (Trainer, TrainingArguments, LigerTrainer, LigerTrainingArguments, {"train_dataset": token_rows()}),
        (
            SFTTrainer, SFTConfig, LigerSFTTrainer, LigerSFTConfig,
            {"train_dataset": text_dataset(), "processing_class": tokenizer()},
        ),
    ]  # fmt: skip
    tolerance = 3e-2 if bf16 else 1e-3
    for stock_class, stock_args, our_class, our_args, data in pairs:
        stock = stock_class(llama(), stock_args(output_dir=str(tmp_path), bf16=bf16, **ON_DEVICE), **data)
        stock.train()
        ours = our_class(llama(), our_args(output_dir=str(tmp_path), bf16=bf16, **ON_DEVICE), **data)
        ours.train()
        for left, right in zip(logged(stock), logged(ours), strict=True):
            for key in left:
                assert right[key] == pytest.approx(left[key], abs=tolerance, rel=tolerance), key


class NoWaits(TrainerCallback):
    """From the end of step `first` to that of step `last`, an operation that waits for the device is an error."""

    def __init__(self, first, last):
        self.first, self.last = first, last

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in (self.first, self.last):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if state.global_step == self.first else "default")


MADE_TO_WAIT = {"copies": {"accelerator_config": {"non_blocking": False}}, "reads": {}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_preferences_wait_for_the_device_once_a_log(kind, padding_free, tmp_path):
    options = {"use_cpu": False, "logging_steps": 100, "max_steps": 7, "max_grad_norm": 1.0, "cuda_graphs": False}
    llama().save_pretrained(tmp_path / "model")  # from which the reference is loaded
    trainer = build(kind, True, tmp_path, str(tmp_path / "model"), **options, padding_free=padding_free)
    trainer.add_callback(NoWaits(3, 6))
    try:
        trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (log,) = logged(trainer)
    assert "rewards/margins" in log or "rewards/chosen" in log


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_the_loss_of_completions_does_not_wait(kind, tmp_path):
    options = {"use_cpu": False, "logging_steps": 100, "max_steps": 5, "cuda_graphs": False}
    llama().save_pretrained(tmp_path / "model")
    trainer = build(kind, True, tmp_path, str(tmp_path / "model"), **options)
    loss, calls = trainer.compute_loss, []

    def never_waiting(*args, **kwargs):
        calls.append(trainer.state.global_step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if trainer.state.global_step > 2 else "default")
        try:
            return loss(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer.compute_loss = never_waiting
    trainer.train()
    assert max(calls) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding", ["right", "left", None])
@pytest.mark.parametrize("waits", [None, *MADE_TO_WAIT])
def test_training_does_not_wait_for_the_device(waits, padding, tmp_path, monkeypatch):
    """Whole steps, with their batches, the padding of whose rows differs; and what would make them wait is found."""
    rows = left_padded(32) if padding == "left" else token_rows(32)  # on the left, rows are cut into documents
    if padding is None:
        rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]
    values = {**ON_DEVICE, "logging_steps": 100, "max_steps": 7, "max_grad_norm": 1.0, **MADE_TO_WAIT.get(waits, {})}
    args = LigerTrainingArguments(output_dir=str(tmp_path), **values)
    trainer = LigerTrainer(llama(), args, train_dataset=rows, callbacks=[NoWaits(3, 6)])
    if waits == "reads":
        monkeypatch.setattr(forward, "rows_of", lambda *given: None)
    try:
        if waits is None:
            trainer.train()
        else:
            with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                trainer.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
