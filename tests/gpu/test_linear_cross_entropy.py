"""Both cross entropies on a GPU: real shapes, no synchronisation, CUDA graphs, peak memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.kernels.head.cross_entropy import cross_entropy
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

pytestmark = pytest.mark.gpu

IGNORE = -100
MIB = 2**20
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "none"},
    {"num_items": 100, "label_smoothing": 0.1, "z_loss": 1e-4},
    {"weighted": True, "softcap": 30.0, "outputs": ("entropy", "token_accuracy", "z_loss")},
    {"num_items_on": "cuda"},
    {"num_items_on": "cpu"},
]


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def _case(
    tokens: int, size: int, vocab: int, dtype: torch.dtype = torch.bfloat16, scale: float = 2.0
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator, device="cuda", dtype=dtype)
    weight = torch.randn(vocab, size, generator=generator, device="cuda", dtype=dtype) * (scale / size**0.5)
    target = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    target[::5] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), target


def _prepared(options: dict[str, Any], vocab: int) -> dict[str, Any]:
    options = dict(options)
    if options.pop("weighted", False):
        options["class_weights"] = torch.linspace(0.5, 2.0, vocab, device="cuda")
    if where := options.pop("num_items_on", None):
        options["num_items"] = torch.tensor(100, device=where)
    return options


def _sum(result: Any) -> torch.Tensor:
    return (result if isinstance(result, torch.Tensor) else result.loss).sum()


def _error(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradient.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.usefixtures("_no_synchronisation")
def test_nothing_synchronises(options: dict[str, Any]) -> None:
    hidden, weight, target = _case(1000, 256, 5003)
    options = _prepared(options, 5003)
    bias = torch.zeros(5003, device="cuda", requires_grad=True)

    def step() -> None:
        linear = linear_cross_entropy(hidden, weight, target, bias, logits_memory=2 * MIB, **options)
        given = cross_entropy((hidden @ weight.t()), target, **options)
        inplace = cross_entropy((hidden @ weight.t()), target, inplace=True, **options)
        (2.0 * _sum(linear) + _sum(given) + _sum(inplace)).backward()

    step()  # compiles the kernels and sets up cuBLAS, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()


def test_cuda_graph_replays_on_new_inputs() -> None:
    hidden, weight, target = _case(512, 256, 5000)

    def step() -> torch.Tensor:
        loss = linear_cross_entropy(hidden, weight, target, logits_memory=2 * MIB)
        return torch.stack([loss.detach(), *(g.float().norm() for g in torch.autograd.grad(loss, (hidden, weight)))])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    target.copy_(target.roll(1))
    graph.replay()
    torch.testing.assert_close(captured, step())


@pytest.mark.parametrize("vocab", [32000, 50257, 128256])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_gradients_are_no_further_from_float64_than_eager_bf16(vocab: int, softcap: float | None) -> None:
    hidden, weight, target = _case(1024, 1024, vocab, scale=3.0)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact_loss = linear_cross_entropy_reference(*doubles, target, softcap=softcap)
    exact = torch.autograd.grad(exact_loss, doubles)
    logits = F.linear(hidden, weight).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    eager = torch.autograd.grad(F.cross_entropy(logits, target), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, target, softcap=softcap)
    ours = torch.autograd.grad(loss, (hidden, weight))
    assert abs(loss.item() - exact_loss.item()) < 1e-3
    for mine, theirs, truth in zip(ours, eager, exact):
        assert _error(mine, truth) <= 1.05 * _error(theirs, truth)


@pytest.mark.parametrize("budget", [16 * MIB, 64 * MIB])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_of_an_odd_vocabulary_are_as_exact_as_eager(budget: int, dtype: torch.dtype) -> None:
    """Chunks of 128 and 640 rows, for which cuBLAS splits the terms of a matmul: their parts are added in fp32."""
    hidden, weight, target = _case(4096, 1024, 50257, dtype, scale=3.0)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.autograd.grad(linear_cross_entropy_reference(*doubles, target, reduction="sum"), doubles)
    eager_loss = F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="sum")
    eager = torch.autograd.grad(eager_loss, (hidden, weight))
    ours = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, target, reduction="sum", logits_memory=budget), (hidden, weight)
    )
    for mine, theirs, truth in zip(ours, eager, exact):
        assert _error(mine, truth) <= 1.1 * _error(theirs, truth)
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


def test_many_chunks_sum_the_weight_gradient_in_fp32() -> None:
    hidden, weight, target = _case(4096, 512, 8192, scale=3.0)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    (exact,) = torch.autograd.grad(linear_cross_entropy_reference(*doubles, target), doubles[1])
    eager = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), target), weight)[0]
    loss = linear_cross_entropy(hidden, weight, target, logits_memory=128 * 8192 * 2)  # 32 chunks
    (ours,) = torch.autograd.grad(loss, weight)
    # 8 chunks need 512 rows, 384 more than the budget and fewer than H: the buffer grows, and the sum rounds 7 times at
    # k/8 of its final variance, each by at most 2**-9.
    assert _error(ours, exact) <= (_error(eager, exact) ** 2 + 3.5 * 2**-18) ** 0.5
    narrow, head = hidden.detach()[:, :128].contiguous(), weight.detach()[:, :128].contiguous().requires_grad_()
    (exact,) = torch.autograd.grad(
        linear_cross_entropy_reference(narrow.double(), double := head.detach().double().requires_grad_(), target),
        double,
    )
    (ours,) = torch.autograd.grad(linear_cross_entropy(narrow, head, target, logits_memory=128 * 8192 * 2), head)
    eager = torch.autograd.grad(F.cross_entropy(F.linear(narrow, head).float(), target), head)[0]
    assert _error(ours, exact) <= 1.05 * _error(eager, exact)


@pytest.mark.parametrize("frozen", [False, True])
def test_peak_memory_is_buffer_and_gradients(frozen: bool) -> None:
    tokens, size, vocab = 8192, 1024, 128256
    hidden, weight, target = _case(tokens, size, vocab)
    weight.requires_grad_(not frozen)
    linear_cross_entropy(hidden, weight, target).backward()  # workspaces and compiled kernels
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (2.0 * linear_cross_entropy(hidden, weight, target)).backward()
    peak = torch.cuda.max_memory_allocated() - before
    buffer, d_hidden = 2048 * vocab * 2, 2 * tokens * size
    d_weight = 0 if frozen else 2 * vocab * size
    assert peak <= buffer + d_hidden + d_weight + 4 * MIB  # nothing is held twice, though the upstream gradient is 2
    assert torch.cuda.memory_allocated() - before <= d_hidden + d_weight + 4 * MIB


def test_cross_entropy_allocates_one_gradient_or_none() -> None:
    tokens, vocab = 2048, 128256
    leaf = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    for options, allowed in (({}, 1), ({"inplace": True}, 0), ({"expected_grad": 1.0}, 1)):
        logits = leaf * 1.0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = cross_entropy(logits, target, **options)
        (gradient,) = torch.autograd.grad(loss, logits)
        peak = torch.cuda.max_memory_allocated() - before
        # The allocator hands out whole blocks: it does not split off what is left where that is 1 MiB or less.
        assert peak <= allowed * (2 * tokens * vocab + MIB) + MIB
        exact = torch.softmax(leaf.detach()[:64].double(), -1) - F.one_hot(target[:64], vocab)
        assert _error(gradient[:64], exact / tokens) < 3e-3
        del logits, loss, gradient


@pytest.mark.parametrize("options", [{}, {"inplace": True}], ids=str)
def test_rows_beyond_two_billion_elements(options: dict[str, Any]) -> None:
    tokens, vocab = 8400, 262208  # the last rows start past 2**31 elements
    logits = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    target = torch.full((tokens,), IGNORE, device="cuda")
    target[-2:] = torch.tensor([5, vocab - 1], device="cuda")
    rows = logits[-2:].double().requires_grad_()
    logits = logits.requires_grad_() * 1.0  # a leaf would not be overwritten
    loss = cross_entropy(logits, target, **options)
    (gradient,) = torch.autograd.grad(loss, logits)
    exact = F.cross_entropy(rows, target[-2:])
    assert abs(loss.item() - exact.item()) < 1e-4
    assert _error(gradient[-2:], torch.autograd.grad(exact, rows)[0]) < 3e-3
    assert not gradient[:-2:4096].any()
