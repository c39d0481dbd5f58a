"""What `liger_trainer` offers, and that importing it costs little."""

from __future__ import annotations

import subprocess
import sys

import pytest

import liger_trainer
from liger_trainer import functional
from liger_trainer.liger import apply as liger_apply


def test_every_public_name_is_there():
    for name in liger_trainer.__all__:
        assert getattr(liger_trainer, name) is not None
        assert name in dir(liger_trainer)
    assert set(liger_apply.FUNCTIONS) <= set(liger_trainer.__all__)
    with pytest.raises(AttributeError, match="no attribute 'apply_liger_kernels'"):
        liger_trainer.apply_liger_kernels  # noqa: B018


def test_functional_names():
    wanted = {"rms_norm", "fused_add_rms_norm", "layer_norm", "rope", "swiglu", "geglu"}
    wanted |= {"cross_entropy", "linear_cross_entropy"}
    assert wanted <= set(functional.__all__)
    assert all(callable(getattr(functional, name)) for name in functional.__all__)
    assert functional.__all__ == sorted(functional.__all__)


def loaded_after(statement: str) -> set[str]:
    heavy = ("torch", "triton", "transformers", "trl")
    code = f"import sys\n{statement}\nprint(' '.join(name for name in {heavy!r} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_config_needs_no_torch():
    assert "torch" not in loaded_after("from liger_trainer.configs.kernel_config import KernelConfig")
