"""Log-probabilities over a head that expect one upstream gradient, on a GPU: no waiting, exact gradients, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from liger_trainer.head.context import expected_loss_gradient
from liger_trainer.kernels.head import linear_log_probs_expected as expected_gradients
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, linear_log_probs_reference
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.trainers.fused_head import install_fused_forward
from liger_trainer.trainers.token_statistics import StatisticsOptions

pytestmark = pytest.mark.gpu

IGNORE = -100
MIB = 2**20


def _case(tokens: int, size: int, vocab: int, head_trained: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    make: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, size, **make)
    weight = torch.randn(vocab, size, **make) * (3.0 / size**0.5)
    target = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    target[::5] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(head_trained), target


def _factors(result: Any) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, result.log_probs.numel(), device="cuda").to(result.log_probs)


LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "sum": lambda result: -result.log_probs.sum() / 7,
    "weights": lambda result: (result.log_probs * _factors(result)).sum(),
    "entropy": lambda result: (result.entropy * _factors(result)).sum(),
    "sum and entropy": lambda result: result.log_probs.sum() - 0.1 * result.entropy.sum(),
}


@contextlib.contextmanager
def _no_waiting() -> Any:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("loss", ["sum", "entropy", "sum and entropy"])
def test_nothing_synchronises(loss: str, head_trained: bool) -> None:
    hidden, weight, target = _case(1000, 256, 5003, head_trained)

    def step() -> None:
        options: dict[str, Any] = {"outputs": ("entropy", "top1"), "logits_memory": 2 * MIB, "expected_grad": 1 / 7}
        LOSSES[loss](linear_log_probs(hidden, weight, target, **options)).backward()

    step()  # compiles the kernels and sets up cuBLAS, which may wait
    with _no_waiting():
        step()


@pytest.mark.parametrize("loss", LOSSES)
def test_cuda_graph_replays_on_new_inputs(loss: str) -> None:
    hidden, weight, target = _case(512, 256, 5000)

    def step() -> torch.Tensor:
        result = linear_log_probs(
            hidden, weight, target, outputs=("entropy",), logits_memory=2 * MIB, expected_grad=1 / 7
        )
        value = LOSSES[loss](result)
        gradients = torch.autograd.grad(value, (hidden, weight))
        return torch.stack([value.detach(), *(gradient.float().norm() for gradient in gradients)])

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


@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_no_further_from_float64_than_eager_bf16(loss: str, head_trained: bool) -> None:
    hidden, weight, target = _case(1024, 1024, 50257, head_trained)
    options: dict[str, Any] = {"softcap": 30.0, "outputs": ("entropy",)}
    doubles = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in (hidden, weight)]
    results = (
        linear_log_probs(hidden, weight, target, logits_memory=32 * MIB, expected_grad=1 / 7, **options),
        linear_log_probs_reference(hidden, weight, target, **options),
        linear_log_probs_reference(*doubles, target, **options),
    )
    wanted, exacts = ([leaf for leaf in group if leaf.requires_grad] for group in ((hidden, weight), doubles))
    ours, eager = (torch.autograd.grad(LOSSES[loss](result), wanted) for result in results[:2])
    for mine, theirs, exact in zip(ours, eager, torch.autograd.grad(LOSSES[loss](results[2]), exacts)):
        assert (mine.double() - exact).norm() <= 1.1 * (theirs.double() - exact).norm()


@pytest.mark.parametrize("head_trained", [True, False])
def test_a_sum_takes_the_memory_of_the_summed_loss(head_trained: bool) -> None:
    hidden, weight, target = _case(8192, 1024, 128256, head_trained)

    def summed_loss() -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, target, reduction="sum")

    def log_probs() -> torch.Tensor:
        return -linear_log_probs(hidden, weight, target, outputs=("entropy",), expected_grad=1.0).log_probs.sum()

    peaks = []
    for loss in (summed_loss, log_probs):
        loss().backward()  # workspaces and compiled kernels
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        hidden.grad = weight.grad = None
    assert peaks[1] <= peaks[0] + MIB, f"{peaks[1] / MIB:.1f} MiB, {peaks[0] / MIB:.1f} for the loss"


def test_trls_loss_neither_waits_nor_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers itself reads the position ids back to choose its attention kernel.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    config = LlamaConfig(
        vocab_size=32768, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).cuda().to(torch.bfloat16).train()
    apply_liger_kernel(model)
    install_fused_forward(model, StatisticsOptions(("log_probs", "entropy", "is_top1"), uniform_gradient=True))
    ids = torch.randint(0, 32768, (2, 300), device="cuda")
    items = torch.tensor(598, device="cuda")

    def step() -> None:
        with expected_loss_gradient(1 / items):
            outputs = model(input_ids=ids, labels=ids, fused_lm_head=True)
            per_token_loss = -outputs.log_probs
            loss = per_token_loss.sum() / torch.as_tensor(items).clamp(min=1)
        loss.backward()

    step()  # kernels are compiled here
    monkeypatch.setattr(expected_gradients, "recomputed_gradients", lambda *args: pytest.fail("recomputed"))
    with _no_waiting():
        step()
