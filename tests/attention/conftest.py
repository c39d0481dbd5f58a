"""Plans on the CPU too: without kernels, transformers makes its own masks."""

import pytest

from liger_trainer.attention import interface


@pytest.fixture(autouse=True)
def _plans(monkeypatch):
    monkeypatch.setattr(interface, "TRITON_DEVICES", ("cpu", "cuda", "meta"))
