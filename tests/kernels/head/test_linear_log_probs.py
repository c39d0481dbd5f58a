"""Log-probabilities over a head: gradients in float64, matmuls, backward protocol, compilation, memory."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.head import cross_entropy_kernel, head_chunks, linear_log_probs_backward
from liger_trainer.kernels.head import linear_log_probs as operator
from liger_trainer.kernels.head.cross_entropy_kernel import row_partials_
from liger_trainer.kernels.head.cross_entropy_torch import row_partials_torch_
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, linear_log_probs_reference
from liger_trainer.kernels.head.row_statistics import ExtraStats, RowOptions, RowStats, Shard
from tests.aot import TARGETS, compile_launch, recorded_launches

IGNORE = -100
EVERYTHING: dict[str, Any] = {"softcap": 4.0, "logit_scale": 1.5, "temperature": 0.8}
ALL_OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")
TOKENS, HIDDEN, VOCAB = 13, 6, 20
ROW = 64 * 4  # bytes of one fp32 row of logits, padded to 64 columns
ALL_RETAINED = {"logits_memory": 5 * ROW, "retain_memory": TOKENS * ROW}
NONE_RETAINED = {"logits_memory": 5 * ROW, "retain_memory": 0}
SOME_RETAINED = {"logits_memory": 5 * ROW, "retain_memory": 3 * ROW}
BUDGETS = [{"logits_memory": 5 * ROW}, ALL_RETAINED, NONE_RETAINED, SOME_RETAINED]


def _case(dtype: torch.dtype = torch.float32, tokens: int = TOKENS, seed: int = 0) -> Any:
    """Hidden states, head, bias and target; the first and every fourth token ignored."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    target = torch.randint(0, VOCAB, (tokens,), generator=generator)
    target[::4] = IGNORE
    return (*tensors, target)


def _run(hidden: Any, weight: Any, bias: Any, target: Any, **options: Any) -> Any:
    return linear_log_probs(hidden, weight, target, bias, **{"logits_memory": 5 * ROW, **options})


def _reference(hidden: Any, weight: Any, bias: Any, target: Any, **options: Any) -> Any:
    for name in ("logits_memory", "retain_memory"):
        options.pop(name, None)
    return linear_log_probs_reference(hidden, weight, target, bias, **options)


def _loss(function: Any, *inputs: Any, entropy: bool = True, **options: Any) -> torch.Tensor:
    """A loss with another upstream gradient for every token, of the entropies too if asked."""
    result = function(*inputs, outputs=("entropy",), **options)
    factors = torch.linspace(-1.0, 2.0, result.log_probs.numel()).to(result.log_probs)
    loss = (result.log_probs * factors).sum()
    return loss + (result.entropy * factors.flip(0).square()).sum() if entropy else loss


@given(
    tokens=st.integers(1, 12),
    memory=st.integers(1, 5000),
    retain=st.none() | st.integers(0, 9000),
    softcap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, -0.5]),
    temperature=st.sampled_from([1.0, 2.0]),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any),
    entropy=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_outputs_and_gradients_equal_the_reference(
    tokens: int, memory: int, retain: int | None, softcap: float | None, scale: float, temperature: float,
    trained: tuple[bool, bool, bool], entropy: bool, seed: int,
) -> None:  # fmt: skip
    *leaves, target = _case(torch.float64, tokens, seed)
    for leaf, train in zip(leaves, trained):
        leaf.requires_grad_(train)
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": scale, "temperature": temperature}
    budgets = {"logits_memory": memory, "retain_memory": retain}
    result = _run(*leaves, target, outputs=ALL_OUTPUTS, **options, **budgets)
    expected = _reference(*leaves, target, outputs=ALL_OUTPUTS, **options)
    for name in ("log_probs", *ALL_OUTPUTS):
        torch.testing.assert_close(getattr(result, name), getattr(expected, name))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    ours = torch.autograd.grad(_loss(_run, *leaves, target, entropy=entropy, **options, **budgets), wanted)
    theirs = torch.autograd.grad(_loss(_reference, *leaves, target, entropy=entropy, **options), wanted)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("frozen_head", [False, True])
def test_gradcheck(frozen_head: bool) -> None:
    hidden, weight, bias, target = _case(torch.float64, 5)

    def outputs(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        head = (weight.detach(), bias.detach()) if frozen_head else leaves[1:]
        result = _run(leaves[0], *head, target, outputs=("entropy",), **EVERYTHING)
        return result.log_probs, result.entropy

    assert torch.autograd.gradcheck(outputs, (hidden,) if frozen_head else (hidden, weight, bias))


def test_matches_trls_head() -> None:
    function = pytest.importorskip("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    *leaves, target = _case()
    target = target.clamp(min=0)
    ours = _run(*leaves, target, outputs=ALL_OUTPUTS, softcap=4.0, temperature=0.8, logit_scale=1.5)
    theirs = function.apply(*leaves, target, 0.8, 7, 4.0, 1.5)
    named = (ours.log_probs, ours.entropy, ours.sum_squared_probs, ours.mean_logit, ours.top1)
    for mine, other in zip(named, theirs):
        torch.testing.assert_close(mine, other)
        assert mine.requires_grad == other.requires_grad


def _matmuls(trained: tuple[int, ...], entropy: bool, **options: Any) -> float:
    """Rows of (N, V) logits or of its gradient that went through a matmul, in units of N."""
    *leaves, target = _case()
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in trained)
    rows = 0

    def spy(function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal rows
            left, right = args[-2:]
            rows += next(size for size in (*left.shape, *right.shape) if size not in (HIDDEN, VOCAB))
            return function(*args, **kwargs)

        return count

    with (
        mock.patch.object(torch, "mm", side_effect=spy(torch.mm)),
        mock.patch.object(torch, "addmm", side_effect=spy(torch.addmm)),
    ):
        loss = _loss(_run, *leaves, target, entropy=entropy, **options)
        if trained:
            loss.backward()
    if trained:
        expected = _loss(_reference, *leaves, target, entropy=entropy)
        wanted = [leaves[index] for index in trained]
        for leaf, gradient in zip(wanted, torch.autograd.grad(expected, wanted)):
            torch.testing.assert_close(leaf.grad, gradient)
    assert all(leaf.grad is None for index, leaf in enumerate(leaves) if index not in trained)
    return rows / TOKENS


@pytest.mark.parametrize(
    ("trained", "entropy", "options", "matmuls"),
    [
        ((), False, NONE_RETAINED, 1),
        ((0,), False, NONE_RETAINED, 2),  # the frozen head
        ((0,), False, ALL_RETAINED, 2),
        ((0,), True, ALL_RETAINED, 4),  # whose entropy gradient is not made in advance
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
    assert _matmuls(trained, entropy, **options) == pytest.approx(matmuls)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trained", [(0,), (0, 1, 2)])
def test_retained_graph_gives_the_right_gradient_every_time(trained: tuple[int, ...], budget: dict[str, int]) -> None:
    *leaves, target = _case()
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in trained)
    wanted = [leaves[index] for index in trained]
    ours, theirs = (_loss(function, *leaves, target, entropy=False, **budget) for function in (_run, _reference))
    taken = []
    for factor in (1.0, 2.0, 0.0, -0.5):
        gradients = torch.autograd.grad(ours, wanted, torch.tensor(factor), retain_graph=factor != -0.5)
        torch.testing.assert_close(
            gradients, torch.autograd.grad(theirs, wanted, torch.tensor(factor), retain_graph=True)
        )
        taken.append((gradients, [gradient.clone() for gradient in gradients]))
    for gradients, copies in taken:  # no later backward wrote into what an earlier one returned
        assert all(gradient.equal(copy) for gradient, copy in zip(gradients, copies))


def test_only_the_last_backward_writes_over_the_retained_logits() -> None:
    *leaves, target = _case()
    loss = _loss(_run, *leaves, target)
    run_chunks = linear_log_probs_backward._run_chunks
    with mock.patch.object(linear_log_probs_backward, "_run_chunks", side_effect=run_chunks) as run:
        torch.autograd.grad(loss, leaves, retain_graph=True)
        torch.autograd.grad(loss, leaves)
    assert [call.kwargs["overwrite"] for call in run.call_args_list] == [False, True]


def test_retained_logits_are_the_memory_of_the_other_chunks() -> None:
    *leaves, target = _case()
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
    *leaves, target = _case()
    copies = [leaf.detach().clone() for leaf in leaves]
    with torch.no_grad(), mock.patch.object(operator, "attach_gradients", side_effect=AssertionError):
        result = _run(*leaves, target, outputs=ALL_OUTPUTS)
    assert not result.log_probs.requires_grad
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(leaves, copies))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_are_fp32_and_ignored_tokens_zero(dtype: torch.dtype) -> None:
    *leaves, target = _case(dtype)
    result = _run(*leaves, target, outputs=ALL_OUTPUTS)
    for name in ("log_probs", *ALL_OUTPUTS):
        value = getattr(result, name)
        assert value.dtype == (torch.bool if name == "top1" else torch.float32)
        assert not value[::4].any()
    alone = _run(*leaves, target)
    assert alone.equal(result.log_probs)


def test_ignored_tokens_have_no_gradient_whatever_comes_from_upstream() -> None:
    for trained in ((0,), (0, 1)):
        *leaves, target = _case()
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(index in trained)
        upstream = torch.where(target == IGNORE, float("inf"), 1.0)
        (gradient,) = torch.autograd.grad(_run(*leaves, target), leaves[0], upstream)
        assert gradient.isfinite().all()
        assert gradient[::4].eq(0).all()


def test_everything_ignored_and_nothing_at_all_backpropagate_zeros() -> None:
    for tokens in (TOKENS, 0):
        for trained in ((0,), (0, 1, 2)):
            *leaves, target = _case(tokens=tokens)
            for index, leaf in enumerate(leaves):
                leaf.requires_grad_(index in trained)
            _loss(_run, *leaves, torch.full_like(target, IGNORE)).backward()
            for index in trained:
                assert leaves[index].grad.shape == leaves[index].shape
                assert leaves[index].grad.eq(0).all()


def test_strided_and_batched_inputs() -> None:
    hidden, weight, bias, target = _case(tokens=12)
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


def test_a_masked_vocabulary_has_no_nan() -> None:
    hidden, weight, bias, target = _case()
    masked = bias.detach().clone()
    masked[-4:] = -float("inf")
    target = torch.where(target == IGNORE, IGNORE, target % (VOCAB - 4))
    ours = torch.autograd.grad(_loss(_run, hidden, weight, masked, target), (hidden, weight))
    assert all(gradient.isfinite().all() for gradient in ours)
    part = (hidden, weight[:-4], bias.detach()[:-4], target)
    torch.testing.assert_close(ours, torch.autograd.grad(_loss(_reference, *part), (hidden, weight)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    *leaves, target = _case()
    checkpoint(lambda *leaves: _loss(_run, *leaves, target), *leaves, use_reentrant=reentrant).backward()
    expected = torch.autograd.grad(_loss(_reference, *leaves, target), leaves)
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), expected)


@pytest.mark.parametrize("trained", [(0,), (0, 1, 2)])
def test_double_backward_is_refused(trained: tuple[int, ...]) -> None:
    *leaves, target = _case()
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index in trained)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(_run(*leaves, target).sum(), leaves[0], create_graph=True)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("trained", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(trained: tuple[int, ...], entropy: bool, dynamic: bool) -> None:
    def step(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 3.0 * _loss(_run, hidden * 2.0, weight, bias, target, entropy=entropy)

    torch._dynamo.reset()  # or its limit on recompilations counts all cases together
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (TOKENS, 21) if dynamic else (TOKENS,):
        *leaves, target = _case(tokens=tokens)
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(index in trained)
        wanted = [leaves[index] for index in trained]
        loss, expected = compiled(*leaves, target), step(*leaves, target)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, wanted), torch.autograd.grad(expected, wanted))


def test_operators_pass_opcheck() -> None:
    hidden, _, _, target = _case()
    weight, bias = torch.randn(64, HIDDEN), torch.randn(64)  # 64 columns: the padding of others is not initialised
    options = (IGNORE, 0.0, 0.0, 5.0, 1.0, 1.0)
    fixed = (hidden.detach(), weight, target, bias)
    torch.library.opcheck(operator._rows, (*fixed, *options, 5 * ROW, 3, True, True, True, True, False))
    torch.library.opcheck(operator._rows, (*fixed, *options, 5 * ROW, 0, False, False, False, False, True))
    rows, kept = torch.rand(TOKENS), torch.rand(3, 64)
    saved = (rows, rows, rows, kept, *options, 5 * ROW, 0, 64)
    torch.library.opcheck(linear_log_probs_backward._gradients, (rows, rows, *fixed, *saved, True, True, True))
    torch.library.opcheck(linear_log_probs_backward._gradients, (rows, None, *fixed, *saved, True, False, True))
    attached = (rows, torch.empty(0), hidden, weight.requires_grad_(), target, bias, *saved, "")
    torch.library.opcheck(linear_log_probs_backward.attach_gradients, attached)


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_kernel_compiles_ahead_of_time(target_name: str, dtype: torch.dtype) -> None:
    logits, target, ones = torch.empty(2, 20000, dtype=dtype), torch.zeros(2, dtype=torch.int64), torch.ones(2)
    options, shard = RowOptions(IGNORE, 0.0, 0.0, 30.0, 1.0, 0.8), Shard(20000, 40000)
    stats, extra = RowStats.allocate(logits, 2, True, True), ExtraStats.allocate(logits, 2, True, True)
    hip = "6.4" if target_name.startswith("gfx") else None
    with (
        recorded_launches() as launches,
        mock.patch.object(cross_entropy_kernel, "use_triton", return_value=True),
        mock.patch.object(torch.version, "hip", hip),
    ):
        cross_entropy_kernel.row_statistics_(logits, target, stats, options, extra=extra)
        cross_entropy_kernel.row_gradient_(logits, target, stats, options, ones, entropy_coefficient=ones, shard=shard)
        cross_entropy_kernel.row_partials_(logits, target, torch.empty(2, 8), options, shard)
    assert len(launches) == 3
    for launch in launches:
        assert compile_launch(launch, target_name) is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": torch.zeros(13, 7)}, ["`hidden`", "(13, 7)", "`weight`", "(20, 6)"]),
        ({"weight": torch.zeros(20, 6, dtype=torch.bfloat16)}, ["float32", "bfloat16", "cast"]),
        ({"bias": torch.zeros(19)}, ["`bias`", "(19,)", "(20,)"]),
        ({"target": torch.zeros(12, dtype=torch.int64)}, ["`target`", "(12,)", "(13,)"]),
        ({"target": torch.full((13,), 20)}, ["label 20", "[0, 20)"]),
        ({"logits_memory": 0}, ["`logits_memory`", "at least 1 byte"]),
        ({"retain_memory": -1}, ["`retain_memory`", "-1"]),
        ({"temperature": 0.0}, ["`temperature`", "more than 0"]),
        ({"softcap": 0.0}, ["`softcap`", "more than 0"]),
        ({"outputs": ("log_probs",)}, ["['log_probs']", "'entropy'"]),
        ({"outputs": "entropy"}, ["`outputs`", "tuple"]),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    hidden, weight, _, target = _case()
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        linear_log_probs(**{"hidden": hidden, "weight": weight, "target": target, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


def test_plan_of_known_models() -> None:
    def plan(tokens: int, hidden_size: int, vocab_size: int, retain: int | None = None) -> tuple[int, int]:
        hidden = torch.empty(tokens, hidden_size, dtype=torch.bfloat16, device="meta")
        weight = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device="meta")
        keep = head_chunks.retained_rows(hidden, weight, 512 * 2**20, retain)
        return keep, head_chunks.saturating_chunk_rows(hidden[: tokens - keep], weight, 512 * 2**20, True)

    assert plan(8192, 4096, 128256) == (2048, 2048)  # the backward's chunks fit into the memory of the retained ones
    assert plan(32768, 4096, 128256) == (4096, 3584)
    assert plan(8192, 4096, 128256, 2**31) == (8192, 1)
    assert plan(8192, 4096, 128256, 0) == (0, 2048)
    hidden = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    assert (
        head_chunks.saturating_chunk_rows(hidden, weight, 512 * 2**20, False) == 1024
    )  # a frozen head gains nothing beyond


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


def _gradients(result: Any, leaves: list[torch.Tensor], entropy: bool, **options: Any) -> tuple[torch.Tensor, ...]:
    factors = torch.linspace(-1.0, 2.0, result.log_probs.numel()).to(result.log_probs)
    loss = (result.log_probs * factors).sum()
    if entropy:
        loss = loss + (result.entropy * factors.square()).sum()
    return torch.autograd.grad(loss, leaves, **options)


def _sum_gradients(result: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(-result.log_probs.sum() / 3, leaves)


def _assert_equal(ours: Any, exact: Any) -> None:
    # A sum over the vocabulary rounds its largest terms, so an element near zero is no closer than the others.
    size = max(1.0, exact.double().abs().max().item())
    torch.testing.assert_close(ours.to(exact.dtype), exact, atol=2e-5 * size, rtol=2e-5)


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


@pytest.mark.kernel
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
    hidden, weight, target = _kernel_case(device, tokens, 4, vocab, seed)
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


@pytest.mark.kernel
@pytest.mark.parametrize("vocab", [1, 128, 8193])
def test_vocabularies_of_one_and_of_many_tiles(device: str, vocab: int) -> None:
    hidden, weight, target = _kernel_case(device, 4, 8, vocab)
    leaves, doubles = (
        [make(t).requires_grad_() for t in (hidden, weight)] for make in (torch.clone, torch.Tensor.double)
    )
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
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    results = [
        linear_log_probs(*leaves, target, outputs=("entropy",), logits_memory=16 * 512 * 2, **options),
        linear_log_probs_reference(*leaves, target, outputs=("entropy",)),
        linear_log_probs_reference(*doubles, target, outputs=("entropy",)),
    ]
    entropy = way != "frozen head"
    ours, eager = (_gradients(result, wanted, entropy) for result in results[:2])
    exact = _gradients(results[2], doubles, entropy)
    for mine, theirs, truth in zip(ours, eager, exact):
        assert (mine.double() - truth).norm() <= 1.1 * (theirs.double() - truth).norm()
    for name in ("log_probs", "entropy"):
        mine, theirs, truth = (getattr(result, name).detach().double() for result in results)
        assert (mine - truth).norm() <= 1.1 * (theirs - truth).norm()


@pytest.mark.kernel
@pytest.mark.parametrize("head_trained", [True, False])
@pytest.mark.parametrize("expected", [1.0, 1 / 3])
def test_an_expected_gradient_against_float64(device: str, expected: float, head_trained: bool) -> None:
    hidden, weight, target = _kernel_case(device, 9, 16, 200)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(head_trained)]
    doubles = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    options: dict[str, Any] = {"softcap": 2.0, "temperature": 0.7, "outputs": ("entropy",)}
    wanted, exacts = ([leaf for leaf in group if leaf.requires_grad] for group in (leaves, doubles))
    for gradients_of in (_sum_gradients, functools.partial(_gradients, entropy=True)):
        ours = linear_log_probs(*leaves, target, logits_memory=4096, expected_grad=expected, **options)
        exact = linear_log_probs_reference(*doubles, target, **options)
        for gradient, exact_gradient in zip(gradients_of(ours, wanted), gradients_of(exact, exacts)):
            _assert_equal(gradient, exact_gradient)


@pytest.mark.kernel
@pytest.mark.parametrize("way", WAYS)
def test_two_runs_are_equal_bit_for_bit(device: str, way: str) -> None:
    hidden, weight, target = _kernel_case(device, 9, 16, 200)
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


@pytest.mark.kernel
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


@pytest.mark.kernel
@pytest.mark.parametrize("entropy", [False, True])
def test_kernel_a_masked_vocabulary_has_no_nan(device: str, entropy: bool) -> None:
    hidden, weight, _ = _kernel_case(device, 3, 4, 20)
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


@pytest.mark.kernel
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


@pytest.mark.kernel
def test_kernel_compiles_to_one_graph(device: str) -> None:
    hidden, weight, target = _kernel_case(device, 5, 8, 30)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def step(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result = linear_log_probs(hidden * 2.0, weight, target, outputs=("entropy",), logits_memory=2 * 64 * 4)
        return (result.log_probs.exp() + 0.1 * result.entropy).sum()

    loss, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves), step(*leaves)
    _assert_equal(loss, expected)
    for ours, exact in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)):
        _assert_equal(ours, exact)


# Real shapes, memory and waiting on a GPU.


MIB = 2**20
GPU_WAYS = {
    "retained": (True, 2**32),
    "recomputed": (True, 0),
    "frozen head": (False, 0),
}  # head trained, bytes


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def _gpu_case(tokens: int, size: int, vocab: int, scale: float = 3.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    make = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, size, **make)
    weight = torch.randn(vocab, size, **make) * (scale / size**0.5)
    target = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    target[::5] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), target


def _gpu_loss(result: Any, entropy: bool = False) -> torch.Tensor:
    factors = torch.linspace(-1.0, 2.0, result.log_probs.numel(), device="cuda").to(result.log_probs)
    loss = (result.log_probs * factors).sum()
    return loss + (result.entropy * factors.square()).sum() if entropy else loss


def _error(gradient: torch.Tensor, exact: torch.Tensor) -> float:
    return float((gradient.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
@pytest.mark.usefixtures("_no_synchronisation")
def test_nothing_synchronises(way: str) -> None:
    hidden, weight, target = _gpu_case(1000, 256, 5003)
    weight.requires_grad_(GPU_WAYS[way][0])
    bias = torch.zeros(5003, device="cuda", requires_grad=GPU_WAYS[way][0])

    def step() -> None:
        budgets = {"logits_memory": 2 * MIB, "retain_memory": GPU_WAYS[way][1]}
        _gpu_loss(
            linear_log_probs(hidden, weight, target, bias, outputs=ALL_OUTPUTS, softcap=30.0, **budgets)
        ).backward()

    step()  # compiles the kernels and sets up cuBLAS, which may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
def test_cuda_graph_replays_on_new_inputs(way: str) -> None:
    hidden, weight, target = _gpu_case(512, 256, 5000)
    weight.requires_grad_(GPU_WAYS[way][0])
    wanted = [leaf for leaf in (hidden, weight) if leaf.requires_grad]

    def step() -> torch.Tensor:
        budgets = {"logits_memory": 2 * MIB, "retain_memory": GPU_WAYS[way][1]}
        loss = _gpu_loss(linear_log_probs(hidden, weight, target, outputs=("entropy",), **budgets))
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


@pytest.mark.gpu
@pytest.mark.parametrize("way", GPU_WAYS)
@pytest.mark.parametrize(("vocab", "softcap"), [(128256, None), (50257, 30.0)])
def test_gradients_are_no_further_from_float64_than_eager_bf16(vocab: int, softcap: float | None, way: str) -> None:
    hidden, weight, target = _gpu_case(1024, 1024, vocab)
    weight.requires_grad_(GPU_WAYS[way][0])
    entropy = way != "frozen head"
    options: dict[str, Any] = {"softcap": softcap, "temperature": 0.9, "outputs": ALL_OUTPUTS}
    doubles = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in (hidden, weight)]
    truth = linear_log_probs_reference(*doubles, target, **options)
    eager = linear_log_probs_reference(hidden, weight, target, **options)
    ours = linear_log_probs(hidden, weight, target, logits_memory=256 * MIB, retain_memory=GPU_WAYS[way][1], **options)
    for name in ("log_probs", "entropy", "mean_logit", "sum_squared_probs"):
        assert _error(getattr(ours, name), getattr(truth, name)) <= 1.1 * _error(
            getattr(eager, name), getattr(truth, name)
        )
    assert (ours.top1 == truth.top1).float().mean() > 0.99
    wanted, exacts = ([leaf for leaf in group if leaf.requires_grad] for group in ((hidden, weight), doubles))
    gradients = [torch.autograd.grad(_gpu_loss(result, entropy), wanted) for result in (ours, eager)]
    for mine, theirs, exact in zip(*gradients, torch.autograd.grad(_gpu_loss(truth, entropy), exacts)):
        assert _error(mine, exact) <= 1.1 * _error(theirs, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("way", [*GPU_WAYS, "default"])
def test_peak_memory_is_what_the_budgets_say(way: str) -> None:
    tokens, size, vocab = 8192, 1024, 128256
    hidden, weight, target = _gpu_case(tokens, size, vocab)
    trained, retain = GPU_WAYS.get(way, (True, None))
    weight.requires_grad_(trained)

    def step() -> None:
        _gpu_loss(linear_log_probs(hidden, weight, target, outputs=("entropy",), retain_memory=retain)).backward()

    step()  # workspaces and compiled kernels
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    row, d_hidden = 2 * vocab, 2 * tokens * size
    d_weight = 2 * vocab * size if trained else 2 * d_hidden  # the unit gradient is fp32
    rows = {"retained": tokens, "recomputed": 2048, "default": 2048, "frozen head": 2048}[way]
    assert peak <= rows * row + d_hidden + d_weight + 4 * MIB


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [True, False])
def test_a_pair_of_32k_tokens_fits_the_default_budget(trained: bool) -> None:
    """Gemma's vocabulary: all logits would be 32 GiB."""
    hidden, weight, target = _gpu_case(2 * 32768, 2560, 262208)
    weight.requires_grad_(trained)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _gpu_loss(linear_log_probs(hidden, weight, target, softcap=30.0, outputs=("entropy",))).backward()
    peak = torch.cuda.max_memory_allocated() - before
    d_weight = 2 * weight.numel() if trained else 0
    assert peak - d_weight <= 1536 * MIB
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


@pytest.mark.gpu
def test_retained_logits_beyond_two_billion_elements() -> None:
    hidden, weight, target = _gpu_case(8400, 64, 262208)
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
