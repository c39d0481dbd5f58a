"""Which positions of a batch are tokens, and which have a label: logs their share, and warns of a batch without any."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from liger_trainer.callbacks.logged import LoggedMetricsCallback, is_distributed
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX

NO_LABEL = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "completion_mask": 0, "KL_completion_mask": 0}
"""What a trainer takes labels from, each for a forward of its own, and the value where there is none."""

# Transformers' names of the losses in which a label belongs to its own position, and not to the one before it.
_OWN_TOKEN_LOSSES = ("ForMaskedLM", "ForTokenClassification")


def first_label(model: Any) -> int | None:
    """The first position of a row whose label `model` trains on; None if labels do not belong to `input_ids`.

    It is 1 if a token is predicted from those before it, since there is none before the first.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    loss_type = getattr(model, "loss_type", None)
    if loss_type is None:  # transformers reads it off the name of the class, which a subclass need not keep
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        names = [kind.__name__ for kind in type(base).__mro__]
        loss_type = next((loss for loss in _OWN_TOKEN_LOSSES for name in names if name.endswith(loss)), None)
    return 0 if loss_type in _OWN_TOKEN_LOSSES else 1


def token_masks(batch: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Two masks for each batch of sequences in `batch`: which positions are tokens, and which of those have a label.

    Args:
        batch: The output of a collator, or what a trainer has made of it: token ids with an attention mask or without
            (then nothing is padding), and `labels` or a `completion_mask`; the same for both sides of a pair; or
            prompts and completions. Anything else has no tokens.

    Yields:
        Bool tensors `(rows, length)` on the batch's device; the second is None if positions have no labels.
    """
    if not isinstance(batch, Mapping):
        return
    for side in ("", "chosen_", "rejected_"):  # a pair may come as two batches of sequences
        mask, ids = batch.get(f"{side}attention_mask"), batch.get(f"{side}input_ids")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            tokens = mask.detach().ne(0)
        elif isinstance(ids, torch.Tensor):
            tokens = torch.ones_like(ids, dtype=torch.bool)
        else:
            continue
        yield tokens, _labelled(batch, side, tokens)
    prompt, completion = batch.get("prompt_mask"), batch.get("completion_mask")
    if isinstance(prompt, torch.Tensor) and isinstance(completion, torch.Tensor):
        trained = completion * batch["tool_mask"] if "tool_mask" in batch else completion
        yield (
            torch.cat([prompt.ne(0), completion.ne(0)], dim=1),
            torch.cat([torch.zeros_like(prompt, dtype=torch.bool), trained.ne(0)], dim=1),
        )


def _labelled(batch: Mapping[str, Any], side: str, tokens: torch.Tensor) -> torch.Tensor | None:
    for name in ("labels", "completion_mask"):
        values = batch.get(f"{side}{name}")
        if isinstance(values, torch.Tensor) and values.shape == tokens.shape:  # not a label for each row
            return values.ne(NO_LABEL[name]) & tokens
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The callback
# ---------------------------------------------------------------------------------------------------------------------

logger = logging.getLogger("liger_trainer")


class LabelledShareCallback(LoggedMetricsCallback):
    """Logs `labelled_share`: the share of the tokens, without padding, that have a label; between 0 and 1.

    A loss of next tokens never predicts the first token of a row: its label is not counted, and in a row with other
    labels the token is not either. The share is over the micro-batches of all processes since the last training log;
    `train_labelled_share`, at the end, is over the whole run. Warns once of a micro-batch without a label, whose loss
    is 0. The Liger trainers call [`count`].

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
