"""TRL's interface of a fused LM head, implemented with ours, for every TRL trainer that installs one.

TRL's trainers call ``model(**inputs, labels=labels, fused_lm_head=True)`` and get per-token statistics instead of
logits, on which all of their loss code builds. [`own_fused_head`] substitutes our implementation where a trainer's
`__init__` installs TRL's. Ours runs the model's own forward without labels and computes the statistics from the
deferred logits that it returns. So soft-cap, scale, adapters and shards are those of the forward, whatever they are
called in a configuration.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.attention.known_rows import rows_of_forward
from liger_trainer.compat.private import require
from liger_trainer.compat.trl import FUSED_HEAD
from liger_trainer.head.compiled import CAN_DEFER_COMPILED, compiler_restored, uncompiled, whole_graph_wanted
from liger_trainer.head.context import context_of, forward_context, token_observer
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.head.row_statistics import IGNORE_INDEX
from liger_trainer.packing.packing import Packing
from liger_trainer.patching.as_written import is_ours
from liger_trainer.patching.model_forward import forward_layers, is_patched_model, native_forward
from liger_trainer.trainers.packed_statistics import packed_statistics
from liger_trainer.trainers.summed_log_probs import SummedLogProbs
from liger_trainer.trainers.token_statistics import StatisticsOptions, TokenStatistics, token_statistics

_SWAPPED: tuple[str, ...] = ("add_fused_lm_head", "BaseTunerLayer")
_swapping = threading.RLock()
_fused_over: weakref.WeakKeyDictionary[Callable, tuple[Callable, Callable]] = weakref.WeakKeyDictionary()

_, FusedCausalLMOutput = require(FUSED_HEAD)


class _AdapterGuard(type):
    """The metaclass of a class that answers ``isinstance`` in place of PEFT's `BaseTunerLayer`.

    TRL uses that class to refuse an adapter on the head, which our head can train. So, while a thread builds a Liger
    trainer, nothing is an instance in that thread; other threads get PEFT's answer.
    """

    owner: int
    theirs: type | tuple[()]

    def __instancecheck__(cls, instance: Any) -> bool:
        return threading.get_ident() != cls.owner and isinstance(instance, cls.theirs)


@contextlib.contextmanager
def own_fused_head(module: ModuleType, add_fused_lm_head: Callable[..., None]) -> Iterator[None]:
    """While this thread builds a trainer of TRL's `module`, that trainer installs our head instead of TRL's.

    Args:
        module: Such as `trl.trainer.sft_trainer`.
        add_fused_lm_head: Called in place of TRL's function of that name; other threads keep TRL's.
    """
    owner = threading.get_ident()
    names: dict[str, Any] = vars(module)
    with _swapping:
        replaced: dict[str, Any] = {name: names[name] for name in _SWAPPED if name in names}

        def dispatch(*args: Any, **kwargs: Any) -> None:
            ours = threading.get_ident() == owner
            (add_fused_lm_head if ours else replaced["add_fused_lm_head"])(*args, **kwargs)

        guard = _AdapterGuard("BaseTunerLayer", (), {"owner": owner, "theirs": replaced.get("BaseTunerLayer", ())})
        own: dict[str, Any] = {"add_fused_lm_head": dispatch, "BaseTunerLayer": guard}
        names.update((name, own[name]) for name in replaced)
        try:
            yield
        finally:
            names.update(replaced)


def install_fused_forward(model: nn.Module, options: StatisticsOptions, packing: Packing | None = None) -> None:
    """Gives `model` a forward that understands `fused_lm_head=True`; any other call runs the forward that it had.

    Args:
        model: A causal language model (not its PEFT wrapper), with the kernels applied.
        options: What the trainer asks of the head.
        packing: How batches are packed, for a model that is proved for it; None leaves them padded.
    """
    inner, native = _forwards_of(model)
    run_uncompiled = None
    # The forward of another library builds its logits, compiled or not.
    if CAN_DEFER_COMPILED and (native is type(model).forward or is_ours(native)):
        run_uncompiled = torch.compiler.disable(_fused_forward(inner, uncompiled(native), options), recursive=False)
    # `generate` and the Trainer look at the signature, the patching at what is inside.
    forward = functools.wraps(inner)(_fused_forward(inner, native, options, packing, run_uncompiled))
    _fused_over[forward] = inner, native
    model.forward = types.MethodType(forward, model)


def _fused_forward(
    inner: Callable,
    native: Callable,
    options: StatisticsOptions,
    packing: Packing | None = None,
    run_uncompiled: Callable | None = None,
) -> Callable:
    """A forward that is `inner`, and with `fused_lm_head=True` the statistics of the logits of `native`.

    Under `torch.compile` such a call is `run_uncompiled`, where it is given.
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

        def run(inputs: dict[str, Any]) -> Any:
            # The loss is computed inside this forward, in training and evaluation: the logits need not outlive it.
            arguments = {**kwargs, **inputs}
            with forward_context(context_of(self, has_labels=True)), rows_of_forward(self, native, args, arguments):
                return native(self, *args, **arguments)

        with compiler_restored():
            rows = None
            if packing is not None and args:
                packing.leave(self, "its forward is given positional arguments")
            elif packing is not None and not torch.compiler.is_compiling():
                rows = packing.rows(self, kwargs, target, labels if shift_labels is None else shift_labels)
            if rows is None:
                outputs = run({})
                statistics = token_statistics(outputs.logits, target.to(outputs.logits.device), options)
                aux_loss = getattr(outputs, "aux_loss", None)
            else:
                statistics, aux_loss = packed_statistics(self, run, rows, target.shape, options)
            if aux_loss is None and kwargs.get("output_router_logits"):
                aux_loss = _without_router_loss(self, statistics)
            # The last position has no label, unless the labels were given as those of the next tokens.
            length = target.shape[1] - (shift_labels is None)
            return fused_output(statistics, target, length, aux_loss, text_config, num_items_in_batch, options)

    return forward


def _without_router_loss(model: nn.Module, statistics: TokenStatistics) -> torch.Tensor:
    """The 0 that TRL adds and logs for a model that is asked for its routers' loss, and computes none."""
    if not torch.compiler.is_compiling():
        warn_once(
            f"no router loss: {type(model).__name__}",
            f"{type(model).__name__} has `output_router_logits` but computes no auxiliary loss: its routers are not "
            "balanced, and the logged `aux_loss` is 0. Set `router_aux_loss_coef` to 0 to leave it out. (Shown once.)",
        )
    return statistics.log_probs.new_zeros(())


def _forwards_of(model: nn.Module) -> tuple[Callable, Callable]:
    """The forward for a call without the flag, and the model's own forward for one with it.

    Both take the model as their first argument.

    Raises:
        ValueError: for a forward that is not a method.
    """
    for layer in forward_layers(model):
        if layer in _fused_over:  # installed by an earlier trainer of this model; accelerate may have wrapped it
            return _fused_over[layer]
    inner = getattr(model.forward, "__func__", None)
    if inner is None:
        raise ValueError(
            f"The forward of {type(model).__name__} was replaced by {model.forward!r}, which is not a method; the "
            "fused head cannot wrap it. Give the trainer the model as it was loaded."
        )
    # Where our head took the model's forward, the fused forward tells the head about the call itself.
    return inner, native_forward(model) if is_patched_model(model) else inner


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
        statistics: Of `target`.
        target: `(B, S)`, the next token of each.
        length: How many columns of both TRL is given.
        aux_loss: The auxiliary loss of a mixture of experts, if the model returned one.
        text_config: The configuration of the language model.
        num_items_in_batch: Divides the summed loss; the number of labels by default.
        options: What the trainer asks of the head.
    """
    mask = (target != IGNORE_INDEX)[:, :length].to(statistics.log_probs.device)
    fields = {name: field[:, :length] for name, field in statistics._asdict().items() if field is not None}
    if not torch.compiler.is_compiling() and options.expected_grad is not None:
        fields["log_probs"] = SummedLogProbs.of(statistics.log_probs, length)
    statistics = TokenStatistics(**fields)

    observe = token_observer()
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
