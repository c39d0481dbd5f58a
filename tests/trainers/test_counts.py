"""What divides a loss or a metric is the number of labels that the loss saw."""

from __future__ import annotations

import functools
import random
import threading
import types
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn import functional as F
from transformers import DataCollatorForLanguageModeling, Trainer

import tests
from liger_trainer import LigerGKDTrainer, LigerTrainer
from tests.trainers.builders import causal, sft
from tests.trainers.parity import KINDS, OTHER_KINDS, build
from tests.trainers.test_parity_distillation import build as build_distillation
from tests.trainers.tiny import WORDS, llama, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("case", [{"lmbda": 1.0}, {"lmbda": 0.5}, {"lmbda": 0.0, "seq_kd": True}])
def test_the_divergence_is_divided_by_the_labels_of_the_answers(case: Any, tmp_path: Any, monkeypatch: Any) -> None:
    seen: list[tuple[int, int]] = []
    own = LigerGKDTrainer.generalized_jsd_loss

    def loss(*args: Any, labels: torch.Tensor, num_items_in_batch: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((int(labels.ne(-100).sum()), int(num_items_in_batch)))
        return own(*args, labels=labels, num_items_in_batch=num_items_in_batch, **kwargs)

    monkeypatch.setattr(LigerGKDTrainer, "generalized_jsd_loss", staticmethod(loss))
    steps = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1, "max_new_tokens": 9, "max_steps": 3}
    trainer = build_distillation("gkd", True, tmp_path, **steps, **case)
    random.seed(2)
    trainer.train()
    assert len(seen) == 12
    for step in range(0, 12, 4):
        labels, divisors = zip(*seen[step : step + 4], strict=True)
        assert set(divisors) == {sum(labels)}


def of_labels(outputs: Any, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction=reduction)


def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return of_labels(outputs, labels, "mean")


def divided(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return of_labels(outputs, labels, "sum") / num_items_in_batch


class Noisy:
    """Draws random numbers, counts its calls and changes what it is given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.calls += 1
        noise = 1 + 0.01 * torch.rand(()) * random.random()
        labels[:, :2] = -100
        return divided(outputs, labels, num_items_in_batch) * noise


class Kept:
    """Keeps what it returns in all the ways a function can; `mean` makes it one."""

    losses: list[float]

    def __init__(self, of: Any) -> None:
        self.losses, self.of = [], of

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.of(outputs, labels, num_items_in_batch)
        self.losses.append(loss.item())
        return loss


def closed_over(of: Any) -> Any:
    losses: list[float] = []
    count = 0

    def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        nonlocal count
        count += 1
        loss = of(outputs, labels, num_items_in_batch)
        losses.append(loss.item())
        if len(losses) != count:
            raise ValueError
        return loss

    function.losses = losses  # type: ignore[attr-defined]
    return function


_CALLS: list[float] = []
_COUNT = 0


def in_globals(of: Any) -> Any:
    def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        global _COUNT
        _COUNT += 1
        loss = of(outputs, labels, num_items_in_batch)
        _CALLS.append(loss.item())
        if len(_CALLS) != _COUNT:
            raise ValueError
        return loss

    function.losses = _CALLS  # type: ignore[attr-defined]
    return function


def in_itself(of: Any) -> Any:
    def function(outputs: Any, labels: Any, num_items_in_batch: Any = None, seen: Any = []) -> torch.Tensor:  # noqa: B006
        loss = of(outputs, labels, num_items_in_batch)
        seen.append(loss.item())
        function.losses = seen  # type: ignore[attr-defined]
        return loss

    return function


def in_an_object(of: Any) -> Any:
    return Kept(of)


def in_a_partial(of: Any) -> Any:
    kept = Kept(of)
    function = functools.partial(with_kept, kept)
    function.losses = kept.losses  # type: ignore[attr-defined]
    return function


def with_kept(kept: Any, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return kept(outputs, labels, num_items_in_batch)


def with_a_module(of: Any) -> Any:
    weight = torch.nn.Linear(1, 1, bias=False)  # as a criterion with weights of its own
    losses: list[float] = []

    def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = of(outputs, labels, num_items_in_batch)
        with torch.no_grad():
            weight.weight.add_(1.0)
        losses.append(weight.weight.item())
        return loss

    with torch.no_grad():
        weight.weight.zero_()
    function.losses = losses  # type: ignore[attr-defined]
    return function


KEEPING = [closed_over, in_globals, in_itself, in_an_object, in_a_partial, with_a_module]


@pytest.mark.parametrize("keeping", KEEPING)
@pytest.mark.parametrize(("of", "warns"), [("mean", True), ("divided", False)])
def test_a_loss_that_keeps_something_is_tried_on_a_copy(
    keeping: Any, of: str, warns: bool, tmp_path: Any, caplog: Any
) -> None:
    global _COUNT
    _COUNT = 0
    _CALLS.clear()
    function = keeping({"mean": mean, "divided": divided}[of])
    causal(tmp_path, compute_loss_func=function, **ACCUMULATED).train()
    assert caplog.text.count("twice the `num_items_in_batch`") == warns
    assert "cannot be copied" not in caplog.text
    assert len(function.losses) == 8
    if keeping is with_a_module:
        assert function.losses == list(range(1, 9))


def test_a_loss_that_cannot_be_copied_is_said(tmp_path: Any, caplog: Any) -> None:
    with open(tmp_path / "losses.txt", "w") as file:

        def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            loss = mean(outputs, labels)
            file.write(f"{loss.item()}\n")
            return loss

        causal(tmp_path, compute_loss_func=function, **ACCUMULATED).train()
    assert caplog.text.count("holds what cannot be copied") == 1
    assert "twice" not in caplog.text
    assert len((tmp_path / "losses.txt").read_text().splitlines()) == 8


def _nested(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "held",
    [tests, types.SimpleNamespace(), threading.local(), _nested(3000)],
    ids=["module", "namespace", "local", "deep"],
)
def test_whatever_a_loss_holds_the_run_goes_on(held: Any, tmp_path: Any, caplog: Any) -> None:
    def function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        assert held is not None
        return divided(outputs, labels, num_items_in_batch)

    causal(tmp_path, compute_loss_func=function, **ACCUMULATED).train()
    assert caplog.text.count("holds what cannot be copied") == 1


ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2}


@pytest.mark.parametrize("make", [causal, sft])
@pytest.mark.parametrize(("function", "warns"), [(mean, True), (divided, False), (Noisy(), False)])
def test_a_loss_that_is_a_mean_is_named(make: Any, function: Any, warns: bool, tmp_path: Any, caplog: Any) -> None:
    make(tmp_path, compute_loss_func=function, **ACCUMULATED).train()
    assert caplog.text.count("twice the `num_items_in_batch`") == warns
    assert ("4 times too large" in caplog.text) == warns


def test_looking_leaves_no_trace(tmp_path: Any, monkeypatch: Any) -> None:
    def run(looks: bool) -> tuple[Any, int]:
        function, model = Noisy(), llama(attention_dropout=0.1)
        trainer = causal(tmp_path, model, compute_loss_func=function, **ACCUMULATED)
        trainer._users_loss._looked = not looks
        random.seed(5)
        trainer.train()
        return [log.get("grad_norm") for log in trainer.state.log_history], function.calls

    assert run(True) == run(False) == (run(True)[0], 8)


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 1}, {"loss_is_scaled_for_ga": False}])
def test_a_mean_may_be_right(options: dict[str, Any], tmp_path: Any, caplog: Any) -> None:
    options = dict(options)
    scaled = options.pop("loss_is_scaled_for_ga", None)
    trainer = causal(tmp_path, compute_loss_func=mean, **{**ACCUMULATED, **options})
    trainer.loss_is_scaled_for_ga = scaled
    trainer.train()
    assert "twice" not in caplog.text


# Not "bnpo", a mean over the tokens of each micro-batch, and not "grpo", which is 0 in the first step.
@pytest.mark.parametrize(
    "loss_type",
    ["dr_grpo", "dapo", "vespo", *(pytest.param(each, marks=pytest.mark.long) for each in ("cispo", "sapo", "luspo"))],
)
def test_the_policy_loss_does_not_depend_on_accumulation(loss_type: str, folders: Any, tmp_path: Any) -> None:
    """The same completions in one micro-batch and in four; of several lengths, as advantages add up to 0 otherwise."""
    level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    found = []
    for steps in (1, 4):
        sizes = {"per_device_train_batch_size": 16 // steps, "gradient_accumulation_steps": steps}
        trainer = build(
            "GRPO", True, tmp_path, folders["llama"], loss_type=loss_type, entropy_coef=1e-9, max_steps=1,
            max_completion_length=48, reward_funcs=uneven, **sizes, **level,
        )  # fmt: skip
        trainer.train()
        found.append(next(log for log in trainer.state.log_history if "loss" in log))
    assert abs(found[0]["policy_loss"]) > 1e-3
    for log in found:
        assert log["policy_loss"] == pytest.approx(found[0]["loss"], rel=1e-3)


def uneven(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(map(ord, str(completion))) % 11) for completion in completions]


def test_a_label_that_no_loss_sees_counts_as_none(tmp_path: Any, caplog: Any) -> None:
    rows = [{"input_ids": torch.tensor([5]), "labels": torch.tensor([5])} for _ in range(8)]
    whole = [{"input_ids": torch.tensor([5, 6, 7]), "labels": torch.tensor([5, 6, 7])} for _ in range(8)]
    options = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 4, "max_steps": 4}
    trainer = causal(tmp_path, rows=rows + whole, **options)
    trainer.train()
    assert "Step 1 has a micro-batch without a label" in caplog.text
    shares = [log.get("labelled_share") for log in trainer.state.log_history if "loss" in log]
    assert shares == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", *OTHER_KINDS])
def test_several_data_sets_for_evaluation(kind: str, folders: Any, tmp_path: Any) -> None:
    rows = {**KINDS, **OTHER_KINDS}[kind][0]
    model = llama() if kind in ("ORPO", "CPO") else folders["llama"]
    trainer = build(kind, True, tmp_path, model, eval_dataset={"first": rows(4), "second": rows(8)})
    metrics = trainer.evaluate()
    assert {"eval_first_loss", "eval_second_loss"} <= metrics.keys()
    assert trainer.evaluate("second")["eval_loss"] == metrics["eval_second_loss"]


def test_a_tokenizer_that_pads_with_the_end_is_named(tmp_path: Any, caplog: Any) -> None:
    padded = tokenizer()
    rows = Dataset.from_list([{"text": words} for words in WORDS]).map(lambda row: padded(row["text"] + "</s>"))
    rows = rows.remove_columns("text")
    for pad, said in (("<pad>", 0), ("</s>", 1)):
        padded.pad_token = pad
        trainer = causal(tmp_path, rows=rows, data_collator=DataCollatorForLanguageModeling(padded, mlm=False))
        trainer.train()
        assert caplog.text.count("the model does not learn to stop") == said


def test_a_loss_that_keeps_something_is_called_as_by_the_trainer(tmp_path):
    """One call more would show in the losses of a function that counts, such as for a schedule."""

    def losses(trainer_class):
        calls = [0]

        def counting(outputs, labels, num_items_in_batch=None):
            calls[0] += 1
            loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            return calls[0] * loss / num_items_in_batch

        options = {"compute_loss_func": counting, "gradient_accumulation_steps": 2, "logging_steps": 1}
        trainer = causal(tmp_path, llama(), trainer_class, **options)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(LigerTrainer) == pytest.approx(losses(Trainer), rel=1e-5)
