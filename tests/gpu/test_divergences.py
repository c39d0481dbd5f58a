"""The divergences on a GPU: real shapes, no synchronisation, CUDA graphs, peak memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from liger_trainer.kernels.head.divergence_kernel import divergence_rows_, gradient_memory
from liger_trainer.kernels.head.divergence_options import DivergenceOptions, DivergenceStats
from liger_trainer.kernels.head.elementwise_divergence import jsd, kl_div, tvd
from liger_trainer.kernels.head.linear_jsd import linear_jsd, linear_jsd_reference
from liger_trainer.kernels.parity.linear_kl_div import linear_kl_div

pytestmark = pytest.mark.gpu

IGNORE = -100
MIB = 2**20


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def _heads(tokens: int, size: int, other: int, vocab: int, scale: float = 2.0) -> Any:
    """Hidden states and heads of student and teacher in bf16, and labels of which every fifth is ignored."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    student = [normal(tokens, size), normal(vocab, size) * (scale / size**0.5)]
    teacher = [normal(tokens, other), normal(vocab, other) * (scale / other**0.5)]
    labels = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    labels[::5] = IGNORE
    return [tensor.requires_grad_() for tensor in student], teacher, labels


def _error(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradient.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_gradients_are_as_close_to_float64_as_rounded_gradients(beta: float, softcap: float | None) -> None:
    student, teacher, labels = _heads(512, 1024, 768, 128256, scale=3.0)
    options: dict[str, Any] = {"beta": beta, "temperature": 1.5, "student_softcap": softcap, "teacher_softcap": softcap}
    doubles = [tensor.detach().double().requires_grad_() for tensor in student]
    exact_loss = linear_jsd_reference(*doubles, *(tensor.double() for tensor in teacher), labels, **options)
    exact = torch.autograd.grad(exact_loss, doubles)
    loss = linear_jsd(*student, *teacher, labels, **options)
    ours = torch.autograd.grad(loss, student)
    assert abs(loss.item() - exact_loss.item()) < 1e-3 * (1.0 + exact_loss.item())
    for mine, truth in zip(ours, exact):
        assert _error(mine, truth) < 4e-3  # bf16 rounds once in the logits' gradient and once here: 1.7e-3 each
    again = torch.autograd.grad(linear_jsd(*student, *teacher, labels, **options), student)
    assert all(first.equal(second) for first, second in zip(ours, again))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("near", [False, True])
def test_logits_are_not_rounded_to_half_precision(dtype: torch.dtype, beta: float, near: bool) -> None:
    """As Liger's test_logits_projection_is_not_rounded_to_input_dtype has it, and with a teacher near the student."""
    tokens, size, vocab = 256, 1024, 32000
    generator = torch.Generator("cuda").manual_seed(0)
    hiddens = [torch.randn(tokens, size, generator=generator, device="cuda").to(dtype) for _ in range(2)]
    scale = (10.0 if beta == 0.5 else 30.0) / size**0.5
    weights = [torch.randn(vocab, size, generator=generator, device="cuda") * scale for _ in range(2)]
    student = [hiddens[0].requires_grad_(), weights[0].to(dtype).requires_grad_()]
    teacher = [hiddens[1], weights[1].to(dtype)]
    if near:
        teacher = [hiddens[0].detach(), (weights[0] + weights[1] / 100).to(dtype)]
    doubles = [tensor.detach().double().requires_grad_() for tensor in student]
    exact_loss = linear_jsd_reference(*doubles, *(tensor.double() for tensor in teacher), beta=beta, reduction="sum")
    exact = torch.autograd.grad(exact_loss, doubles)
    ours = torch.autograd.grad(linear_jsd(*student, *teacher, beta=beta, reduction="sum"), student)
    for mine, truth in zip(ours, exact):
        assert _error(mine, truth) < 5e-3
        assert float((mine.double() - truth).abs().max() / truth.abs().max()) < 0.01


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd", "cosine"])
def test_gradient_within_the_memory_of_the_logits_overwrites_nothing_that_is_still_read(divergence: str) -> None:
    tokens, vocab = 4096, 128256
    options = DivergenceOptions(divergence, 0.5, 1.0, 1.0, 0.0, None, 1.0, None, 1.0, 0.0, IGNORE)
    logits, teacher = (3 * torch.randn(2, tokens, vocab, device="cuda")).unbind()
    # What rounding alone may change; a logit that was written over would change its gradient by about a probability.
    slack = 1e-5 * (logits.softmax(-1) + teacher.softmax(-1))
    exact, one = logits.clone(), torch.ones((), device="cuda")
    stats = DivergenceStats.allocate(logits, tokens, False, False)
    divergence_rows_(exact, teacher, None, stats, options, None, None, one)
    first = None
    for _ in range(5):
        buffer = logits.clone()
        out = gradient_memory(buffer, torch.bfloat16, divergence)
        divergence_rows_(buffer, teacher, None, stats, options, None, None, one, out=out)
        assert ((out.float() - exact).abs() <= 2**-8 * exact.abs() + slack).all()
        first = out.clone() if first is None else first
        assert out.equal(first)


@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.0, "hard_weight": 0.5, "outputs": ("entropy", "soft_loss")}, {"num_items": 100}],
    ids=["plain", "hard", "num_items"],
)
@pytest.mark.usefixtures("_no_synchronisation")
def test_nothing_synchronises(options: dict[str, Any]) -> None:
    student, teacher, labels = _heads(1000, 256, 128, 5003)
    probs = torch.rand(1000, 5003, device="cuda")
    log_probs = torch.randn(1000, 5003, device="cuda", requires_grad=True)

    def step() -> None:
        result = linear_jsd(*student, *teacher, labels, logits_memory=4 * MIB, **options)
        loss = result if isinstance(result, torch.Tensor) else result.loss
        loss = loss + linear_kl_div(*student, probs, labels, logits_memory=2 * MIB)
        for function in (kl_div, jsd, tvd):
            loss = loss + function(log_probs, probs, labels=labels)
        (2.0 * loss).backward()

    step()  # compiles the kernels and sets up cuBLAS, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()


def test_cuda_graph_replays_on_new_inputs() -> None:
    student, teacher, labels = _heads(512, 256, 128, 5000)
    logits = torch.randn(512, 5000, device="cuda", requires_grad=True)
    target = torch.randn(512, 5000, device="cuda").log_softmax(-1)

    def step() -> torch.Tensor:
        loss = linear_jsd(*student, *teacher, labels, hard_weight=0.5, logits_memory=4 * MIB)
        loss = loss + jsd(logits, target, labels)
        gradients = torch.autograd.grad(loss, (*student, logits))
        return torch.stack([loss.detach(), *(gradient.float().norm() for gradient in gradients)])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    labels.copy_(labels.roll(1))
    graph.replay()
    torch.testing.assert_close(captured, step())


@pytest.mark.parametrize("frozen", [False, True])
def test_peak_memory_is_two_buffers_and_gradients(frozen: bool) -> None:
    tokens, size, vocab = 8192, 1024, 128256
    student, teacher, labels = _heads(tokens, size, 2048, vocab)
    student[1].requires_grad_(not frozen)
    linear_jsd(*student, *teacher, labels).backward()  # workspaces and compiled kernels
    student[0].grad = student[1].grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    (2.0 * linear_jsd(*student, *teacher, labels)).backward()
    peak = torch.cuda.max_memory_allocated() - before
    buffers, d_hidden = 2 * 1024 * vocab * 4, 2 * tokens * size
    d_weight = 0 if frozen else 2 * vocab * size
    slack = 5 * MIB  # exponents, and up to 1 MiB of every block that the allocator does not split off
    assert peak <= buffers + d_hidden + d_weight + slack
    assert torch.cuda.memory_allocated() - before <= d_hidden + d_weight + slack


def test_given_distributions_allocate_one_gradient() -> None:
    tokens, vocab = 2048, 128256
    student = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).log_softmax(-1).requires_grad_()
    teacher = torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16).log_softmax(-1)
    for function in (lambda: kl_div(student, teacher, log_target=True), lambda: jsd(student, teacher)):
        function().backward()
        student.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function().backward()
        assert torch.cuda.max_memory_allocated() - before <= 2 * tokens * vocab + 2 * MIB  # allocations are whole MiB
        student.grad = None


def test_rows_beyond_two_billion_elements() -> None:
    tokens, vocab = 8400, 262208  # the last rows start past 2**31 elements
    student = torch.zeros(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    teacher = torch.zeros(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    student[-2:], teacher[-2:] = torch.randn(2, 2, vocab, device="cuda").log_softmax(-1)
    labels = torch.full((tokens,), IGNORE, device="cuda")
    labels[-2:] = 0
    student.requires_grad_()
    loss = jsd(student, teacher, labels)
    (gradient,) = torch.autograd.grad(loss, student)
    rows = student.detach()[-2:].double().requires_grad_()
    exact = jsd(rows, teacher[-2:].double())
    assert abs(loss.item() - exact.item()) < 1e-5
    assert _error(gradient[-2:], torch.autograd.grad(exact, rows)[0]) < 3e-3
    assert not gradient[:-2:4096].any()
