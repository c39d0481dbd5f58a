"""The forward of a model that computes a loss: its own, which tells the head whether it may defer the logits."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from liger_trainer.attention.config_names import say_if_away
from liger_trainer.compat.private import available, require
from liger_trainer.compat.transformers import GENERATION_STEPS, LOSS_OPTIONS
from liger_trainer.head.forward import (
    CAN_DEFER_COMPILED,
    compiler_restored,
    never_a_frame,
    step_of_forward,
    uncompiled,
    whole_graph_wanted,
)
from liger_trainer.head.step import Forward, current_step, running
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.patching.binding import bound_function

_model_forwards: set[Callable] = set()

# Arguments of the forwards of Liger's patched models. Hugging Face's accept any name, and their loss ignores these.
_OPTIONS = (
    "ce_weight",
    "label_smoothing",
    "lse_square_scale",
    "return_predicted_tokens",
    "return_token_accuracy",
    "return_z_loss",
    "use_token_scaling",
)


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What forwards call the cache of a generation, the newest name first; callers may use one that is deprecated."""


@functools.cache
def make_model_forward(native: Callable) -> Callable:
    """The forward of a model that computes a loss: `native`, which tells the head whether it may defer the logits.

    The logits are deferred in training, and in evaluation if the caller passes `skip_logits` (as the Trainer does for
    evaluation without metrics, with labels or with its own loss), or sets `Step.loss_follows` or, as the Liger trainers
    do for metrics, `Step.read_later`. Everything else (generation, inference) does not change.

    Raises:
        ValueError: In the forward, for an option of Liger's loss that the model's own loss would ignore.
    """
    names = tuple(inspect.signature(native).parameters)[1:]
    if "transformers.generation.utils" in sys.modules:
        available(GENERATION_STEPS)

    def passed(name: str, args: tuple, kwargs: dict) -> Any:
        if name in kwargs:
            return kwargs[name]
        return args[names.index(name)] if name in names[: len(args)] else None

    def defers(self: nn.Module, has_labels: bool, skip_logits: bool) -> bool:
        if not self.training:
            return skip_logits
        return has_labels or torch.is_grad_enabled()

    def run(
        self: Any, native: Callable, has_labels: bool, read_later: bool, num_items: Any, args: tuple, kwargs: dict
    ) -> Any:
        say_if_away(self)
        labels = passed("labels", args, kwargs) if _reads_labelled_logits(self, kwargs) else None
        step = step_of_forward(self, native, args, kwargs, Forward(has_labels, num_items, read_later, labels))
        with compiler_restored(), running(step):
            return native(self, *args, **kwargs)

    run_uncompiled, native_uncompiled = torch.compiler.disable(run, recursive=False), uncompiled(native)

    @functools.wraps(native)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        skip_logits = bool(kwargs.pop("skip_logits", False))
        refuse_ignored_options(self, names, kwargs)
        has_labels = any(passed(name, args, kwargs) is not None for name in ("labels", "shift_labels"))
        num_items = kwargs.get("num_items_in_batch")
        if not torch.compiler.is_compiling() and current_step().loss_follows:
            has_labels = skip_logits = True
        cached = any(passed(name, args, kwargs) is not None for name in CACHE_NAMES)
        read_later = not skip_logits and not cached and _read_later(self)
        skip_logits = skip_logits or read_later
        if not defers(self, has_labels, skip_logits):
            return _plain(self, native, cached, args, kwargs)
        if not torch.compiler.is_compiling():
            return run(self, native, has_labels, read_later, num_items, args, kwargs)
        if not CAN_DEFER_COMPILED or whole_graph_wanted():
            return native(self, *args, **kwargs)
        return run_uncompiled(self, native_uncompiled, has_labels, read_later, num_items, args, kwargs)

    _model_forwards.add(forward)
    return forward


def _reads_labelled_logits(self: Any, kwargs: dict) -> bool:
    """Whether the logits that predict a label are all that is read: by the loss of transformers, and nothing else.

    A loss of the user's own, and one of several models, may read the logits of any token.
    """
    step = current_step()
    if step.labels is None or step.loss_follows or kwargs.get("shift_labels") is not None:
        return False
    (losses,) = require(LOSS_OPTIONS)
    return self.loss_function is losses["ForCausalLM"]


never_a_frame(_reads_labelled_logits)  # it has no operators


def _read_later(self: nn.Module) -> bool:
    """Whether this is the forward of an evaluation whose logits the trainer reads."""
    return not torch.compiler.is_compiling() and not self.training and current_step().read_later


def _plain(self: nn.Module, native: Callable, cached: bool, args: tuple, kwargs: dict) -> Any:
    if torch.compiler.is_compiling():
        return native(self, *args, **kwargs)
    if cached and not torch.is_grad_enabled():
        with running(replace(current_step(), generates=True, forward=None)):
            return native(self, *args, **kwargs)
    if current_step().forward is None:
        return native(self, *args, **kwargs)
    with running(replace(current_step(), forward=None)):
        return native(self, *args, **kwargs)


def refuse_ignored_options(model: Any, names: Sequence[str], kwargs: dict[str, Any]) -> None:
    """Raises ValueError for an option in `kwargs` that neither the model's forward nor its loss would read.

    That loss, `loss_function`, may be the user's own; `names` are the parameters of the forward.
    """
    values = {name: kwargs[name] for name in _OPTIONS if name in kwargs and name not in names}
    asked = [name for name, value in values.items() if isinstance(value, torch.Tensor) or value]
    if not asked:
        return
    (losses,) = require(LOSS_OPTIONS)
    loss = model.loss_function
    if loss not in losses.values():  # a user's own loss may read it from its `**kwargs`
        return
    taken = inspect.signature(loss).parameters
    ignored = ", ".join(f"`{name}`" for name in asked if name not in taken)
    if ignored:
        raise ValueError(
            f"{ignored}: the loss of {type(model).__name__} has no such option and would ignore it. Leave it out, or "
            "compute the loss from the hidden states with liger_trainer.nn.LigerFusedLinearCrossEntropyLoss."
        )


def is_patched_model(model: nn.Module) -> bool:
    """Whether the model's forward is a result of [`make_model_forward`], or wraps one."""
    return any(layer in _model_forwards for layer in forward_layers(model))


def native_forward(model: nn.Module) -> Callable:
    """The forward that a patched model runs: its class's, or a copy of that which calls a function of ours."""
    ours = next((layer for layer in forward_layers(model) if layer in _model_forwards), None)
    if ours is not None:
        return ours.__wrapped__  # type: ignore[attr-defined]
    return bound_function(model) if is_bound_by_us(model) else type(model).forward


def forward_layers(model: nn.Module) -> Iterator[Callable]:
    """The nested functions of the instance's own forward, outermost first; accelerate, for one, wraps ours."""
    function: Any = model.__dict__.get("forward")
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(function, functools.partial):
            function = function.func
        yield function
        function = getattr(function, "__wrapped__", None) or getattr(function, "model_forward", None)


def foreign_forward(model: nn.Module) -> str | None:
    """Why the model's forward cannot be replaced, or None."""
    if "forward" not in model.__dict__ or is_bound_by_us(model):
        return None
    for function in forward_layers(model):
        # Not `__module__`, which functools.wraps copies from the class's forward.
        where = getattr(function, "__globals__", {}).get("__name__", "?")
        if where == "trl.trainer.utils":
            return "TRL's fused head is already in place"
        return f"the instance's forward is already overridden by {where}.{getattr(function, '__name__', '?')}"
    return None
