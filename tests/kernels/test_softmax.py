"""Softmax, sparsemax and multi-token attention: references against their definitions, checks, and compilation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.parity.multi_token_attention import multi_token_attention, multi_token_attention_reference
from liger_trainer.kernels.parity.row_softmax import launch_backward, launch_forward
from liger_trainer.kernels.parity.softmax import softmax
from liger_trainer.kernels.parity.sparsemax import sparsemax, sparsemax_reference
from tests.aot import Launch, compile_launch, on_targets, recorded_launches


@given(
    columns=st.integers(1, 40), scale=st.sampled_from([1e-3, 1.0, 20.0]), ties=st.booleans(), seed=st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_sparsemax_reference_is_the_projection_onto_the_simplex(
    columns: int, scale: float, ties: bool, seed: int
) -> None:
    x = scale * torch.randn(columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = x.round() if ties else x
    y = sparsemax_reference(x)
    assert y.ge(0).all()
    torch.testing.assert_close(y.sum(), torch.ones((), dtype=torch.float64))
    # The conditions of Karush, Kuhn and Tucker: x - y is one number on the support, and nowhere more than it.
    excess = x - y
    tau = excess[y > 0]
    assert tau.max() - tau.min() < 1e-12 * max(1.0, scale)
    assert excess.max() <= tau.max() + 1e-12 * max(1.0, scale)


def test_gradcheck() -> None:
    x = (3 * torch.arange(15.0, dtype=torch.float64).sin()).view(3, 5).requires_grad_()
    assert torch.autograd.gradcheck(sparsemax, x)
    assert torch.autograd.gradcheck(lambda x: sparsemax(x, dim=0), x)
    assert torch.autograd.gradcheck(softmax, x)
    assert torch.autograd.gradgradcheck(softmax, x)  # float64 runs as the reference


def test_sparsemax_by_hand() -> None:
    x = torch.tensor([[0.0, 0.0], [2.0, 0.5], [0.3, 0.1], [-5.0, float("-inf")]])
    expected = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.6, 0.4], [1.0, 0.0]])
    torch.testing.assert_close(sparsemax(x), expected)
    torch.testing.assert_close(sparsemax(x.T, dim=0), expected.T)
    assert sparsemax(x.bfloat16()).dtype == torch.bfloat16


def test_rows_without_an_answer_are_nan() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[nan, 1.0], [-inf, -inf], [inf, 0.0], [1.0, 0.0]])
    assert sparsemax(x).isnan().tolist() == [[True, True]] * 3 + [[False, False]]
    assert softmax(x).isnan().any(-1).tolist() == [True] * 3 + [False]


@pytest.mark.parametrize("sparse", [False, True])
def test_multi_token_attention_is_its_formula(sparse: bool) -> None:
    scores = torch.randn(2, 4, 9, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    out = multi_token_attention(scores, weight, bias, padding=1, groups=2, sparse=sparse)
    masked = scores + torch.full((9, 9), float("-inf")).triu(1)
    probabilities = sparsemax_reference(masked) if sparse else masked.softmax(-1)
    keep = torch.ones(9, 9, dtype=torch.float64).tril()
    torch.testing.assert_close(out, F.conv2d(probabilities, weight, bias, padding=1, groups=2) * keep)
    reference = multi_token_attention_reference(scores, weight, bias, padding=1, groups=2, sparse=sparse)
    torch.testing.assert_close(out, reference)
    assert torch.autograd.gradcheck(
        lambda *leaves: multi_token_attention(*leaves, padding=1, groups=2, sparse=sparse),
        (scores[:1, :, :4, :4].detach().requires_grad_(), weight, bias),
    )
    unbatched = multi_token_attention(scores[0], weight, bias, padding=1, groups=2, sparse=sparse)
    torch.testing.assert_close(unbatched, out[0])


def test_multi_token_attention_in_half_precision_is_no_worse_than_an_fp32_softmax_that_is_rounded() -> None:
    """The gradient of scores is that of the softmax before it was rounded, as in attention with ``dtype=float32``."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 128, 128), (4, 1, 3, 3), (1, 4, 128, 128))
    scores, weight, dy = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    future = torch.ones(128, 128, dtype=torch.bool).triu(1)

    def eager(scores: torch.Tensor, weight: torch.Tensor, **options: int) -> torch.Tensor:
        masked = scores.masked_fill(future, float("-inf"))
        wide = torch.promote_types(scores.dtype, torch.float32)
        return F.conv2d(masked.softmax(-1, dtype=wide).to(scores.dtype), weight, **options).masked_fill(future, 0)

    def gradients(function, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (scores, weight)]
        return torch.autograd.grad(function(*leaves, padding=1, groups=4), leaves, dy.to(dtype))

    exact = gradients(eager, torch.float64)
    both = (gradients(function, torch.bfloat16) for function in (multi_token_attention, eager))
    for ours, theirs, right in zip(*both, exact):
        assert (ours - right).norm() <= 1.1 * (theirs - right).norm()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: softmax(torch.zeros(())), ["`x` of softmax", "()"]),
        (lambda: softmax(torch.zeros(3, dtype=torch.int64)), ["`x` of softmax", "int64"]),
        (lambda: sparsemax(torch.zeros(())), ["`x` of sparsemax", "()"]),
        (lambda: sparsemax(torch.zeros(2, dtype=torch.bool)), ["`x` of sparsemax", "bool"]),
        (lambda: sparsemax(torch.zeros(2, 3), dim=2), ["`dim`", "2", "(2, 3)"]),
        (lambda: sparsemax(torch.zeros(2, 3), dim=-3), ["`dim`", "-3"]),
        (lambda: multi_token_attention(torch.zeros(1, 2, 3, 4), torch.zeros(2, 2, 1, 1)), ["`scores`", "(1, 2, 3, 4)"]),
        (lambda: multi_token_attention(torch.zeros(3, 3), torch.zeros(2, 2, 1, 1)), ["`scores`", "(3, 3)"]),
    ],
)
def test_errors_say_what_is_wrong(call, words) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        call()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiles_to_one_graph(dtype: torch.dtype) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (sparsemax(x, dim=1) * softmax(x)).sum()

    x = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(x), x), torch.autograd.grad(step(x), x))


def _launches(columns: int, dtype: torch.dtype) -> list[Launch]:
    x = torch.empty(3, columns, dtype=dtype)
    with recorded_launches() as launches:
        for option in (False, True):  # plain softmax, causal sparsemax
            launch_forward(x, x, sparse=option, causal=option)
            launch_backward(x, x, x, sparse=option, causal=option)
        lse = torch.empty(3)
        launch_forward(x, x, sparse=False, causal=True, lse=lse)
        launch_backward(x, x, x, sparse=False, causal=True, lse=lse)
    return launches


@pytest.mark.parametrize(
    ("target", "dtype", "columns"),
    [case for columns in (500, 100_001) for case in on_targets((torch.bfloat16, columns), (torch.float32, columns))],
)
def test_compiles_ahead_of_time(target: str, dtype: torch.dtype, columns: int) -> None:
    launches = _launches(columns, dtype)
    assert len(launches) == 6
    for launch in launches:
        assert compile_launch(launch, target)


@pytest.mark.parametrize("columns", [1024, 131_072])
def test_kernels_read_128_bits_at_a_time(columns: int) -> None:
    for launch in _launches(columns, torch.bfloat16):
        lines = compile_launch(launch, "sm_90").asm["ptx"].splitlines()
        accesses = [line for line in lines if "ld.global" in line or "st.global" in line]
        numbers_a_row = int(launch.arguments["lse_ptr"] is not None)
        assert len(accesses) > numbers_a_row
        narrow = {line.split("[")[1].split()[0] for line in accesses if "v4.b32" not in line}
        assert len(narrow) == numbers_a_row  # addresses, as Triton 3.7 reads a row's one number more than once
