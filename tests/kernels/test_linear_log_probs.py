"""Log-probabilities over a head on the CPU: gradients in float64, matmuls spent, backward protocol, compilation."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.head import cross_entropy_kernel, head_chunks
from liger_trainer.kernels.head import linear_cross_entropy as chunks
from liger_trainer.kernels.head import linear_log_probs as operator
from liger_trainer.kernels.head import linear_log_probs_backward as row_gradients
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, linear_log_probs_reference
from liger_trainer.kernels.head.row_statistics import ExtraStats, RowOptions, RowStats, Shard
from tests.aot import TARGETS, compile_launch, recorded_launches

IGNORE = -100
EVERYTHING: dict[str, Any] = {"softcap": 4.0, "logit_scale": 1.5, "temperature": 0.8}
ALL_OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")
TOKENS, HIDDEN, VOCAB = 13, 6, 20
ROW = 64 * 4  # bytes of one fp32 row of logits, padded to 64 columns
ALL_KEPT = {"logits_memory": 5 * ROW, "retain_memory": TOKENS * ROW}
NONE_KEPT = {"logits_memory": 5 * ROW, "retain_memory": 0}
SOME_KEPT = {"logits_memory": 5 * ROW, "retain_memory": 3 * ROW}
BUDGETS = [{"logits_memory": 5 * ROW}, ALL_KEPT, NONE_KEPT, SOME_KEPT]


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
        mock.patch.object(chunks.torch, "mm", side_effect=spy(torch.mm)),
        mock.patch.object(chunks.torch, "addmm", side_effect=spy(torch.addmm)),
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
        ((), False, NONE_KEPT, 1),
        ((0,), False, NONE_KEPT, 2),  # the frozen head
        ((0,), False, ALL_KEPT, 2),
        ((0,), True, ALL_KEPT, 4),  # whose entropy gradient is not made in advance
        ((1,), True, NONE_KEPT, 3),
        ((1,), True, ALL_KEPT, 2),
        ((0, 1, 2), True, ALL_KEPT, 3),
        ((0, 1, 2), True, NONE_KEPT, 4),
        ((0, 1, 2), True, SOME_KEPT, 4 - 3 / TOKENS),
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


def test_only_the_last_backward_writes_over_the_kept_logits() -> None:
    *leaves, target = _case()
    loss = _loss(_run, *leaves, target)
    with mock.patch.object(row_gradients, "_gradients_", wraps=row_gradients._gradients_) as in_place:
        torch.autograd.grad(loss, leaves, retain_graph=True)
        assert not in_place.called
        torch.autograd.grad(loss, leaves)
        assert in_place.called


def test_kept_logits_are_the_memory_of_the_other_chunks() -> None:
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


def test_no_grad_keeps_nothing_and_leaves_the_inputs_alone() -> None:
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
    torch.library.opcheck(row_gradients._gradients, (rows, rows, *fixed, *saved, True, True, True))
    torch.library.opcheck(row_gradients._gradients_, (rows, None, *fixed, *saved, True, False, True))
    attached = (rows, torch.empty(0), hidden, weight.requires_grad_(), target, bias, *saved, "")
    torch.library.opcheck(row_gradients.attach_gradients, attached)


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

    assert plan(8192, 4096, 128256) == (2048, 2048)  # the backward's chunks fit into the memory of the kept ones
    assert plan(32768, 4096, 128256) == (4096, 3584)
    assert plan(8192, 4096, 128256, 2**31) == (8192, 1)
    assert plan(8192, 4096, 128256, 0) == (0, 2048)
    hidden = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128256, 4096, dtype=torch.bfloat16, device="meta")
    assert (
        head_chunks.saturating_chunk_rows(hidden, weight, 512 * 2**20, False) == 1024
    )  # a frozen head gains nothing beyond
