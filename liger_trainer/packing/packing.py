"""How a trainer packs the batches that it gives to its models."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_trainer.attention.interface import has_our_attention
from liger_trainer.callbacks.logged import is_distributed
from liger_trainer.head.lm_head import sharding_of, version_of
from liger_trainer.head.step import current_step
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.packing.packed_row import PackedRow, Padded, packed_rows
from liger_trainer.patching.recurrent.find import mixers_of, reason_against

NOT_OURS = "its attention is not ours"

_UNDERSTOOD = frozenset(
    {"input_ids", "attention_mask", "position_ids", "use_cache", "output_router_logits", "return_dict"}
)
"""Arguments of a model's forward with which a batch can be packed."""


@dataclasses.dataclass(eq=False)
class Packing:
    """Turns padded batches into packed rows.

    Args:
        share: Whether rows of a batch share their common beginnings.
        most: The tokens of a packed row at most, if it has several rows of the batch; None for one packed row a batch.
        draws: Whether training is known to draw random numbers, whatever [`drops`] finds.

    Attributes:
        trained: The tokens of all batches so far that a gradient was computed for, without padding.
        executed: How many of them the model ran on; the others are shared.
        levels: The most levels at which rows of these batches shared tokens.
    """

    share: bool
    most: int | None = None
    draws: bool = False
    trained: int = 0
    executed: int = 0
    levels: int = 0
    _last: tuple[list[Any], list[Any], list[PackedRow]] | None = None  # what they are of, its tensors, and the rows
    _dropping: weakref.WeakKeyDictionary[nn.Module, bool] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    _mixers: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )

    def rows(
        self,
        model: PreTrainedModel,
        kwargs: Mapping[str, Any],
        labels: torch.Tensor,
        given_labels: Any = None,
        values: Callable[[], torch.Tensor | None] | None = None,
    ) -> list[PackedRow] | None:
        """The packed rows of a batch, those of the last one if it is the same.

        None if it cannot be packed, or has no padding and nothing to share.

        Args:
            model: The model to run. It, or its policy, has passed `prove_packing`.
            kwargs: The keyword arguments of its forward.
            labels: (B, S), the label of the token after each.
            given_labels: The object that `labels` was made of: the same for a policy and its reference.
            values: Returns what the host knows of the batch, if that knows anything; see [`packed_rows`].

        Raises:
            ValueError: if the batch cannot be packed, but should be split.
        """
        if model not in self._mixers:
            self._mixers[model] = mixers_of(model)
        mixers = self._mixers[model]
        reason = _unpackable(model, kwargs, labels) or (reason_against(mixers) if mixers else "")
        if reason:
            self.leave(model, reason)
            return None
        batch = Padded(kwargs["input_ids"], kwargs.get("attention_mask"), kwargs.get("position_ids"), labels)
        share = self.share
        if share and model.training:
            # Of the model as it was at its first batch: to look takes as long as a few launches.
            if model not in self._dropping:
                self._dropping[model] = self.draws or drops(model)
            share = not self._dropping[model]
        tensors = [*batch[:3], labels if given_labels is None else given_labels]
        # Rows made in inference mode have no backward, and in-place changes of its tensors are not counted.
        one_level = bool(mixers)  # a layer with a state continues a beginning that continues none
        fills_below = current_step().fills_below
        key: list[Any] = [share, one_level, fills_below, torch.is_inference_mode_enabled()]
        for each in tensors:
            key += id(each), 0 if each is None else version_of(each)
        if self._last is None or self._last[0] != key or None in key:
            agreed = functools.partial(self._agreed, model)
            read = None if values is None else values()
            rows = packed_rows(batch, share, self.most, agreed, one_level, fills_below, read)
            if rows is None:
                self.leave(model, "a row has padding between its tokens")
                return None
            self._last = key, tensors, rows
        rows = self._last[-1]
        if torch.is_grad_enabled():
            for row in rows:
                self.trained += int(row.layout.shared_by.sum())
                self.executed += len(row.layout.tokens) - row.layout.added
                self.levels = max(self.levels, row.layout.levels)
        # Attention of rows of one length is faster in the batch.
        saves = len(rows) > 1 or len(rows[0].layout.tokens) < batch.input_ids.numel()
        return rows if saves else None

    @property
    def tokens_of_last_forward(self) -> int:
        """The tokens of the largest forward of several sequences in the last batch; 0 if there was none."""
        layouts = [row.layout for row in self._last[-1]] if self._last else []
        several = [each for each in layouts if ((each.places >= 0).any(1)).sum() > 1]
        return max((len(each.tokens) for each in several), default=0)

    @property
    def executed_share(self) -> float:
        """The part of the trained tokens that the model ran on."""
        return self.executed / self.trained if self.trained else 1.0

    def leave(self, model: nn.Module, reason: str) -> None:
        """Says once why a batch stays padded.

        Args:
            model: The model that gets the batch.
            reason: Why it cannot be packed.

        Raises:
            ValueError: in training, if it should be split.
        """
        if self.most is not None and torch.is_grad_enabled():
            raise ValueError(
                f"`tokens_per_micro_batch` is {self.most}, but a batch cannot be packed: {reason}. Leave it out."
            )
        warn_once(f"padded: {reason}", f"{type(model).__name__} gets a padded batch: {reason}. (Shown once.)")

    def shares_in_training(self, model: nn.Module) -> bool:
        """Whether rows share their common beginnings while `model` is trained."""
        return self.share and not self.draws and not drops(model)

    def _agreed(self, model: nn.Module, rows: int, device: torch.device) -> int:
        """How many forwards the batch takes: its packed rows, or those of the process that has most.

        A forward gathers the parameters that processes share, so all run the same number. Where every process has a
        model of its own, one of them may use it alone.
        """
        if not is_distributed() or _is_whole(model):
            return rows
        most = torch.tensor(rows, device=device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return int(most)


def _unpackable(model: PreTrainedModel, kwargs: Mapping[str, Any], labels: torch.Tensor) -> str:
    """Why a batch cannot be packed; empty if it can."""
    if not has_our_attention(model):
        return NOT_OURS
    others = []
    for name, value in kwargs.items():
        if value is not None and name not in _UNDERSTOOD:
            others.append(name)
    if others:
        return f"its forward is given {', '.join(sorted(others))}"
    if kwargs.get("return_dict") is False:
        return "its forward is to return a tuple"
    if kwargs.get("input_ids") is None:
        return "its forward is given no token ids"
    for name in ("input_ids", "attention_mask", "position_ids"):
        each = kwargs.get(name)
        if each is not None and (each.dim() != 2 or each.shape[1] != labels.shape[1]):
            return "its mask or positions are not a number for each token"
    return ""


def _is_whole(model: nn.Module) -> bool:
    """Whether a forward of `model` needs no other process."""
    is_split = (getattr(model, "tp_size", None) or 1) > 1 or any(map(is_dtensor, model.parameters()))
    return not is_split and not any(map(sharding_of, model.modules()))


def drops(model: nn.Module) -> bool:
    """Whether training of `model` draws random numbers: rows that share tokens would share those too."""
    return any(True for _ in _random(model))


def draws_beside_dropout(model: nn.Module) -> bool:
    """Whether training of `model` draws random numbers for something else than dropout."""
    return any(not of_dropout for _, of_dropout in _random(model))


def drops_attention(model: nn.Module) -> bool:
    """Whether training of `model` drops weights of its attention."""
    return any("att" in name for name, _ in _random(model))


def _random(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """The names under which modules have a rate above 0, and whether it is one of dropout, and not a router's noise."""
    for module in model.modules():
        for name, value in (*vars(module).items(), *module.named_children()):
            is_dropout = isinstance(value, nn.Module) and "dropout" in type(value).__name__.lower()
            # Adapters of PEFT have a rate each, in a dictionary.
            rates = [getattr(value, "p", None)] if is_dropout else value.values() if type(value) is dict else [value]
            if is_dropout or "drop" in name or "jitter" in name:
                # PEFT leaves a whole module out by a number that is drawn on the host.
                drawn = (name, (is_dropout or "dropout" in name) and "module_dropout" not in name)
                yield from (drawn for rate in rates if isinstance(rate, float) and rate > 0)
