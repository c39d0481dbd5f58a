"""What a trainer knows of a micro-batch before its loss: its labels, its padding, and how its loss is scaled.

The collator checks and reads a batch while that is on the CPU, where it costs nothing, and adds [`Facts`]; the trainer
takes them out when it gets the batch. They hold for the very tensors that were read, as long as nobody writes to them.
Labels that no collator has seen, such as those of completions that a student has just written, are counted on the
device, unless the host has their values (`head/on_host.py`). The head then waits for that count, which comes before the
forward in the device's queue, while the device runs the forward.

Shifting and masking leave labels out and add none, so the number of labels bounds every loss of the micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DataCollatorForLanguageModeling

from liger_trainer.callbacks.labelled_share import NO_LABEL
from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import LOSS_SCALE
from liger_trainer.head.lm_head import version_of
from liger_trainer.head.on_host import on_host, values_of
from liger_trainer.head.step import Bounds, Padding, ReadLabels, Runs, Step, bounds_of, runs_of
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX

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


require(LOSS_SCALE)

_KEY = "liger_trainer_facts"
_CHOOSING = (
    *("input_ids", "attention_mask", "completion_mask", "label"),
    *("KL_input_ids", "KL_attention_mask", "KL_completion_mask"),
)
"""The tensors of DPO's and KTO's batches that say which tokens are scored, and which answers are good."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was read of a batch.

    Args:
        labels: How many labels it has, at most, for one forward; None if it has no tensor of labels.
        bounds: The tokens of the rows of its attention mask; None if it has none, or one with holes.
        scored: The tokens before those with a label, which predict them; None if it has more than one tensor of labels,
            or labels of something else.
        tensors: By their names, the tensors from which a trainer makes labels and chooses tokens itself.
    """

    labels: int | None
    bounds: Bounds | None
    scored: Runs | None = None
    tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def add_facts(batch: Any) -> None:
    """Adds [`Facts`] to the `batch` of a collator, if it is a dictionary of tensors on the CPU that has any."""
    if not (type(batch) is dict or isinstance(batch, UserDict)):
        return
    labels, mask = labels_of(batch), _mask_of(batch)
    tensors = [*labels.values(), *([] if mask is None else [mask])]
    if tensors and all(tensor.device.type == "cpu" for tensor in tensors):
        count = int(most_labels(labels)) if labels else None
        choosing = [name for name in _CHOOSING if name in batch] if "completion_mask" in batch else []
        chosen = {name: batch[name].clone() for name in choosing}  # a collator may use its memory again
        batch[_KEY] = Facts(count, None if mask is None else bounds_of(mask), _scored(labels), chosen)


def _scored(labels: Mapping[str, torch.Tensor]) -> Runs | None:
    """The tokens that predict a label of a model of the next token."""
    if labels.keys() != {"labels"} or labels["labels"].dim() != 2:
        return None
    return runs_of(F.pad(labels["labels"][:, 1:] != NO_LABEL["labels"], (0, 1)))


def discard_facts(batch: Any) -> None:
    """Takes the facts out of `batch`, if it has any."""
    if isinstance(batch, MutableMapping):
        batch.pop(_KEY, None)


class KnownBatches:
    """The facts of the micro-batches of a step."""

    def __init__(self) -> None:
        self._labels: list[tuple[dict[str, torch.Tensor], list[int | None], Facts]] = []  # labels, versions
        self._paddings: list[Padding] = []
        self._read: list[tuple[torch.Tensor, int | None, torch.Tensor]] = []  # with their version and values

    def take(self, batches: Sequence[Any]) -> None:
        """Takes the facts of a step out of its `batches`, in place."""
        self._labels, self._paddings, self._read = [], [], []
        for batch in batches:
            if not isinstance(batch, MutableMapping) or _KEY not in batch:
                continue
            facts = batch.pop(_KEY)
            self._read += [
                (batch[name], version_of(batch[name]), each) for name, each in facts.tensors.items() if name in batch
            ]
            if facts.labels is not None:
                labels = labels_of(batch)
                self._labels.append((labels, [version_of(tensor) for tensor in labels.values()], facts))
            if facts.bounds is not None:
                mask = batch["attention_mask"]
                self._paddings.append(Padding(mask, version_of(mask), facts.bounds))

    def added_to(self, step: Step, inputs: Any, count_labels: bool) -> Step:
        """`step` with how the rows of `inputs` are padded, if the host knows it, and with a count of their labels.

        The count is a function that returns the most labels of a loss of `inputs`, without waiting if the host knows
        it; it is left out if they have no labels, or without `count_labels`.
        """
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        for padding in self._paddings:
            if padding.mask is mask and padding.version == version_of(mask):
                step = replace(step, padding=padding)
                break
        found = labels_of(inputs) if count_labels else {}
        for read, versions, facts in self._labels if found else ():
            same = read.keys() == found.keys() and all(read[name] is found[name] for name in read)
            if same and versions == [version_of(tensor) for tensor in read.values()]:
                assert facts.labels is not None
                if facts.scored is not None:
                    step = replace(step, labels=ReadLabels(found["labels"], versions[0], facts.scored))
                return replace(step, labelled=functools.partial(int, facts.labels))
        return replace(step, labelled=count_later(most_labels(found))) if found else step

    def on_host(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """`inputs` with the values on the host of those tensors whose values were read."""
        found = dict(inputs)
        for tensor, version, values in self._read:
            for name, each in inputs.items():
                if each is tensor and version == version_of(tensor):
                    found[name] = on_host(tensor, values)
        return found


def _mask_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
    mask = batch.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.numel() else None


def labels_of(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of `batch` that have a label for each token, by name; none if it is no mapping."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(batch, Mapping):
        for name in NO_LABEL:
            tensor = batch.get(name)
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and not tensor.is_floating_point():
                found[name] = tensor
    return found


def most_labels(labels: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The labels of the forward that has most, of those that [`labels_of`] found; 0-d."""
    counts = []
    for name, tensor in labels.items():
        counts.append(tensor.ne(NO_LABEL[name]).sum())
    return torch.stack(counts).amax()


def labels_of_parts(mask: torch.Tensor, rows: int | None) -> torch.Tensor:
    """The most labels of several forwards, each of `rows` rows of `mask` `(B, S)`, not 0 where there is a label; 0-d.

    By default one forward takes them all.
    """
    counts = mask.ne(0).sum(-1)
    return torch.stack([part.sum() for part in counts.split(rows or len(counts))]).amax()


def count_later(count: torch.Tensor) -> Callable[[], int]:
    """A function that returns a 0-d `count`, which is copied to the host while the device works."""
    if not count.is_cuda or values_of(count) is not None:
        return count.item  # type: ignore[return-value]
    return CountOnDevice(count)


class CountOnDevice:
    """A count on its way to the host; the first call waits for it.

    Args:
        count: 0-d, of integers.
        event: Creates the event to wait for.
    """

    def __init__(self, count: torch.Tensor, event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._count = torch.empty((), dtype=count.dtype, pin_memory=count.is_cuda)
        self._count.copy_(count, non_blocking=True)
        self._ready: Any = event()
        self._ready.record()

    def __call__(self) -> int:
        """The count."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None
        return int(self._count)


def loss_divisor(trainer: Any, num_items: torch.Tensor | int | None) -> int:
    """The divisor for a term of one micro-batch: the accumulation steps, or 1 if the Trainer divides by them."""
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        by_items = trainer.model_accepts_loss_kwargs and num_items is not None
        scaled = by_items or trainer.compute_loss_func is not None
    return getattr(trainer, "current_gradient_accumulation_steps", 1) if scaled else 1


def process_scale(trainer: Any, num_items: torch.Tensor | int | None) -> int:
    """The factor by which the Trainer multiplies a loss that was divided by the labels of all processes.

    Processes that share their batches (tensor parallelism) count as one.
    """
    if num_items is None or not trainer.args.average_tokens_across_devices:
        return 1
    return trainer.accelerator.num_processes // trainer.get_tp_size()
