"""Evaluations: the mean of the losses, the metrics of all tokens, and metrics that need no logits."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from liger_trainer.callbacks.labelled_share import first_label
from liger_trainer.callbacks.logged import is_distributed, summed_over_processes
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.head.recorded import build, tree_leaves, tree_map
from liger_trainer.head.step import TokenObserver, current_step, running
from liger_trainer.head.vocab_functions import padded_logits
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX

logger = logging.getLogger("liger_trainer")

_PADDING = -100.0  # what the Trainer pads logits with


class EvaluatingMixin(Trainer):
    """Comes before a Trainer, whose evaluations it extends in four ways.

    Batches without a finite loss, such as one without labels, are left out of the mean. With `_token_metrics`, the
    metrics named there are logged, over all tokens of all processes. With `_metrics_of_deferred_logits`, the model does
    not build the logits for `preprocess_logits_for_metrics`, nor, batch by batch, for `compute_metrics`. After an
    evaluation outside of a training, the weights that `bf16_full_eval` or `fp16_full_eval` has cast are what they were.
    """

    _token_metrics: tuple[str, ...] = ()
    _metrics_of_deferred_logits = False
    _without_loss: torch.Tensor | int = 0  # batches of this evaluation, counted on the device
    _evaluated = 0
    _counted: list[torch.Tensor] | None = None  # of each batch: the sum of the token losses, right tokens, all tokens
    _passes_deferred = False  # whether this evaluation gives deferred logits to the user's functions

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates; see [`~transformers.Trainer.evaluation_loop`]."""
        given = inspect.signature(super().evaluation_loop).bind(*args, **kwargs).arguments
        self._without_loss, self._evaluated, self._counted = 0, 0, []
        try:
            deferred = self._deferred_logits_passed(given["description"])
            with self._finite_losses(), deferred, self._weights_restored():
                output = super().evaluation_loop(*args, **kwargs)
            if left_out := int(self._without_loss):
                logger.warning(
                    "%s of the %s batches evaluated here have no finite loss, so the mean is over the others: all of "
                    "their labels are -100, or the model's numbers overflow.",
                    *(left_out, self._evaluated),
                )
            prefix = given.get("metric_key_prefix", "eval")
            of_tokens = {f"{prefix}_{name}": value for name, value in self._of_all_tokens(self._counted).items()}
            own = output.metrics or {}
            return output._replace(metrics={**own, **of_tokens, **own})  # the user's own values win
        finally:
            self._counted = None

    @contextlib.contextmanager
    def _finite_losses(self) -> Iterator[None]:
        filters = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = True  # leaves them out, unless there are no others
        try:
            yield
        finally:
            self.args.logging_nan_inf_filter = filters

    @contextlib.contextmanager
    def _weights_restored(self) -> Iterator[None]:
        """Around an evaluation, before which the Trainer may cast the model for good; a later training would go on so.

        The weights of an accelerator are kept on the CPU.
        """
        casts = self.args.fp16_full_eval or self.args.bf16_full_eval
        if self.is_in_train or not casts:
            yield
            return
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            warn_once(
                "full evaluation",
                "`bf16_full_eval` and `fp16_full_eval` cast a model that processes hold in parts, and it stays so: "
                "training or saving it after this evaluation takes the rounded weights. (Said once.)",
            )
            yield
            return
        model: Any = self.model
        weights = [(one, _off_accelerator(one.data)) for one in model.parameters() if one.is_floating_point()]
        buffers = [
            (module, name, _off_accelerator(one))
            for module in model.modules()
            for name, one in module._buffers.items()
            if one is not None and one.is_floating_point()
        ]
        try:
            yield
        finally:
            for parameter, data in weights:
                parameter.data = data.to(parameter.device)
            for module, name, buffer in buffers:
                now = module._buffers[name]
                module._buffers[name] = buffer if now is None else buffer.to(now.device)

    @contextlib.contextmanager
    def _deferred_logits_passed(self, description: str) -> Iterator[None]:
        """Where the Trainer itself would keep or gather the logits, the user's functions get them built."""
        preprocess = self.preprocess_logits_for_metrics
        by_batch = self.args.batch_eval_metrics and self.compute_metrics is not None and description != "Prediction"
        self._passes_deferred = preprocess is not None or (by_batch and self.accelerator.num_processes == 1)
        if preprocess is not None:
            self.preprocess_logits_for_metrics = _with_results_built(preprocess)
        try:
            yield
        finally:
            self._passes_deferred, self.preprocess_logits_for_metrics = False, preprocess

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """One batch; see [`~transformers.Trainer.prediction_step`]. The loss of a batch without labels is NaN."""
        labelled = _labelled(inputs, self.model)
        counted: list[torch.Tensor] = []
        step = current_step()
        if self._metrics_of_deferred_logits:
            step = replace(step, read_later=True)
        if self._counts_tokens:
            step = replace(step, observer=_counter(counted))
        with running(step):
            loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None:
            if labelled is not None:
                loss = loss.masked_fill(labelled.logical_not().to(loss.device), math.nan)
            self._evaluated += 1
            self._without_loss = self._without_loss + loss.isfinite().all().logical_not()
            if self._counted is not None and len(counted) == 1:  # with a second loss, it is not known which is meant
                self._counted += counted
        return loss, *(tree_map(self._padded, rest) if self._passes_deferred else self._built(rest))

    @property
    def _counts_tokens(self) -> bool:
        return bool(self._token_metrics) and self.compute_loss_func is None

    def _built(self, values: list[Any]) -> list[Any]:
        """`values` with logits in the place of deferred ones."""
        kept = self._counted is not None and self.compute_metrics is not None
        if kept and any(isinstance(value, DeferredLogits) for value in tree_leaves(values)):
            warn_once(
                "collected logits",
                "Without `preprocess_logits_for_metrics` the Trainer collects the logits of the whole evaluation for "
                "`compute_metrics`, so they are built. If it needs less of them, reduce them batch by batch, as in "
                "`preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)`, which runs in chunks of "
                "tokens. (Shown once.)",
            )
        return tree_map(build, values)

    def _padded(self, value: Any) -> Any:
        """Deferred logits as long as those of the longest process; the Trainer would build them to pad them."""
        if not isinstance(value, DeferredLogits) or value.meta.dim() != 3 or self.accelerator.num_processes == 1:
            return value
        lengths = self.accelerator.gather(torch.tensor([value.meta.shape[1]], device=value.device))
        longest = int(lengths.max())
        return value if longest == value.meta.shape[1] else padded_logits(value, longest, _PADDING)

    def _of_all_tokens(self, counted: list[torch.Tensor]) -> dict[str, float]:
        """The `_token_metrics` of all processes; none if a batch had no loss of deferred logits."""
        if not self._counts_tokens:
            return {}
        rows = torch.stack(counted).cpu().double() if counted else torch.zeros(0, 3, dtype=torch.float64)
        sums = rows[rows[:, 0].isfinite()].sum(0)
        total = torch.cat([sums, sums.new_tensor([self._evaluated - len(counted)])])
        if is_distributed():
            total = summed_over_processes(total.to(self.args.device)).cpu()
        cross_entropy, right, labelled, uncounted = total.unbind()
        if uncounted or not labelled:
            return {}
        values = {"perplexity": (cross_entropy / labelled).exp(), "mean_token_accuracy": right / labelled}
        return {name: values[name].item() for name in self._token_metrics if values[name].isfinite()}


def _off_accelerator(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "meta" else tensor.cpu()


def _counter(counted: list[torch.Tensor]) -> TokenObserver:
    def observe(*sums: torch.Tensor) -> None:
        counted.append(torch.stack([value.float() for value in sums]))  # below 2**24 tokens a batch, so exact

    return observe


def _with_results_built(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose deferred results are built, since the Trainer keeps them."""

    @functools.wraps(function)
    def preprocess(*args: Any, **kwargs: Any) -> Any:
        return tree_map(build, function(*args, **kwargs))

    return preprocess


def _labelled(inputs: Any, model: Any) -> torch.Tensor | None:
    """Whether any token of a batch has a label; None if the labels are not those of its tokens."""
    first = first_label(model)
    if not isinstance(inputs, Mapping) or first is None:
        return None
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if not isinstance(ids, torch.Tensor) or not isinstance(labels, torch.Tensor) or ids.shape != labels.shape:
        return None
    return labels[:, first:].ne(IGNORE_INDEX).any()
