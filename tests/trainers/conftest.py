"""What the trainer tests share: the tiny models as folders, saved once."""

import pytest

from tests.trainers.parity import save_models


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))
