"""The first chunk of the head in the memory of its weight gradient, at the shape of Llama 3 and a tight budget."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.kernels.head import linear_cross_entropy as chunks
from liger_trainer.kernels.head import logits_in_weight_gradient as panels
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.weight_gradient import launch_for
from liger_trainer.kernels.runtime import INTERPRETED

pytestmark = pytest.mark.gpu

MIB = 2**20
TIGHT = 64 * MIB
TOKENS, SIZE, VOCAB = 8192, 4096, 128256


@pytest.fixture(autouse=True)
def _block_floating_point() -> Iterator[None]:
    if not torch.cuda.is_available() or INTERPRETED or launch_for(torch.device("cuda", 0)) is None:
        pytest.skip("needs a GPU with a bulk copy engine (Hopper or later)")
    yield
    torch.cuda.set_sync_debug_mode("default")


def _case(tokens: int, size: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab, size, generator=generator, device="cuda", dtype=torch.bfloat16) * (3.0 / size**0.5)
    target = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    target[::5] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


def _error(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradient.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("tokens", "size", "vocab", "budget", "bound"),
    [
        (TOKENS, SIZE, VOCAB, TIGHT, 1.05),
        # Rows of the head that no tile divides, in matmuls for which cuBLAS has no aligned kernels.
        (4096, 1000, 50257, 16 * MIB, 1.1),
    ],
)
def test_gradients_are_no_further_from_float64_than_eager_bf16(
    tokens: int, size: int, vocab: int, budget: int, bound: float
) -> None:
    hidden, weight, target = _case(tokens, size, vocab)
    with mock.patch.object(chunks, "run_panels", side_effect=panels.run_panels) as run:
        loss = linear_cross_entropy(hidden, weight, target, logits_memory=budget)
    assert run.call_count == 1
    ours = torch.autograd.grad(loss, (hidden, weight))
    eager = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), target), (hidden, weight))
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    with mock.patch.object(chunks, "plan_panels", return_value=None):
        exact_loss = linear_cross_entropy(*doubles, target)
    exact = torch.autograd.grad(exact_loss, doubles)
    assert abs(loss.item() - exact_loss.item()) < 1e-3
    for mine, theirs, truth in zip(ours, eager, exact):
        assert _error(mine, truth) <= bound * _error(theirs, truth)


def test_peak_memory_is_buffer_gradients_and_exponents() -> None:
    hidden, weight, target = _case(TOKENS, SIZE, VOCAB)
    linear_cross_entropy(hidden, weight, target, logits_memory=TIGHT).backward()  # workspaces and compiled kernels
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, target, logits_memory=TIGHT).backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients, exponents = 2 * (VOCAB + TOKENS) * SIZE, VOCAB * SIZE // 128
    assert peak <= gradients + TIGHT + exponents + MIB


def test_nothing_synchronises_and_two_runs_are_equal() -> None:
    hidden, weight, target = _case(2048, 512, 32000)
    kept = [torch.autograd.grad(_tight(hidden, weight, target), (hidden, weight))]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    kept.append(torch.autograd.grad(_tight(hidden, weight, target), (hidden, weight)))
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, second) for first, second in zip(*kept))


def _tight(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(chunks, "run_panels", side_effect=panels.run_panels) as run:
        loss = linear_cross_entropy(hidden, weight, target, logits_memory=4 * MIB)
    assert run.call_count == 1
    return loss


def test_cuda_graph_replays_on_new_inputs() -> None:
    hidden, weight, target = _case(2048, 512, 32000)

    def step() -> torch.Tensor:
        loss = _tight(hidden, weight, target)
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
