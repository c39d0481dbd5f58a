"""What the trainer tests share: the tiny models as folders, saved once, and a guard against logits."""

import pytest

from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.trainers import fused_forward
from tests.tiny_models import TINY_MODELS
from tests.trainers.parity import save_models
from tests.trainers.tiny import tokenizer
from tests.trainers.vision import save_vision_models


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Of a tiny Llama and its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    TINY_MODELS["llama"]().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def vision_folders(tmp_path_factory):
    return save_vision_models(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def never_built(monkeypatch):
    """No logits, neither built from deferred ones nor given by the model."""
    monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))
    monkeypatch.setattr(fused_forward, "log_probs", lambda *args, **kwargs: pytest.fail("the model built logits"))
