"""Puts our fused LM head (`fused_forward.py`) where a trainer of TRL installs its own in its `__init__`."""

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

from liger_trainer.head.forward import CAN_DEFER_COMPILED, uncompiled
from liger_trainer.packing.packing import Packing
from liger_trainer.patching.as_written import is_ours
from liger_trainer.patching.model_forward import forward_layers, is_patched_model, native_forward
from liger_trainer.trainers.fused_forward import StatisticsOptions, fused_forward

_SWAPPED: tuple[str, ...] = ("add_fused_lm_head", "BaseTunerLayer")
_swapping = threading.RLock()
_fused_over: weakref.WeakKeyDictionary[Callable, tuple[Callable, Callable]] = weakref.WeakKeyDictionary()


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
        options: Statistics that the trainer asks of the head.
        packing: How batches are packed, for a model that is proved for it; None leaves them padded.
    """
    inner, native = _forwards_of(model)
    run_uncompiled = None
    # The forward of another library builds its logits, compiled or not.
    if CAN_DEFER_COMPILED and (native is type(model).forward or is_ours(native)):
        run_uncompiled = torch.compiler.disable(fused_forward(inner, uncompiled(native), options), recursive=False)
    # `generate` and the Trainer look at the signature, the patching at what is inside.
    forward = functools.wraps(inner)(fused_forward(inner, native, options, packing, run_uncompiled))
    _fused_over[forward] = inner, native
    model.forward = types.MethodType(forward, model)


def _forwards_of(model: nn.Module) -> tuple[Callable, Callable]:
    """The forward for a call without the flag, and the model's own forward for one with it.

    Both take the model as their first argument.
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
