"""relu_squared's reference against transformers, and its kernels compiled for every GPU."""

import pytest
import torch
from transformers.activations import ACT2FN

from liger_trainer.kernels.mlp import relu_squared as operators
from liger_trainer.kernels.mlp.relu_squared import relu_squared, relu_squared_reference
from tests.aot import TARGETS, compile_launch, recorded_launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_the_models_own(dtype):
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(relu_squared_reference(x), ACT2FN["relu2"](x))


def test_float64_runs_as_reference(device):
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(relu_squared, x)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_ahead_of_time(target, dtype):
    x = torch.zeros(4, 1000, dtype=dtype)
    with recorded_launches() as launches:
        operators._relu_squared(x, False)
        operators._relu_squared_backward(x, x)
    assert len(launches) == 2
    for launch, tensors in zip(launches, (2, 3)):
        compiled = compile_launch(launch, target)
        if target == "sm_90":
            assert compiled.asm["ptx"].count(".v4.b32") == tensors
