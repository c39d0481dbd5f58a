"""Each row of the table of activations: its derivative, and its kernels against the row in plain torch, compiled."""

import pytest
import torch

from liger_trainer.kernels.activation import ACTIVATIONS, NAMES, GatedActivation
from liger_trainer.kernels.mlp import gated_activation as operators
from tests.accuracy import assert_no_worse, in_float64, seeded_randn, value_and_gradients
from tests.aot import compile_launch, on_targets, recorded_launches

rows = pytest.mark.parametrize("name", ACTIVATIONS)


def run(name, gate, up):
    return operators.gated_activation(gate, up, GatedActivation.of(name), False)


@rows
def test_the_derivative_is_autograds(name):
    x = seeded_randn(1000, dtype=torch.float64, scale=3.0).requires_grad_()
    (right,) = torch.autograd.grad(ACTIVATIONS[name].value(x).sum(), x)
    torch.testing.assert_close(ACTIVATIONS[name].derivative(x.detach()), right)


@pytest.mark.kernel
@rows
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_are_no_worse_than_the_row(name, dtype, device):
    gate, up = (seeded_randn(8, 130, seed=i, scale=3.0, dtype=dtype, device=device).requires_grad_() for i in (0, 1))

    def reference(gate, up):
        return ACTIVATIONS[name].value(gate) * up

    ours, right = value_and_gradients(lambda *x: run(name, *x), gate, up), in_float64(reference, gate, up)
    if dtype == torch.float32:
        for mine, exact in zip(ours, right):
            torch.testing.assert_close(mine.double(), exact, rtol=3e-6, atol=6e-5)
    else:
        assert_no_worse(ours, value_and_gradients(reference, gate, up), right)


@pytest.mark.parametrize(("target", "name"), on_targets(*((name,) for name in NAMES)))
def test_compiles_ahead_of_time(target, name):
    gate, up = (torch.zeros(4, 64, dtype=torch.bfloat16) for _ in range(2))
    with recorded_launches() as launches:
        run(name, gate, up)
        operators.gated_activation_backward(gate, gate, up, GatedActivation.of(name), True, True)
    for launch in launches:
        assert compile_launch(launch, target)
