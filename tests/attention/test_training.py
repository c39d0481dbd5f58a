"""The trainers with our attention log what the stock ones with eager attention do, on packed and padded batches."""

import pytest

from liger_trainer.attention import interface
from tests.attention.training import CASES, assert_trains_as_stock


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
def test_losses_and_norms_are_those_of_stock(model, case, tmp_path, monkeypatch):
    """Through our own function, as on devices where it has kernels."""
    monkeypatch.setattr(interface, "use_triton", lambda query: True)
    assert_trains_as_stock(tmp_path, model, case, monkeypatch, tolerance=1e-5)
