"""`LigerSFTTrainer`: TRL's `SFTTrainer` with the kernels and the fused head.

With a chat template that marks no answers, `assistant_only_loss` finds them by the turns of the conversation.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import trl.trainer.sft_trainer as trl_sft_trainer
from datasets import Dataset, Json
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer._version import OfThisVersion
from liger_trainer.compat.private import available, require
from liger_trainer.compat.trl import COUNTED_METRICS, SFT_ANSWERS, SFT_HEAD, SFT_LOSS, SFT_OWN_LOSS, SFT_PACKED_PARTS
from liger_trainer.configs.trl_configs import LigerSFTConfig
from liger_trainer.data.response_labels import answer_mask
from liger_trainer.data.turns import is_learnt, without_none
from liger_trainer.head.deferred_logits import DeferredLogits, recordable
from liger_trainer.head.warn_once import warn_once
from liger_trainer.trainers.base import parameters_of, wants_kernels
from liger_trainer.trainers.deferred_metrics import DeferredMetrics, DeferredMetricsMixin, DeferredNumber, may_defer
from liger_trainer.trainers.fused_forward import (
    StatisticsOptions,
    fused_output,
    next_token_labels,
    token_statistics,
)
from liger_trainer.trainers.trl_mixin import LigerTRLMixin

require(SFT_ANSWERS)

_SWAPPED = ("get_training_chat_template", "is_chat_template_stop_token_trained", "has_generation_markers")
_swapping = threading.RLock()


@contextlib.contextmanager
def templates_without_markers(trainer: Any) -> Iterator[None]:
    """While this thread builds `trainer`, TRL takes a chat template that it cannot mark; `by_turns` then says True."""
    owner, names = threading.get_ident(), vars(trl_sft_trainer)
    with _swapping:
        find, is_stop_trained, has_markers = (names[name] for name in _SWAPPED)

        def is_marked(template: Any) -> bool:
            if template is None and threading.get_ident() == owner:
                raise ValueError(
                    "`assistant_only_loss` is true, but the tokenizer has no chat template; name one in "
                    "`chat_template_path`, or set it to false."
                )
            return has_markers(template)

        def template_of(processing_class: Any) -> str | None:
            try:
                return find(processing_class)
            except ValueError:
                if threading.get_ident() != owner or not isinstance(processing_class, PreTrainedTokenizerFast):
                    raise
                trainer.answers_by_turns = True
                return None

        def is_trained(*args: Any, **kwargs: Any) -> bool:
            ours = threading.get_ident() == owner and trainer.answers_by_turns
            return ours or is_stop_trained(*args, **kwargs)

        theirs = {name: names[name] for name in _SWAPPED}
        names.update(zip(_SWAPPED, (template_of, is_trained, is_marked), strict=True))
        try:
            yield
        finally:
            names.update(theirs)


def some_are_not_learnt(rows: Any) -> bool:
    """Whether `rows`, or the first hundred of streamed ones, have answers that are not to be learnt."""
    looked_at = rows if isinstance(rows, Dataset) else rows.take(100)
    features = rows.features or {}
    columns = [name for name in ("messages", "completion") if name in (rows.column_names or ("messages", "completion"))]
    if features and not any(_may_weigh(features[name]) for name in columns):
        return False
    turns = (turn for row in looked_at for name in columns for turn in row.get(name) or ())
    return not all(is_learnt(without_none(turn)) for turn in turns if isinstance(turn, Mapping))


def _may_weigh(feature: Any) -> bool:
    """Whether turns of this type may have the keys that `is_learnt` reads; those of `Json` may have any."""
    turn = getattr(feature, "feature", None)
    return bool({"weight", "train"} & {*turn}) if isinstance(turn, dict) else isinstance(turn, Json)


def with_answer_masks(rows: Any, tokenizer: PreTrainedTokenizerFast, processes: int | None) -> Any:
    """Conversations as `input_ids` and `assistant_masks`, and `completion_mask` where there is a prompt.

    Args:
        rows: A dataset, streamed or not; one that has `input_ids` is returned as it is.
        tokenizer: The tokenizer with the chat template.
        processes: How many processes share the rows.
    """
    names = rows.column_names or list(next(iter(rows)))
    if "input_ids" in names:
        return rows
    more = {"num_proc": processes, "desc": "Finding the answers"} if isinstance(rows, Dataset) else {}
    return rows.map(OfThisVersion(partial(_tokenized, tokenizer=tokenizer)), remove_columns=names, **more)


def _tokenized(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, list[int]]:
    tools = row.get("tools")
    options = {
        "tools": json.loads(tools) if isinstance(tools, str) else tools or None,
        **(row.get("chat_template_kwargs") or {}),
    }
    if "prompt" not in row:
        return answer_mask(without_none(row["messages"]), tokenizer, **options)
    prompt, completion = without_none(row["prompt"]), without_none(row["completion"])
    found = answer_mask([*prompt, *completion], tokenizer, **options)
    asked: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **options)
    pairs = zip(asked["input_ids"], found["input_ids"], strict=False)
    start = next((place for place, (one, other) in enumerate(pairs) if one != other), len(asked["input_ids"]))
    mask = [int(place >= start) for place in range(len(found["input_ids"]))]
    return {**found, "completion_mask": mask}


require(SFT_HEAD)
require(SFT_LOSS)


class LigerSFTTrainer(DeferredMetricsMixin, LigerTRLMixin, SFTTrainer):
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
        self._deferred = DeferredMetrics(self) if may_defer(self) and available(COUNTED_METRICS) else None

    @classmethod
    @contextlib.contextmanager
    def _hidden_from_trl(cls, config: Any) -> Iterator[None]:
        packing = config.packing, config.eval_packing
        with super()._hidden_from_trl(config):
            try:
                yield
            finally:
                config.packing, config.eval_packing = packing

    def _add_fused_lm_head(self, *args: Any, **kwargs: Any) -> None:
        super()._add_fused_lm_head(*args, **kwargs)
        if self._ranks is not None:
            require(SFT_PACKED_PARTS)
            # The rows are packed by now. Next, TRL refuses that with `cp_size`, as accelerate would drop their masks.
            self.args.packing = self.args.eval_packing = False

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

    def _leave_out(self, tokens: int) -> None:
        if self._graphs is not None and (tokens or self.accelerator.num_processes > 1):  # which gather together
            own = torch.full((), tokens, device=self.args.device)
            everywhere = self.accelerator.gather(own).sum()
            self._total_train_tokens -= (
                int(everywhere) if self._deferred is None else everywhere.as_subclass(DeferredNumber)
            )

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
