"""Tokens per second, and the share of the hardware's peak that they use: FLOPs per token, and the peak FLOP/s."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from liger_trainer.callbacks.labelled_share import token_masks
from liger_trainer.callbacks.logged import LoggedMetricsCallback, summed_over_processes

# Dense bf16/fp16 FLOP/s of the tensor cores from the vendors' data sheets (without structured sparsity), by a part of
# the device's name; the first match counts.
PEAK_FLOPS = {
    "GB300": 2.5e15,
    "GB200": 2.5e15,
    "B300": 2.25e15,
    "B200": 2.25e15,
    "GH200": 989.4e12,
    "H200": 989.4e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "MI355X": 2.5e15,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
    "MI250X": 191.5e12,
}


def peak_flops(device: torch.device, half_precision: bool) -> float | None:
    """Peak dense FLOP/s of `device` in bf16 or fp16; None if it is not known, as for CPUs and for fp32."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" and half_precision else None


def peak_of(name: str) -> float | None:
    """Peak dense FLOP/s in bf16 or fp16 of the card with this name; None if it is not known."""
    words = name.replace("-", " ").split()
    for part, flops in PEAK_FLOPS.items():
        if all(word in words for word in part.split()):
            return flops
    return None


def flops_per_token(model: nn.Module) -> float:
    """Floating point operations that one token costs in a training step.

    2 per weight in the forward, 2 in the backward for the gradient of the activations, and 2 more if the weight itself
    is trained: 6N for full fine-tuning, the usual count (Kaplan et al. 2020, appendix B), and 4N for the frozen weights
    under an adapter. N does not count the input embedding, which is a look-up (a tied one counts as the head), and
    counts only the share of a mixture of experts that a token is routed to. The attention scores and the recomputation
    of gradient checkpointing are not counted, so the utilisation computed from it is a lower bound if all tokens have
    labels. The LM head is counted for every token, although ours leaves out those without one.
    """
    share = _expert_share(model)
    embedding = _weight(model, "get_input_embeddings")
    tied = embedding is not None and embedding is _weight(model, "get_output_embeddings")
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and not tied:
            continue
        numel = getattr(parameter, "ds_numel", parameter.numel())
        active = numel * (share if ".experts." in f".{name}." else 1.0)
        total += active * (6 if parameter.requires_grad else 4)
    return total


def _expert_share(model: nn.Module) -> float:
    config = getattr(model, "config", None)
    text: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return chosen / experts if experts and chosen else 1.0


def _weight(model: nn.Module, getter: str) -> nn.Parameter | None:
    try:
        module = getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None
    return getattr(module, "weight", None)


# ---------------------------------------------------------------------------------------------------------------------
# The callback
# ---------------------------------------------------------------------------------------------------------------------


class ThroughputCallback(LoggedMetricsCallback):
    """Logs `tokens_per_second` (of all processes) and, if the peak of the hardware is known, `mfu`.

    Tokens are those of the attention mask, so padding does not count. The Liger trainers count each batch when they
    fetch it, without waiting for the device. With a stock `Trainer`, set
    `TrainingArguments(include_num_input_tokens_seen="non_padding")`, whose counter is read instead. The clock stops
    during evaluation and saving. At the end, `train_tokens_per_second` and `train_mfu` are over the whole run.

    MFU is ``tokens per second * FLOPs per token / (processes * peak)``; see [`flops_per_token`]. Tokens that sequences
    share (`share_prompt`) count as often as they are trained in the rate, and once in the MFU. Where there are some,
    the log has `shared_share`, the part of the tokens so far that need not run for them, and `shared_levels`, the most
    common beginnings inside each other. Both are of the process that logs.
    """

    def __init__(self) -> None:
        self.flops_per_token = 0.0
        self.replicas_per_batch = 1
        """How many processes share the same tokens (tensor, context and sequence parallelism)."""
        self.executed_share: Callable[[], float] = lambda: 1.0
        """The part of the tokens that the model runs on."""
        self.shared_levels: Callable[[], int] = lambda: 0
        """At how many levels sequences have shared tokens."""
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
        self.leave_out()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leaves out the time of saving."""
        self.leave_out()

    def leave_out(self) -> None:
        """Does not count the time since the last step as training."""
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
            pending = torch.as_tensor(self._pending, dtype=torch.int64, device=args.device)
            self._pending = 0
            tokens = summed_over_processes(pending.clone()).item() / self.replicas_per_batch
        else:
            tokens = float(state.num_input_tokens_seen - (self._seen_by_trainer or 0))
            self._seen_by_trainer = state.num_input_tokens_seen
        self._window_tokens += tokens
        self._run_tokens += tokens

    def _rate(self, args: TrainingArguments, tokens: float, seconds: float) -> dict[str, float]:
        if tokens <= 0 or seconds <= 0:
            return {}
        rate = {"tokens_per_second": round(tokens / seconds, 1)}
        peak = peak_flops(args.device, self._half_precision or args.bf16 or args.fp16)
        if peak is not None and self.flops_per_token:
            used = tokens / seconds * self.flops_per_token * self.executed_share()
            rate["mfu"] = round(used / (peak * max(args.world_size, 1)), 4)
        if levels := self.shared_levels():
            rate |= {"shared_share": round(1 - self.executed_share(), 4), "shared_levels": levels}
        return rate
