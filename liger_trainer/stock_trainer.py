"""Two switches of transformers that turn these kernels on, in stock trainers and in models.

`TrainingArguments(use_liger_kernel=True)`: `Trainer.train()` passes the model to
`transformers.integrations.liger.apply_liger_kernel`, a name that `transformers.trainer` binds when it is imported.
[`apply_for_trainer`] takes its place in both modules. If the `liger-kernel` package is installed too,
[`set_stock_trainer_kernels`] decides whose kernels run.

`from_pretrained(..., use_kernels=True)` calls `set_use_kernels(True)`, and so does such a model whenever it changes
between training and evaluation. [`switch_kernels`] takes the place of that method. Adapters that were added since get
their kernels at such a change, and when `Trainer.train()` begins, before anything is wrapped.

[`install`] does so without importing transformers: a module that is not loaded yet is changed when it is imported.
[`uninstall`] restores everything.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.abc
import importlib.util
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import STOCK_TRAINER, USE_KERNELS

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer

    from liger_trainer.patching.report import KernelReport

logger = logging.getLogger("liger_trainer")

_originals: dict[Callable, Callable] = {}  # by the functions that took their places
_lock = threading.RLock()
_choice: Literal["liger_trainer", "liger_kernel"] = "liger_trainer"
_reports: weakref.WeakKeyDictionary[nn.Module, KernelReport] = weakref.WeakKeyDictionary()
_in_charge: contextvars.ContextVar[Trainer | None] = contextvars.ContextVar("liger_trainer_in_charge", default=None)


def set_stock_trainer_kernels(which: Literal["liger_trainer", "liger_kernel"]) -> None:
    """Sets whose kernels the stock `Trainer` uses for `use_liger_kernel=True`, from the next `train()` on.

    Args:
        which: `"liger_trainer"` (the default) or `"liger_kernel"`, the `liger-kernel` package.

    Raises:
        ValueError: for anything else.
        ImportError: for `"liger_kernel"` if that package is not installed.
    """
    global _choice
    if which not in ("liger_trainer", "liger_kernel"):
        raise ValueError(f"`which` is {which!r}; it must be 'liger_trainer' or 'liger_kernel'.")
    if which == "liger_kernel" and not liger_kernel_installed():
        raise ImportError("`which` is 'liger_kernel', and that package is not installed: `pip install liger-kernel`.")
    _choice = which


def liger_kernel_installed() -> bool:
    """Whether the `liger-kernel` package is importable, and is not this package standing in for it."""
    spec = importlib.util.find_spec("liger_kernel")
    return spec is not None and spec.origin != "liger_trainer"


def install() -> None:
    """Makes both switches turn on these kernels; called on `import liger_trainer`, and harmless when repeated."""
    with _lock:
        for hook in _HOOKS:
            hook.put()
        if not installed():
            sys.meta_path.insert(0, _LateHook())


def uninstall() -> None:
    """Gives both switches their own meaning back."""
    with _lock:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _LateHook)]
        for hook in _HOOKS:
            current = hook.current()
            if current in _originals:
                setattr(hook.owner(), hook.name, _originals[current])


def installed() -> bool:
    """Whether both switches turn on these kernels, or will once transformers is imported."""
    return any(isinstance(finder, _LateHook) for finder in sys.meta_path)


@contextlib.contextmanager
def in_charge(trainer: Trainer) -> Iterator[None]:
    """While a Liger trainer trains, the `Trainer` that it extends leaves the kernels of its model alone.

    For that, the hook is installed inside, even if the user has removed it.
    """
    was_installed = installed()
    install()
    before = _in_charge.set(trainer)
    try:
        yield
    finally:
        _in_charge.reset(before)
        if not was_installed:
            uninstall()


def apply_for_trainer(model: nn.Module, kernel_config: dict[str, Any] | None = None) -> KernelReport | None:
    """What the stock `Trainer` calls in place of `transformers.integrations.liger.apply_liger_kernel`.

    Args:
        model: The model that is about to be trained, possibly in a PEFT wrapper.
        kernel_config: `TrainingArguments.liger_kernel_config`, with our keys or Liger's.

    Returns:
        The report of what was patched; None if a Liger trainer, or the `liger-kernel` package, is in charge.
    """
    trainer = _in_charge.get()
    if trainer is not None and trainer.model is model:
        return None
    if _choice == "liger_kernel" and liger_kernel_installed():
        logger.warning("use_liger_kernel: the kernels of the liger-kernel package run, as set.")
        return _original()(model, kernel_config)
    if _data_parallel_is_next(model):
        raise ValueError(data_parallel_message("Trainer"))

    if liger_kernel_installed():
        logger.warning(
            "use_liger_kernel: the kernels of liger_trainer run, not those of the liger-kernel package, which is "
            "installed too; `liger_trainer.set_stock_trainer_kernels('liger_kernel')` changes that."
        )
    return _apply(model, "use_liger_kernel", kernel_config)


def switch_kernels(original: Callable, model: Any, on: bool, kernel_config: Any, *args: Any, **kwargs: Any) -> None:
    """What a model of transformers does for `use_kernels`, in place of its own `set_use_kernels`.

    Args:
        original: `set_use_kernels` of the model's class.
        model: The model.
        on: Whether to use kernels. False takes out those that True has put in.
        kernel_config: Transformers' `KernelConfig`, which asks for kernels of the `kernels` library. It gets all
            modules that have none of ours. None asks for ours, unless the model has such a configuration already.
        *args: Further arguments of the method.
        **kwargs: Further arguments of the method.
    """
    from liger_trainer.patching.apply import revert_liger_kernel
    from liger_trainer.patching.use_kernels import forwards_kept, lacks_kernels, remember, remembered

    if on and kernel_config is None and model.kernel_config is None:
        if lacks_kernels(model):
            _warn_of_the_library()
            _apply(model, "use_kernels")
        remember(model)
        return
    if not on and remembered(model):
        revert_liger_kernel(model)
    with forwards_kept(model):
        original(model, on, kernel_config, *args, **kwargs)


def stock_trainer_report(model: nn.Module) -> KernelReport | None:
    """The report of the kernels that one of the switches has put into `model`; None if none has."""
    return next((_reports[module] for module in model.modules() if module in _reports), None)


def _apply(model: nn.Module, switch: str, kernel_config: dict[str, Any] | None = None) -> KernelReport:
    from liger_trainer.patching.apply import apply_liger_kernel

    report = _reports[model] = apply_liger_kernel(model, kernel_config)
    if not report.applied:
        reasons = "; ".join(f"{row.target}: {row.reason}" for row in report.left_alone) or "nothing was recognised"
        logger.warning("%s: no kernel of liger_trainer fits this model (%s).", switch, reasons)
    else:
        kernels = ", ".join(f"{row.count}x {row.kernel}" for row in report.applied)
        logger.info("%s: the kernels of liger_trainer run: %s.", switch, kernels)
    return report


def data_parallel_message(trainer: str) -> str:
    """Why `nn.DataParallel` is refused, and what to do."""
    return (
        f"{trainer} sees several GPUs in one process and would wrap the model in `nn.DataParallel`, whose replicas do "
        "not run the kernels that are bound to this model. Start the script with `accelerate launch` (or `torchrun`), "
        "or show it one GPU with `CUDA_VISIBLE_DEVICES=0`."
    )


def _data_parallel_is_next(model: nn.Module) -> bool:
    """Whether the stock `Trainer` is about to use `nn.DataParallel`, by the rule of `TrainingArguments.n_gpu`."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    if torch.cuda.device_count() < 2 or getattr(model, "hf_device_map", None) is not None:
        return False
    return all(parameter.device.type == "cuda" for parameter in model.parameters())


def _warn_of_the_library() -> None:
    from transformers.utils import is_kernels_available

    from liger_trainer.head.warn_once import warn_once

    if is_kernels_available():
        warn_once(
            "use_kernels",
            "use_kernels: the kernels of liger_trainer run, not those of the `kernels` library, which is installed "
            "too; `model.set_use_kernels(True, transformers.KernelConfig())` adds its own where there are none of "
            "ours. (Shown once.)",
        )


# ---------------------------------------------------------------------------------------------------------------------
# What is replaced in transformers
# ---------------------------------------------------------------------------------------------------------------------


def _for_trainer(original: Callable) -> Callable | None:
    return apply_for_trainer if available(STOCK_TRAINER) else None


def _switching(original: Callable) -> Callable | None:
    @functools.wraps(original)
    def set_use_kernels(self: Any, use_kernels: bool, kernel_config: Any = None, *args: Any, **kwargs: Any) -> None:
        switch_kernels(original, self, use_kernels, kernel_config, *args, **kwargs)

    return set_use_kernels if available(USE_KERNELS) else None


def _serving_adapters(original: Callable) -> Callable | None:
    @functools.wraps(original)
    def train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        from liger_trainer.patching.use_kernels import remembered

        served = [] if self.model is None else list(filter(remembered, self.model.modules()))
        for module in served:
            if _data_parallel_is_next(module):
                raise ValueError(data_parallel_message(type(self).__name__))
            module.set_use_kernels(True)  # type: ignore[operator]
        return original(self, *args, **kwargs)

    return train if available(USE_KERNELS) else None


class _Hook(NamedTuple):
    """A function of transformers that is replaced."""

    module: str
    path: str
    replacement: Callable[[Callable], Callable | None]
    """Takes the function and returns ours; None if transformers has changed."""

    def owner(self) -> Any:
        """The module or the class that holds the function; None if the module is not imported."""
        owner = sys.modules.get(self.module)
        return functools.reduce(lambda holder, name: getattr(holder, name, None), self.path.split(".")[:-1], owner)

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def current(self) -> Any:
        """The function now; None if there is none."""
        return getattr(self.owner(), self.name, None)

    def put(self) -> None:
        """Puts ours in its place, unless it is there or transformers has changed."""
        current = self.current()
        ours = None if current is None or current in _originals else self.replacement(current)
        if ours is not None:
            _originals.setdefault(ours, current)
            setattr(self.owner(), self.name, ours)


_LIGER_MODULE = "transformers.integrations.liger"
_HOOKS = (
    _Hook(_LIGER_MODULE, "apply_liger_kernel", lambda original: apply_for_trainer),
    _Hook("transformers.trainer", "apply_liger_kernel", _for_trainer),
    _Hook("transformers.trainer", "Trainer.train", _serving_adapters),
    _Hook("transformers.modeling_utils", "PreTrainedModel.set_use_kernels", _switching),
)


def _original() -> Callable:
    if apply_for_trainer not in _originals:
        importlib.import_module(_LIGER_MODULE)
    return _originals[apply_for_trainer]


class _LateHook(importlib.abc.MetaPathFinder):
    """Changes a module of `_HOOKS` right after its import; finds no modules itself."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if all(hook.module != fullname for hook in _HOOKS):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                spec.loader.exec_module = _then_hooked(spec.loader.exec_module)  # type: ignore
            return spec
        return None


def _then_hooked(exec_module: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    @functools.wraps(exec_module)
    def run(module: ModuleType) -> None:
        exec_module(module)
        with _lock:
            for hook in _HOOKS:
                if installed() and hook.module == module.__name__:
                    hook.put()

    return run
