"""Logs the share of tokens that have a label, and warns of a batch without any."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from liger_trainer.callbacks.batch_tokens import first_label, token_masks
from liger_trainer.callbacks.logged import LoggedMetricsCallback, is_distributed

logger = logging.getLogger("liger_trainer")


class LabelledShareCallback(LoggedMetricsCallback):
    """Logs `labelled_share`: the share of the tokens, without padding, that have a label; between 0 and 1.

    The first token of a row, which a loss of next tokens does not predict, is no label, and in a row with others no
    token. The share is over the micro-batches of all processes since the last training log; `train_labelled_share`, at
    the end, is over the whole run. Warns once of a micro-batch without a label, whose loss is 0. The Liger trainers
    call [`count`].
    Counts stay on the device and are read with a log, and once after the first step, which shows most mistakes.
    Nothing is counted for an encoder-decoder, whose labels do not belong to its `input_ids`.
    """

    def __init__(self) -> None:
        # Since the last reading: tokens and labels; and for the first micro-batch without a label, its step and the
        # number of tokens in its longest row.
        self._pending: torch.Tensor | None = None
        self._empty: torch.Tensor | None = None
        self._window, self._run = [0, 0], [0, 0]
        self._has_read = self._has_warned = False
        self._first_label: int | None = 1

    def count(self, batches: Sequence[Any], step: int) -> None:
        """Counts micro-batches of the optimizer step `step`, from 1, without waiting for the device."""
        for batch in batches:
            masks = [(tokens, labelled) for tokens, labelled in token_masks(batch) if labelled is not None]
            if not masks or self._first_label is None:
                continue
            counts = torch.stack([self._counts(*pair) for pair in masks]).sum(0)
            self._pending = counts if self._pending is None else self._pending + counts
            empty = ~torch.stack([labelled[:, self._first_label :].any() for _, labelled in masks]).any()
            longest = torch.stack([tokens.sum(-1).max() for tokens, _ in masks]).max()
            found = torch.where(empty, torch.stack([torch.full_like(longest, step), longest]), 0)
            self._empty = found if self._empty is None else torch.where(self._empty[0] > 0, self._empty, found)

    def _counts(self, tokens: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
        seen = labelled[:, self._first_label :]
        first = labelled[:, : self._first_label] & seen.any(-1, keepdim=True)
        return torch.stack([tokens.sum() - first.sum(), seen.sum()])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Starts counting."""
        self._first_label = first_label(model)
        self._pending = self._empty = None
        self._window, self._run = [0, 0], [0, 0]
        self._has_read = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Reads the counts of the first step of a run."""
        if not self._has_read:
            self._read(args, state)

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """The share since the last training log."""
        self._read(args, state)
        window, self._window = self._window, [0, 0]
        return _share(window)

    def summary(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """The share over the whole run."""
        self._read(args, state)
        return _share(self._run)

    def _read(self, args: TrainingArguments, state: TrainerState) -> None:
        self._has_read = True
        own = torch.zeros(4, dtype=torch.int64, device=args.device)
        if self._pending is not None and self._empty is not None:
            own[:2], own[2:] = self._pending, self._empty
        self._pending = self._empty = None
        everyone = [own]
        if is_distributed():
            everyone = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(everyone, own)
        found = torch.stack(everyone).tolist()
        for counts in (self._window, self._run):
            counts[0] += sum(tokens for tokens, _, _, _ in found)
            counts[1] += sum(labels for _, labels, _, _ in found)
        empty = [(step, longest) for _, _, step, longest in found if step]
        if empty and not self._has_warned:
            self._has_warned = True
            if state.is_world_process_zero:
                logger.warning(_message(*min(empty), getattr(args, "max_length", None)))


def _share(counts: Sequence[int]) -> dict[str, float]:
    tokens, labels = counts
    return {"labelled_share": round(labels / tokens, 4)} if tokens else {}


def _message(step: int, longest: int, max_length: int | None) -> str:
    cause = (
        "all of its labels are -100, or its completions are masked. Check that every row has an answer to learn, and "
        "that the chat template marks the assistant's turns where only these are trained on"
    )
    if max_length is not None and longest >= max_length:
        cause = (
            f"its rows fill `max_length={max_length}`, which may have cut off the answers. Increase `max_length`, or "
            "leave out prompts this long"
        )
    return f"Step {step} has a micro-batch without a label, which trains nothing: {cause}. (Said once.)"
