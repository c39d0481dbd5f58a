"""`LIGER_TRAINER_AS_LIGER=1`: programs that import `liger_kernel` get the modules of this package.

Where the `liger-kernel` package is not installed, [`install`] makes `import liger_kernel` work, with the names of
`liger_trainer.liger.modules`, and tells version checks 0.8.5. Where it is installed, its own registries get our
operators in place of its Triton ones, when `liger_kernel.ops` is imported. Imports of a single file of Liger's kernels,
such as `liger_kernel.ops.rope`, go past the registries. [`remove`] stops both.

The file `liger_trainer_as_liger.pth` in site-packages calls [`install`] when Python starts, so that processes started
by torchrun or Ray have it too. It imports nothing unless the variable is ``1``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from liger_trainer.liger import modules

logger = logging.getLogger("liger_trainer")

VERSION = "0.8.5"
ORIGIN = "liger_trainer"
"""The origin in the spec of a module that stands in, by which it is told from an installed one."""
_REGISTRY = "liger_kernel.ops.backends"
# Operators that Liger's modules call through its dispatcher, and past the names in `liger_kernel.ops`.
_DISPATCHED = {
    "cross_entropy": "LigerCrossEntropyFunction",
    "geglu": "LigerGELUMulFunction",
    "rms_norm": "LigerRMSNormFunction",
    "rope": "LigerRopeFunction",
    "swiglu": "LigerSiLUMulFunction",
}


def install() -> None:
    """Starts the stand-in, with a line in the log; harmless when repeated.

    Raises:
        RuntimeError: if `liger_kernel.ops` is imported already, whose operators cannot be replaced any more.
    """
    if any(isinstance(finder, _StandIn | _AfterImport) for finder in sys.meta_path):
        return
    if importlib.util.find_spec("liger_kernel") is None:
        sys.meta_path.append(_StandIn())
        logger.warning("LIGER_TRAINER_AS_LIGER: liger_kernel is not installed; importing it gives liger_trainer.")
        return
    if "liger_kernel.ops" in sys.modules:
        raise RuntimeError("liger_kernel.ops is imported already; call this before, or set LIGER_TRAINER_AS_LIGER=1.")
    sys.meta_path.insert(0, _AfterImport())
    logger.warning("LIGER_TRAINER_AS_LIGER: the operators of liger_trainer run in the installed liger_kernel.")


def remove() -> None:
    """Stops the stand-in. Modules that stood in are forgotten; what was imported from them keeps working.

    An installed `liger_kernel.ops` that was imported meanwhile keeps our operators until the process ends.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _StandIn | _AfterImport)]
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "liger_kernel" and getattr(module.__spec__, "origin", None) == ORIGIN:
            del sys.modules[name]


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `liger_kernel` and the modules of the table, and a distribution of that name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        known = fullname.startswith("liger_kernel.") and fullname.removeprefix("liger_kernel.") in modules.MODULES
        package = fullname.split(".")[0] == "liger_kernel" and modules.is_package(fullname)
        if not (known or package):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=ORIGIN, is_package=package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        held = modules.names(module.__name__)

        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            value = modules.find(module.__name__, name)
            setattr(module, name, value)
            return value

        module.__getattr__ = find  # type: ignore[method-assign]
        module.__all__ = [*held]  # type: ignore[attr-defined]

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        name = getattr(context, "name", None)
        if name is None or name.replace("-", "_").lower() == "liger_kernel":
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        metadata = f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {VERSION}\n"
        return {"METADATA": metadata, "top_level.txt": "liger_kernel\n"}.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(path)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Registers our operators when the installed registry has been imported; finds no modules itself."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname != _REGISTRY:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register(registry: ModuleType) -> None:
    from liger_trainer.liger.autograd_functions import OPERATIONS
    from liger_trainer.liger.helpers import infer_device

    device = infer_device()
    operators = "liger_trainer.liger.autograd_functions"
    info = registry.ImplInfo(name=ORIGIN, devices=(device,), default_devices=(device,), module_path=operators)
    others = dict(registry.IMPL_REGISTRY)
    registry.IMPL_REGISTRY.clear()  # the first that names the device is the default
    registry.register_impl(info)
    registry.IMPL_REGISTRY.update(others)
    dispatcher = importlib.import_module("liger_kernel.backends")
    for name, function in _DISPATCHED.items():
        operator = _without_mode(OPERATIONS[function].apply)  # type: ignore[attr-defined]
        dispatcher.register_impl(name, impl_name=f"{ORIGIN}-triton", preference_rank=0)(operator)


def _without_mode(operator: Callable[..., Any]) -> Callable[..., Any]:
    """`operator` as the dispatcher calls it, with the mode of a kernel: ours have none."""

    def run(*args: Any, mode: str | None = None, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return run
