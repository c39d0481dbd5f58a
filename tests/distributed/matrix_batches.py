"""The matrix's batches, and the losses that are taken of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.distributed.matrix_models import SIZES
from tests.steps import step_with

IGNORE = -100
Batch = dict[str, torch.Tensor]


def _rows(seed: int, rows: int, length: int, prompt: int) -> Batch:
    """`rows` sequences whose first `prompt` tokens have no label; the last one ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, SIZES["vocab_size"], (rows, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[-1, -2:] = 0
    input_ids = input_ids * attention_mask
    labels = input_ids.masked_fill(attention_mask == 0, IGNORE)
    labels[:, :prompt] = IGNORE
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _unequal(step: int) -> list[list[Batch]]:
    """As many rows on both ranks, of other lengths, with other numbers of labels."""
    return [[_rows(10 * step, 4, 12, 1)], [_rows(10 * step + 1, 4, 7, 4)]]


def _without_labels(step: int) -> list[list[Batch]]:
    """One rank, in turn, has no label at all."""
    ranks = _unequal(step)
    for batch in ranks[(step + 1) % 2]:
        batch["labels"] = torch.full_like(batch["labels"], IGNORE)
    return ranks


def _accumulated(step: int) -> list[list[Batch]]:
    """Two forwards for each optimizer step."""
    first = [_rows(10 * step, 2, 12, 1), _rows(10 * step + 1, 2, 5, 2)]
    return [first, [_rows(10 * step + 2, 2, 4, 1), _rows(10 * step + 3, 2, 9, 5)]]


def _short_last(step: int) -> list[list[Batch]]:
    """From the second step on, one rank has fewer rows."""
    ranks = _unequal(step)
    return [ranks[0], [{name: value[:2] for name, value in ranks[1][0].items()}]] if step else ranks


def _shared(step: int) -> list[list[Batch]]:
    """Rows that begin alike; one rank, in turn, has long ones; of the other's one has no label, or none.

    Two of them have more in common, and of the short ones one is the beginning of the other.
    """
    ranks = []
    for rank, (length, common) in enumerate([(12, 5), (7, 4)]):
        batch = _rows(10 * step + rank, 4, length, common - 1)
        for name in ("input_ids", "labels"):
            batch[name][:, :common] = batch[name][:1, :common]
            batch[name][3, : common + 2 - rank] = batch[name][2, : common + 2 - rank]
        if rank:
            batch["labels"][slice(None) if step % 2 else 1] = IGNORE
        ranks.append([batch])
    return ranks[:: 1 - 2 * (step % 2)]


BATCHES: dict[str, Callable[[int], list[list[Batch]]]] = {
    "unequal": _unequal,
    "a rank without labels": _without_labels,
    "accumulated": _accumulated,
    "short last": _short_last,
    "shared": _shared,
}
"""Step → the batches of every rank, one for each forward."""


def concatenated(batches: list[Batch]) -> Batch:
    """The rows of all `batches`, padded to one length."""
    length = max(batch["input_ids"].shape[1] for batch in batches)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": IGNORE}

    def padded(name: str) -> list[torch.Tensor]:
        return [F.pad(batch[name], (0, length - batch[name].shape[1]), value=fill[name]) for batch in batches]

    return {name: torch.cat(padded(name)) for name in fill}


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss as a trainer takes it.

    Args:
        of_tokens: Maps log-probabilities and entropies `(B, S - 1)`, zero where there is no label, the mask of the
            labels and the batch to a sum over the batch.
        options: `StatisticsOptions` of the fused head; None for the loss of the model itself.
        items: The divisor of the sum: "tokens" or "pairs" of rows, of all ranks.
    """

    of_tokens: Callable[[torch.Tensor, Any, torch.Tensor, Batch], torch.Tensor]
    options: dict[str, Any] | None = None
    items: str = "tokens"

    @property
    def temperature(self) -> float:
        """Of the statistics."""
        return 1.0 if self.options is None else self.options.get("temperature", 1.0)

    def count(self, batches: list[Batch]) -> torch.Tensor:
        """What the sum over `batches` is divided by."""
        if self.items == "pairs":
            return torch.tensor(sum(batch["labels"].shape[0] // 2 for batch in batches))
        return torch.stack([(batch["labels"][:, 1:] != IGNORE).sum() for batch in batches]).sum()


def _nll(log_probs: torch.Tensor, entropy: Any, mask: torch.Tensor, batch: Batch) -> torch.Tensor:
    return -log_probs.sum()


def _preference(log_probs: torch.Tensor, entropy: Any, mask: torch.Tensor, batch: Batch) -> torch.Tensor:
    """DPO's, of rows that are chosen and rejected in turn."""
    chosen, rejected = log_probs.sum(-1).view(-1, 2).unbind(-1)
    return -F.logsigmoid(0.5 * (chosen - rejected)).sum()


def _policy_gradient(log_probs: torch.Tensor, entropy: Any, mask: torch.Tensor, batch: Batch) -> torch.Tensor:
    """GRPO's with a bonus for entropy, which has a gradient of its own."""
    advantage = 1.0 - 1.5 * (batch["input_ids"].sum(-1, keepdim=True) % 2)
    ratio = torch.exp(log_probs - log_probs.detach())
    return -((ratio * advantage + 0.1 * entropy) * mask).sum()


LOSSES: dict[str, Loss] = {
    "labels": Loss(_nll),
    "sft": Loss(_nll, {"outputs": ("log_probs", "entropy", "is_top1"), "uniform_gradient": True}),
    "dpo": Loss(_preference, {"outputs": ("log_probs",)}, items="pairs"),
    "grpo": Loss(_policy_gradient, {"outputs": ("log_probs", "entropy"), "temperature": 0.9}),
}


def naive_loss(model: Any, batch: Batch, loss: Loss, items: torch.Tensor) -> torch.Tensor:
    """`loss` by plain torch on whole logits."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    target = batch["labels"][:, 1:]
    mask = target != IGNORE
    log_probs = (logits[:, :-1].float() / loss.temperature).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1) * mask
    chosen = log_probs.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1) * mask
    return loss.of_tokens(chosen, entropy, mask, batch) / items


def product_loss(model: Any, batch: Batch, loss: Loss, items: torch.Tensor) -> torch.Tensor:
    """`loss` as the trainers ask a patched model for it."""
    if loss.options is None:
        return model(**batch, num_items_in_batch=items).loss
    with step_with(expected_gradient=1.0 / items):
        outputs = model(**batch, fused_lm_head=True)
    return loss.of_tokens(outputs.log_probs, outputs.entropy, outputs.label_mask, batch) / items
