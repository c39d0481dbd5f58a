"""Batches filled up with padding to one of a few lengths, of which each is captured as CUDA graphs once.

A right-padded batch gets more of its padding, and a packed row one document more at its end: tokens that no other
token sees, without a label. So the loss, the number of labels and the metrics stay as they are, to the rounding of
products whose number of rows is another. Padding is not counted as tokens; the trainer leaves out the last document.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.packing.layout import filled_length

_PADDING = {"attention_mask": 0, "labels": -100, "completion_mask": 0}
"""What marks padding in the tensors of a batch that have a number for each token, beside the ids."""
_OF_PACKED = {"input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"}
"""The tensors of a packed row."""
_KEY = "liger_trainer_filled"


@dataclasses.dataclass(frozen=True)
class FillingCollator:
    """Runs a collator and fills its batch up.

    Args:
        collator: The collator.
        most: The most tokens that a padded row may have; None for any number.
        fills_packed: Whether packed rows are filled up too.
        busy_from: Batches of as many tokens or more stay as they are; see [`Gains`].
        token: The id of the tokens that are added. No loss of tokens sees them, but the Trainer counts all but padding.
    """

    collator: Callable
    most: int | None
    fills_packed: bool
    busy_from: torch.Tensor
    token: int = 0

    def __call__(self, features: list[Any]) -> Any:
        """Collates `features`."""
        batch = self.collator(features)
        if not (type(batch) is dict or isinstance(batch, UserDict)):
            return batch
        padded = _is_padded(batch)
        if not padded and not (self.fills_packed and _is_packed(batch)):
            return batch
        length = batch["input_ids"].shape[1]
        more = filled_length(length) - length
        if padded and self.most is not None and length + more > self.most:
            return batch
        if more and len(batch["input_ids"]) * (length + more) < int(self.busy_from):
            add = _add_padding if padded else _add_document
            add(batch, more, self.token)
        return batch


def filling_collator(collator: Callable, model: nn.Module, busy_from: torch.Tensor, tokenizer: Any) -> Callable:
    """A collator that fills batches up for `model`, those with fewer tokens than `busy_from`, as `tokenizer` pads."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return collator
    text = config.get_text_config()
    # The loss of routers counts every token that no mask leaves out.
    fills_packed = not hasattr(text, "router_aux_loss_coef")
    most, token = getattr(text, "max_position_embeddings", None), getattr(tokenizer, "pad_token_id", None) or 0
    return FillingCollator(collator, most, fills_packed, busy_from, token)


def take_filled(batch: Any) -> int:
    """How many tokens a packed row was filled up by, which `batch` no longer says then."""
    return batch.pop(_KEY, 0) if isinstance(batch, MutableMapping) else 0


def without_filling(batch: Any, more: int) -> Any:
    """The ids and labels of a packed row without the last `more` tokens; any other `batch` as it is."""
    return {name: batch[name][:, :-more] for name in ("input_ids", "labels") if name in batch} if more else batch


def _is_padded(batch: Mapping[str, Any]) -> bool:
    """Whether a batch is known to be padded on the right, and its loss one of tokens."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return False
    known = {"input_ids", *_PADDING}
    of_tokens = {name: each for name, each in batch.items() if isinstance(each, torch.Tensor) and each.dim() > 1}
    if not known >= of_tokens.keys() or not of_tokens.keys() & {"labels", "completion_mask"}:
        return False  # a model that classifies rows looks for their last token
    if any(each.shape != mask.shape for each in of_tokens.values()):
        return False
    # A row that begins with padding is padded on the left, and positions may be counted from there.
    return bool(mask.numel()) and bool(mask[:, 0].all())


def _add_padding(batch: MutableMapping[str, Any], more: int, token: int) -> None:
    for name, value in {"input_ids": token, **_PADDING}.items():
        if name in batch:
            batch[name] = F.pad(batch[name], (0, more), value=value)


def _is_packed(batch: Mapping[str, Any]) -> bool:
    """Whether a batch is known to be a row of documents whose positions begin at 0."""
    tensors = {name: each for name, each in batch.items() if isinstance(each, torch.Tensor)}
    if not {"input_ids", "labels", "position_ids"} <= tensors.keys() <= _OF_PACKED:
        return False
    ids, positions = tensors["input_ids"], tensors["position_ids"]
    rows = (tensors[name] for name in ("labels", "position_ids", "seq_idx") if name in tensors)
    if ids.dim() != 2 or len(ids) != 1 or any(each.shape != ids.shape for each in rows):
        return False
    return bool(ids.numel()) and not bool(positions[0, 0])


def _add_document(batch: MutableMapping[str, Any], more: int, token: int) -> None:
    length = batch["input_ids"].shape[1] + more
    batch["input_ids"] = F.pad(batch["input_ids"], (0, more), value=token)
    batch["labels"] = F.pad(batch["labels"], (0, more), value=-100)
    batch["position_ids"] = torch.cat([batch["position_ids"], torch.arange(more)[None]], dim=1)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in batch:
            batch[name] = F.pad(batch[name], (0, 1), value=length)
    for name in ("max_length_q", "max_length_k"):
        if name in batch:
            batch[name] = max(batch[name], more)
    if "seq_idx" in batch:
        batch["seq_idx"] = F.pad(batch["seq_idx"], (0, more), value=int(batch["seq_idx"][0, -1]) + 1)
    batch[_KEY] = more
