"""Cross entropy over a head: gradients in float64, chunk sizes, backward protocol, compilation, errors, memory."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.head import head_chunks as _rescale
from liger_trainer.kernels.head import linear_cross_entropy as operator
from liger_trainer.kernels.head.cross_entropy import cross_entropy
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.device import assert_no_host_sync, peak_memory_of_one_run
from tests.kernels.head.heads import (
    EXAMPLES,
    HIDDEN,
    IGNORE,
    MIB,
    ROW,
    TOKENS,
    VOCAB,
    assert_close,
    assert_refused,
    doubled,
    gpu_head,
    in_double,
    needing_gradients,
    recorded_matmuls,
    relative_error,
    small_head,
    with_class_weights,
)

ALL_OUTPUTS = ("z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll")
FIVE_TOKENS = 5 * ROW  # bytes of logits_memory


def _loss(*inputs: Any, **options: Any) -> Any:
    hidden, weight, bias, target = inputs
    return linear_cross_entropy(hidden, weight, target, bias, logits_memory=FIVE_TOKENS, **options)


def _eager(*inputs: Any, **options: Any) -> torch.Tensor:
    hidden, weight, bias, target = inputs
    return F.cross_entropy(F.linear(hidden, weight, bias), target, **options)


@given(
    tokens=st.integers(1, 9),
    vocab_size=st.integers(1, 300),
    memory=st.integers(1, 5000),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.2]),
    z_loss=st.sampled_from([0.0, 0.1]),
    softcap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, -0.5]),
    temperature=st.sampled_from([1.0, 2.0]),
    weighted=st.booleans(),
    biased=st.booleans(),
    trained=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    num_items=st.sampled_from([None, 5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_loss_gradients_and_outputs_equal_the_reference(
    backend: tuple[str, torch.dtype], tokens: int, vocab_size: int, memory: int, reduction: str, smoothing: float,
    z_loss: float, softcap: float | None, scale: float, temperature: float, weighted: bool, biased: bool,
    trained: tuple[bool, bool, bool], num_items: int | None, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = leaves = [
        torch.randn(shape, generator=generator).to(*backend).requires_grad_(train)
        for shape, train in zip(((tokens, 4), (vocab_size, 4), (vocab_size,)), trained)
    ]
    target = torch.randint(0, vocab_size, (tokens,), generator=generator).to(backend[0])
    target[2::3] = IGNORE
    options = with_class_weights({"weighted": weighted}, vocab_size, backend[0])
    options |= {
        "reduction": reduction,
        "num_items": None if reduction == "none" else num_items,
        "label_smoothing": smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "logit_scale": scale,
        "temperature": temperature,
        "outputs": ALL_OUTPUTS,
    }
    doubles = doubled(leaves)
    ours = linear_cross_entropy(hidden, weight, target, bias if biased else None, logits_memory=memory, **options)
    exact = linear_cross_entropy_reference(*doubles[:2], target, doubles[2] if biased else None, **in_double(options))
    for name in ("loss", *ALL_OUTPUTS):
        assert_close(getattr(ours, name), getattr(exact, name))
    if ours.loss.requires_grad:
        wanted, exacts = (needing_gradients(group[: 3 if biased else 2]) for group in (leaves, doubles))
        upstream = torch.rand_like(ours.loss)
        truth = torch.autograd.grad(exact.loss, exacts, upstream.double())
        for gradient, exact_gradient in zip(torch.autograd.grad(ours.loss, wanted, upstream), truth):
            assert_close(gradient, exact_gradient)


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_that_are_needed_are_computed(trained: tuple[int, ...], reduction: str) -> None:
    *leaves, target = small_head(trained=trained)
    with recorded_matmuls() as matmuls:
        _loss(*leaves, target, reduction=reduction).sum().backward()
    wanted = needing_gradients(leaves)
    expected = torch.autograd.grad(_eager(*leaves, target, reduction=reduction).sum(), wanted)
    torch.testing.assert_close(tuple(leaf.grad for leaf in wanted), expected)
    assert all(leaf.grad is None for leaf in leaves if not leaf.requires_grad)
    passes = 1 + (reduction == "none") + (0 in trained) + (1 in trained)
    assert len(matmuls) == 3 * passes  # three chunks of five tokens


def test_no_grad_runs_one_matmul_a_chunk_and_leaves_the_inputs_alone() -> None:
    *leaves, target = small_head()
    copies = [leaf.detach().clone() for leaf in leaves]
    with torch.no_grad(), recorded_matmuls() as matmuls:
        loss = _loss(*leaves, target)
    assert len(matmuls) == 3
    assert not loss.requires_grad
    torch.testing.assert_close(loss, _eager(*leaves, target).detach())
    assert all(torch.equal(leaf, copy) for leaf, copy in zip(leaves, copies))


def test_retained_graph_gives_the_right_gradient_for_every_upstream_gradient() -> None:
    *leaves, target = small_head()
    loss, eager = _loss(*leaves, target), _eager(*leaves, target)
    taken = []
    for upstream in (1.0, 2.0, 0.0, float("inf"), 2.0, -0.5, 1.0):
        gradients = torch.autograd.grad(loss, leaves, torch.tensor(upstream), retain_graph=True)
        taken.append((gradients, [gradient.clone() for gradient in gradients]))
        if upstream == float("inf"):
            assert not any(gradient.isfinite().all() for gradient in gradients)
        else:
            expected = torch.autograd.grad(eager, leaves, torch.tensor(upstream), retain_graph=True)
            torch.testing.assert_close(gradients, expected)
    last = torch.autograd.grad(loss, leaves, torch.tensor(3.0))
    torch.testing.assert_close(last, torch.autograd.grad(eager, leaves, torch.tensor(3.0)))
    for gradients, copies in taken:  # no later backward wrote into what an earlier one returned
        assert all(gradient.equal(copy) or copy.isnan().any() for gradient, copy in zip(gradients, copies))


def test_accumulate_grad_takes_the_saved_gradients_over() -> None:
    *leaves, target = small_head()
    saved: list[int] = []

    def spy(gradients: list[Any], *scalars: torch.Tensor) -> list[Any]:
        saved.extend(gradient.data_ptr() for gradient in gradients)
        return _rescale.rescaled_gradients(gradients, *scalars)

    with mock.patch.object(operator, "rescaled_gradients", spy):
        (_loss(*leaves, target) * 2.0).backward()
    assert [leaf.grad.data_ptr() for leaf in leaves] == saved  # scaled where they were, and never copied
    torch.testing.assert_close(
        [leaf.grad for leaf in leaves], list(torch.autograd.grad(_eager(*leaves, target) * 2.0, leaves))
    )


@pytest.mark.parametrize("form", [float, torch.tensor])
def test_the_expected_upstream_gradient_leaves_the_gradients_untouched(form: Any) -> None:
    *leaves, target = small_head(torch.bfloat16)
    upstream = torch.tensor(1 / 3)
    loss = _loss(*leaves, target, reduction="sum", expected_grad=form(upstream.item()))
    with mock.patch.object(torch.Tensor, "mul_", side_effect=AssertionError("the gradients were scaled")):
        gradients = torch.autograd.grad(loss, leaves, upstream)
    divided = torch.autograd.grad(_loss(*leaves, target, num_items=3), leaves)
    torch.testing.assert_close(gradients, divided)


@pytest.mark.parametrize("expected_grad", [0.0, float("nan"), float("inf")])
def test_an_expectation_that_cannot_be_divided_out_is_ignored(expected_grad: float) -> None:
    *leaves, target = small_head()
    gradients = torch.autograd.grad(_loss(*leaves, target, expected_grad=expected_grad), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(_eager(*leaves, target), leaves))


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum", "expected_grad": 1 / 4096}, {"expected_grad": 0.5}], ids=str
)
def test_fp16_gradients_of_a_mean_do_not_underflow(options: dict[str, Any]) -> None:
    """Of a mean, of the sum that a trainer divides later, and of the mean of one of two micro-batches.

    4096 tokens of the same label: every dlogit is below 2**-25, which is 0 in fp16, unless it is scaled.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, HIDDEN, generator=generator).half()
    weight = (0.1 * torch.randn(VOCAB, HIDDEN, generator=generator)).half().requires_grad_()
    weight.data[0] = 4 * hidden.float().mean(0).half()
    target = torch.zeros(4096, dtype=torch.int64)
    bias = torch.full((VOCAB,), -12.0)
    bias[0] = 0.0
    upstream = torch.tensor(1.0 if "reduction" in options else 4096.0)
    loss = linear_cross_entropy(hidden, weight, target, bias, **options)
    (gradient,) = torch.autograd.grad(loss, weight, upstream)
    double = weight.detach().double().requires_grad_()
    reference = linear_cross_entropy_reference(hidden.double(), double, target, bias.double())
    (expected,) = torch.autograd.grad(reference * 4096.0, double)
    assert (gradient.double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("tokens", [1, 3, 4096])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_fp16_gradients_of_few_tokens_do_not_overflow(tokens: int, upstream: float) -> None:
    # One token's dW is as large as its hidden states, 100 here, which fp16 does not hold times 4096.
    size = 64  # of 6 numbers the errors would be chance
    generator = torch.Generator().manual_seed(0)
    hidden = (100 * torch.randn(tokens, size, generator=generator)).half().requires_grad_()
    weight = (0.003 * torch.randn(VOCAB, size, generator=generator)).half().requires_grad_()
    target = torch.full((tokens,), IGNORE)
    target[0] = 3  # however many tokens there are, one is valid
    ours, eager = (
        torch.autograd.grad(function(hidden, weight, target) * upstream, (hidden, weight))
        for function in (linear_cross_entropy, linear_cross_entropy_reference)
    )
    for mine, theirs in zip(ours, eager):
        assert mine.isfinite().all()
        assert (mine.double() - theirs.double()).norm() <= 4e-3 * theirs.double().norm()


def test_a_bias_of_minus_infinity_masks_the_vocabulary() -> None:
    hidden, weight, bias, target = small_head()
    masked = bias.detach().clone()
    masked[-4:] = -float("inf")
    target = torch.where(target == IGNORE, IGNORE, target % (VOCAB - 4))
    leaves = (hidden, weight)
    for reduction in ("mean", "none"):
        ours = torch.autograd.grad(_loss(*leaves, masked, target, reduction=reduction).sum(), leaves)
        expected = torch.autograd.grad(_eager(*leaves, masked, target, reduction=reduction).sum(), leaves)
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("tokens", [TOKENS, 0])
@pytest.mark.parametrize("options", [{}, {"num_items": 0}, {"label_smoothing": 0.1}, {"reduction": "none"}])
def test_without_a_valid_token_the_loss_is_a_zero_that_backpropagates(options: dict[str, Any], tokens: int) -> None:
    *leaves, target = small_head(tokens=tokens)
    loss = _loss(*leaves, torch.full_like(target, IGNORE), **options).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert all(leaf.grad.shape == leaf.shape and leaf.grad.eq(0).all() for leaf in leaves)


def test_nan_in_the_input_gives_a_nan_loss() -> None:
    hidden, *rest = small_head()
    poisoned = hidden.detach().clone()
    poisoned[1, 0] = float("nan")
    assert _loss(poisoned, *rest).isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_is_fp32(dtype: torch.dtype) -> None:
    *leaves, target = small_head(dtype)
    assert _loss(*leaves, target).dtype == torch.float32
    assert _loss(*leaves, target, reduction="none").dtype == torch.float32


def test_strided_and_batched_inputs() -> None:
    hidden, weight, bias, target = small_head(tokens=12)
    strided = hidden.detach().view(3, 4, HIDDEN).transpose(0, 1).requires_grad_()
    tied = weight.detach().t().contiguous().t().requires_grad_()  # column-major, as some tied embeddings are
    labels = target.view(3, 4).t()
    loss = _loss(strided, tied, bias, labels)
    gradients = torch.autograd.grad(loss, (strided, tied, bias))
    expected = _eager(hidden, weight, bias, target)
    torch.testing.assert_close(loss, expected)
    d_hidden, d_weight, d_bias = torch.autograd.grad(expected, (hidden, weight, bias))
    torch.testing.assert_close(gradients, (d_hidden.view(3, 4, HIDDEN).transpose(0, 1), d_weight, d_bias))
    assert gradients[1].stride() == tied.stride()  # or autograd would copy it into .grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant: bool) -> None:
    *leaves, target = small_head()
    checkpoint(_loss, *leaves, target, use_reentrant=reentrant).backward()
    expected = torch.autograd.grad(_eager(*leaves, target), leaves)
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_double_backward_is_refused(reduction: str) -> None:
    *leaves, target = small_head()
    loss = _loss(*leaves, target, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, leaves, create_graph=True)


def test_compiles_to_one_graph_with_a_normaliser_and_outputs() -> None:
    *leaves, target = small_head()

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        options = {"num_items": torch.tensor(5), "outputs": ("entropy", "token_accuracy")}
        return 3.0 * _loss(leaves[0] * 2.0, *leaves[1:], target, **options).loss

    loss, expected = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves), step(*leaves)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": torch.zeros(13, 7)}, ["`hidden`", "(13, 7)", "`weight`", "(20, 6)"]),
        ({"hidden": torch.zeros(13, 0), "weight": torch.zeros(20, 0)}, ["(13, 0)", "(20, 0)", "at least 1"]),
        ({"weight": torch.zeros(20, 6, dtype=torch.bfloat16)}, ["float32", "bfloat16", "cast"]),
        ({"weight": torch.zeros(20, 6, device="meta")}, ["`weight`", "meta"]),
        ({"bias": torch.zeros(19)}, ["`bias`", "(19,)", "(20,)"]),
        ({"target": torch.zeros(12, dtype=torch.int64)}, ["`target`", "(12,)", "(13,)"]),
        ({"target": torch.full((13,), 20)}, ["label 20", "[0, 20)"]),
        ({"logits_memory": 0}, ["`logits_memory`", "at least 1 byte"]),
        ({"class_weights": torch.ones(3)}, ["`class_weights`", "(3,)"]),
        ({"reduction": "mode"}, ["`reduction`"]),
    ],
)
def test_errors_say_what_is_wrong(changes: dict[str, Any], words: list[str]) -> None:
    hidden, weight, _, target = small_head()
    assert_refused(linear_cross_entropy, words, **{"hidden": hidden, "weight": weight, "target": target, **changes})


def _weight_gradient_errors(count: int, tokens: int = 1024, size: int = 64, vocab: int = 2048) -> tuple[float, float]:
    """Relative errors of dW against float64, of eager bf16 and of `count` chunks; logits of standard deviation 3."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator).bfloat16()
    weight = (3 / size**0.5 * torch.randn(vocab, size, generator=generator)).bfloat16().requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    double = weight.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(_eager(hidden.double(), double, None, target), double)
    (eager,) = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), target), weight)
    with mock.patch.object(operator, "chunk_rows", return_value=tokens // count):
        (ours,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), weight)
    return float((eager.double() - exact).norm() / exact.norm()), float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("count", [1, 9, 32])
def test_weight_gradient_of_one_or_of_many_chunks_has_eagers_error(count: int) -> None:
    eager, ours = _weight_gradient_errors(count)
    assert ours <= 1.02 * eager


@pytest.mark.parametrize("count", [2, 4, 8])
def test_weight_gradient_of_few_chunks_has_the_documented_error(count: int) -> None:
    """One rounding to bf16 costs 1.7e-3 of the norm; c chunks round partial sums of 1/c to 1 of the variance.

    That is 1.25 times eager's error with 8 chunks. With one more rounding of the sum they would be over the bound.
    """
    eager, ours = _weight_gradient_errors(count)
    assert ours <= 1.03 * (eager**2 + (count - 1) / 2 * 1.7e-3**2) ** 0.5


# Real shapes, memory and waiting on a GPU.


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "none"},
    {"num_items": 100, "label_smoothing": 0.1, "z_loss": 1e-4},
    {"weighted": True, "softcap": 30.0, "outputs": ("entropy", "token_accuracy", "z_loss")},
    {"num_items_on": "cuda"},
    {"num_items_on": "cpu"},
]


def _prepared(options: dict[str, Any], vocab: int) -> dict[str, Any]:
    options = with_class_weights(options, vocab, "cuda")
    if where := options.pop("num_items_on", None):
        options["num_items"] = torch.tensor(100, device=where)
    return options


def _sum(result: Any) -> torch.Tensor:
    return (result if isinstance(result, torch.Tensor) else result.loss).sum()


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_nothing_synchronises(options: dict[str, Any]) -> None:
    hidden, weight, target = gpu_head(1000, 256, 5003)
    options = _prepared(options, 5003)
    bias = torch.zeros(5003, device="cuda", requires_grad=True)

    def step() -> None:
        linear = linear_cross_entropy(hidden, weight, target, bias, logits_memory=2 * MIB, **options)
        given = cross_entropy((hidden @ weight.t()), target, **options)
        inplace = cross_entropy((hidden @ weight.t()), target, inplace=True, **options)
        (2.0 * _sum(linear) + _sum(given) + _sum(inplace)).backward()

    assert_no_host_sync(step)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32000, 50257, 128256])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_gradients_are_no_further_from_float64_than_eager_bf16(vocab: int, softcap: float | None) -> None:
    hidden, weight, target = gpu_head(1024, 1024, vocab, scale=3.0)
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
        assert relative_error(mine, truth) <= 1.05 * relative_error(theirs, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [16 * MIB, 64 * MIB])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_rows_of_an_odd_vocabulary_are_as_exact_as_eager(budget: int, dtype: torch.dtype) -> None:
    """Chunks of 128 and 640 rows, for which cuBLAS splits the terms of a matmul: their parts are added in fp32."""
    hidden, weight, target = gpu_head(4096, 1024, 50257, dtype, scale=3.0)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.autograd.grad(linear_cross_entropy_reference(*doubles, target, reduction="sum"), doubles)
    eager_loss = F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="sum")
    eager = torch.autograd.grad(eager_loss, (hidden, weight))
    ours = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, target, reduction="sum", logits_memory=budget), (hidden, weight)
    )
    for mine, theirs, truth in zip(ours, eager, exact):
        assert relative_error(mine, truth) <= 1.1 * relative_error(theirs, truth)
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.gpu
def test_many_chunks_sum_the_weight_gradient_in_fp32() -> None:
    hidden, weight, target = gpu_head(4096, 512, 8192, scale=3.0)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    (exact,) = torch.autograd.grad(linear_cross_entropy_reference(*doubles, target), doubles[1])
    eager = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), target), weight)[0]
    loss = linear_cross_entropy(hidden, weight, target, logits_memory=128 * 8192 * 2)  # 32 chunks
    (ours,) = torch.autograd.grad(loss, weight)
    # 8 chunks need 512 rows, 384 more than the budget and fewer than H: the buffer grows, and the sum rounds 7 times at
    # k/8 of its final variance, each by at most 2**-9.
    assert relative_error(ours, exact) <= (relative_error(eager, exact) ** 2 + 3.5 * 2**-18) ** 0.5
    narrow, head = hidden.detach()[:, :128].contiguous(), weight.detach()[:, :128].contiguous().requires_grad_()
    (exact,) = torch.autograd.grad(
        linear_cross_entropy_reference(narrow.double(), double := head.detach().double().requires_grad_(), target),
        double,
    )
    (ours,) = torch.autograd.grad(linear_cross_entropy(narrow, head, target, logits_memory=128 * 8192 * 2), head)
    eager = torch.autograd.grad(F.cross_entropy(F.linear(narrow, head).float(), target), head)[0]
    assert relative_error(ours, exact) <= 1.05 * relative_error(eager, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [False, True])
def test_peak_memory_is_buffer_and_gradients(frozen: bool) -> None:
    tokens, size, vocab = 8192, 1024, 128256
    hidden, weight, target = gpu_head(tokens, size, vocab)
    weight.requires_grad_(not frozen)
    linear_cross_entropy(hidden, weight, target).backward()  # workspaces and compiled kernels
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    peak = peak_memory_of_one_run(lambda: (2.0 * linear_cross_entropy(hidden, weight, target)).backward())
    buffer, d_hidden = 2048 * vocab * 2, 2 * tokens * size
    d_weight = 0 if frozen else 2 * vocab * size
    assert peak <= buffer + d_hidden + d_weight + 4 * MIB  # nothing is held twice, though the upstream gradient is 2
    assert torch.cuda.memory_allocated() - before <= d_hidden + d_weight + 4 * MIB
