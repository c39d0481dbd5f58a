"""`report_to`: what arrives at each tracker, offline, and one line for a tracker that is not installed.

A tracker that is not installed is skipped: none is a dependency of the tests. `pip install tensorboard wandb trackio
mlflow-skinny` brings all four.
"""

import importlib.util
import json
import sqlite3
import subprocess
import sys

import pytest
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from liger_trainer.callbacks.log_lines import LogLinesCallback
from liger_trainer.tools.cli import main
from tests.tools.cli.runs import environment, refused, state

LOGGED = {"loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_memory_gib", "labelled_share", "epoch"}
EVALUATED = {"loss", "perplexity", "mean_token_accuracy"}


@pytest.fixture
def run(recipe):
    """Trains with a tracker, and gives the samples of the last step."""

    def trained(tracker, **variables):
        if importlib.util.find_spec(tracker) is None:
            pytest.skip(f"{tracker} is not installed")
        options = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "test_split_size": 0.2}
        options |= {"sample_prompts": ["row 1", "row 2"], "sample_tokens": 4, "sample_steps": 1}
        command = [sys.executable, "-m", "liger_trainer", recipe(report_to=tracker, **options)]
        environ = environment(**{name: str(value) for name, value in variables.items()})  # some read it at their import
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        *_, last = (log["samples"] for log in state("run")["log_history"] if "samples" in log)
        return last

    return trained


def test_tensorboard(run, tmp_path):
    samples = run("tensorboard", TENSORBOARD_LOGGING_DIR=tmp_path / "logs")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    events = EventAccumulator(str(tmp_path / "logs"), {"scalars": 0, "tensors": 0})
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    assert scalars >= {f"train/{name}" for name in LOGGED} | {f"eval/{name}" for name in EVALUATED}
    for index, (prompt, answer) in enumerate(samples, 1):
        found = events.Tensors(f"samples/{index}/text_summary")
        assert [each.step for each in found] == [0, 1, 2]
        text = tensor_util.make_ndarray(found[-1].tensor_proto)[0].decode()
        assert text == f"**{prompt}**\n\n{answer}"


def test_wandb(run, tmp_path):
    samples = run("wandb", WANDB_MODE="offline", WANDB_DIR=tmp_path, WANDB_SILENT="true")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()
    for name in (*(f"train/{name}" for name in LOGGED), *(f"eval/{name}" for name in EVALUATED)):
        assert name.encode() in written, name
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert {table["data"][0][0] for table in tables} == {0, 1, 2}
    (last,) = (table for table in tables if table["data"][0][0] == 2)
    assert last["columns"] == ["step", "prompt", "answer"]
    assert last["data"] == [[2, *sample] for sample in samples]


def test_trackio(run, tmp_path):
    samples = run("trackio", TRACKIO_DIR=tmp_path / "trackio")
    (file,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = [json.loads(text) for (text,) in database.execute("SELECT metrics FROM metrics")]
    assert {name for row in rows for name in row} >= {f"train/{name}" for name in LOGGED} | {"eval/loss"}
    tables = [row["samples"]["_value"] for row in rows if "samples" in row]
    assert len(tables) == 3
    assert tables[-1] == [{"step": 2, "prompt": prompt, "answer": answer} for prompt, answer in samples]


def test_mlflow(run, tmp_path):
    samples = run("mlflow", MLFLOW_TRACKING_URI=(tmp_path / "mlruns").as_uri(), MLFLOW_ALLOW_FILE_STORE="true")
    metrics = {path.name for path in tmp_path.glob("mlruns/*/*/metrics/*")}
    assert metrics >= LOGGED | {f"eval_{name}" for name in EVALUATED}
    texts = {path.name: path.read_text() for path in tmp_path.glob("mlruns/*/*/artifacts/samples/*")}
    assert sorted(texts) == ["step-0.md", "step-1.md", "step-2.md"]
    assert texts["step-2.md"] == "\n\n".join(f"**{prompt}**\n\n{answer}" for prompt, answer in samples)


def test_a_tracker_that_fails_is_one_line(recipe, capsys, monkeypatch):
    error = type("UsageError", (Exception,), {"__module__": "wandb.errors.errors"})

    def fail(*args, **kwargs):
        raise error("No API key configured. Use `wandb login` to log in.")

    monkeypatch.setattr(LogLinesCallback, "on_train_begin", fail)
    monkeypatch.setattr("liger_trainer.recipe.run.check_trackers", lambda *_: None)
    monkeypatch.setattr("transformers.trainer.get_reporting_integration_callbacks", lambda _: [])
    message = refused(capsys, recipe(report_to="wandb"))
    assert "`report_to`: wandb: No API key configured. Use `wandb login` to log in." in message
    with pytest.raises(error):
        main(["train", recipe(output_dir="other")])  # it is not asked for


MISSING = next(name for name in INTEGRATION_TO_CALLBACK if name not in get_available_reporting_integrations())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (MISSING, f"`report_to` is '{MISSING}', which is not installed here: `pip install "),
        ([MISSING], f"`report_to` is '{MISSING}', which is not installed here: `pip install "),
        ("wandbb", "`report_to` is 'wandbb', which is no tracker; transformers knows azure_ml,"),
        ("wandbb", "Did you mean 'wandb'?"),
    ],
)
def test_a_tracker_that_is_not_there(asked, message, recipe, capsys, monkeypatch):
    monkeypatch.setattr("liger_trainer.recipe.run.load_data", lambda *_: pytest.fail("read the data first"))
    assert message in refused(capsys, recipe(report_to=asked))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_steps": 5}, "`sample_steps` is 5, but there are no `sample_prompts`; give some"),
        ({"sample_steps": 0, "sample_prompts": ["row"]}, "`sample_steps` is 0; it must be 1 or more"),
        ({"trainer": "reward", "sample_prompts": ["row"]}, "a reward model writes no text; leave it out"),
        ({"sample_steps": 1, "sample_prompts": [""]}, "the prompt '' has 0 tokens"),
    ],
)
def test_samples_that_cannot_be(options, message, recipe, capsys):
    assert message in refused(capsys, recipe(**options))
