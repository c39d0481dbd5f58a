"""What the trainer tests share: the tiny models as folders, saved once."""

import pytest

from tests.trainers.parity import save_models
from tests.trainers.vision import save_vision_models


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def vision_folders(tmp_path_factory):
    return save_vision_models(tmp_path_factory.mktemp("vision"))
