"""The reference of DPO, KTO, GRPO and RLOO: where it comes from, and that it is the policy when training starts.

Where no reference is given, it is the policy of the first step. TRL does not copy that, though: it loads the model
again from its path, switches the adapters off, or reads log-probabilities that it has cached. If what it finds there is
another model, training goes on with a wrong loss. The first step shows it for free: all rewards and the KL divergence,
which TRL logs anyway, are 0 there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets.fingerprint import Hasher
from peft import LoraConfig
from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.trl import CACHED_REFERENCE, FIRST_STEP
from liger_trainer.configs.flags import kernel_config_of
from liger_trainer.trainers.trl_mixin import LigerTRLMixin, wants_kernels

_COPY = "ref"  # TRL's name of the adapter that it copies from an adapted model's "default"
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NOISE = ("dropout", "layerdrop", "drop_path", "jitter")
"""In the names of attributes that make a model compute another result in training than in evaluation."""

_FP32, _HALF, _FP8 = 0.003, 0.015, 0.05
"""By how much rounding may change the mean log-probability of a batch's tokens, by the precision: ten times what is
seen."""


class WrongReferenceError(ValueError):
    """The reference is not the policy of the first step, though no other was given; the text names the likely cause."""


class ReferenceMixin(LigerTRLMixin):
    """Comes before a TRL trainer with a reference: stops in the first step if that is not the policy.

    Nothing is expected where the reference may differ on purpose: if the user gives one, if adapters do not start as
    nothing, if the policy has dropout, and in resumed runs.
    """

    beta: float  # this and the next two are TRL's
    _metrics: dict[str, Any]
    _precompute_model_hash: Any

    _given_reference: bool
    _given_adapters: Any  # the configuration of adapters that TRL has put in
    _takes_reference: bool  # whether a reference may be given
    _cause: str | None = None  # why the first step's rewards might not be 0; None once nothing is expected of them

    def _check_given(self, given: inspect.BoundArguments, config: Any) -> None:
        super()._check_given(given, config)
        self._given_reference = given.arguments.get("ref_model") is not None
        self._given_adapters = given.arguments.get("peft_config")
        self._takes_reference = "ref_model" in given.signature.parameters
        if not self._given_reference and (self._takes_reference or config.beta != 0.0):
            _check_source(given.arguments["model"], self._given_adapters, config, self._takes_reference)

    def _finish_init(self) -> None:
        super()._finish_init()
        self._own_reference = self._reference
        self._cause = self._cause_of_another_reference() if available(FIRST_STEP) else None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; see [`~transformers.Trainer.train`].

        Raises:
            WrongReferenceError: in the first step, if the reference should be the policy there and is not.
        """
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.state.global_step > 0:
                self._cause = None  # a second training starts with a trained policy

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trains on one micro-batch; those of the first step have no rewards yet."""
        if self.state.global_step > 0 or self._reference is not self._own_reference:
            self._cause = None
        loss = super().training_step(*args, **kwargs)
        if self._cause is not None:
            metrics: Mapping[str, Sequence[float]] = self._metrics["train"]
            found = _other_than_policy(metrics, self.beta, self._rounding())
            if found is not None:
                raise WrongReferenceError(
                    f"In the first step the reference is the policy, so that {found[0]} must be 0, but it is "
                    f"{found[1]:.3g}: {self._cause}."
                )
        return loss

    @property
    def _reference(self) -> Any:
        trainer: Any = self
        return trainer.ref_model

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # TRL's cache knows the model and the rows, but not how the collator cuts them, nor what it sums up.
        own = self._precompute_model_hash
        if available(CACHED_REFERENCE):
            self._precompute_model_hash = Hasher.hash((own, self.data_collator, getattr(self, "ld_alpha", None)))
        try:
            return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._precompute_model_hash = own

    def _cause_of_another_reference(self) -> str | None:
        """The likely cause if the reference is not the policy; None if it need not be."""
        model: Any = self.accelerator.unwrap_model(self.model)
        adapters: Mapping[str, Any] | None = getattr(model, "peft_config", None)
        copied = adapters is not None and _COPY in adapters
        noisy = getattr(self.args, "neftune_noise_alpha", None) or _is_noisy(model, but_adapters=not copied)
        if self._given_reference or noisy:
            return None
        if adapters is not None and not copied and not _start_as_nothing(self._given_adapters):
            return None
        or_give = ", or give `ref_model`" if self._takes_reference else ""
        if getattr(self, "precompute_ref_logps", False):
            return (
                "the log-probabilities of `precompute_ref_log_probs` are of other rows or of another model, as from a "
                "stale cache. Remove it with `train_dataset.cleanup_cache_files()`, or set "
                f"`precompute_ref_log_probs=False`{or_give}"
            )
        if copied:
            return (
                f"the reference is a copy of the adapter 'default', made when the trainer was built, and the active "
                f"adapter ({', '.join(model.active_adapters)}) has other weights. Load them into 'default' before the "
                f"trainer is built{or_give}"
            )
        if adapters is not None:
            init = getattr(self._given_adapters, "init_lora_weights", True)
            changed = f", and `init_lora_weights={init!r}` changes the base weights" if init is not True else ""
            return f"the reference is the model without its adapters{changed}. Set `init_lora_weights=True`{or_give}"
        if self._reference is None:
            return None
        return (
            f"the reference was loaded from {model.config.name_or_path!r}, and the model in memory has other weights, "
            "as after training it or merging an adapter. Save it with `model.save_pretrained(FOLDER)` and give the "
            f"trainer that folder{or_give}"
        )

    def _rounding(self) -> float:
        """By how much rounding may change the mean log-probability of a batch's tokens."""
        models = [model for model in (self.model, self._reference) if model is not None]
        dtypes = {parameter.dtype for model in models for parameter in model.parameters()}
        mixed = self.accelerator.mixed_precision
        eight = mixed == "fp8" or (wants_kernels(self.args) and kernel_config_of(self.args).fp8 is not None)
        if eight or any(dtype.itemsize == 1 and dtype.is_floating_point for dtype in dtypes):
            return _FP8
        return _FP32 if mixed == "no" and dtypes <= {torch.float32, torch.float64} else _HALF


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
    precomputed = getattr(config, "precompute_ref_log_probs", False)
    if adapters is None and peft_config is None and not precomputed and not model.config.name_or_path:
        raise ValueError(
            "`model` has no path (`model.config.name_or_path` is empty) from which TRL could load its reference again: "
            f"{advice}, or save it with `model.save_pretrained(FOLDER)` and give the trainer that folder."
        )


def _start_as_nothing(adapter: Any) -> bool:
    """Whether new adapters of this configuration promise not to change what the model computes."""
    return isinstance(adapter, LoraConfig) and adapter.init_lora_weights is not False


def _is_noisy(model: nn.Module, but_adapters: bool) -> bool:
    """Whether `model` draws random numbers in training; with `but_adapters`, those of its adapters do not count."""
    for name, module in model.named_modules():
        if but_adapters and "lora_dropout" in name:
            continue
        if isinstance(module, _DROPOUTS) and module.p > 0:
            return True
        values = ((key, value) for key, value in vars(module).items() if isinstance(value, float) and value > 0)
        if any(part in key for key, _ in values for part in _NOISE):
            return True
    return False


def _other_than_policy(
    metrics: Mapping[str, Sequence[float]], beta: float, rounding: float
) -> tuple[str, float] | None:
    """The metric of the last micro-batch by which the reference is not the policy, and its value; None if it is.

    Args:
        metrics: TRL's lists of what it has logged since the last log.
        beta: Multiplies the log-ratios of whole completions to rewards.
        rounding: By how much rounding may change the mean log-probability of the tokens.
    """
    sides = [side for side in ("chosen", "rejected") if metrics.get(f"rewards/{side}")]
    for side in sides:
        reward, log_prob = metrics[f"rewards/{side}"][-1], metrics[f"logps/{side}"][-1]
        # How many tokens a completion has is not logged. Its log-probability grows with them.
        if abs(reward) > abs(beta) * rounding * (abs(log_prob) + 10):
            return f"`rewards/{side}`", reward
    divergence = [] if sides else metrics.get("kl", [])  # with rewards, as in KTO, it is one of whole completions
    return ("`kl`", divergence[-1]) if divergence and abs(divergence[-1]) > rounding else None
