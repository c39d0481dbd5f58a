"""Which positions of a batch are tokens, and which of those have a label that is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from liger_trainer.kernels.head.loss_options import IGNORE_INDEX

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
    for name, nothing in ((f"{side}labels", IGNORE_INDEX), (f"{side}completion_mask", 0)):
        values = batch.get(name)
        if isinstance(values, torch.Tensor) and values.shape == tokens.shape:  # not a label for each row
            return values.ne(nothing) & tokens
    return None
