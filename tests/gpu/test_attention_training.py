"""The trainers with our attention on an accelerator, beside the stock ones with eager attention."""

import pytest

from tests.attention.training import CASES, assert_trains_as_stock
from tests.device import one_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), one_gpu]


# In fp32 through our kernels; in bf16 through torch's flash operator, whose roundings are not those of eager.
@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-4), (True, 1e-2)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
def test_losses_and_norms_are_those_of_stock(model, case, bf16, tolerance, tmp_path, monkeypatch):
    assert_trains_as_stock(tmp_path, model, case, monkeypatch, tolerance, use_cpu=False, bf16=bf16)
