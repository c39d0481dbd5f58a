"""Log-probabilities over a head: gradients in float64, matmuls, backward protocol, compilation, memory."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.head import linear_log_probs as operator
from liger_trainer.kernels.head import linear_log_probs_gradients
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, linear_log_probs_reference
from tests.accuracy import assert_no_worse
from tests.device import assert_no_host_sync, peak_memory_of_one_run
from tests.kernels.head.heads import (
    EXAMPLES,
    HIDDEN,
    IGNORE,
    MIB,
    ROW,
    TOKENS,
    assert_close,
    assert_refused,
    doubled,
    gpu_head,
    needing_gradients,
    recorded_matmuls,
    relative_error,
    small_head,
    weighted_loss,
)

ALL_OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")
ALL_RETAINED = {"logits_memory": 5 * ROW, "retain_memory": TOKENS * ROW}
NONE_RETAINED = {"logits_memory": 5 * ROW, "retain_memory": 0}
SOME_RETAINED = {"logits_memory": 5 * ROW, "retain_memory": 3 * ROW}
BUDGETS = [{"logits_memory": 5 * ROW}, ALL_RETAINED, NONE_RETAINED, SOME_RETAINED]


def _run(hidden: Any, weight: Any, bias: Any, target: Any, **options: Any) -> Any:
    return linear_log_probs(hidden, weight, target, bias, **{"logits_memory": 5 * ROW, **options})


def _reference(hidden: Any, weight: Any, bias: Any, target: Any, **options: Any) -> Any:
    for name in ("logits_memory", "retain_memory"):
        options.pop(name, None)
    return linear_log_probs_reference(hidden, weight, target, bias, **options)


def _loss(function: Any, *inputs: Any, entropy: bool = True, **options: Any) -> torch.Tensor:
    return weighted_loss(function(*inputs, outputs=("entropy",), **options), entropy)


def test_matches_trls_head() -> None:
    function = pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    *leaves, target = small_head()
    target = target.clamp(min=0)
    ours = _run(*leaves, target, outputs=ALL_OUTPUTS, softcap=4.0, temperature=0.8, logit_scale=1.5)
    theirs = function.apply(*leaves, target, 0.8, 7, 4.0, 1.5)
    named = (ours.log_probs, ours.entropy, ours.sum_squared_probs, ours.mean_logit, ours.top1)
    for mine, other in zip(named, theirs):
        torch.testing.assert_close(mine, other)
        assert mine.requires_grad == other.requires_grad


@pytest.mark.parametrize(
    ("trained", "entropy", "options", "matmuls"),
    [
        ((), False, NONE_RETAINED, 1),
        ((0,), False, NONE_RETAINED, 2),  # the frozen head
        ((0,), False, ALL_RETAINED, 2),
        ((0,), True, ALL_RETAINED, 4),  # whose gradient of the entropies is not computed in advance
        ((1,), True, NONE_RETAINED, 3),
        ((1,), True, ALL_RETAINED, 2),
        ((0, 1, 2), True, ALL_RETAINED, 3),
        ((0, 1, 2), True, NONE_RETAINED, 4),
        ((0, 1, 2), True, SOME_RETAINED, 4 - 3 / TOKENS),
        ((0, 1), False, {"logits_memory": 5 * ROW}, 4 - 5 / TOKENS),
    ],
)
def test_no_matmul_more_than_the_gradients_and_the_budget_need(
    trained: tuple[int, ...], entropy: bool, options: dict[str, Any], matmuls: float
) -> None:
    """`matmuls` is in units of N: how often a token's logits, or their gradient, went through one."""
    *leaves, target = small_head(trained=trained)
    with recorded_matmuls() as tokens:
        loss = _loss(_run, *leaves, target, entropy=entropy, **options)
        if trained:
            loss.backward()
    assert sum(tokens) / TOKENS == pytest.approx(matmuls)
    assert all(leaf.grad is None for leaf in leaves if not leaf.requires_grad)
    if trained:
        wanted = needing_gradients(leaves)
        expected = torch.autograd.grad(_loss(_reference, *leaves, target, entropy=entropy), wanted)
        assert max(relative_error(leaf.grad, each) for leaf, each in zip(wanted, expected)) < 1e-5


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trained", [(0,), (0, 1, 2)])
def test_retained_graph_gives_the_right_gradient_every_time(trained: tuple[int, ...], budget: dict[str, int]) -> None:
    *leaves, target = small_head(trained=trained)
    wanted = needing_gradients(leaves)
    ours, theirs = (_loss(function, *leaves, target, entropy=False, **budget) for function in (_run, _reference))
    taken = []
    for factor in (1.0, 2.0, 0.0, -0.5):
        gradients = torch.autograd.grad(ours, wanted, torch.tensor(factor), retain_graph=factor != -0.5)
        expected = torch.autograd.grad(theirs, wanted, torch.tensor(factor), retain_graph=True)
        for ours_now, each in zip(gradients, expected):
            assert (ours_now - each).norm() <= 1e-5 * each.norm()
        taken.append((gradients, [gradient.clone() for gradient in gradients]))
    for gradients, copies in taken:  # no later backward wrote into what an earlier one returned
        assert all(gradient.equal(copy) for gradient, copy in zip(gradients, copies))


def test_only_the_last_backward_writes_over_the_retained_logits() -> None:
    *leaves, target = small_head()
    loss = _loss(_run, *leaves, target)
    run_chunks = linear_log_probs_gradients._run_chunks
    with mock.patch.object(linear_log_probs_gradients, "_run_chunks", side_effect=run_chunks) as run:
        torch.autograd.grad(loss, leaves, retain_graph=True)
        torch.autograd.grad(loss, leaves)
    assert [call.kwargs["overwrite"] for call in run.call_args_list] == [False, True]


def test_retained_logits_are_the_memory_of_the_other_chunks() -> None:
    *leaves, target = small_head()
    allocated: list[tuple[int, ...]] = []
    new_empty = torch.Tensor.new_empty

    def spy(self: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
        tensor = new_empty(self, *size, **kwargs)
        allocated.append(tuple(tensor.shape))
        return tensor

    with mock.patch.object(torch.Tensor, "new_empty", spy):
        loss = _loss(_run, *leaves, target)
        assert [shape for shape in allocated if len(shape) == 2] == [(5, 64)]
        loss.backward()
    assert [shape for shape in allocated if len(shape) == 2] == [(5, 64)]  # forward and backward, three chunks each


def test_no_grad_retains_nothing_and_leaves_the_inputs_alone() -> None:
    *leaves, target = small_head()
    copies = [leaf.detach().clone() for leaf in leaves]
    with torch.no_grad(), mock.patch.object(operator, "attach_gradients", side_effect=AssertionError):
        result = _run(*leaves, target, outputs=ALL_OUTPUTS)
    assert not result.log_probs.requires_grad
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(leaves, copies))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_fp32_and_ignored_tokens_zero(dtype: torch.dtype) -> None:
    *leaves, target = small_head(dtype)
    result = _run(*leaves, target, outputs=ALL_OUTPUTS)
    for name in ("log_probs", *ALL_OUTPUTS):
        value = getattr(result, name)
        assert value.dtype == (torch.bool if name == "top1" else torch.float32)
        assert not value[::4].any()
    alone = _run(*leaves, target)
    assert alone.equal(result.log_probs)


def test_ignored_tokens_have_no_gradient_whatever_comes_from_upstream() -> None:
    for trained in ((0,), (0, 1)):
        *leaves, target = small_head(trained=trained)
        upstream = torch.where(target == IGNORE, float("inf"), 1.0)
        (gradient,) = torch.autograd.grad(_run(*leaves, target), leaves[0], upstream)
        assert gradient.isfinite().all()
        assert gradient[::4].eq(0).all()


def test_everything_ignored_and_nothing_at_all_backpropagate_zeros() -> None:
    for tokens in (TOKENS, 0):
        for trained in ((0,), (0, 1, 2)):
            *leaves, target = small_head(tokens=tokens, trained=trained)
            _loss(_run, *leaves, torch.full_like(target, IGNORE)).backward()
            for leaf in needing_gradients(leaves):
                assert leaf.grad.shape == leaf.shape
                assert leaf.grad.eq(0).all()


def test_strided_and_batched_inputs() -> None:
    hidden, weight, bias, target = small_head(tokens=12)
    strided = hidden.detach().view(3, 4, HIDDEN).transpose(0, 1).requires_grad_()
    tied = weight.detach().t().contiguous().t().requires_grad_()  # column-major, as some tied embeddings are
    labels = target.view(3, 4).t()
    result = _run(strided, tied, bias, labels, outputs=("entropy",))
    expected = _reference(hidden, weight, bias, target, outputs=("entropy",))
    torch.testing.assert_close(result.log_probs, expected.log_probs.view(3, 4).t())
    torch.testing.assert_close(result.entropy, expected.entropy.view(3, 4).t())
    gradients = torch.autograd.grad(result.log_probs.sum(), (strided, tied, bias))
    d_hidden, *rest = torch.autograd.grad(expected.log_probs.sum(), (hidden, weight, bias))
    torch.testing.assert_close(gradients, (d_hidden.view(3, 4, HIDDEN).transpose(0, 1), *rest))
    assert gradients[1].stride() == tied.stride()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    *leaves, target = small_head()
    checkpoint(lambda *leaves: _loss(_run, *leaves, target), *leaves, use_reentrant=reentrant).backward()
    expected = torch.autograd.grad(_loss(_reference, *leaves, target), leaves)
    assert max(relative_error(leaf.grad, each) for leaf, each in zip(leaves, expected)) < 1e-5


@pytest.mark.parametrize("trained", [(0,), (0, 1, 2)])
def test_compiles_to_one_graph_for_any_number_of_tokens(trained: tuple[int, ...]) -> None:
    def step(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 3.0 * _loss(_run, hidden * 2.0, weight, bias, target)

    torch._dynamo.reset()  # or its limit on recompilations counts all cases together
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (TOKENS, 21):
        *leaves, target = small_head(tokens=tokens, trained=trained)
        wanted = needing_gradients(leaves)
        loss, expected = compiled(*leaves, target), step(*leaves, target)
        torch.testing.assert_close(loss, expected)
        found, gradients = torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted)
        # Some CPUs' matmuls sum in another order where memory is aligned otherwise.
        assert max(map(relative_error, found, gradients)) < 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": torch.zeros(13, 7)}, ["`hidden`", "(13, 7)", "`weight`", "(20, 6)"]),
        ({"target": torch.full((13,), 20)}, ["label 20", "[0, 20)"]),
        ({"retain_memory": -1}, ["`retain_memory`", "-1"]),
        ({"softcap": 0.0}, ["`softcap`", "more than 0"]),
        ({"outputs": ("log_probs",)}, ["['log_probs']", "'entropy'"]),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    hidden, weight, _, target = small_head()
    assert_refused(linear_log_probs, words, **{"hidden": hidden, "weight": weight, "target": target, **changes})


# The kernels, under the interpreter or on a GPU.


WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    # head trained, options
    "retained": (True, {"retain_memory": 2**20}),
    "recomputed": (True, {"retain_memory": 0}),
    "frozen head": (False, {"retain_memory": 0}),
    "expected": (True, {"expected_grad": 1.0}),
    "expected of a frozen head": (False, {"expected_grad": 1.0}),
}


def _kernel_case(device: str, tokens: int, size: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, size, generator=generator)
    weight = 3.0 / size**0.5 * torch.randn(vocab, size, generator=generator)
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    target[2::3] = IGNORE
    return hidden.to(device), weight.to(device), target.to(device)


def _gradients(result: Any, leaves: list[torch.Tensor], entropy: bool) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(weighted_loss(result, entropy), leaves)


def _sum_gradients(result: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(-result.log_probs.sum() / 3, leaves)


def _assert_equal(ours: Any, exact: Any) -> None:
    # A sum over the vocabulary rounds its largest terms, so an element near zero is no closer than the others.
    assert_close(ours, exact, atol=2e-5 * max(1.0, exact.double().abs().max().item()))


@pytest.mark.kernel
@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
def test_the_entropy_of_large_logits_is_no_worse_than_eager(device: str, size: float) -> None:
    hidden, weight, target = _kernel_case(device, 32, 16, 700)
    weight *= size
    target.clamp_(min=0)
    ours = linear_log_probs(hidden, weight, target, outputs=("entropy",), retain_memory=0).entropy
    eager = linear_log_probs_reference(hidden, weight, target, outputs=("entropy",)).entropy
    exact = linear_log_probs_reference(hidden.double(), weight.double(), target, outputs=("entropy",)).entropy
    assert ours is not None
    assert eager is not None
    assert exact is not None
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6


@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(1, 300),
    softcap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, -0.5]),
    temperature=st.sampled_from([1.0, 2.0]),
    memory=st.integers(1, 5000),
    retain=st.none() | st.integers(0, 9000),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    entropy=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_outputs_and_gradients_equal_the_reference(
    backend: tuple[str, torch.dtype], tokens: int, vocab: int, softcap: float | None, scale: float, temperature: float,
    memory: int, retain: int | None, trained: tuple[bool, bool, bool], entropy: bool, seed: int,
) -> None:  # fmt: skip
    device, dtype = backend
    hidden, weight, target = _kernel_case(device, tokens, 4, vocab, seed)
    tensors = (hidden, weight, torch.linspace(-1.0, 1.0, vocab, device=device))
    leaves = [tensor.to(dtype).requires_grad_(train) for tensor, train in zip(tensors, trained)]
    doubles = doubled(leaves)
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": scale, "temperature": temperature}
    options |= {"outputs": ALL_OUTPUTS}
    ours = linear_log_probs(*leaves[:2], target, leaves[2], logits_memory=memory, retain_memory=retain, **options)
    exact = linear_log_probs_reference(*doubles[:2], target, doubles[2], **options)
    for name in ("log_probs", *ALL_OUTPUTS):
        _assert_equal(getattr(ours, name), getattr(exact, name))
    wanted, exacts = needing_gradients(leaves), needing_gradients(doubles)
    for gradient, exact_gradient in zip(_gradients(ours, wanted, entropy), _gradients(exact, exacts, entropy)):
        _assert_equal(gradient, exact_gradient)


@pytest.mark.kernel
@pytest.mark.parametrize("vocab", [1, 128, 8193])
def test_vocabularies_of_one_and_of_many_tiles(device: str, vocab: int) -> None:
    hidden, weight, target = _kernel_case(device, 4, 8, vocab)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    doubles = doubled(leaves)
    ours = linear_log_probs(*leaves, target, outputs=ALL_OUTPUTS)
    exact = linear_log_probs_reference(*doubles, target, outputs=ALL_OUTPUTS)
    for name in ("log_probs", *ALL_OUTPUTS):
        _assert_equal(getattr(ours, name), getattr(exact, name))
    for gradient, exact_gradient in zip(_gradients(ours, leaves, True), _gradients(exact, doubles, True)):
        _assert_equal(gradient, exact_gradient)


@pytest.mark.kernel
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(device: str, dtype: torch.dtype, way: str) -> None:
    hidden, weight, target = (t.to(dtype) if t.is_floating_point() else t for t in _kernel_case(device, 48, 32, 500))
    head_trained, options = WAYS[way]
    leaves = [hidden.requires_grad_(), weight.requires_grad_(head_trained)]
    doubles = doubled(leaves)
    results = [
        linear_log_probs(*leaves, target, outputs=("entropy",), logits_memory=16 * 512 * 2, **options),
        linear_log_probs_reference(*leaves, target, outputs=("entropy",)),
        linear_log_probs_reference(*doubles, target, outputs=("entropy",)),
    ]
    entropy = way != "frozen head"
    ours, eager = (_gradients(result, needing_gradients(leaves), entropy) for result in results[:2])
    exact = _gradients(results[2], needing_gradients(doubles), entropy)
    assert_no_worse(ours, eager, exact)
    for name in ("log_probs", "entropy"):
        mine, theirs, truth = (getattr(result, name).detach().double() for result in results)
        assert (mine - truth).norm() <= 1.1 * (theirs - truth).norm()


@pytest.mark.kernel
@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("expected", [1.0, 1 / 3])
def test_an_expected_gradient_against_float64(device: str, expected: float, head_trained: bool) -> None:
    hidden, weight, target = _kernel_case(device, 9, 16, 200)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(head_trained)]
    doubles = doubled(leaves)
    options: dict[str, Any] = {"softcap": 2.0, "temperature": 0.7, "outputs": ("entropy",)}
    wanted, exacts = needing_gradients(leaves), needing_gradients(doubles)
    for gradients_of in (_sum_gradients, functools.partial(_gradients, entropy=True)):
        ours = linear_log_probs(*leaves, target, logits_memory=4096, expected_grad=expected, **options)
        exact = linear_log_probs_reference(*doubles, target, **options)
        for gradient, exact_gradient in zip(gradients_of(ours, wanted), gradients_of(exact, exacts)):
            _assert_equal(gradient, exact_gradient)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_masked_vocabulary_has_no_nan(backend: tuple[str, torch.dtype], entropy: bool) -> None:
    hidden, weight = (tensor.to(backend[1]) for tensor in _kernel_case(backend[0], 3, 4, 20)[:2])
    target = torch.tensor([1, 2, 7], device=hidden.device)
    bias = torch.zeros(20, device=hidden.device)
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


@pytest.mark.kernel
@pytest.mark.parametrize("label", [-1, 20, 2**40])
def test_a_label_outside_the_vocabulary_is_nan(device: str, label: int) -> None:
    if device == "cpu":
        pytest.skip("on the CPU such a label is an error")
    hidden, weight, target = _kernel_case(device, 3, 4, 20)
    target[0] = label
    result = linear_log_probs(hidden.requires_grad_(), weight, target, outputs=("entropy",))
    assert result.log_probs.isnan().tolist() == [True, False, False]
    (gradient,) = torch.autograd.grad(result.log_probs.sum(), hidden)
    assert gradient.isnan().any(-1).tolist() == [True, False, False]


# Real shapes, memory and waiting on a GPU.


GPU_WAYS = {
    "retained": (True, 2**32),
    "recomputed": (True, 0),
    "frozen head": (False, 0),
}  # head trained, bytes


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
def test_nothing_synchronises(way: str) -> None:
    hidden, weight, target = gpu_head(1000, 256, 5003)
    weight.requires_grad_(GPU_WAYS[way][0])
    bias = torch.zeros(5003, device="cuda", requires_grad=GPU_WAYS[way][0])

    def step() -> None:
        budgets = {"logits_memory": 2 * MIB, "retain_memory": GPU_WAYS[way][1]}
        weighted_loss(
            linear_log_probs(hidden, weight, target, bias, outputs=ALL_OUTPUTS, softcap=30.0, **budgets), entropy=False
        ).backward()

    assert_no_host_sync(step)


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
@pytest.mark.parametrize(("vocab", "softcap"), [(128256, None), (50257, 30.0)])
def test_gradients_are_no_further_from_float64_than_eager_bf16(vocab: int, softcap: float | None, way: str) -> None:
    hidden, weight, target = gpu_head(1024, 1024, vocab)
    weight.requires_grad_(GPU_WAYS[way][0])
    entropy = way != "frozen head"
    options: dict[str, Any] = {"softcap": softcap, "temperature": 0.9, "outputs": ALL_OUTPUTS}
    doubles = doubled((hidden, weight))
    truth = linear_log_probs_reference(*doubles, target, **options)
    eager = linear_log_probs_reference(hidden, weight, target, **options)
    ours = linear_log_probs(hidden, weight, target, logits_memory=256 * MIB, retain_memory=GPU_WAYS[way][1], **options)
    for name in ("log_probs", "entropy", "mean_logit", "sum_squared_probs"):
        assert relative_error(getattr(ours, name), getattr(truth, name)) <= 1.1 * relative_error(
            getattr(eager, name), getattr(truth, name)
        )
    assert (ours.top1 == truth.top1).float().mean() > 0.99
    wanted, exacts = needing_gradients((hidden, weight)), needing_gradients(doubles)
    gradients = [torch.autograd.grad(weighted_loss(result, entropy), wanted) for result in (ours, eager)]
    for mine, theirs, exact in zip(*gradients, torch.autograd.grad(weighted_loss(truth, entropy), exacts)):
        assert relative_error(mine, exact) <= 1.1 * relative_error(theirs, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [*GPU_WAYS, "default"])
def test_peak_memory_is_what_the_budgets_say(way: str) -> None:
    tokens, size, vocab = 8192, 1024, 128256
    hidden, weight, target = gpu_head(tokens, size, vocab)
    trained, retain = GPU_WAYS.get(way, (True, None))
    weight.requires_grad_(trained)

    def step() -> None:
        weighted_loss(
            linear_log_probs(hidden, weight, target, outputs=("entropy",), retain_memory=retain), entropy=False
        ).backward()

    step()  # workspaces and compiled kernels
    hidden.grad = weight.grad = None
    peak = peak_memory_of_one_run(step)
    row, d_hidden = 2 * vocab, 2 * tokens * size
    d_weight = 2 * vocab * size if trained else 2 * d_hidden  # the unit gradient is fp32
    rows = {"retained": tokens, "recomputed": 2048, "default": 2048, "frozen head": 2048}[way]
    assert peak <= rows * row + d_hidden + d_weight + 4 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [True, False])
def test_a_pair_of_32k_tokens_fits_the_default_budget(trained: bool) -> None:
    """Gemma's vocabulary: all logits would be 32 GiB."""
    hidden, weight, target = gpu_head(2 * 32768, 2560, 262208)
    weight.requires_grad_(trained)

    def step() -> None:
        result = linear_log_probs(hidden, weight, target, softcap=30.0, outputs=("entropy",))
        weighted_loss(result, entropy=False).backward()

    d_weight = 2 * weight.numel() if trained else 0
    assert peak_memory_of_one_run(step) - d_weight <= 1536 * MIB
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


@pytest.mark.gpu
def test_retained_logits_beyond_two_billion_elements() -> None:
    hidden, weight, target = gpu_head(8400, 64, 262208)
    target[:-2] = IGNORE
    log_probs = linear_log_probs(hidden, weight, target, retain_memory=2**33)
    gradients = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden[-2:], weight)]
    exact = linear_log_probs_reference(*doubles, target[-2:])
    torch.testing.assert_close(log_probs[-2:].double(), exact, atol=0.05, rtol=0.0)
    d_hidden, d_weight = torch.autograd.grad(exact.sum(), doubles)
    assert relative_error(gradients[0][-2:], d_hidden) < 0.02
    assert relative_error(gradients[1], d_weight) < 0.02
    assert not gradients[0][:-2].any()
