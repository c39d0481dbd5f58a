"""Log-probabilities of given logits: values and gradients in float64, strides, backward protocol."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.head.log_probs import log_probs, log_probs_reference
from tests.kernels.head.heads import IGNORE, weighted_loss

ALL_OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")
EVERYTHING: dict[str, Any] = {"softcap": 4.0, "logit_scale": 1.5, "temperature": 0.8}


def _case(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (7,), seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, 20, generator=generator, dtype=torch.float64).mul(3.0).to(dtype)
    target = torch.randint(0, 20, shape, generator=generator)
    target.view(-1)[::4] = IGNORE
    return logits.requires_grad_(), target


def _loss(function: Any, logits: torch.Tensor, target: torch.Tensor, entropy: bool = True, **options: Any) -> Any:
    return weighted_loss(function(logits, target, outputs=("entropy",), **options), entropy)


@given(
    shape=st.sampled_from([(1,), (6,), (2, 5), (2, 3, 4)]),
    softcap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, -0.5]),
    temperature=st.sampled_from([1.0, 0.7]),
    entropy=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_outputs_and_gradients_equal_the_reference(
    shape: tuple[int, ...], softcap: float | None, scale: float, temperature: float, entropy: bool, seed: int
) -> None:
    logits, target = _case(shape=shape, seed=seed)
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": scale, "temperature": temperature}
    result = log_probs(logits, target, outputs=ALL_OUTPUTS, **options)
    expected = log_probs_reference(logits, target, outputs=ALL_OUTPUTS, **options)
    for name in ("log_probs", *ALL_OUTPUTS):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name))
    ours, theirs = (
        torch.autograd.grad(_loss(function, logits, target, entropy, **options), logits)
        for function in (log_probs, log_probs_reference)
    )
    torch.testing.assert_close(ours, theirs)


def test_gradcheck() -> None:
    logits, target = _case()

    def outputs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = log_probs(logits, target, outputs=("entropy",), **EVERYTHING)
        return result.log_probs, result.entropy

    assert torch.autograd.gradcheck(outputs, (logits,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_fp32_inside(dtype: torch.dtype) -> None:
    logits, target = _case(dtype)
    before = logits.detach().clone()
    result = log_probs(logits, target, outputs=ALL_OUTPUTS)
    exact = log_probs_reference(logits.detach().double(), target, outputs=ALL_OUTPUTS)
    for name in ("log_probs", *ALL_OUTPUTS):
        value = getattr(result, name)
        assert value.dtype == (torch.bool if name == "top1" else torch.float32)
        assert not value[::4].any()
        torch.testing.assert_close(value, getattr(exact, name).to(value.dtype), rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(_loss(log_probs, logits, target), logits)
    assert gradient.dtype == dtype
    assert not gradient[::4].any()
    assert torch.equal(logits, before)
    assert torch.equal(log_probs(logits, target), result.log_probs)


def test_strided_logits() -> None:
    logits, target = _case(shape=(3, 4))
    shifted, labels = logits[:, :-1], target[:, 1:]
    transposed = logits.transpose(0, 1)
    for x, t in ((shifted, labels), (transposed, target.t()), (logits[..., ::2], target.clamp(max=9))):
        ours, theirs = (torch.autograd.grad(_loss(f, x, t), logits) for f in (log_probs, log_probs_reference))
        torch.testing.assert_close(ours, theirs)


def test_under_activation_checkpointing() -> None:
    logits, target = _case()
    expected = torch.autograd.grad(_loss(log_probs, logits, target), logits)
    checkpoint(lambda x: _loss(log_probs, x, target), logits, use_reentrant=False).backward()
    torch.testing.assert_close(logits.grad, expected[0])


def test_nothing_and_everything_ignored() -> None:
    for shape in ((0,), (5,)):
        logits, target = _case(shape=shape)
        _loss(log_probs, logits, torch.full_like(target, IGNORE)).backward()
        assert not logits.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"outputs": ("entropies",)}, "entropies"),
        ({"target": torch.zeros(6, dtype=torch.long)}, "shape"),
        ({"target": torch.full((7,), 20)}, "label 20"),
        ({"logits": torch.zeros(7, 20, dtype=torch.long)}, "floats"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    logits, target = _case()
    with pytest.raises(ValueError, match=message):
        log_probs(**{"logits": logits, "target": target, **change})


# The kernels, under the interpreter or on a GPU.


LAYOUTS = {
    "rows": lambda x: x.flatten(0, 1),
    "batched": lambda x: x,
    "shifted": lambda x: x[:, :-1],
    "transposed": lambda x: x.transpose(0, 1),
    "strided vocabulary": lambda x: x[..., ::2],
}


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "logit_scale": -1.5, "temperature": 0.7}], ids=str)
def test_against_float64(options, layout, dtype, device):
    generator = torch.Generator().manual_seed(0)
    leaf = (3.0 * torch.randn(2, 4, 150, generator=generator)).to(dtype).to(device).requires_grad_()
    exact_leaf = leaf.detach().double().requires_grad_()
    results = []
    for function, x in ((log_probs, leaf), (log_probs_reference, exact_leaf)):
        logits = LAYOUTS[layout](x)
        target = torch.arange(logits[..., 0].numel(), device=device).view(logits.shape[:-1]) * 7
        target = target.masked_fill(target % 3 == 0, -100)
        found = function(logits, target, outputs=ALL_OUTPUTS, **options)
        values = [found.log_probs, *(getattr(found, name) for name in ALL_OUTPUTS)]
        results.append([*(value.detach() for value in values), *torch.autograd.grad(weighted_loss(found), x)])
    for ours, exact in zip(*results):
        tolerance = 2e-5 if ours.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours.to(exact.dtype), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.kernel
def test_a_label_out_of_range_makes_its_token_nan_and_no_other(device):
    if device == "cpu":
        pytest.skip("on the CPU it is an error")
    logits = torch.randn(3, 20, device=device, requires_grad=True)
    found = log_probs(logits, torch.tensor([20, 3, -100], device=device))
    assert found.isnan().tolist() == [True, False, False]
