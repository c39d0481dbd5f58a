"""`apply_liger_kernel_to_llama` and its siblings, with the flags Liger's users know.

All are one call of [`liger_trainer.apply_liger_kernel`]. Without a model they apply to every model of that type built
afterwards, through a hook on `PreTrainedModel.post_init` that is installed with the first such call and taken off when
nothing is registered any more; [`undo_liger_kernel`] unregisters. Only forwards of instances are bound, so it does not
matter that `from_pretrained` loads the weights after that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel

from liger_trainer.configs.kernel_config import KERNEL_KEYS, KernelConfig
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.patching.report import KernelReport

_TEXT = ("rms_norm", "swiglu")
_GEMMA = ("rms_norm", "geglu")
_MIXTURE = ("experts", "router", "load_balancing_loss")  # for which Liger has no flag

# name -> (the model types it takes: the whole model and its text part, the flags after the common ones, in Liger's
# order). The common ones are rope, cross_entropy and fused_linear_cross_entropy.
_TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (("llama",), _TEXT),
    "mllama": (("mllama", "mllama_text_model"), ("layer_norm", *_TEXT)),
    "mistral": (("mistral",), _TEXT),
    "mixtral": (("mixtral",), _TEXT),
    "gemma": (("gemma",), _GEMMA),
    "gemma2": (("gemma2",), _GEMMA),
    "gemma3": (("gemma3",), ("layer_norm", *_GEMMA)),
    "gemma3_text": (("gemma3_text",), _GEMMA),
    "qwen2": (("qwen2",), _TEXT),
    "qwen2_vl": (("qwen2_vl", "qwen2_vl_text"), ("rms_norm", "layer_norm", "swiglu")),
    "qwen3": (("qwen3",), _TEXT),
    "qwen3_moe": (("qwen3_moe",), _TEXT),
    "phi3": (("phi3",), _TEXT),
    "granite": (("granite",), _TEXT),
    "olmo2": (("olmo2",), _TEXT),
    "glm4": (("glm4",), _TEXT),
}

_registered: dict[str, KernelConfig] = {}  # model type -> what models of it built from now on get
_original_post_init: Callable | None = None


def undo_liger_kernel(model_type: str | None = None) -> None:
    """Stops what the functions of this module, called without a model, started.

    Models that were built meanwhile keep their kernels; [`liger_trainer.revert_liger_kernel`] takes them out.

    Args:
        model_type: The name in the function's name, such as ``"llama"``; None for all.

    Raises:
        ValueError: if there is no function for `model_type`.
    """
    if model_type is not None and model_type not in _TABLE:
        raise ValueError(f"`model_type` is {model_type!r}; it must be None or one of {', '.join(_TABLE)}.")
    for name in _TABLE if model_type is None else (model_type,):
        for registered in _TABLE[name][0]:
            _registered.pop(registered, None)
    if not _registered:
        _remove_hook()


def _install_hook() -> None:
    global _original_post_init
    if _original_post_init is not None:
        return
    original = PreTrainedModel.post_init

    @functools.wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        original(self)
        config = _registered.get(getattr(self.config, "model_type", ""))
        if config is not None:
            apply_liger_kernel(self, config)

    _original_post_init = original
    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]


def _remove_hook() -> None:
    global _original_post_init
    hook = PreTrainedModel.post_init
    # If somebody else wrapped the hook since, it stays, and with nothing registered does nothing.
    if _original_post_init is not None and getattr(hook, "__wrapped__", None) is _original_post_init:
        PreTrainedModel.post_init = _original_post_init  # type: ignore[method-assign,assignment]
        _original_post_init = None


def _check_model(function: str, model_types: tuple[str, ...], model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` is a {type(model).__name__}; {function} needs a torch.nn.Module, or None.")
    base = without_adapters(model)
    model_type = getattr(getattr(base, "config", None), "model_type", None)
    if model_type not in model_types:
        fitting = [name for name, (types, _) in _TABLE.items() if model_type in types]
        advice = f"Use apply_liger_kernel_to_{fitting[0]}, or" if fitting else "Use"
        raise ValueError(
            f"{function} takes models of type {' or '.join(map(repr, model_types))}, but `model` is a "
            f"{type(base).__name__} (type {model_type!r}). {advice} apply_liger_kernel, which takes any model."
        )


def _make(name: str, model_types: tuple[str, ...], own_flags: tuple[str, ...]) -> Callable[..., KernelReport | None]:
    flags = ("rope", "cross_entropy", "fused_linear_cross_entropy", *own_flags)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [
            *(inspect.Parameter(flag, kind, default=flag != "cross_entropy", annotation="bool") for flag in flags),
            inspect.Parameter("model", kind, default=None, annotation="nn.Module | None"),
        ],
        return_annotation="KernelReport | None",
    )

    def function(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        model = values.pop("model")
        mixture = any(values.get(flag, False) for flag in ("swiglu", "geglu"))  # which mean experts too, as in Liger
        values |= dict.fromkeys(_MIXTURE, mixture)
        config = KernelConfig.parse({**dict.fromkeys(KERNEL_KEYS, False), **values})
        if model is not None:
            _check_model(function.__name__, model_types, model)
            return apply_liger_kernel(model, config)
        _registered.update(dict.fromkeys(model_types, config))
        _install_hook()
        return None

    function.__name__ = function.__qualname__ = f"apply_liger_kernel_to_{name}"
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__doc__ = f"""Puts the kernels into one {name} model, or into all that are built from now on.

    A thin call of [`liger_trainer.apply_liger_kernel`]: a flag that is on still applies only where the kernel is proved
    equal to what the model computes.

    Args:
        {", ".join(flags)}:
            Which kernels; all are on but `cross_entropy`, which `fused_linear_cross_entropy` includes. `swiglu` and
            `geglu` are for mixtures of experts too: experts, routers and their losses.
        model: The model, of type {" or ".join(map(repr, model_types))}. None applies the flags to every model of that
            type built afterwards, until `undo_liger_kernel({name!r})`.

    Returns:
        The report; None without a model.

    Raises:
        ValueError: if `model` is of another type.
    """
    return function


FUNCTIONS: dict[str, Callable[..., KernelReport | None]] = {
    f"apply_liger_kernel_to_{name}": _make(name, *row) for name, row in _TABLE.items()
}
globals().update(FUNCTIONS)

__all__ = ["undo_liger_kernel", *FUNCTIONS]
