"""The forward with TRL's `fused_lm_head`: per-token statistics of the logits, which are never built.

TRL's trainers call ``model(**inputs, labels=labels, fused_lm_head=True)`` and get per-token statistics instead of
logits, on which all of their loss code builds. Our forward runs the model's own without labels, and computes the
statistics from the deferred logits that it returns. So soft-cap, scale, adapters and shards are those of the model's
forward, whatever they are called in a configuration.

The gradient of a summed loss is one number for all labels. Autograd expands the gradient of a sum to the shape of the
summand, so its strides show that it is one number. But the last position is dropped, and TRL negates the
log-probabilities before it sums them; torch's gradients of both operations write the number to every position. Then
only the values show it, and reading them makes the host wait for the device. [`SummedLogProbs`] leave it expanded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.compat.private import require
from liger_trainer.compat.trl import FUSED_HEAD
from liger_trainer.head.deferred_logits import build, recordable, unwrapped
from liger_trainer.head.forward import compiler_restored, step_of_forward, whole_graph_wanted
from liger_trainer.head.fused_loss import chunked_log_probs, head_log_probs
from liger_trainer.head.on_host import OnHost, plain, values_of
from liger_trainer.head.step import Forward, Padding, Step, bounds_of, current_step, expected_gradient, running
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.attention.plan import Ranks
from liger_trainer.kernels.autograd import one_number
from liger_trainer.kernels.copied_rows import copied_rows
from liger_trainer.kernels.head.log_probs import log_probs
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.packing.packed_row import PackedRow, each_row, rows_of
from liger_trainer.packing.packing import Packing
from liger_trainer.parallel.sequence_parts import gathered_columns
from liger_trainer.trainers.sequence_parts import attended, part_of_batch

_, FusedCausalLMOutput = require(FUSED_HEAD)

_KERNEL_NAMES = {
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_squared_probs",
    "mean_logits": "mean_logit",
    "is_top1": "top1",
}


@dataclasses.dataclass(frozen=True)
class StatisticsOptions:
    """What a trainer asks of its LM head in every call.

    Args:
        outputs: TRL's names of the statistics, among the fields of [`TokenStatistics`].
        temperature: Divides the logits.
        uniform_gradient: Whether the trainer's own loss weighs all labels alike. If so, the gradients of the head are
            computed in the forward of that loss, and recomputed in the backward of any other.
        retain_memory: Bytes of logits to save for the backward of any other loss; one chunk by default.
        recomputed: Whether the caller's checkpoint computes what the head saves again, which then retains no logits.
    """

    outputs: tuple[str, ...] = ("log_probs",)
    temperature: float = 1.0
    uniform_gradient: bool = False
    retain_memory: int | None = None
    recomputed: bool = False

    @functools.cached_property
    def asked(self) -> dict[str, str]:
        """The kernels' names of the statistics besides the log-probabilities, by TRL's names."""
        return {theirs: ours for theirs, ours in _KERNEL_NAMES.items() if theirs in self.outputs}


def fused_forward(
    inner: Callable,
    native: Callable,
    options: StatisticsOptions,
    packing: Packing | None = None,
    run_uncompiled: Callable | None = None,
    ranks: Ranks | None = None,
) -> Callable:
    """A forward that is `inner`, and with `fused_lm_head=True` the statistics of the logits of `native`.

    Under `torch.compile` such a call is `run_uncompiled`, where it is given. With `ranks`, which are all given the same
    batch, each computes a part of every row.
    """

    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        read = {"labels": labels, "shift_labels": shift_labels, **kwargs}
        known = any(isinstance(each, OnHost) for each in read.values())
        if known:
            labels, shift_labels, kwargs = plain(labels), plain(shift_labels), {k: plain(v) for k, v in kwargs.items()}
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        if not fused_lm_head:
            return inner(self, *args, **kwargs, **{key: value for key, value in given.items() if value is not None})
        if run_uncompiled is not None and torch.compiler.is_compiling() and not whole_graph_wanted():
            return run_uncompiled(self, *args, fused_lm_head=True, **given, **kwargs)
        text_config = self.config.get_text_config()
        kwargs["use_cache"] = False
        if getattr(text_config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        target = next_token_labels(labels, shift_labels)

        with compiler_restored():
            rows = None
            if packing is not None and args:
                packing.leave(self, "its forward is given positional arguments")
            elif packing is not None and not torch.compiler.is_compiling():
                values = functools.partial(_values_of_batch, read) if known else None
                rows = packing.rows(self, kwargs, target, labels if shift_labels is None else shift_labels, values)
            if ranks is not None:
                statistics, aux_loss = statistics_of_parts(self, native, kwargs, target, options, ranks)
            elif rows is None:
                scored = Forward(has_labels=True, labels=labels if shift_labels is None else None)
                padded = running(_with_padding(read)) if known else contextlib.nullcontext()
                with padded, running(step_of_forward(self, native, args, kwargs, scored)):
                    outputs = native(self, *args, **kwargs)
                statistics = token_statistics(outputs.logits, target, options)
                aux_loss = getattr(outputs, "aux_loss", None)
            else:
                statistics, aux_loss = packed_statistics(self, native, kwargs, rows, target.shape, options)
            if aux_loss is None and kwargs.get("output_router_logits"):
                aux_loss = _without_router_loss(self, statistics)
            # The last position has no label, unless the labels were given as those of the next tokens.
            length = target.shape[1] - (shift_labels is None)
            return fused_output(statistics, target, length, aux_loss, text_config, num_items_in_batch, options)

    return forward


def _values_of_batch(read: Mapping[str, Any]) -> torch.Tensor | None:
    """Ids, padding mask and labels of the next tokens, `(3, B, S)`, on the host; None if that does not know them."""
    ids, mask = read.get("input_ids"), read.get("attention_mask")
    ids, mask, labels = map(values_of, (ids, mask, next_token_labels(read["labels"], read["shift_labels"])))
    return None if ids is None or mask is None or labels is None else torch.stack([ids, mask.ne(0).long(), labels])


def _with_padding(read: Mapping[str, Any]) -> Step:
    """The current step, with the padding of this forward if the host knows it: that of the batch may be another."""
    step, mask = current_step(), read.get("attention_mask")
    if not isinstance(mask, OnHost) or (step.padding is not None and step.padding.mask is mask.on_device):
        return step
    values = values_of(mask)
    bounds = None if values is None else bounds_of(values)
    return step if bounds is None else replace(step, padding=Padding(mask.on_device, mask.version, bounds))


def _without_router_loss(model: nn.Module, statistics: TokenStatistics) -> torch.Tensor:
    """The 0 that TRL adds and logs for a model that is asked for its routers' loss, and computes none."""
    if not torch.compiler.is_compiling():
        warn_once(
            f"no router loss: {type(model).__name__}",
            f"{type(model).__name__} has `output_router_logits` but computes no auxiliary loss: its routers are not "
            "balanced, and the logged `aux_loss` is 0. Set `router_aux_loss_coef` to 0 to leave it out. (Shown once.)",
        )
    return statistics.log_probs.new_zeros(())


class TokenStatistics(NamedTuple):
    """Per-label statistics in the shape of the labels, zero where a label is `IGNORE_INDEX`; None if not asked for.

    Attributes:
        log_probs: fp32, differentiable.
        entropy: fp32, differentiable.
        log_sum_sq_probs: fp32, the logarithm of the sum of the squared probabilities, not differentiable.
        mean_logits: fp32, mean of the logits over the vocabulary, after the temperature, not differentiable.
        is_top1: bool, whether the label is the most likely token.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


def token_statistics(logits: torch.Tensor, labels: torch.Tensor, options: StatisticsOptions) -> TokenStatistics:
    """Statistics of `labels` `(...)` under `logits` `(..., V)`, without building logits that are deferred."""
    outputs, temperature = tuple(options.asked.values()) or ("top1",), options.temperature
    found: Any
    deferred = recordable(logits)
    if deferred is None:
        built = build(logits)
        found = log_probs(built, labels.to(built.device), IGNORE_INDEX, temperature, outputs=outputs)
    elif not deferred.recorded.call.fused or deferred.recorded.chain.fused_form is None:
        found = chunked_log_probs(deferred, labels, outputs, temperature, IGNORE_INDEX)
    else:
        expected = expected_gradient("sum") if options.uniform_gradient else None
        found = head_log_probs(
            deferred, labels, outputs, temperature, options.retain_memory, IGNORE_INDEX, expected, options.recomputed
        )
    statistics = TokenStatistics(found.log_probs)
    for theirs, ours in options.asked.items():
        statistics = statistics._replace(**{theirs: getattr(found, ours)})
    return statistics


def packed_statistics(
    model: Any,
    native: Callable,
    kwargs: dict[str, Any],
    rows: Sequence[PackedRow],
    shape: torch.Size,
    options: StatisticsOptions,
) -> tuple[TokenStatistics, torch.Tensor | None]:
    """The statistics of a batch as its padded forward would give them, and the router's loss if the model returns one.

    Args:
        model: The transformers model.
        native: Its own forward.
        kwargs: The arguments of the padded forward; `input_ids`, `position_ids` and `attention_mask` are of a row.
        rows: The packed rows.
        shape: The shape of the batch's labels.
        options: Statistics that the trainer asks of the head.
    """
    recomputed = dataclasses.replace(options, recomputed=True)

    def of(row: PackedRow) -> tuple[TokenStatistics, torch.Tensor | None]:
        arguments = {**kwargs, **row.inputs}
        labels = row.scored.labels
        step = step_of_forward(model, native, (), arguments, Forward(has_labels=True, labels=labels.tensor))
        with running(replace(step, labelled=None, labels=labels)), row.attended():
            outputs = native(model, **arguments)
            logits = rows_of(outputs.logits, row.scored.tokens)
            found = token_statistics(logits, labels.tensor, options if row is rows[-1] else recomputed)
        return found, getattr(outputs, "aux_loss", None)

    found = each_row(of, rows, model)
    statistics, losses = zip(*found)
    return _scattered(statistics, rows, shape), losses[-1]


def statistics_of_parts(
    model: Any, native: Callable, kwargs: dict[str, Any], target: torch.Tensor, options: StatisticsOptions, ranks: Ranks
) -> tuple[TokenStatistics, torch.Tensor | None]:
    """The statistics of a batch of which each process of `ranks` computes a part, and the router's loss of this part.

    Args:
        model: The transformers model, with our attention.
        native: Its own forward.
        kwargs: The arguments of the forward of the whole batch.
        target: (B, S), the next token of each.
        options: Statistics that the trainer asks of the head.
        ranks: The processes, all of which have the same batch.
    """
    parts, arguments = part_of_batch({**kwargs, "shift_labels": target}, ranks)
    labels = arguments.pop("shift_labels")
    with attended(parts), running(step_of_forward(model, native, (), arguments, Forward(has_labels=True))):
        outputs = native(model, **arguments)
        found = token_statistics(outputs.logits, labels, options)
    names = [name for name, value in found._asdict().items() if value is not None]
    part = torch.stack([getattr(found, name).float() for name in names])
    whole = dict(zip(names, gathered_columns(part, ranks)[..., : target.shape[1]]))
    for name, value in whole.items():
        of_part = getattr(found, name)
        whole[name] = value if of_part.is_floating_point() else value.bool()
        if not of_part.requires_grad:
            whole[name] = whole[name].detach()
    return TokenStatistics(**whole), getattr(outputs, "aux_loss", None)


def _scattered(found: Sequence[TokenStatistics], rows: Sequence[PackedRow], shape: torch.Size) -> TokenStatistics:
    """The statistics of the tokens that each packed row has scored, at their places in zeros of `shape`."""
    batch: dict[str, torch.Tensor] = {}
    for statistics, row in zip(found, rows):
        scored = row.scored
        for name, value in statistics._asdict().items():
            if value is None:
                continue
            # A row without labels adds no value, but has a backward, as it has on the other processes.
            differentiable = value.is_floating_point()
            copied = copied_rows(value, scored.copies) if differentiable else value[scored.copies.index]
            before = batch[name] if name in batch else value.new_zeros(shape.numel())
            batch[name] = before.index_copy(0, scored.places, copied)
    return TokenStatistics(**{name: value.view(shape) for name, value in batch.items()})


def fused_output(
    statistics: TokenStatistics,
    target: torch.Tensor,
    length: int,
    aux_loss: torch.Tensor | None,
    text_config: Any,
    num_items_in_batch: torch.Tensor | int | None,
    options: StatisticsOptions,
) -> Any:
    """TRL's `FusedCausalLMOutput`.

    Args:
        statistics: Statistics of the tokens in `target`.
        target: `(B, S)`, the next token of each.
        length: How many columns of both TRL is given.
        aux_loss: The auxiliary loss of a mixture of experts, if the model returned one.
        text_config: The configuration of the language model.
        num_items_in_batch: Divides the summed loss; the number of labels by default.
        options: Statistics that the trainer asks of the head.
    """
    mask = (target != IGNORE_INDEX)[:, :length].to(statistics.log_probs.device)
    log_probs = statistics.log_probs[:, :length]
    if options.uniform_gradient and not torch.compiler.is_compiling() and expected_gradient("sum") is not None:
        log_probs = _SignedPart.apply(statistics.log_probs, 1.0, length).as_subclass(SummedLogProbs)
    statistics = statistics._replace(log_probs=log_probs)
    for name in options.asked:
        statistics = statistics._replace(**{name: getattr(statistics, name)[:, :length]})

    observe = current_step().observer
    if observe is not None and statistics.is_top1 is not None:
        observe(-statistics.log_probs.detach().sum(), statistics.is_top1.sum(), mask.sum())
    count = mask.sum() if num_items_in_batch is None else num_items_in_batch
    loss = -statistics.log_probs.sum() / torch.as_tensor(count, device=mask.device).clamp(min=1)
    if aux_loss is not None:
        loss = loss + getattr(text_config, "router_aux_loss_coef", 0.0) * aux_loss.to(loss.device)
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **statistics._asdict())


def next_token_labels(labels: torch.Tensor | None, shift_labels: torch.Tensor | None) -> torch.Tensor:
    """The label of the next token at every position, `(B, S)`.

    Args:
        labels: `(B, S)`, the tokens themselves; the last position then has no label.
        shift_labels: `(B, S)`, the next token of each.

    Raises:
        ValueError: if neither kind of labels is given.
    """
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        raise ValueError("`fused_lm_head=True` needs `labels` or `shift_labels`; neither was given.")
    # Shifting the labels, not the hidden states, avoids a copy of the latter. The last position has no label.
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]


_NEGATIONS = (torch.neg, torch.negative, torch.Tensor.neg, torch.Tensor.negative)
_CLONES = (torch.clone, torch.Tensor.clone)  # DistributedDataParallel clones the outputs of a model


class SummedLogProbs(torch.Tensor):
    """Log-probabilities `(B, S)`: a plain tensor, except that the gradient of their negation stays expanded."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unwrapped():
            if func in _NEGATIONS and not kwargs:
                return _SignedPart.apply(args[0], -1.0, args[0].shape[-1])
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in _CLONES else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as a plain tensor, since `torch.load` refuses classes that it does not know.
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class _SignedPart(torch.autograd.Function):
    """``sign * tensor[:, :length]``. An expanded gradient stays expanded; the dropped positions have no label."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sign: float, length: int) -> torch.Tensor:
        ctx.shape, ctx.sign = tensor.shape, sign
        return sign * tensor[:, :length]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        number = one_number(grad)
        if number is not None:
            return (ctx.sign * number).expand(ctx.shape), None, None
        return F.pad(ctx.sign * grad, (0, ctx.shape[1] - grad.shape[1])), None, None
