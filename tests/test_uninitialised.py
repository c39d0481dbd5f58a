"""What the tests allocate without writing holds nothing that could pass for a result."""

import pytest
import torch

from tests.forked import run

NEW = {
    "empty": lambda x: torch.empty(3, dtype=x.dtype, device=x.device),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((3,), (2,), dtype=x.dtype, device=x.device),
    "empty_permuted": lambda x: torch.empty_permuted((3,), (0,), dtype=x.dtype, device=x.device),
    "new_empty": lambda x: x.new_empty(3),
    "new_empty_strided": lambda x: x.new_empty_strided((3,), (2,)),
}
DTYPES = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32, torch.uint8, torch.uint64)


@pytest.mark.parametrize("new", NEW.values(), ids=NEW)
def test_new_memory_is_filled(new, device):
    for dtype in DTYPES:
        filled = new(torch.zeros(3, dtype=dtype, device=device))
        worst = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        torch.testing.assert_close(filled, torch.full_like(filled, worst), equal_nan=True, rtol=0, atol=0)
    assert new(torch.zeros(3, dtype=torch.bool, device=device)).all()


def test_parameters_are_filled():
    assert torch.empty(3, requires_grad=True).isnan().all()


def test_the_default_device_stays():
    with torch.device("meta"):
        assert torch.empty(3).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta


def print_filled() -> None:
    print(torch.empty(3).isnan().all().item())


def test_forked_processes_fill_too():
    assert run(print_filled).stdout == "True\n"
