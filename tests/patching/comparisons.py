"""Loss and gradients of a model with and without the kernels, and how they are compared."""

from __future__ import annotations

import torch

from liger_trainer import apply_liger_kernel

LAYERS = {"linear_cross_entropy": False, "cross_entropy": False}  # the head has tests of its own


def loss_and_gradients(model, batch) -> dict[str, torch.Tensor]:
    """The loss and the gradients of all parameters that get one, with the same dropout masks at every call."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    scale = one.double().norm().clamp_min(1e-30)
    return float((one.double() - other.double()).norm() / scale)


def total_error(truth: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    """Over all gradients together, as single tensors of a tiny model are few samples of the rounding noise.

    Gradients that are nothing but noise are left out: a key's bias, which a softmax does not see.
    """
    largest = max(float(value.norm()) for value in truth.values())
    return sum(relative(v, got[name]) ** 2 for name, v in truth.items() if float(v.norm()) > 1e-5 * largest) ** 0.5


def assert_same(got, expected, tolerance=1e-5, floor=0.0) -> None:
    """Every tensor differs by at most `tolerance` of its norm, and `floor`, the norm of pure rounding noise."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = (got[name].double() - value.double()).norm()
        assert error <= tolerance * value.double().norm() + floor, f"{name}: {relative(value, got[name]):.1e}"


def apply_unchanged(model, batch, config=None, tolerance=1e-5, floor=0.0):
    """Applies the kernels, checks that loss and gradients stay what they were, and returns the report."""
    expected = loss_and_gradients(model, batch)
    report = apply_liger_kernel(model, config)
    assert_same(loss_and_gradients(model, batch), expected, tolerance, floor)
    return report
