"""The kernel that makes matrices in 4 bits floating: bit for bit the reference, which is bitsandbytes'."""

import pytest
import torch

from liger_trainer.functional import nf4_dequantize
from liger_trainer.kernels.lora.nf4 import nf4_dequantize_reference
from tests.kernels.test_nf4 import random_weight


def moved(weight, device):
    nested = weight.nested
    if nested is not None:
        nested = nested._replace(**{name: getattr(nested, name).to(device) for name in ("code", "absmax", "offset")})
    parts = {name: getattr(weight, name).to(device) for name in ("packed", "absmax", "code")}
    return weight._replace(**parts, nested=nested)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("shape", "blocksize"), [((3, 64), 64), ((40, 96), 64), ((7, 33), 32), ((1, 1), 64), ((9, 1000), 4096)], ids=str
)
def test_the_bits_of_the_reference(shape, blocksize, nested, dtype, device):
    torch.manual_seed(0)
    weight = moved(random_weight(*shape, nested, blocksize, quantised_scales=4), device)
    memory = torch.full((shape[0] * shape[1] + 8,), 7.0, dtype=dtype, device=device)
    out = memory[:-8].view(shape)
    assert nf4_dequantize(weight, out=out) is out
    assert torch.equal(out, nf4_dequantize_reference(weight, dtype))
    assert (memory[-8:] == 7).all()  # nothing is written behind it


def test_a_matrix_without_elements(device):
    assert nf4_dequantize(moved(random_weight(0, 64), device)).shape == (0, 64)
