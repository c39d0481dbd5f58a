"""`apply_liger_kernel_to_llama` and its siblings, with the flags Liger's users know.

All are one call of [`liger_trainer.apply_liger_kernel`]. Without a model they apply to every model of that type built
afterwards, through a hook on `PreTrainedModel.post_init` that is installed with the first such call and taken off when
nothing is registered any more; [`undo_liger_kernel`] unregisters. Only forwards of instances are bound, so it does not
matter that `from_pretrained` loads the weights after that.

`AutoLigerKernelForCausalLM` applies the kernels to the models it builds.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from liger_trainer.configs.kernel_config import KERNEL_KEYS, KernelConfig
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.liger.model_types import ROWS, Row
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.patching.report import KernelReport

_MIXTURE = ("experts", "router", "load_balancing_loss")  # for which Liger has no flag

logger = logging.getLogger("liger_trainer")

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
    if model_type is not None and model_type not in ROWS:
        raise ValueError(f"`model_type` is {model_type!r}; it must be None or one of {', '.join(ROWS)}.")
    for name in ROWS if model_type is None else (model_type,):
        for registered in (name, *ROWS[name].more_types):
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


def _check_model(name: str, model: nn.Module) -> None:
    function = f"apply_liger_kernel_to_{name}"
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` is a {type(model).__name__}; {function} needs a torch.nn.Module, or None.")
    base = without_adapters(model)
    model_type = getattr(getattr(base, "config", None), "model_type", None)
    fitting = [row for row in ROWS if model_type in _accepted(row)]
    if name not in fitting:
        advice = f"Use apply_liger_kernel_to_{fitting[0]}, or" if fitting else "Use"
        raise ValueError(
            f"{function} takes models of type {' or '.join(map(repr, _accepted(name)))}, but `model` is a "
            f"{type(base).__name__} (type {model_type!r}). {advice} apply_liger_kernel, which takes any model."
        )


def _accepted(name: str) -> tuple[str, ...]:
    """The model types that a row's function takes: those it is looked up by, and their text part by itself."""
    return tuple(dict.fromkeys((name, *ROWS[name].more_types, f"{name}_text")))


def _signature(row: Row) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(flag, kind, default=None, annotation="nn.Module | None")
        if flag == "model"
        else inspect.Parameter(flag, kind, default=flag not in row.off, annotation="bool | None")
        for flag in row.flags
    ]
    if row.keywords is not None:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD, annotation="bool | None"))
    return inspect.Signature(parameters, return_annotation="KernelReport | None")


def _kernels(name: str, row: Row, given: dict[str, Any]) -> KernelConfig:
    """The config for the flags that were `given`, of which None is the default."""
    keywords = row.keywords or ()
    defaults = {flag: flag not in row.off for flag in (*row.flags, *keywords) if flag != "model"}
    if unknown := sorted(given.keys() - defaults.keys()):
        logger.warning("apply_liger_kernel_to_%s has no use for %s, as in Liger.", name, ", ".join(unknown))
    values = {flag: default if given.get(flag) is None else given[flag] for flag, default in defaults.items()}
    mixture = any(values.get(flag) is True for flag in ("swiglu", "geglu"))  # which mean experts too, as in Liger
    return KernelConfig.parse(dict.fromkeys(KERNEL_KEYS, False) | dict.fromkeys(_MIXTURE, mixture) | values)


def _make(name: str, row: Row) -> Callable[..., KernelReport | None]:
    signature = _signature(row)

    def function(*args: Any, **kwargs: Any) -> KernelReport | None:
        given = dict(signature.bind(*args, **kwargs).arguments)
        model = given.pop("model", None)
        config = _kernels(name, row, given | given.pop("kwargs", {}))
        if model is not None:
            _check_model(name, model)
            return apply_liger_kernel(model, config)
        _registered.update(dict.fromkeys((name, *row.more_types), config))
        _install_hook()
        return None

    off = " and ".join(f"`{flag}`" for flag in row.off if flag in row.flags)
    further = f" Further keywords: {', '.join(row.keywords)}; others are ignored." if row.keywords else ""
    function.__name__ = function.__qualname__ = f"apply_liger_kernel_to_{name}"
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__doc__ = f"""Puts the kernels into one {name} model, or into all that are built from now on.

    A thin call of [`liger_trainer.apply_liger_kernel`]: a flag that is on still applies only where the kernel is proved
    equal to what the model computes.

    Args:
        {", ".join(flag for flag in row.flags if flag != "model")}:
            Which kernels; all are on{f" but {off}" if off else ""}, as in Liger, and None is the default. `swiglu` and
            `geglu` are for mixtures of experts too: experts, routers and their losses.{further}
        model: The model, of type {" or ".join(map(repr, _accepted(name)))}. None applies the flags to every model of
            that type built afterwards, until `undo_liger_kernel({name!r})`.

    Returns:
        The report; None without a model.

    Raises:
        ValueError: if `model` is of another type.
    """
    return function


FUNCTIONS: dict[str, Callable[..., KernelReport | None]] = {
    f"apply_liger_kernel_to_{name}": _make(name, row) for name, row in ROWS.items()
}
globals().update(FUNCTIONS)

MODEL_TYPE_TO_APPLY_LIGER_FN: dict[str, Callable[..., KernelReport | None]] = {
    model_type: FUNCTIONS[f"apply_liger_kernel_to_{name}"]
    for name, row in ROWS.items()
    for model_type in (name, *row.more_types)
}


def _apply_by_type(model_type: str | None, kwargs: dict[str, Any]) -> None:
    function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type or "")
    if function is None:
        logger.info("No kernels are applied: there is no apply_liger_kernel_to_* for model type %r.", model_type)
        return
    parameters = inspect.signature(function).parameters
    function(**{key: value for key, value in kwargs.items() if key in parameters})


def _apply_liger_kernel(model_type: str, **kwargs: Any) -> None:
    """Liger's function of this name: the kernels for all models of `model_type` that are built from now on.

    Args:
        model_type: A key of `MODEL_TYPE_TO_APPLY_LIGER_FN`; of another, nothing happens but a line in the log.
        kwargs: Flags; those that the function of the type does not have are dropped, as in Liger.
    """
    _apply_by_type(model_type, kwargs)


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Liger's function of this name: `_apply_liger_kernel` for one model, by the type in its config."""
    _apply_by_type(getattr(getattr(model, "config", None), "model_type", None), {**kwargs, "model": model})


__all__ = [
    "MODEL_TYPE_TO_APPLY_LIGER_FN",
    "_apply_liger_kernel",
    "_apply_liger_kernel_to_instance",
    "undo_liger_kernel",
    *FUNCTIONS,
]


_KERNEL_KWARGS = (*KERNEL_KEYS, "fused_linear_cross_entropy", "recompute_mlp", "tiled_mlp", "logits_memory")


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` with kernel switches among its keyword arguments.

    Besides the arguments of `AutoModelForCausalLM`, both constructors take `strict` and the fields of
    [`liger_trainer.KernelConfig`] but `global_load_balancing`, with `fused_linear_cross_entropy` as another name of
    `linear_cross_entropy`; see [`liger_trainer.apply_liger_kernel`]. Remote code is trusted only if the caller passes
    `trust_remote_code=True`, as in transformers.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
        """Loads a model, as `AutoModelForCausalLM.from_pretrained` does, and applies the kernels to it.

        Raises:
            ValueError: for a wrong kernel switch, or a kernel that cannot be applied with `strict=True`.
        """
        kernels, strict, kwargs = _split(kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # a tuple with output_loading_info=True
        apply_liger_kernel(model, kernels, strict=strict)
        return loaded

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Builds a model with random weights, as `AutoModelForCausalLM.from_config` does, and applies the kernels.

        Raises:
            ValueError: for a wrong kernel switch, or a kernel that cannot be applied with `strict=True`.
        """
        kernels, strict, kwargs = _split(kwargs)
        model = super().from_config(config, **kwargs)
        apply_liger_kernel(model, kernels, strict=strict)
        return model


def _split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    """(kernel switches, strict, the rest)."""
    kernels = {name: value for name, value in kwargs.items() if name in _KERNEL_KWARGS}
    KernelConfig.parse(kernels)  # a wrong switch is an error before the weights are loaded
    rest = {name: value for name, value in kwargs.items() if name not in (*_KERNEL_KWARGS, "strict")}
    return kernels, bool(kwargs.get("strict", False)), rest
