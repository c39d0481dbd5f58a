"""Log-probabilities over a head from the row kernel against float64, under the interpreter or on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.head.cross_entropy_kernel import row_partials_
from liger_trainer.kernels.head.cross_entropy_torch import row_partials_torch_
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, linear_log_probs_reference
from liger_trainer.kernels.head.row_statistics import RowOptions, Shard
from liger_trainer.kernels.runtime import use_triton

IGNORE = -100
ALL_OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    # head trained, options
    "kept": (True, {"retain_memory": 2**20}),
    "recomputed": (True, {"retain_memory": 0}),
    "unit": (False, {"retain_memory": 0}),
    "expected": (True, {"expected_grad": 1.0}),
    "expected of a frozen head": (False, {"expected_grad": 1.0}),
}


@pytest.fixture(autouse=True)
def _kernels_run(device: str) -> None:
    if not use_triton(torch.empty(1, device=device)):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")


def _case(device: str, tokens: int, size: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=generator)
    weight = 3.0 / size**0.5 * torch.randn(vocab, size, generator=generator)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    target[2::3] = IGNORE
    return hidden.to(device), weight.to(device), target.to(device)


def _gradients(result: Any, leaves: list[torch.Tensor], entropy: bool, **options: Any) -> tuple[torch.Tensor, ...]:
    factors = torch.linspace(-1.0, 2.0, result.log_probs.numel()).to(result.log_probs)
    loss = (result.log_probs * factors).sum()
    if entropy:
        loss = loss + (result.entropy * factors.square()).sum()
    return torch.autograd.grad(loss, leaves, **options)


def _sum_gradients(result: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(-result.log_probs.sum() / 3, leaves)


def _assert_equal(ours: Any, exact: Any) -> None:
    torch.testing.assert_close(ours.to(exact.dtype), exact, atol=2e-5, rtol=2e-5)


@given(
    tokens=st.integers(1, 5),
    vocab=st.integers(1, 300),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([1.0, -1.3]),
    memory=st.integers(1, 4000),
    retain=st.none() | st.integers(0, 8000),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    entropy=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_against_float64(
    device: str, tokens: int, vocab: int, softcap: float | None, scale: float, memory: int, retain: int | None,
    trained: tuple[bool, bool, bool], entropy: bool, seed: int,
) -> None:  # fmt: skip
    hidden, weight, target = _case(device, tokens, 4, vocab, seed)
    leaves = [hidden, weight, torch.linspace(-1.0, 1.0, vocab, device=device)]
    doubles = [leaf.double().requires_grad_(train) for leaf, train in zip(leaves, trained)]
    for leaf, train in zip(leaves, trained):
        leaf.requires_grad_(train)
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": scale, "temperature": 0.7, "outputs": ALL_OUTPUTS}
    ours = linear_log_probs(*leaves[:2], target, leaves[2], logits_memory=memory, retain_memory=retain, **options)
    exact = linear_log_probs_reference(*doubles[:2], target, doubles[2], **options)
    for name in ("log_probs", *ALL_OUTPUTS):
        _assert_equal(getattr(ours, name), getattr(exact, name))
    wanted, exacts = ([leaf for leaf in group if leaf.requires_grad] for group in (leaves, doubles))
    for gradient, exact_gradient in zip(_gradients(ours, wanted, entropy), _gradients(exact, exacts, entropy)):
        _assert_equal(gradient, exact_gradient)


@pytest.mark.parametrize("vocab", [1, 128, 8193])
def test_vocabularies_of_one_and_of_many_tiles(device: str, vocab: int) -> None:
    hidden, weight, target = _case(device, 4, 8, vocab)
    leaves, doubles = (
        [make(t).requires_grad_() for t in (hidden, weight)] for make in (torch.clone, torch.Tensor.double)
    )
    ours = linear_log_probs(*leaves, target, outputs=ALL_OUTPUTS)
    exact = linear_log_probs_reference(*doubles, target, outputs=ALL_OUTPUTS)
    for name in ("log_probs", *ALL_OUTPUTS):
        _assert_equal(getattr(ours, name), getattr(exact, name))
    for gradient, exact_gradient in zip(_gradients(ours, leaves, True), _gradients(exact, doubles, True)):
        _assert_equal(gradient, exact_gradient)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(device: str, dtype: torch.dtype, way: str) -> None:
    hidden, weight, target = (t.to(dtype) if t.is_floating_point() else t for t in _case(device, 48, 32, 500))
    head_trained, options = WAYS[way]
    leaves = [hidden.requires_grad_(), weight.requires_grad_(head_trained)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    results = [
        linear_log_probs(*leaves, target, outputs=("entropy",), logits_memory=16 * 512 * 2, **options),
        linear_log_probs_reference(*leaves, target, outputs=("entropy",)),
        linear_log_probs_reference(*doubles, target, outputs=("entropy",)),
    ]
    entropy = way != "unit"
    ours, eager = (_gradients(result, wanted, entropy) for result in results[:2])
    exact = _gradients(results[2], doubles, entropy)
    for mine, theirs, truth in zip(ours, eager, exact):
        assert (mine.double() - truth).norm() <= 1.1 * (theirs.double() - truth).norm()
    for name in ("log_probs", "entropy"):
        mine, theirs, truth = (getattr(result, name).detach().double() for result in results)
        assert (mine - truth).norm() <= 1.1 * (theirs - truth).norm()


@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("expected", [1.0, 1 / 3])
def test_an_expected_gradient_against_float64(device: str, expected: float, head_trained: bool) -> None:
    hidden, weight, target = _case(device, 9, 16, 200)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(head_trained)]
    doubles = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    options: dict[str, Any] = {"softcap": 2.0, "temperature": 0.7, "outputs": ("entropy",)}
    wanted, exacts = ([leaf for leaf in group if leaf.requires_grad] for group in (leaves, doubles))
    for gradients_of in (_sum_gradients, functools.partial(_gradients, entropy=True)):
        ours = linear_log_probs(*leaves, target, logits_memory=4096, expected_grad=expected, **options)
        exact = linear_log_probs_reference(*doubles, target, **options)
        for gradient, exact_gradient in zip(gradients_of(ours, wanted), gradients_of(exact, exacts)):
            _assert_equal(gradient, exact_gradient)


@pytest.mark.parametrize("way", WAYS)
def test_two_runs_are_equal_bit_for_bit(device: str, way: str) -> None:
    hidden, weight, target = _case(device, 9, 16, 200)
    head_trained, options = WAYS[way]
    runs = []
    for _ in range(2):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_(head_trained)]
        result = linear_log_probs(*leaves, target, outputs=("entropy",), logits_memory=4096, **options)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        first = _gradients(result, wanted, True, retain_graph=True)
        runs.append((result.log_probs, result.entropy, *first))
        torch.testing.assert_close(_gradients(result, wanted, True), first)
    assert all(one.equal(other) for one, other in zip(*runs))


def test_confident_tokens_keep_their_digits(device: str) -> None:
    logits = torch.zeros(2, 50)
    logits[0, 3], logits[1, 4] = 24.0, 9.0
    target = torch.tensor([3, 4])
    identity = torch.eye(50)
    exact_leaf = logits.double().requires_grad_()
    exact = linear_log_probs_reference(exact_leaf, identity.double(), target)
    leaf = logits.to(device).requires_grad_()
    ours = linear_log_probs(leaf, identity.to(device), target.to(device))
    torch.testing.assert_close(ours.detach().double().cpu(), exact.detach(), rtol=1e-5, atol=0.0)
    (gradient,), (exact_gradient,) = (
        torch.autograd.grad(value.sum(), at) for value, at in ((ours, leaf), (exact, exact_leaf))
    )
    torch.testing.assert_close(gradient.double().cpu(), exact_gradient, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_masked_vocabulary_has_no_nan(device: str, entropy: bool) -> None:
    hidden, weight, _ = _case(device, 3, 4, 20)
    target = torch.tensor([1, 2, 7], device=device)
    bias = torch.zeros(20, device=device)
    bias[8:] = float("-inf")
    part = weight[:8].clone()
    leaves, parts = (
        [hidden.clone().requires_grad_(), weight.requires_grad_()],
        [hidden.requires_grad_(), part.requires_grad_()],
    )
    ours = linear_log_probs(*leaves, target, bias, outputs=("entropy", "sum_squared_probs"))
    exact = linear_log_probs_reference(*parts, target, outputs=("entropy", "sum_squared_probs"))
    _assert_equal(ours.entropy, exact.entropy)
    _assert_equal(ours.sum_squared_probs, exact.sum_squared_probs)
    d_hidden, d_weight = _gradients(ours, leaves, entropy)
    exact_hidden, exact_part = _gradients(exact, parts, entropy)
    _assert_equal(d_hidden, exact_hidden)
    _assert_equal(d_weight, F.pad(exact_part, (0, 0, 0, 12)))


@pytest.mark.parametrize("vocab_start", [0, 70, 140])
def test_partials_are_those_of_plain_torch(device: str, vocab_start: int) -> None:
    logits, target = 3.0 * torch.randn(6, 70), torch.tensor([0, 71, IGNORE, 139, 140, 209])
    bias = torch.randn(70)
    options, shard = RowOptions(IGNORE, 0.0, 0.0, 8.0, 1.2, 0.8), Shard(vocab_start, 210)
    exact = torch.empty(6, 8, dtype=torch.float64)
    row_partials_torch_(logits.double(), target, exact, options, shard, bias.double())
    ours = torch.full((6, 8), float("nan"), device=device)
    buffer = torch.full((6, 128), float("nan"), device=device)
    buffer[:, :70] = logits.to(device)
    row_partials_(buffer[:, :70], target.to(device), ours, options, shard, bias.to(device), width=128)
    exact[:, 6] *= 1.4426950408889634  # the kernel compares powers of two
    torch.testing.assert_close(ours.double().cpu(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("label", [-1, 20, 2**40])
def test_a_label_outside_the_vocabulary_is_nan(device: str, label: int) -> None:
    if device == "cpu":
        pytest.skip("on the CPU such a label is an error")
    hidden, weight, target = _case(device, 3, 4, 20)
    target[0] = label
    result = linear_log_probs(hidden.requires_grad_(), weight, target, outputs=("entropy",))
    assert result.log_probs.isnan().tolist() == [True, False, False]
    (gradient,) = torch.autograd.grad(result.log_probs.sum(), hidden)
    assert gradient.isnan().any(-1).tolist() == [True, False, False]


def test_compiles_to_one_graph(device: str) -> None:
    hidden, weight, target = _case(device, 5, 8, 30)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def step(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = linear_log_probs(hidden * 2.0, weight, target, outputs=("entropy",), logits_memory=2 * 64 * 4)
        return (result.log_probs.exp() + 0.1 * result.entropy).sum()

    loss, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves), step(*leaves)
    _assert_equal(loss, expected)
    for ours, exact in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)):
        _assert_equal(ours, exact)
