"""`LigerSFTTrainer`: TRL's `SFTTrainer` with the kernels and the fused head."""

from __future__ import annotations

from typing import Any, cast

import torch
import trl.trainer.sft_trainer as trl_sft_trainer
from torch import nn
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer.compat.private import require
from liger_trainer.compat.trl import SFT_HEAD, SFT_LOSS, SFT_OWN_LOSS
from liger_trainer.configs.trl_configs import LigerSFTConfig
from liger_trainer.head.deferred_logits import DeferredLogits, recordable
from liger_trainer.head.warn_once import warn_once
from liger_trainer.trainers.answer_labels import some_are_not_learnt, templates_without_markers, with_answer_masks
from liger_trainer.trainers.base import parameters_of, wants_kernels
from liger_trainer.trainers.fused_forward import (
    StatisticsOptions,
    fused_output,
    next_token_labels,
    token_statistics,
)
from liger_trainer.trainers.trl_mixin import LigerTRLMixin

require(SFT_HEAD)
require(SFT_LOSS)


class LigerSFTTrainer(LigerTRLMixin, SFTTrainer):
    """[`~trl.SFTTrainer`] with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerSFTConfig`], or an `SFTConfig`, with which the kernels are on. Loss,
    options and metrics are TRL's own code on statistics that are computed without logits. An adapter on the LM head,
    which TRL refuses, is trained. Each log also has `tokens_per_second`, `mfu` if the hardware's peak is known,
    and `peak_memory_gib`; an evaluation also has `eval_perplexity`, over all tokens.

    With `loss_type="nll"` the gradients at the head are computed in the forward. A subclass may take any loss of the
    log-probabilities and entropies, as with TRL's trainer. Where it calls the model itself, the head takes one matmul
    more than for the loss of this class; where it adds such a term to that loss, three more.

    Raises:
        ValueError: for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    trl_module = trl_sft_trainer
    config_class = LigerSFTConfig
    args: SFTConfig
    _takes_parts_of_sequences = True
    _own_loss_is_of_labels = True
    _token_metrics = ("perplexity",)  # TRL logs the accuracy
    _metrics_of_deferred_logits = True
    answers_by_turns = False
    """Whether `assistant_only_loss` finds the answers itself, since neither the chat template nor TRL marks them."""

    @parameters_of(SFTTrainer.__init__, LigerSFTConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with templates_without_markers(self):
            super().__init__(*args, **kwargs)
        if self.label_smoother is not None or self.compute_loss_func is not None:
            require(SFT_OWN_LOSS)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: SFTConfig, *more: Any) -> Any:
        left_out = some_are_not_learnt(dataset)
        if left_out and not args.assistant_only_loss:
            warn_once(
                "weights of turns",
                "Some answers have `weight: 0` or `train: false`, and are trained on all the same: set "
                "`assistant_only_loss=True` to leave them out. (Shown once.)",
            )
        if self.answers_by_turns or (left_out and args.assistant_only_loss):
            dataset = with_answer_masks(dataset, processing_class, args.dataset_num_proc)
        return super()._prepare_dataset(dataset, processing_class, args, *more)

    @classmethod
    def _configured(cls, args: TrainingArguments | None, model: Any) -> Any:
        if args is None or isinstance(args, SFTConfig):
            return super()._configured(args, model)
        values = args.to_dict()  # as TRL converts `TrainingArguments`
        values["hub_token"] = args.hub_token  # to_dict hides it
        values["use_liger_kernel"] = wants_kernels(args)
        return cls.config_class(**values)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; with label smoothing or a `compute_loss_func` by one forward instead of two."""
        smooths = self.label_smoother is not None and self.args.loss_type == "nll"
        if self._statistics is not None and (smooths or self.compute_loss_func is not None):
            text_config = self.model.config.get_text_config()  # type: ignore[operator, union-attr]
            model = cast(nn.Module, OnePassModel(model, text_config, self._statistics))
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if isinstance(found, tuple) and not hasattr(found[1], "logits"):  # asked for by metrics; TRL 2.0 has none
            with torch.no_grad():
                found = found[0], model(**{name: value for name, value in inputs.items() if name != "labels"})
        return found

    def _weighs_labels_alike(self) -> bool:
        return self.args.loss_type != "dft"


class OnePassModel:
    """A wrapper of `model` for one computation of TRL's SFT loss, in which TRL calls it twice and it runs once.

    With label smoothing or a `compute_loss_func`, TRL computes the loss from the model's logits, and its metrics from a
    second forward with the fused head. This computes those statistics from the logits of the first forward.

    Args:
        model: The model that the trainer calls, with its wrappers.
        text_config: The configuration of the language model inside.
        options: The statistics that TRL has asked for.
    """

    def __init__(self, model: nn.Module, text_config: Any, options: StatisticsOptions) -> None:
        self._model, self._text_config, self._options = model, text_config, options
        self._outputs: Any = None
        self._logits: torch.Tensor | None = None
        self._version: int | None = None

    def __call__(
        self,
        *args: Any,
        fused_lm_head: bool = False,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's outputs; with `fused_lm_head`, those of TRL's fused head."""
        given = {"labels": labels, "shift_labels": shift_labels}
        if not fused_lm_head:
            outputs = self._model(*args, **kwargs, **{key: value for key, value in given.items() if value is not None})
            self._remember(outputs)
            return outputs
        of_labels = labels if shift_labels is None else shift_labels
        if self._logits is None or self._changed or of_labels is None or of_labels.shape != self._logits.shape[:-1]:
            return self._model(*args, fused_lm_head=True, **given, **kwargs)  # such as with PEFT's virtual tokens
        with torch.no_grad():
            target = next_token_labels(labels, shift_labels).to(self._logits.device)
            statistics = token_statistics(self._logits, target, self._options)
            length, aux_loss = target.shape[1] - (shift_labels is None), getattr(self._outputs, "aux_loss", None)
            return fused_output(statistics, target, length, aux_loss, self._text_config, None, self._options)

    def _remember(self, outputs: Any) -> None:
        logits = outputs.logits
        self._outputs = outputs
        if isinstance(logits, DeferredLogits):
            # Derived, not a view: what a loss function does to its logits in place must not change these.
            deferred = recordable(logits)
            self._logits = None if deferred is None else deferred.derive(deferred.meta, detached=True)
        else:
            self._logits, self._version = logits.detach(), logits._version

    @property
    def _changed(self) -> bool:
        return self._version is not None and self._logits is not None and self._logits._version != self._version
