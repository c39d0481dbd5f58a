"""A small head and its input for the tests of deferred logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from liger_trainer.head import DeferredLogits, warn_once
from tests.head.deferring import B, H, S, V


@pytest.fixture(autouse=True)
def _nothing_announced():
    warn_once._said.clear()


@pytest.fixture
def head():
    torch.manual_seed(0)
    return nn.Linear(H, V)


@pytest.fixture
def hidden():
    torch.manual_seed(1)
    return torch.randn(B, S, H, requires_grad=True)


@pytest.fixture
def never_built(monkeypatch):
    monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))
