"""Checks and reads a batch while it is still on the CPU, where that costs nothing."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForLanguageModeling

from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.trainers.step import add_facts

logger = logging.getLogger("liger_trainer")


class BatchError(ValueError):
    """A batch with a label or token id outside of the model's vocabulary."""


@dataclasses.dataclass(frozen=True)
class CheckedCollator:
    """Runs a collator and checks its batch; an id out of range would end in a device-side assert later."""

    collator: Callable
    num_labels: int | None  # size of the vocabulary that labels index; None not to check labels
    num_tokens: int | None  # size of the embedding that `input_ids` index; None not to check them
    reads: bool = False  # whether to add what a training step need not ask the device (`trainers/step.py`)

    def __call__(self, features: list[Any]) -> Any:
        """Collates `features`."""
        batch = self.collator(features)
        if isinstance(batch, Mapping):
            for side in ("", "chosen_", "rejected_"):  # a pair may come as two batches of sequences
                _check(batch, f"{side}labels", self.num_labels, "the model's vocabulary", IGNORE_INDEX)
                _check(batch, f"{side}input_ids", self.num_tokens, "the model's embedding", None)
        if self.reads:
            add_facts(batch)
        return batch


def checked_collator(collator: Callable, model: nn.Module, reads: bool = False) -> Callable:
    """`collator` with the checks that fit `model`: a language model's labels, a text model's token ids.

    With `reads`, the batches of a language model get what a training step need not ask the device (`trainers/step.py`).
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return collator
    text = config.get_text_config()
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return collator
    num_labels = getattr(text, "vocab_size", None) if head is not None else None
    # In multimodal models an id beyond the text embedding can stand for an image.
    num_tokens = getattr(embedding, "num_embeddings", None) if text is config else None
    return CheckedCollator(collator, num_labels, num_tokens, reads and num_labels is not None)


def warn_of_unlabelled_end(collator: Any) -> None:
    """Warns of a collator that takes the token that ends a text for padding, which then has no label."""
    if not isinstance(collator, DataCollatorForLanguageModeling) or collator.mlm:
        return
    tokenizer = collator.tokenizer
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        logger.warning(
            "The tokenizer pads with %r, which ends a text too, and `DataCollatorForLanguageModeling` gives padding no "
            "label: the model does not learn to stop. Set `tokenizer.pad_token` to another token, or take "
            "`DataCollatorWithFlattening`, which does not pad.",
            tokenizer.eos_token,
        )


def check_prompts(prompt_ids: Sequence[Sequence[int]], model: nn.Module) -> None:
    """Checks the token ids of prompts that do not pass through a collator, such as those that a policy answers."""
    flat = [token for ids in prompt_ids for token in ids]
    checked_collator(lambda rows: {"input_ids": torch.tensor([rows])}, model)(flat)


def _check(batch: Mapping[str, Any], name: str, size: int | None, what: str, ignored: int | None) -> None:
    ids = batch.get(name)
    if size is None or not isinstance(ids, torch.Tensor) or ids.device.type != "cpu":
        return
    if ids.dim() < 2 or ids.is_floating_point() or ids.numel() == 0:
        return
    low = ids if ignored is None else ids.masked_fill(ids == ignored, 0)
    for bad in (int(ids.max()), int(low.min())):
        if not 0 <= bad < size and bad != ignored:
            also = f", or {ignored} for a position without a label" if ignored is not None else ""
            raise BatchError(
                f"`{name}` holds {bad}, and {what} has {size} entries: ids must be 0 to {size - 1}{also}. Use the "
                "tokenizer that belongs to the model, or call `model.resize_token_embeddings(len(tokenizer))`."
            )
