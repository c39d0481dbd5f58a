"""`LIGER_TRAINER_AS_LIGER=1`, each in a process of its own: without liger-kernel, and with its registries."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests import forked

ROOT = pathlib.Path(__file__).resolve().parents[2]
STARTUP = ROOT / "liger_trainer" / "liger" / "liger_trainer_as_liger.pth"


def run(code, variable):
    """What a process prints that starts as Python does with the file in site-packages."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LIGER_TRAINER_AS_LIGER": variable}
    start = [sys.executable, "-c", STARTUP.read_text() + code]
    result = subprocess.run(start, capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return result


def test_the_file_is_one_line_that_imports_nothing_unless_asked():
    text = STARTUP.read_text()
    assert text.startswith("import os;")
    assert text.count("\n") == 1
    for variable in ("", "0", "true"):
        code = "import sys; print([name for name in sys.modules if name.startswith(('liger', 'torch'))], sys.meta_path)"
        modules, finders = run(code, variable).stdout.split(" ", 1)
        assert modules == "[]"
        assert "_StandIn" not in finders


ABSENT = """
import sys
assert "torch" not in sys.modules and "transformers" not in sys.modules
import importlib.metadata
assert importlib.metadata.version("liger-kernel") == importlib.metadata.version("liger_kernel") == "0.8.5"
assert importlib.metadata.version("torch") != "0.8.5"
from liger_kernel.transformers import LigerRMSNorm
from liger_kernel.transformers.functional import liger_rope
from liger_kernel.utils import infer_device
import liger_kernel.ops.fused_linear_cross_entropy as linear
import liger_trainer.functional, liger_trainer.nn, liger_trainer.losses
assert "transformers" not in sys.modules  # which none of these needs
from liger_kernel.transformers import apply_liger_kernel_to_llama
from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss
assert LigerRMSNorm is liger_trainer.nn.LigerRMSNorm
assert LigerFusedLinearDPOLoss is liger_trainer.losses.LigerFusedLinearDPOLoss
assert apply_liger_kernel_to_llama is liger_trainer.apply_liger_kernel_to_llama
assert linear.LigerFusedLinearCrossEntropyFunction.apply
for name in ("liger_kernel.megatron", "liger_kernel.transformers.model.llama"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert error.name == name
    else:
        raise AssertionError(name)
try:
    from liger_kernel.ops.grpo_loss import GrpoLossFunction
except ImportError as raised:
    assert "GrpoLossFunction" in str(raised)
from transformers.utils import is_liger_kernel_available
from transformers.utils.versions import require_version
assert is_liger_kernel_available()
require_version("liger-kernel>=0.8")
from liger_trainer.stock_trainer import liger_kernel_installed
assert not liger_kernel_installed()
from liger_trainer.liger import stand_in
stand_in.install()  # again: nothing
assert sum(type(finder).__name__ == "_StandIn" for finder in sys.meta_path) == 1
stand_in.remove()
assert not [name for name in sys.modules if name.startswith("liger_kernel")]
try:
    import liger_kernel
except ModuleNotFoundError:
    print("gone")
"""


def test_absent():
    result = run(ABSENT, "1")
    assert result.stdout.split() == ["gone"]
    assert result.stderr.count("LIGER_TRAINER_AS_LIGER: liger_kernel is not installed") == 1


FAKE = {  # the registries of Liger, as far as they are used
    "__init__.py": "",
    "backends/__init__.py": "registered = {}\n"
    "def register_impl(name, *, impl_name, preference_rank):\n"
    "    return lambda function: registered.update({name: (impl_name, preference_rank, function)})\n",
    "ops/__init__.py": "from liger_kernel.ops.backends import IMPL_REGISTRY\n",
    "ops/backends/__init__.py": "import dataclasses\n"
    "@dataclasses.dataclass\n"
    "class ImplInfo:\n"
    "    name: str\n    devices: tuple\n    default_devices: tuple\n    module_path: str\n"
    "IMPL_REGISTRY = {'other': 1}\n"
    "def register_impl(info): IMPL_REGISTRY[info.name] = info\n",
}
INSTALLED = """
import sys
import liger_kernel.ops, liger_kernel.backends
registry = liger_kernel.ops.IMPL_REGISTRY
assert [*registry] == ["liger_trainer", "other"]
import importlib, torch
operators = importlib.import_module(registry["liger_trainer"].module_path)
assert {"LigerRMSNormFunction", "LigerFusedLinearCrossEntropyFunction"} <= set(operators.__all__)
assert all(hasattr(getattr(operators, name), "apply") for name in operators.__all__)
assert registry["liger_trainer"].default_devices == ("cuda" if torch.cuda.is_available() else "cpu",)
assert {"rope", "cross_entropy"} <= liger_kernel.backends.registered.keys()
name, rank, swiglu = liger_kernel.backends.registered["swiglu"]
x = torch.randn(3, 4)
assert (name, rank) == ("liger_trainer-triton", 0)
torch.testing.assert_close(swiglu(x, x, 2.0, mode=None), torch.nn.functional.silu(2 * x) * x)
from liger_trainer.liger import stand_in
stand_in.remove()
assert not [finder for finder in sys.meta_path if "_AfterImport" in type(finder).__name__]
try:
    stand_in.install()
except RuntimeError as error:
    print("imported already" in str(error))
"""


@pytest.fixture
def installed(tmp_path):
    for name, text in FAKE.items():
        path = tmp_path / "liger_kernel" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def started(folder):
    """What Python does when it starts, in a forked process; `test_absent` shows that it imports nothing."""
    sys.path.insert(0, str(folder))
    exec(STARTUP.read_text() + INSTALLED, {})


def test_installed(installed):
    result = forked.run(started, installed, environment={"LIGER_TRAINER_AS_LIGER": "1"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"]
    assert result.stderr.count("the operators of liger_trainer run in the installed liger_kernel") == 1
