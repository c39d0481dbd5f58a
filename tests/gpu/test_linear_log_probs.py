"""Log-probabilities over a head on a GPU: real shapes, no synchronisation, CUDA graphs, peak memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, linear_log_probs_reference

pytestmark = pytest.mark.gpu

IGNORE = -100
MIB = 2**20
ALL_OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")
WAYS = {"kept": (True, 2**32), "recomputed": (True, 0), "unit": (False, 0)}  # head trained, bytes kept


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def _case(tokens: int, size: int, vocab: int, scale: float = 3.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, size, **make)
    weight = torch.randn(vocab, size, **make) * (scale / size**0.5)
    target = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    target[::5] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), target


def _loss(result: Any, entropy: bool = False) -> torch.Tensor:
    factors = torch.linspace(-1.0, 2.0, result.log_probs.numel(), device="cuda").to(result.log_probs)
    loss = (result.log_probs * factors).sum()
    return loss + (result.entropy * factors.square()).sum() if entropy else loss


def _error(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradient.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("_no_synchronisation")
def test_nothing_synchronises(way: str) -> None:
    hidden, weight, target = _case(1000, 256, 5003)
    weight.requires_grad_(WAYS[way][0])
    bias = torch.zeros(5003, device="cuda", requires_grad=WAYS[way][0])

    def step() -> None:
        budgets = {"logits_memory": 2 * MIB, "retain_memory": WAYS[way][1]}
        _loss(linear_log_probs(hidden, weight, target, bias, outputs=ALL_OUTPUTS, softcap=30.0, **budgets)).backward()

    step()  # compiles the kernels and sets up cuBLAS, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()


@pytest.mark.parametrize("way", WAYS)
def test_cuda_graph_replays_on_new_inputs(way: str) -> None:
    hidden, weight, target = _case(512, 256, 5000)
    weight.requires_grad_(WAYS[way][0])
    wanted = [leaf for leaf in (hidden, weight) if leaf.requires_grad]

    def step() -> torch.Tensor:
        budgets = {"logits_memory": 2 * MIB, "retain_memory": WAYS[way][1]}
        loss = _loss(linear_log_probs(hidden, weight, target, outputs=("entropy",), **budgets))
        return torch.stack([loss.detach(), *(g.float().norm() for g in torch.autograd.grad(loss, wanted))])

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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("vocab", "softcap"), [(128256, None), (50257, 30.0)])
def test_gradients_are_no_further_from_float64_than_eager_bf16(vocab: int, softcap: float | None, way: str) -> None:
    hidden, weight, target = _case(1024, 1024, vocab)
    weight.requires_grad_(WAYS[way][0])
    entropy = way != "unit"
    options: dict[str, Any] = {"softcap": softcap, "temperature": 0.9, "outputs": ALL_OUTPUTS}
    doubles = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in (hidden, weight)]
    truth = linear_log_probs_reference(*doubles, target, **options)
    eager = linear_log_probs_reference(hidden, weight, target, **options)
    ours = linear_log_probs(hidden, weight, target, logits_memory=256 * MIB, retain_memory=WAYS[way][1], **options)
    for name in ("log_probs", "entropy", "mean_logit", "sum_squared_probs"):
        assert _error(getattr(ours, name), getattr(truth, name)) <= 1.1 * _error(
            getattr(eager, name), getattr(truth, name)
        )
    assert (ours.top1 == truth.top1).float().mean() > 0.99
    wanted, exacts = ([leaf for leaf in group if leaf.requires_grad] for group in ((hidden, weight), doubles))
    gradients = [torch.autograd.grad(_loss(result, entropy), wanted) for result in (ours, eager)]
    for mine, theirs, exact in zip(*gradients, torch.autograd.grad(_loss(truth, entropy), exacts)):
        assert _error(mine, exact) <= 1.1 * _error(theirs, exact)


@pytest.mark.parametrize("way", [*WAYS, "default"])
def test_peak_memory_is_what_the_budgets_say(way: str) -> None:
    tokens, size, vocab = 8192, 1024, 128256
    hidden, weight, target = _case(tokens, size, vocab)
    trained, retain = WAYS.get(way, (True, None))
    weight.requires_grad_(trained)

    def step() -> None:
        _loss(linear_log_probs(hidden, weight, target, outputs=("entropy",), retain_memory=retain)).backward()

    step()  # workspaces and compiled kernels
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    row, d_hidden = 2 * vocab, 2 * tokens * size
    d_weight = 2 * vocab * size if trained else 2 * d_hidden  # the unit gradient is fp32
    rows = {"kept": tokens, "recomputed": 2048, "default": 2048, "unit": 2048}[way]
    assert peak <= rows * row + d_hidden + d_weight + 4 * MIB


@pytest.mark.parametrize("trained", [True, False])
def test_a_pair_of_32k_tokens_fits_the_default_budget(trained: bool) -> None:
    """Gemma's vocabulary: all logits would be 32 GiB."""
    hidden, weight, target = _case(2 * 32768, 2560, 262208)
    weight.requires_grad_(trained)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _loss(linear_log_probs(hidden, weight, target, softcap=30.0, outputs=("entropy",))).backward()
    peak = torch.cuda.max_memory_allocated() - before
    d_weight = 2 * weight.numel() if trained else 0
    assert peak - d_weight <= 1536 * MIB
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


def test_kept_logits_beyond_two_billion_elements() -> None:
    hidden, weight, target = _case(8400, 64, 262208)
    target[:-2] = IGNORE
    log_probs = linear_log_probs(hidden, weight, target, retain_memory=2**33)
    gradients = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden[-2:], weight)]
    exact = linear_log_probs_reference(*doubles, target[-2:])
    torch.testing.assert_close(log_probs[-2:].double(), exact, atol=0.05, rtol=0.0)
    d_hidden, d_weight = torch.autograd.grad(exact.sum(), doubles)
    assert _error(gradients[0][-2:], d_hidden) < 0.02
    assert _error(gradients[1], d_weight) < 0.02
    assert not gradients[0][:-2].any()
