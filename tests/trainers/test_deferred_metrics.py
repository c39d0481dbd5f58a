"""Metrics that are read once a log are those that are read after each micro-batch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from liger_trainer.trainers import deferred_metrics, generation_trainers, reference_trainers, reward_trainer
from liger_trainer.trainers.deferred_metrics import DeferredMetrics, DeferredNumber, nanmax, nanmin
from tests.trainers.builders import sft
from tests.trainers.parity import build
from tests.trainers.tiny import llama, logged, mixtral, text_dataset

pytestmark = pytest.mark.filterwarnings("ignore")


TRL = tuple(f"trl/trainer/{name}.py" for name in ("sft_trainer", "reward_trainer"))
MODULES = {
    **dict.fromkeys(("DPO", "KTO"), reference_trainers),
    **dict.fromkeys(("GRPO", "RLOO"), generation_trainers),
}


class ReadsOfTRL(TorchDispatchMode):
    """Counts the numbers that TRL's trainer reads of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        frame, callers = sys._getframe(1), []
        while frame is not None and len(callers) < 8:
            callers.append(frame.f_code.co_filename)
            frame = frame.f_back
        reads = func.overloadpacket.__name__ == "_local_scalar_dense"
        self.count += reads and any(name.endswith(TRL) for name in callers)
        return func(*args, **(kwargs or {}))


def trained(folder: Any, deferred: bool, model: Any = None, resume: Any = None, **options: Any) -> tuple[Any, int]:
    trainer = sft(folder, model or llama(), **{"max_steps": 7, "logging_steps": 3, **options})
    assert trainer._deferred is None  # on a CPU, nothing waits
    trainer._deferred = DeferredMetrics(trainer) if deferred else None
    with ReadsOfTRL() as reads:
        trainer.train(resume_from_checkpoint=resume)
    return trainer, reads.count


def without_labels() -> Dataset:
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, *([-100] * 3 if i % 3 else [6, 7, 8])]} for i in range(16)]
    return Dataset.from_list(rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2, "logging_steps": 1},
        {"model": mixtral},
        {"data": without_labels, "per_device_train_batch_size": 1, "shuffle_dataset": False},
        {"bf16": True},
    ],
)
def test_logs_are_the_same(options, tmp_path):
    made = {name: value() if name in ("data", "model") else value for name, value in options.items()}
    again = {name: value() if name in ("data", "model") else value for name, value in options.items()}
    one, reads = trained(tmp_path, True, **made)
    other, more = trained(tmp_path, False, **again)
    assert logged(one) == logged(other)
    assert all(type(value) in (int, float) for log in one.state.log_history for value in log.values())
    assert reads == 0
    assert more > 0


def test_an_evaluation_logs_numbers(tmp_path):
    """That of the tokens of the training, too."""
    options = {"eval_dataset": text_dataset(), "eval_strategy": "steps", "eval_steps": 2}
    logs = [logged(trained(tmp_path, deferred, **options)[0]) for deferred in (True, False)]
    assert logs[0] == logs[1]
    assert any("eval_num_tokens" in entry for entry in logs[0])
    assert all(type(value) in (int, float) for entry in logs[0] for value in entry.values())


def test_a_checkpoint_between_logs_holds_them(tmp_path):
    logs = []
    for deferred in (True, False):
        folder = tmp_path / str(deferred)
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "logging_steps": 5}
        trained(folder, deferred, **options)
        logs.append(logged(trained(folder, deferred, resume=str(folder / "checkpoint-2"), **options)[0]))
    assert logs[0] == logs[1]


def test_numbers_that_wait_are_few(tmp_path, monkeypatch):
    monkeypatch.setattr(deferred_metrics, "_MOST", 3)
    waiting = []

    class Waiting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            waiting.append(
                sum(isinstance(one, DeferredNumber) for each in trainer._metrics["train"].values() for one in each)
            )

    trainer = sft(tmp_path, llama(), max_steps=7, logging_steps=100)
    trainer._deferred = DeferredMetrics(trainer)
    trainer.add_callback(Waiting())
    trainer.train()
    assert waiting == [3, 5, 0, 3, 5, 0, 3]  # the count of all tokens is one number


def test_a_number_acts_as_one_that_was_read():
    count, none, total = (torch.tensor(each).as_subclass(DeferredNumber) for each in (4, 0, 3.0))
    assert float(total / count) == 0.75
    assert float(total / none) == 0.0
    assert (total / count).item() is not None
    assert torch.isnan((torch.tensor(float("nan")).as_subclass(DeferredNumber)) / count)
    assert int(7 + count // 2) == 9


def test_code_of_the_user_gets_numbers(tmp_path):
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs.logits.float().square().mean()

    trainer = sft(tmp_path, llama(), compute_loss_func=loss)
    trainer.args.__dict__["_setup_devices"] = torch.device("meta")
    try:
        assert not deferred_metrics.may_defer(trainer)
    finally:
        trainer.args.__dict__.pop("_setup_devices")


@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2, "logging_steps": 1}])
def test_logs_of_a_reward_model_are_the_same(options, tmp_path, folders):
    logs = []
    for deferred in (True, False):
        settings = {"max_steps": 7, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 2, **options}
        trainer = build("Reward", True, tmp_path, folders["llama"], **settings)
        assert trainer._deferred is None
        trainer._deferred = DeferredMetrics(trainer, ("gather", "gather_for_metrics")) if deferred else None
        gather = trainer.accelerator.gather
        with ReadsOfTRL() as reads:
            trainer.train()
        assert trainer.accelerator.gather == gather
        logs.append((logged(trainer), reads.count))
    assert logs[0][0] == logs[1][0]
    assert any("max_reward" in entry for entry in logs[0][0])
    assert all(type(value) in (int, float) for log in trainer.state.log_history for value in log.values())
    assert logs[0][1] < logs[1][1]  # evaluations read them each time


def test_metrics_of_a_reward_model_wait_on_a_device(tmp_path, folders, monkeypatch):
    monkeypatch.setattr(reward_trainer, "may_defer", lambda trainer: True)
    trainer = build("Reward", True, tmp_path, folders["llama"], max_steps=2, logging_steps=2)
    with ReadsOfTRL() as reads:
        trainer.train()
    assert reads.count == 0
    assert any("min_reward" in entry for entry in trainer.state.log_history)


def policy(kind: str, deferred: bool, folder: Any, model: Any, monkeypatch: Any, **case: Any) -> Any:
    """A trainer of `MODULES` whose metrics wait, or do not, as on a device."""
    monkeypatch.setattr(MODULES[kind], "may_defer", lambda trainer: deferred)
    settings = {"max_steps": 5, "logging_steps": 2, **case}
    trainer = build(kind, True, folder, model, **settings)
    assert (trainer._deferred is not None) == (deferred and not settings.get("use_adaptive_entropy"))
    return trainer


def compared(trainer: Any) -> list[dict[str, Any]]:
    """Its logs, without times."""
    return [{name: value for name, value in log.items() if "step_time" not in name} for log in logged(trainer)]


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize(
    "options",
    [
        {"eval_strategy": "steps", "eval_steps": 2},
        {"gradient_accumulation_steps": 3, "logging_steps": 1},
        {"bf16": True},
        {"model": "mixtral"},
    ],
    ids=str,
)
def test_logs_of_alignment_are_the_same(kind, options, tmp_path, folders, monkeypatch):
    options = {"model": "llama", **options}
    model, logs, weights = folders[options.pop("model")], [], []
    for deferred in (True, False):
        trainer = policy(kind, deferred, tmp_path, model, monkeypatch, **options)
        trainer.train()
        logs.append(compared(trainer))
        weights.append([*trainer.model.parameters()])
        assert all(type(value) in (int, float) for log in trainer.state.log_history for value in log.values())
        left = trainer._metrics["train"].values()  # after an evaluation, the last log of TRL is one of an evaluation
        assert all(type(value) in (int, float) for each in left for value in each)
    assert logs[0] == logs[1]
    assert all(torch.equal(*each) for each in zip(*weights, strict=True))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("DPO", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
        ("KTO", {"per_device_train_batch_size": 2, "max_steps": 7, "logging_steps": 1}),  # without good or bad answers
        ("KTO", {"loss_type": "apo_zero_unpaired"}),
        ("GRPO", {"loss_type": "cispo", "gradient_accumulation_steps": 3, "entropy_coef": 0.01}),
        ("GRPO", {"use_adaptive_entropy": True}),
        ("GRPO", {"top_entropy_quantile": 0.5, "beta": 0.1}),
    ],
    ids=str,
)
def test_logs_of_options_are_the_same(kind, options, tmp_path, folders, monkeypatch):
    logs = []
    for deferred in (True, False):
        trainer = policy(kind, deferred, tmp_path, folders["llama"], monkeypatch, **options)
        trainer.train()
        logs.append(compared(trainer))
    assert logs[0] == logs[1]
    if options.get("per_device_train_batch_size"):
        assert len({"rewards/margins" in log for log in logs[0] if "loss" in log}) == 2


@pytest.mark.parametrize("kind", MODULES)
def test_a_checkpoint_of_alignment_holds_them(kind, tmp_path, folders, monkeypatch):
    logs = []
    for deferred in (True, False):
        folder = tmp_path / str(deferred)
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "logging_steps": 3}
        policy(kind, deferred, folder, folders["llama"], monkeypatch, **options).train()
        trainer = policy(kind, deferred, folder, folders["llama"], monkeypatch, **options)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        logs.append(compared(trainer))
    assert logs[0] == logs[1]


def test_the_first_step_shows_a_wrong_reference(tmp_path, folders, monkeypatch):
    trainer = policy("DPO", True, tmp_path, folders["llama"], monkeypatch)
    with torch.no_grad():
        trainer.ref_model.get_input_embeddings().weight.mul_(2.0)
    with pytest.raises(ValueError, match="`rewards/chosen` must be 0"):
        trainer.train()


@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0], [float("nan"), -1.0], [float("nan")] * 2, [float("inf")]])
def test_extremes_without_nan_are_those_of_trl(values):
    from trl.trainer import utils

    given = torch.tensor(values)
    for ours, theirs in ((nanmin, utils.nanmin), (nanmax, utils.nanmax)):
        torch.testing.assert_close(ours(given), theirs(given), equal_nan=True, rtol=0, atol=0)


def test_a_number_that_was_read_is_one_of_python():
    three, seven = (torch.tensor(each).as_subclass(DeferredNumber).item() for each in (3.0, 7))
    before = three
    three *= 0.1
    numbers = [before / seven, seven / 3, three, before - 0.1]
    assert [float(each) for each in numbers] == [3 / 7, 7 / 3, 3 * 0.1, 3 - 0.1]
    assert before.item() == 3.0


def test_what_has_a_gradient_is_no_metric(tmp_path, folders, monkeypatch):
    weight, number = torch.ones((), requires_grad=True), torch.tensor(2.0).as_subclass(DeferredNumber)
    assert all(type(each) is torch.Tensor for each in (weight * number, number - weight))
    assert type(number - 1) is DeferredNumber
    trainer = policy("KTO", True, tmp_path, folders["llama"], monkeypatch)
    with torch.no_grad():
        loss = trainer.compute_loss(trainer.model.train(), next(iter(trainer.get_train_dataloader())))
    assert type(loss) is torch.Tensor
