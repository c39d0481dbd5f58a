"""Sends texts to the trackers that transformers reports to; numbers reach every one of them through `on_log`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback

_COLUMNS = ["step", "prompt", "answer"]


def send_samples(callbacks: Iterable[TrainerCallback], step: int, samples: Sequence[tuple[str, str]]) -> None:
    """Sends the answers of one step to each tracker among `callbacks`; to be called on the main process.

    TensorBoard and MLflow get texts, wandb and trackio tables. Any other tracker gets nothing.

    Args:
        callbacks: The callbacks of the trainer.
        step: The optimizer step.
        samples: Prompt and answer of each.
    """
    texts = [f"**{prompt}**\n\n{answer}" for prompt, answer in samples]
    rows = [[step, *sample] for sample in samples]
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback):
            for index, text in enumerate(texts, 1):
                callback.tb_writer.add_text(f"samples/{index}", text, step)
        elif isinstance(callback, MLflowCallback):
            import mlflow

            mlflow.log_text("\n\n".join(texts), f"samples/step-{step}.md")
        elif isinstance(callback, WandbCallback):
            import wandb

            _log(wandb, wandb.Table(columns=_COLUMNS, data=rows), step)
        elif isinstance(callback, TrackioCallback):
            import pandas
            import trackio

            _log(trackio, trackio.Table(dataframe=pandas.DataFrame(rows, columns=_COLUMNS)), step)


def _log(tracker: Any, table: Any, step: int) -> None:
    tracker.log({"samples": table, "train/global_step": step})  # along which transformers draws everything
