"""Stock `Trainer(args=TrainingArguments(use_liger_kernel=True))` runs these kernels.

`Trainer.train()` passes the model to `transformers.integrations.liger.apply_liger_kernel`, a name that
`transformers.trainer` binds when it is imported. [`install`] puts [`apply_for_trainer`] into both modules without
importing them: a module that is not loaded yet is patched when it is imported. [`uninstall`] restores everything.

If the `liger-kernel` package is installed too, [`set_stock_trainer_kernels`] decides whose kernels run.
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
from typing import TYPE_CHECKING, Any, Literal

from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import STOCK_TRAINER

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer

    from liger_trainer.patching.report import KernelReport

logger = logging.getLogger("liger_trainer")

_LIGER_MODULE = "transformers.integrations.liger"
_TRAINER_MODULE = "transformers.trainer"
_HOOKED_MODULES = (_LIGER_MODULE, _TRAINER_MODULE)
_NAME = "apply_liger_kernel"

_originals: dict[str, Callable] = {}
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
    """Makes the stock `Trainer` use these kernels; called on `import liger_trainer`, and harmless when repeated."""
    with _lock:
        for name in _HOOKED_MODULES:
            if name in sys.modules:
                _replace(sys.modules[name])
        if not any(isinstance(finder, _LateHook) for finder in sys.meta_path):
            sys.meta_path.insert(0, _LateHook())


def uninstall() -> None:
    """Gives the stock `Trainer` its own `apply_liger_kernel` back."""
    with _lock:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _LateHook)]
        original = _originals.get(_LIGER_MODULE)
        for name in _HOOKED_MODULES:
            module = sys.modules.get(name)
            if original is not None and getattr(module, _NAME, None) is apply_for_trainer:
                setattr(module, _NAME, original)


def installed() -> bool:
    """Whether the stock `Trainer` uses these kernels, or will once it is imported."""
    modules = [sys.modules[name] for name in _HOOKED_MODULES if name in sys.modules]
    hooked = all(getattr(module, _NAME, None) is apply_for_trainer for module in modules)
    return hooked and any(isinstance(finder, _LateHook) for finder in sys.meta_path)


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

    from liger_trainer.patching.apply import apply_liger_kernel

    report = apply_liger_kernel(model, kernel_config)
    _reports[model] = report
    if liger_kernel_installed():
        logger.warning(
            "use_liger_kernel: the kernels of liger_trainer run, not those of the liger-kernel package, which is "
            "installed too; `liger_trainer.set_stock_trainer_kernels('liger_kernel')` changes that."
        )
    if not report.applied:
        reasons = "; ".join(f"{row.target}: {row.reason}" for row in report.left_alone) or "nothing was recognised"
        logger.warning("use_liger_kernel: no kernel of liger_trainer fits this model (%s).", reasons)
    else:
        kernels = ", ".join(f"{row.count}x {row.kernel}" for row in report.applied)
        logger.info("use_liger_kernel: the kernels of liger_trainer run: %s.", kernels)
    return report


def stock_trainer_report(model: nn.Module) -> KernelReport | None:
    """The report of [`apply_for_trainer`] for `model`; None if it has not been called with it."""
    return _reports.get(model)


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


def _original() -> Callable:
    if _LIGER_MODULE not in _originals:
        importlib.import_module(_LIGER_MODULE)
    return _originals[_LIGER_MODULE]


def _replace(module: ModuleType) -> None:
    current = getattr(module, _NAME, None)
    if current is None or current is apply_for_trainer:
        return
    if module.__name__ == _TRAINER_MODULE and not available(STOCK_TRAINER):
        return
    _originals.setdefault(_LIGER_MODULE, current)
    setattr(module, _NAME, apply_for_trainer)


class _LateHook(importlib.abc.MetaPathFinder):
    """Replaces the name in a module of `_HOOKED_MODULES` right after its import; finds no modules itself."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _HOOKED_MODULES:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                spec.loader.exec_module = _then_replace(spec.loader.exec_module)  # type: ignore
            return spec
        return None


def _then_replace(exec_module: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    @functools.wraps(exec_module)
    def run(module: ModuleType) -> None:
        exec_module(module)
        with _lock:
            if any(isinstance(finder, _LateHook) for finder in sys.meta_path):
                _replace(module)

    return run
