"""Plans on the CPU too: without kernels, transformers makes its own masks."""

import pytest

from liger_trainer.attention import masks


@pytest.fixture(autouse=True)
def _plans(monkeypatch):
    monkeypatch.setattr(masks, "triton_drives", lambda device: True)
