"""Loss and gradients of a model with and without the kernels, and how they are compared."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

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


def image_batch(model, seed: int = 0) -> dict[str, torch.Tensor]:
    """Text with one image of four tokens, number 120, for a tiny Qwen VL model."""
    ids = torch.tensor([[5, 122, 120, 120, 120, 120, 123, 7, 8]])
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(ids >= 120, -100),
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 120).int(),
    }


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    scale = one.double().norm().clamp_min(1e-30)
    return float((one.double() - other.double()).norm() / scale)


def total_error(truth: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    """Over all gradients together, as single tensors of a tiny model are few samples of the rounding noise.

    Gradients that are nothing but noise are left out: a key's bias, which a softmax does not see.
    """
    largest = max(float(value.norm()) for value in truth.values())
    return sum(relative(v, got[name]) ** 2 for name, v in truth.items() if float(v.norm()) > 1e-5 * largest) ** 0.5


def assert_as_near_to_the_truth(
    native,
    config,
    batch_of: Callable[..., dict[str, torch.Tensor]],
    under: Callable[[], AbstractContextManager] = nullcontext,
    times: float = 1.3,
) -> None:
    """With the kernels `native` is at most `times` as far from fp32 as without them, in the middle of 12 batches.

    The quotient of two rounding errors scatters, and is 10 where one of the two sends a token to another expert: the
    middle of 12 of Qwen3-Next is between 0.8 and 1.4. Where it is too large, it is that of 36. Where every bit is the
    same, one batch says it all.

    Args:
        native: A model, which stays as it is.
        config: The `liger_kernel_config`.
        batch_of: `batch_of(model, seed=...)` gives a batch.
        under: Gives the context of the forwards that round.
        times: How many times as far.
    """
    exact, patched = copy.deepcopy(native).float(), copy.deepcopy(native)
    apply_liger_kernel(patched, config)
    quotients = []
    for seed in range(36):
        if seed == 12 and statistics.median(quotients) <= times:
            return
        batch = batch_of(native, seed=seed)
        truth = loss_and_gradients(exact, batch)
        batch = {name: x.to(native.dtype) if x.is_floating_point() else x for name, x in batch.items()}
        with under():
            ours, theirs = loss_and_gradients(patched, batch), loss_and_gradients(native, batch)
        assert {name: value.dtype for name, value in ours.items()} == {name: v.dtype for name, v in theirs.items()}
        if all(torch.equal(value, theirs[name]) for name, value in ours.items()):
            return
        quotients.append(total_error(truth, ours) / total_error(truth, theirs))
    assert statistics.median(quotients) <= times


def assert_same(got, expected, tolerance=1e-5, floor=0.0) -> None:
    """Every tensor differs by at most `tolerance` of its norm, and `floor` of the largest norm.

    The latter is the rounding of gradients that are small as sums of large terms, such as those of keys' biases.
    """
    assert got.keys() == expected.keys()
    noise = floor * max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        error = (got[name].double() - value.double()).norm()
        assert error <= tolerance * value.double().norm() + noise, f"{name}: {relative(value, got[name]):.1e}"


def apply_unchanged(model, batch, config=None, tolerance=1e-5, floor=0.0):
    """Applies the kernels, checks that loss and gradients stay what they were, and returns the report."""
    expected = loss_and_gradients(model, batch)
    report = apply_liger_kernel(model, config)
    assert_same(loss_and_gradients(model, batch), expected, tolerance, floor)
    return report
