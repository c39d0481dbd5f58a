"""Tokens per second, and the share of the hardware's peak that they use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from liger_trainer.callbacks.batch_tokens import token_masks
from liger_trainer.callbacks.flops import flops_per_token, peak_flops
from liger_trainer.callbacks.logged import LoggedMetricsCallback, summed_over_processes


class ThroughputCallback(LoggedMetricsCallback):
    """Logs `tokens_per_second` (of all processes) and, if the peak of the hardware is known, `mfu`.

    Tokens are those of the attention mask, so padding does not count. The Liger trainers count each batch when they
    fetch it, without waiting for the device. With a stock `Trainer`, set
    `TrainingArguments(include_num_input_tokens_seen="non_padding")`, whose counter is read instead. The clock stops
    during evaluation and saving. At the end, `train_tokens_per_second` and `train_mfu` are over the whole run.

    MFU is ``tokens per second * FLOPs per token / (processes * peak)``; see [`flops_per_token`]. Tokens that sequences
    share (`share_prompt`) count as often as they are trained in the rate, and once in the MFU.
    """

    def __init__(self) -> None:
        self.flops_per_token = 0.0
        self.replicas_per_batch = 1
        """How many processes share the same tokens (tensor, context and sequence parallelism)."""
        self.executed_share: Callable[[], float] = lambda: 1.0
        """The part of the tokens that the model runs on."""
        self._half_precision = False
        self._pending: torch.Tensor | int = 0  # since the last reading; on the device, so that counting never waits
        self._window_tokens = self._run_tokens = 0.0
        self._window_seconds = self._run_seconds = 0.0
        self._mark: float | None = None
        self._seen_by_trainer: int | None = None
        self._counts_batches = False

    def measure(self, model: nn.Module) -> None:
        """Reads the model's size; to be called before the model is sharded."""
        self.flops_per_token = flops_per_token(model)
        dtypes = {parameter.dtype for parameter in model.parameters()}
        self._half_precision = bool(dtypes & {torch.bfloat16, torch.float16})

    def count(self, batches: Sequence[Any]) -> None:
        """Counts the tokens of micro-batches."""
        self._counts_batches = True
        for batch in batches:
            for tokens, _ in token_masks(batch):
                self._pending = self._pending + tokens.sum()

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reads the model's size while it is whole."""
        if kwargs.get("model") is not None:
            self.measure(kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock."""
        self._pending, self._window_tokens, self._run_tokens = 0, 0.0, 0.0
        self._window_seconds = self._run_seconds = 0.0
        self._seen_by_trainer = state.num_input_tokens_seen
        self._mark = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Counts the time until now as training."""
        self._tick(training=True)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leaves out the time of the evaluation."""
        self._tick(training=False)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leaves out the time of saving."""
        self._tick(training=False)

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Rate since the last training log."""
        self._read(args, state)
        rate = self._rate(args, self._window_tokens, self._window_seconds)
        self._window_tokens = self._window_seconds = 0.0
        return rate

    def summary(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Rate over the whole run."""
        self._read(args, state)
        return self._rate(args, self._run_tokens, self._run_seconds)

    def _tick(self, training: bool) -> None:
        now = time.perf_counter()
        if training and self._mark is not None:
            self._window_seconds += now - self._mark
            self._run_seconds += now - self._mark
        self._mark = now

    def _read(self, args: TrainingArguments, state: TrainerState) -> None:
        """Reads the counted tokens; the Trainer has just waited for the device to read the loss."""
        self._tick(training=True)
        if self._counts_batches:
            tokens = self._gathered(args)
        else:
            tokens = float(state.num_input_tokens_seen - (self._seen_by_trainer or 0))
            self._seen_by_trainer = state.num_input_tokens_seen
        self._window_tokens += tokens
        self._run_tokens += tokens

    def _gathered(self, args: TrainingArguments) -> float:
        pending = torch.as_tensor(self._pending, dtype=torch.int64, device=args.device)
        self._pending = 0
        return summed_over_processes(pending.clone()).item() / self.replicas_per_batch

    def _rate(self, args: TrainingArguments, tokens: float, seconds: float) -> dict[str, float]:
        if tokens <= 0 or seconds <= 0:
            return {}
        rate = {"tokens_per_second": round(tokens / seconds, 1)}
        peak = peak_flops(args.device, self._half_precision or args.bf16 or args.fp16)
        if peak is not None and self.flops_per_token:
            used = tokens / seconds * self.flops_per_token * self.executed_share()
            rate["mfu"] = round(used / (peak * max(args.world_size, 1)), 4)
        return rate
