import importlib.util
import sys
import types

import pytest

from liger_trainer.liger import stand_in
from tests.integrations import frameworks


@pytest.fixture(autouse=True)
def _as_before():
    """Plug-ins act when they are imported: each test imports its own anew, and what that did is taken back."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    stand_in.remove()
    for name in [*sys.modules]:
        if name.startswith("liger_trainer.integrations."):
            del sys.modules[name]


def stand_for(monkeypatch, module, **names):
    """A module of a framework that is not installed, and the packages it is in."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
            if length > 1:
                setattr(sys.modules[".".join(parts[: length - 1])], parts[length - 1], sys.modules[name])
    vars(sys.modules[module]).update(names)


@pytest.fixture
def axolotl(monkeypatch):
    """axolotl's loader of plug-ins: its own, or one written after it."""
    if importlib.util.find_spec("axolotl"):
        return importlib.import_module("axolotl.integrations.base")
    stand_for(monkeypatch, "axolotl.integrations.base", BasePlugin=frameworks.BasePlugin)
    return types.SimpleNamespace(load_plugin=frameworks.load_plugin)


@pytest.fixture
def llamafactory(monkeypatch):
    """LLaMA-Factory's registry of kernels: its own, or one written after it."""
    interface = "llamafactory.v1.plugins.model_plugins.kernels.interface"
    if importlib.util.find_spec("llamafactory"):
        return importlib.import_module(interface)
    stand_for(monkeypatch, interface, KernelPlugin=frameworks.KernelPlugin)
    stand_for(monkeypatch, "llamafactory.v1.utils.logging", get_logger=frameworks.get_logger)
    return sys.modules[interface]


@pytest.fixture
def swift():
    """ms-swift's import of a plug-in's file: its own, or one written after it."""
    return importlib.import_module("swift.utils.utils") if importlib.util.find_spec("swift") else frameworks


@pytest.fixture
def verl():
    """verl's import of a module: its own, or one written after it."""
    return importlib.import_module("verl.utils.import_utils") if importlib.util.find_spec("verl") else frameworks
