"""What `make peers` runs Liger's tests with: names of ours under `liger_kernel`."""

from __future__ import annotations

import pathlib
import subprocess
import sys

CODE = """
import tests.peers.liger_names
import liger_kernel.ops.swiglu
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_trainer import nn
assert LigerRMSNorm is nn.LigerRMSNorm
try:
    from liger_kernel.ops import LigerNewFunction
except ImportError as error:
    assert "LigerNewFunction" in str(error)
else:
    raise AssertionError("a name that is in no table was taken")
"""


def test_names_are_ours_or_listed():
    # In a process of its own, as the names of an installed liger_kernel would be hidden here too.
    root = pathlib.Path(__file__).resolve().parents[1]
    result = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
