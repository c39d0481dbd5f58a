"""`report.html`: when it is written, what is in it, and that it costs no run."""

import json
import logging
import math
from collections import deque
from pathlib import Path

import pytest
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from liger_trainer.callbacks.run_report import REPORT, RunReportCallback
from liger_trainer.callbacks.throughput import ThroughputCallback
from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.run_report import run_report
from liger_trainer.run_report.report import changed_arguments
from tests.run_report.reading import Page, places
from tests.trainers import test_parity_distillation as distillation
from tests.trainers.builders import causal
from tests.trainers.parity import build, reward, save_models
from tests.trainers.tiny import COMMON, WORDS, llama, token_rows

SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
ALWAYS = {"loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_gib"}
GENERATES = {"reward", "reward_std", "rewards/reward/mean", "entropy", "completions/mean_length"}
PAIRS = {"rewards", "rewards/accuracies", "rewards/margins", "logps"}
CHARTS = {
    "SFT": {"entropy", "mean_token_accuracy"},
    "DPO": PAIRS,
    "KTO": {"rewards", "rewards/margins", "logps", "kl"},
    "GRPO": GENERATES,
    "RLOO": GENERATES,
    "ORPO": PAIRS,
    "CPO": PAIRS,
    "Reward": {"accuracy", "margin", "min_reward", "mean_reward", "max_reward"},
    "gkd": set(),
    "distillation": set(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))["llama"]


def report(folder):
    return Page((Path(folder) / REPORT).read_text(encoding="utf-8"))


def points(page, title):
    """How many points the first line of a chart has."""
    line, dots = page.strokes[title][:2]
    return sum(map(len, places(line) + places(dots)))


class RaiseAfter(TrainerCallback):
    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise self.error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", CHARTS)
def test_every_trainer_leaves_its_curves(kind, folder, tmp_path):
    case = {**SAVES, "max_steps": 2, "save_steps": 1}
    if kind in distillation.TRAINERS:
        trainer = distillation.build(kind, True, tmp_path, **case)
    else:
        trainer = build(kind, True, tmp_path, folder, **case)
    trainer.train()
    page = report(trainer.args.output_dir)
    assert page.headings[:2] == ["Run", "Curves"]
    assert set(page.charts) >= ALWAYS | CHARTS[kind]
    assert {points(page, title) for title in ALWAYS} == {2}
    numbers = {key for log in trainer.state.log_history[:-1] for key in log} - {"step", "epoch", "num_tokens"}
    halves = {key.removesuffix("/chosen").removesuffix("/rejected") for key in numbers}
    assert halves == set(page.charts)  # whatever was logged
    assert ["rms_norm", "LlamaRMSNorm"] in [row[:2] for row in page.rows]
    assert ["max_steps", "2"] in page.rows
    assert ("Completions" in page.headings) == (kind in ("GRPO", "RLOO"))
    if "Completions" in page.headings:
        start = page.rows.index(["prompt", "completion", "reward", "advantage"]) + 1
        shown = page.rows[start : start + 4]  # of the last step
        assert {row[0] for row in shown} <= set(WORDS)
        assert [float(row[2]) for row in shown] == [float(reward([row[1]])[0]) for row in shown]


def test_evaluations_share_the_chart_of_training(tmp_path):
    options = {**SAVES, "eval_strategy": "steps", "eval_steps": 2}
    trainer = causal(tmp_path, eval_dataset=token_rows(4), **options)
    trainer.train()
    page = report(tmp_path)
    first, last = (log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log)
    assert first != last
    trained, evaluated = page.charts["loss"]
    assert trained.startswith("training ")
    assert float(evaluated.removeprefix("evaluation ")) == pytest.approx(last, rel=1e-3)
    assert [len(places(path)) for path in page.strokes["loss"]] == [1, 0, 1, 0]
    assert not {"runtime", "samples_per_second", "steps_per_second"} & set(page.charts)
    values = dict(row for row in page.rows if len(row) == 2)
    end = trainer.state.log_history[-1]
    assert values["training time"] == f"{end['train_runtime']:,.4g} s"
    assert values["peak memory"] == f"{end['train_peak_memory_gib']:,.4g} GiB"
    assert not [name for name in values if name.startswith("train ")]  # without a unit


def test_a_resumed_run_continues_its_curves(tmp_path):
    with pytest.raises(RuntimeError):
        causal(tmp_path, callbacks=[RaiseAfter(3, RuntimeError("cut <off>"))], **SAVES).train()
    page = report(tmp_path)
    assert ["ended", "at step 3 by RuntimeError: cut <off>"] in page.rows
    assert ["step", "3 of 4"] in page.rows
    assert points(page, "loss") == 3
    before = places(page.strokes["loss"][0])[0]
    causal(tmp_path, **SAVES).train(resume_from_checkpoint=True)
    page = report(tmp_path)
    assert ["step", "4 of 4"] in page.rows
    assert not [row for row in page.rows if row[0] == "ended"]
    assert points(page, "loss") == 4
    assert len(before) == 3
    whole = causal(tmp_path / "whole", **SAVES)
    whole.train()
    assert page.strokes["loss"] == report(tmp_path / "whole").strokes["loss"]


def test_ctrl_c_leaves_a_report_beside_the_checkpoint(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        causal(tmp_path, callbacks=[RaiseAfter(3, KeyboardInterrupt())], **SAVES).train()
    assert ["ended", "at step 3 by KeyboardInterrupt"] in report(tmp_path).rows


def test_it_comes_with_the_first_thing_that_is_saved(tmp_path):
    with pytest.raises(RuntimeError):
        causal(tmp_path / "failed", callbacks=[RaiseAfter(1, RuntimeError())], **SAVES).train()
    assert not (tmp_path / "failed" / REPORT).exists()
    trainer = causal(tmp_path / "model")
    trainer.train()
    trainer.save_model(tmp_path / "elsewhere")
    assert not (tmp_path / "model" / REPORT).exists()
    assert not (tmp_path / "elsewhere" / REPORT).exists()
    trainer.evaluate(token_rows(4))
    trainer.save_model()
    assert len(report(tmp_path / "model").charts["loss"]) == 2


def test_without_the_callback_there_is_none(tmp_path):
    trainer = causal(tmp_path, callbacks=[RaiseAfter(3, RuntimeError())], **SAVES)
    trainer.remove_callback(RunReportCallback)
    with pytest.raises(RuntimeError):
        trainer.train()
    trainer.save_model()
    assert not (tmp_path / REPORT).exists()


def test_a_stock_trainer(tmp_path):
    args = TrainingArguments(str(tmp_path), **{**COMMON, **SAVES})
    Trainer(llama(), args, train_dataset=token_rows(), callbacks=[RunReportCallback()]).train()
    page = report(tmp_path)
    assert points(page, "loss") == 4
    assert "No kernels of liger_trainer were put into the model." in page.text


@pytest.mark.parametrize("obstacle", ["a folder", "a file of the user's", "a log that is none"])
def test_a_failure_to_write_is_one_warning(obstacle, tmp_path, caplog):
    trainer = causal(tmp_path / "run", **SAVES)
    path = tmp_path / "run" / REPORT
    if obstacle == "a folder":
        (path / "inside").mkdir(parents=True)
    elif obstacle == "a file of the user's":
        path.write_text("<html>mine</html>")
    else:
        trainer.add_callback(type("Breaks", (TrainerCallback,), {"on_step_end": broken})())
    with caplog.at_level(logging.WARNING, logger="liger_trainer"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert [str(record.msg).startswith("%s could not be written") for record in caplog.records] == [True]
    assert not list((tmp_path / "run").glob(f".{REPORT}*"))
    if obstacle == "a file of the user's":
        assert path.read_text() == "<html>mine</html>"
        assert "has not written" in caplog.text


def broken(self, args, state, control, **kwargs):
    state.log_history.append({"step": "two", "loss": 1.0})


def test_a_folder_that_cannot_be_written_to(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    callback = RunReportCallback()
    with caplog.at_level(logging.WARNING, logger="liger_trainer"):
        for _ in range(3):
            callback.write(LigerTrainingArguments(str(tmp_path / "file" / "run")), TrainerState())
    assert len(caplog.records) == 1
    assert "Not a directory" in caplog.text


def test_the_file_is_whole_at_any_time(tmp_path, monkeypatch):
    """The old one stays until the new one is complete."""
    trainer = causal(tmp_path, **SAVES)
    trainer.train()
    before = (tmp_path / REPORT).read_bytes()
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk full")))
    trainer.state.global_step = 99
    trainer._run_report.write(trainer.args, trainer.state)
    assert (tmp_path / REPORT).read_bytes() == before
    assert [path.name for path in tmp_path.glob("*report*")] + [path.name for path in tmp_path.glob(".*")] == [REPORT]


@pytest.mark.parametrize("state", [{"is_world_process_zero": False}, {"is_hyper_param_search": True}])
def test_only_the_main_process_writes_and_no_trial(state, tmp_path):
    args = LigerTrainingArguments(str(tmp_path))
    RunReportCallback().write(args, TrainerState(**state))
    assert not (tmp_path / REPORT).exists()
    RunReportCallback().write(args, TrainerState())
    assert (tmp_path / REPORT).exists()


def test_it_is_not_counted_as_training(tmp_path):
    """The throughput's clock, which stops while something is saved, comes after the report."""
    kinds = [type(callback) for callback in causal(tmp_path).callback_handler.callbacks]
    assert kinds.index(RunReportCallback) < kinds.index(ThroughputCallback)
    own = RunReportCallback()
    callbacks = causal(tmp_path, callbacks=[own]).callback_handler.callbacks
    assert [callback for callback in callbacks if isinstance(callback, RunReportCallback)] == [own]


def test_arguments_are_those_that_were_given_without_secrets(tmp_path):
    before = dict(changed_arguments(LigerTrainingArguments(str(tmp_path))))
    assert len(before) < 6  # some are derived, as `disable_tqdm` from the level of the logs
    secrets = {"hub_token": "hf_one"}
    args = LigerTrainingArguments(str(tmp_path), learning_rate=1e-3, lr_scheduler_type="cosine", **secrets)
    args.lr_scheduler_kwargs = {"inner": {"api_key": "two", "Token": "three", "tokens": 4}}
    assert dict(changed_arguments(args)) == before | {
        "output_dir": str(tmp_path),
        "hub_token": "(not shown)",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"inner": {"api_key": "(not shown)", "Token": "(not shown)", "tokens": 4}},
    }


def history(state):
    return Page(run_report(LigerTrainingArguments("somewhere"), state))


def test_logs_of_any_kind():
    """None is what the Trainer logs for a number that is not finite; a reader's checkpoint has NaN itself."""
    entries = [
        {"loss": 2.0, "note": "text", "flag": True, "step": 1},
        {"loss": None, "step": 2},
        {"loss": 1.5, "step": 3},
        {"loss": math.nan, "step": 4},
        {"loss": 1.0, "<b>mine</b>": 3, "step": 5},
        {"loss": 5.0},
    ]
    page = history(TrainerState(log_history=json.loads(json.dumps(entries))))
    assert page.charts == {"loss": ["training 1.000"], "<b>mine</b>": ["training 3.000"]}
    assert [len(places(path)) for path in page.strokes["loss"]] == [0, 3]
    assert "Nothing has been logged." in history(TrainerState()).text


def test_a_long_run_has_a_small_page():
    keys = [f"metric/{index}" for index in range(20)]
    entries = [{**{key: math.sin(step / 99) for key in keys}, "step": step} for step in range(5000)]
    text = run_report(LigerTrainingArguments("somewhere"), TrainerState(log_history=entries))
    assert len(text) < 20 * 12_000
    assert len(Page(text).charts) == 20


def test_completions_of_conversations():
    parts = [{"type": "image", "image": object()}, {"type": "text", "text": "<what>?"}]
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    answer = [{"role": "assistant", "content": "x" * 3000}]
    logs = {
        "prompt": deque([["old"]] * 2 + [turns] * 8),
        "completion": deque([answer] * 10),
        "rewards": {"mine": deque([0.123456] * 9 + [math.nan])},
        "extra": {"late": deque([1, 2])},
        "advantages": deque(range(10)),
    }
    page = Page(run_report(LigerTrainingArguments("somewhere"), TrainerState(), completions=logs))
    start = page.rows.index(["prompt", "completion", "mine", "advantage"]) + 1
    prompt, completion = (
        "system: Be short.\nuser: [image] <what>?",
        "assistant: " + "x" * 1989 + " … (3,011 characters)",
    )
    shown = page.rows[start : start + 8]
    assert shown[0] == [prompt, completion, "0.1235", "2"]
    assert shown[-1] == [prompt, completion, "nan", "9"]
    assert "The last 8 of the 10 completions" in page.text
    assert page.rows[start + 8][0] == "name"
