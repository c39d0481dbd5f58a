"""The reference of DPO, KTO, GRPO and RLOO: how it is split, when it runs, and that it is the policy at first.

Where no reference is given, it is the policy of the first step. TRL does not copy that, though: it loads the model
again from its path, switches the adapters off, or reads log-probabilities that it has cached. If what it finds there is
another model, training goes on with a wrong loss. The first step shows for free whether to look: the rewards and the KL
divergence, which TRL logs anyway, are 0 there. If they are not, dropout, noise and rounding may be why. So the policy
and its reference run once more on the same tokens, as in an evaluation.

Under FSDP2 TRL splits a reference as one, so each process would gather the weights of all its layers for a forward.
Here they are split one by one (`splitting.py`).

In TRL's losses of DPO and KTO the policy runs first, and what it keeps for its backward is there while the reference
runs: where layers gather their weights, that is the peak of the step. TRL also has a loss that finds the reference's
log-probabilities in the batch, that of `precompute_ref_log_probs`. Here they are computed right before that loss.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from datasets.fingerprint import Hasher
from peft import LoraConfig
from torch import nn
from torch.distributed.fsdp import FSDPModule

from liger_trainer.compat.private import available
from liger_trainer.compat.torch import FSDP2_ROOT
from liger_trainer.compat.trl import CACHED_REFERENCE, FIRST_STEP, REFERENCE_FIRST
from liger_trainer.recompute.keeping import CHECKPOINTED, OF_TRANSFORMERS, layers_of, put_back
from liger_trainer.trainers.checkpoints.moving_reference import load_reference, save_reference
from liger_trainer.trainers.checkpoints.resuming import naming
from liger_trainer.trainers.checks.first_step import defines_in_subclass
from liger_trainer.trainers.deferred_metrics import DeferredMetricsMixin
from liger_trainer.trainers.same_rows import as_evaluated, first_scored_call, further_than_rounding
from liger_trainer.trainers.splitting import split_layers
from liger_trainer.trainers.trl_mixin import LigerTRLMixin

_COPY = "ref"  # TRL's name of the adapter that it copies from an adapted model's "default"


class WrongReferenceError(ValueError):
    """The reference is not the policy of the first step, though no other was given; the text names the likely cause."""


class ReferenceMixin(DeferredMetricsMixin, LigerTRLMixin):
    """Comes before a TRL trainer with a reference: stops in the first step if that is not the policy.

    Nothing is expected where the reference may differ on purpose: if the user gives one, if adapters do not start as
    nothing, and in resumed runs.
    """

    ref_model: Any  # this and the next two are TRL's
    _metrics: dict[str, Any]
    _precompute_model_hash: Any
    reference_columns: tuple[str, str]

    _given_reference: bool
    _given_adapters: Any  # the configuration of adapters that TRL has put in
    _takes_reference: bool  # whether a reference may be given
    _must_be_policy = False  # whether the reference has to be the policy in this step

    def _check_given(self, given: inspect.BoundArguments, config: Any) -> None:
        super()._check_given(given, config)
        reference = given.arguments.get("ref_model")
        if reference is not None and not isinstance(reference, nn.Module):
            raise ValueError(
                f"`ref_model` is {reference!r}, and must be a model: load it with `from_pretrained`, or leave it out, "
                "which takes the model before the training."
            )
        self._given_reference = reference is not None
        self._given_adapters = given.arguments.get("peft_config")
        self._takes_reference = "ref_model" in given.signature.parameters
        if not self._given_reference and (self._takes_reference or config.beta != 0.0):
            _check_source(given.arguments["model"], self._given_adapters, config, self._takes_reference)

    def _finish_init(self) -> None:
        super()._finish_init()
        self._own_reference = self.ref_model
        self._must_be_policy = self._is_policy_at_first() and available(FIRST_STEP)
        if self._must_be_policy and self.ref_model is not None:
            self._check_vocabulary()

    def _add_fused_lm_head(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super()._add_fused_lm_head(model, *args, **kwargs)
        if model is self.ref_model:  # before TRL splits what is left of it
            split_layers(model, self.accelerator)

    def _check_vocabulary(self) -> None:
        """Raises WrongReferenceError for a reference with another number of embeddings, which could not be run."""
        models = map(self.accelerator.unwrap_model, (self.model, self.ref_model))
        policy, reference = (getattr(each.get_input_embeddings(), "num_embeddings", None) for each in models)
        if policy != reference:
            raise WrongReferenceError(
                f"The reference has {reference} embeddings, and the policy {policy}: {self._cause(False)}."
            )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see [`~transformers.Trainer.train`].

        Raises:
            WrongReferenceError: in the first step, if the reference should be the policy there and is not.
        """
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.state.global_step > 0:
                self._must_be_policy = False  # a second training starts with a trained policy

    def _asks_host(self, model: nn.Module) -> bool:
        """Whether tensors that say which tokens are scored go through a loss with their values on the host."""
        compiled = self.args.torch_compile or is_compiled_module(model)
        noted = self._deferred is not None and self.model.training
        return noted and self._statistics is not None and not compiled

    def _on_host(self, model: nn.Module, inputs: Any) -> Any:
        return self._known_batches.on_host(inputs) if type(inputs) is dict and self._asks_host(model) else inputs

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss of a micro-batch; in the first step, the reference has to be the policy."""
        if self.state.global_step > 0 or self.ref_model is not self._own_reference:
            self._must_be_policy = False
        if return_outputs:
            return self._with_logits(model, inputs, num_items_in_batch)
        if not self._must_be_policy or not self.model.training:
            return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        with first_scored_call(model) as calls:
            result = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        metric = _first_not_0(self._metrics["train"])
        if metric is not None and calls:
            self._check_reference(metric, calls[0], inputs)
        return result

    def _with_logits(self, model: nn.Module, inputs: Any, num_items: Any) -> tuple[torch.Tensor, Any]:
        """The loss, and outputs from which metrics are computed: TRL 2.0 returns those of the loss, without logits."""
        with first_scored_call(model, inputs.get("input_ids")) as calls:
            loss, outputs = super().compute_loss(model, inputs, True, num_items)
        if not hasattr(outputs, "logits"):
            call = {name: value for name, value in calls[0].items() if name not in ("fused_lm_head", "labels")}
            with torch.no_grad():
                outputs = model(**call)
        return loss, outputs

    def _check_reference(self, metric: str, call: Mapping[str, Any], inputs: Any) -> None:
        """Compares the policy with its reference on the tokens of `call`, and what was cached with what it should be.

        Args:
            metric: The one that is not 0.
            call: The arguments with which the policy was called, the same number of times on every process.
            inputs: The micro-batch.

        Raises:
            WrongReferenceError: if they are further apart than rounding explains.
        """
        model: Any = self.accelerator.unwrap_model(self.model)
        eps = {"bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}
        compare = functools.partial(
            further_than_rounding,
            eps=eps.get(self.accelerator.mixed_precision),
            embeddings=model.get_input_embeddings(),
            gather=self.accelerator.gather,
        )
        policy: Any = self.model
        with as_evaluated(policy), self.compute_loss_context_manager():
            apart, cached = None, False
            if self.ref_model is not None or hasattr(model, "peft_config"):
                with self._as_reference(model) as reference:
                    expected = _scores(reference, call)
                apart = compare(lambda: _scores(policy, call), expected)
            if apart is None and getattr(self, "precompute_ref_logps", False):
                columns = _joined(map(inputs.get, self.reference_columns))
                apart, cached = compare(lambda: self._scores_to_cache(inputs), columns), True
        if apart is not None:
            raise WrongReferenceError(
                f"In the first step the reference is the policy, so that {metric} must be 0, but the log-probabilities "
                f"of the same tokens are {apart[0]:.2g} apart (root mean square, without dropout and noise), where "
                f"rounding explains {apart[1]:.2g}: {self._cause(cached)}."
            )

    @contextlib.contextmanager
    def _as_reference(self, model: Any) -> Any:
        """The model that TRL takes for the reference; if it is the policy, with the adapters that TRL sets."""
        if self.ref_model is not None:
            yield self.ref_model
            return
        from trl.trainer.utils import use_adapter

        with use_adapter(model, _COPY if _COPY in model.peft_config else None):
            yield self.model

    def _scores_to_cache(self, inputs: Any) -> torch.Tensor:
        """What TRL would cache of a micro-batch, with the model that it would take, which has not been trained yet."""
        trainer: Any = self
        answering = trainer.model if trainer.ref_model is None else trainer.ref_model
        return _joined(trainer.compute_ref_log_probs(answering, inputs))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        save_reference(self, Path(output_dir))

    def _before_resuming(self, checkpoint: Path) -> None:
        super()._before_resuming(checkpoint)
        with naming(str(checkpoint)):
            load_reference(self, checkpoint)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # TRL's cache knows the model and the rows, but not how the collator cuts them, nor what it sums up.
        own = self._precompute_model_hash
        if available(CACHED_REFERENCE):
            self._precompute_model_hash = Hasher.hash((own, self.data_collator, getattr(self, "ld_alpha", None)))
        try:
            return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._precompute_model_hash = own

    def _is_policy_at_first(self) -> bool:
        """Whether the reference is meant to be the policy that training starts from."""
        adapters: Mapping[str, Any] | None = getattr(self.accelerator.unwrap_model(self.model), "peft_config", None)
        start_alike = adapters is None or _COPY in adapters or _start_as_nothing(self._given_adapters)
        return start_alike and not self._given_reference

    def _cause(self, cached: bool) -> str:
        """Why the reference, or with `cached` its log-probabilities, are not the policy's, and what helps."""
        model: Any = self.accelerator.unwrap_model(self.model)
        adapters: Mapping[str, Any] | None = getattr(model, "peft_config", None)
        or_give = ", or give `ref_model`" if self._takes_reference else ""
        if cached:
            return (
                "the log-probabilities of `precompute_ref_log_probs` are of other rows or of another model, as from a "
                "stale cache. Remove it with `train_dataset.cleanup_cache_files()`, or set "
                f"`precompute_ref_log_probs=False`{or_give}"
            )
        if adapters is not None and _COPY in adapters:
            return (
                f"the reference is a copy of the adapter 'default', made when the trainer was built, and the active "
                f"adapter ({', '.join(model.active_adapters)}) has other weights. Load them into 'default' before the "
                f"trainer is built{or_give}"
            )
        if adapters is not None:
            init = getattr(self._given_adapters, "init_lora_weights", True)
            changed = f", and `init_lora_weights={init!r}` changes the base weights" if init is not True else ""
            return f"the reference is the model without its adapters{changed}. Set `init_lora_weights=True`{or_give}"
        return (
            f"the reference was loaded from {model.config.name_or_path!r}, and the model in memory has other weights, "
            "as after training it, merging an adapter or rounding it. Save it with `model.save_pretrained(FOLDER)` and "
            f"give the trainer that folder{or_give}"
        )


class ReferenceFirst:
    """Comes right before a TRL trainer with a reference, behind the mixins whose contexts both forwards need."""

    precompute_ref_logps: bool  # TRL's: whether the loss finds the reference's log-probabilities in the batch
    reference_columns: tuple[str, str]  # where it finds them, as `compute_ref_log_probs` returns them
    _reference_reads: Set[str] | None = None  # the columns that TRL's `compute_ref_log_probs` knows; None for all

    @functools.cached_property
    def _may_be_first(self) -> bool:
        users = defines_in_subclass(self, "_compute_loss", "compute_ref_log_probs", "_compute_kl_logps")
        return not users and available(REFERENCE_FIRST) and available(FSDP2_ROOT)

    @functools.cached_property
    def _layers(self) -> list[nn.Module]:
        """Those that can be checkpointed as transformers has it."""
        trainer: Any = self
        return [layer for layer, (_, function) in layers_of(trainer.model).items() if function == OF_TRANSFORMERS]

    def _compute_loss(self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool) -> Any:
        trainer: Any = self
        own = super()._compute_loss  # type: ignore[misc]
        read = self._reference_reads is None or inputs.keys() <= self._reference_reads
        if self.precompute_ref_logps or not read or not self._may_be_first:
            return own(model, inputs, return_outputs)
        if isinstance(model, FSDPModule):
            # FSDP2 notes in its first forward which parameters are trained; in that of a reference no adapter is.
            model._get_fsdp_state()._lazy_init()
        answering = trainer.model if trainer.ref_model is None else trainer.ref_model
        kind = trainer.args.device.type
        # TRL's function turns autocast on, which FSDP2 does without, and that of KTO lets a model keep all keys.
        as_the_policy = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        reference = as_the_policy(functools.partial(answering, use_cache=False))
        layers = self._layers if any(layer.gradient_checkpointing for layer in self._layers) else []
        # TRL turns checkpointing off and on, after which all layers are checkpointed, and by their own functions.
        with put_back(layers, (CHECKPOINTED, OF_TRANSFORMERS)) if layers else contextlib.nullcontext():
            answers = dict(zip(self.reference_columns, trainer.compute_ref_log_probs(reference, inputs)))
        self.precompute_ref_logps = True
        try:
            return own(model, {**inputs, **answers}, return_outputs)
        finally:
            self.precompute_ref_logps = False


def _check_source(model: Any, peft_config: Any, config: Any, takes_reference: bool) -> None:
    """Raises ValueError where TRL could not make a reference of `model`, with an error that does not say so."""
    if isinstance(model, str):
        return
    advice = "give `ref_model`" if takes_reference else "set `beta=0.0`"
    adapters = getattr(model, "peft_config", None)
    if adapters is not None and "default" not in adapters:
        raise ValueError(
            f"`model` has the adapters {', '.join(map(repr, adapters))}, and TRL's reference is a copy of the one that "
            f"is called 'default'. Load it with `adapter_name='default'`, or {advice}."
        )
    active = [] if adapters is None else list(model.active_adapters)
    if len(active) > 1:
        raise ValueError(
            f"`model` has {len(active)} active adapters ({', '.join(map(repr, active))}), and TRL leaves only one of "
            "them active once it has computed the reference. Activate one with `model.set_adapter`, combine them with "
            f"`model.add_weighted_adapter`, or {advice}."
        )
    if adapters is not None and _COPY in adapters:
        raise ValueError(
            f"`model` has an adapter {_COPY!r}, which is TRL's name for its copy of 'default'. Remove it with "
            f"`model.delete_adapter({_COPY!r})`, load it under another name, or {advice}."
        )
    precomputed = getattr(config, "precompute_ref_log_probs", False)
    if adapters is None and peft_config is None and not precomputed and not model.config.name_or_path:
        raise ValueError(
            "`model` has no path (`model.config.name_or_path` is empty) from which TRL could load its reference again: "
            f"{advice}, or save it with `model.save_pretrained(FOLDER)` and give the trainer that folder."
        )


def _start_as_nothing(adapter: Any) -> bool:
    """Whether new adapters of this configuration promise not to change what the model computes."""
    return isinstance(adapter, LoraConfig) and adapter.init_lora_weights is not False


def _first_not_0(metrics: Mapping[str, Sequence[float]]) -> str | None:
    """The metric of the last micro-batch, in TRL's lists, by which the reference may not be the policy."""
    rewards = [name for name in ("rewards/chosen", "rewards/rejected") if metrics.get(name)]
    names = rewards or [name for name in ("kl",) if metrics.get(name)]  # with rewards, as in KTO, it is clamped
    return next((f"`{name}`" for name in names if metrics[name][-1] != 0), None)


def _scores(model: nn.Module, call: Mapping[str, Any]) -> torch.Tensor:
    """The log-probabilities of the labelled tokens, `(N,)`, fp32."""
    outputs = model(**call)
    return outputs.log_probs[outputs.label_mask].float()


def _joined(parts: Any) -> torch.Tensor:
    return torch.cat([part.float() for part in parts if part is not None])
