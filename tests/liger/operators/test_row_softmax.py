"""Softmax, sparsemax and multi-token attention: references, checks, kernels, and large shapes on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.runtime import INTERPRETED
from liger_trainer.liger.operators import row_softmax as module
from liger_trainer.liger.operators.row_softmax import launch_backward, launch_forward
from liger_trainer.liger.operators.softmax import (
    multi_token_attention,
    multi_token_attention_reference,
    softmax,
    softmax_reference,
    sparsemax,
    sparsemax_reference,
)
from tests.accuracy import assert_no_worse
from tests.aot import Launch, compile_launch, on_targets, recorded_launches
from tests.device import peak_memory


@given(
    columns=st.integers(1, 40), scale=st.sampled_from([1e-3, 1.0, 20.0]), ties=st.booleans(), seed=st.integers(0, 99)
)
@settings(max_examples=60)
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

    ours, theirs = (gradients(function, torch.bfloat16) for function in (multi_token_attention, eager))
    assert_no_worse(ours, theirs, gradients(eager, torch.float64))


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


INF, NAN = float("inf"), float("nan")

PAIRS = {"softmax": (softmax, softmax_reference), "sparsemax": (sparsemax, sparsemax_reference)}

functions = pytest.mark.parametrize("name", PAIRS)


@pytest.fixture(params=[False, True], ids=["in registers", "tile by tile"])
def _both_kernels(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(module, "MAX_IN_REGISTERS", 0)
        monkeypatch.setattr(module, "_LONG_TILE", 32)


def value_and_gradient(function, x, dy):
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy.to(y.dtype))[0]


def assert_exact(name, x, atol=3e-7):
    function, reference = PAIRS[name]
    dy = torch.randn(x.shape, device=x.device)
    ours, right = value_and_gradient(function, x, dy), value_and_gradient(reference, x.double(), dy)
    torch.testing.assert_close(ours[0].double(), right[0], rtol=2e-6, atol=atol)
    torch.testing.assert_close(ours[1].double(), right[1], rtol=1e-5, atol=2e-6)


@pytest.mark.kernel
@functions
@pytest.mark.usefixtures("_both_kernels")
@pytest.mark.parametrize("columns", [1, 2, 17, 100, 300])
@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 1e4])
def test_float32_equals_float64(name, columns, scale, device):
    assert_exact(name, scale * torch.randn(3, columns, device=device))


@pytest.mark.kernel
@functions
@pytest.mark.usefixtures("_both_kernels")
def test_ties_masked_entries_and_rows_far_from_zero(name, device):
    x = torch.randn(6, 40, device=device)
    x[0] = 2.5
    x[1, ::2] = -INF
    x[2, 1:] = -INF
    x[3] = x[3].sign()
    x[4] = 1e6 + x[4].round()
    x[5] = torch.linspace(-1e30, 1e30, 40, device=device)
    assert_exact(name, x)
    y = PAIRS[name][0](x)
    torch.testing.assert_close(y.sum(-1), torch.ones(6, device=device))
    torch.testing.assert_close(y[0], torch.full_like(y[0], 1 / 40), rtol=1e-6, atol=0.0)


@pytest.mark.kernel
@functions
@pytest.mark.usefixtures("_both_kernels")
def test_rows_without_an_answer_are_nan_and_stay_alone(name, device):
    function, reference = PAIRS[name]
    x = torch.randn(4, 40, device=device)
    x[0, 7], x[1], x[2, 39] = NAN, -INF, INF
    dy = torch.randn(4, 40, device=device)
    y, dx = value_and_gradient(function, x, dy)
    assert y[:3].isnan().all()
    if name == "softmax":
        assert dx[:3].isnan().all()
    expected = value_and_gradient(reference, x[3:], dy[3:])
    torch.testing.assert_close((y[3:], dx[3:]), expected)
    assert reference(x)[:3].isnan().all()


@pytest.mark.kernel
@pytest.mark.usefixtures("_both_kernels")
def test_sparsemax_threshold_takes_few_steps_whatever_the_row(device):
    # Newton's method is finite: rows made to shed one entry of the support at a time, and one of all sizes of steps.
    halving = -torch.arange(60.0, device=device).exp2().reciprocal().flip(0)
    geometric = torch.logspace(0, -7, 60, device=device).neg()
    assert_exact("sparsemax", torch.stack([halving, geometric, -geometric, torch.linspace(0, 1, 60, device=device)]))


@pytest.mark.kernel
@functions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(name, dtype, device):
    function, reference = PAIRS[name]
    rows = 4 if INTERPRETED else 4096  # enough that chance does not move the norms
    x = torch.randn(rows, 500, device=device).to(dtype)
    dy = torch.randn(rows, 500, device=device).to(dtype)
    ours, theirs = (value_and_gradient(f, x, dy) for f in (function, reference))
    assert_no_worse(ours, theirs, value_and_gradient(reference, x.double(), dy))


@pytest.mark.kernel
@functions
@pytest.mark.usefixtures("_both_kernels")
def test_causal_rows_ignore_what_is_above_the_diagonal(name, device):
    _, reference = PAIRS[name]
    above = torch.ones(37, 37, dtype=torch.bool, device=device).triu(1)
    x = torch.randn(2, 37, 37, device=device).masked_fill(above, NAN).requires_grad_()
    dy = torch.randn(2, 37, 37, device=device).masked_fill(above, NAN)
    y = module.row_softmax(x, name == "sparsemax", True)
    (dx,) = torch.autograd.grad(y, x, dy)
    expected = value_and_gradient(reference, x.masked_fill(above, -INF), dy.masked_fill(above, 0.0))
    torch.testing.assert_close((y, dx), expected)
    assert not y[:, above].any()
    assert not dx[:, above].any()


@pytest.mark.kernel
@functions
@pytest.mark.usefixtures("_both_kernels")
def test_any_layout_of_input_and_gradient(name, device):
    function, reference = PAIRS[name]
    wide = torch.randn(2, 3, 12, device=device)
    for x in (wide[..., 3:9], wide.transpose(0, 1), wide.mT[:, :5], wide[:1].expand(2, 3, 12), wide[:1, 0, ::2]):
        before = x.clone()
        strided = torch.randn((*x.shape, 2), device=device)[..., 0]
        for dy in (torch.ones((), device=device).expand(x.shape), strided):
            ours, right = value_and_gradient(function, x, dy), value_and_gradient(reference, x, dy)
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)
            assert ours[0].is_contiguous()
        assert torch.equal(x, before)


@pytest.mark.kernel
@pytest.mark.parametrize("dim", [0, 1, -2, 2])
def test_sparsemax_along_any_dimension(dim, device):
    x = torch.randn(3, 5, 4, device=device)
    dy = torch.randn_like(x)
    ours = value_and_gradient(partial(sparsemax, dim=dim), x, dy)
    torch.testing.assert_close(ours, value_and_gradient(partial(sparsemax_reference, dim=dim), x, dy))
    torch.testing.assert_close(ours[0].sum(dim), torch.ones_like(ours[0].sum(dim)))


@pytest.mark.kernel
@functions
def test_empty(name, device):
    for shape in ((0, 8), (3, 0), (2, 0, 5)):
        x = torch.zeros(shape, device=device, requires_grad=True)
        y = PAIRS[name][0](x)
        assert y.shape == torch.Size(shape)
        assert torch.autograd.grad(y.sum(), x)[0].shape == torch.Size(shape)


@pytest.mark.kernel
def test_compiles_fullgraph(device):
    torch.compiler.reset()

    def step(x, weight):
        y = softmax(x * 2.0) + sparsemax(x, dim=0) + sparsemax(x)
        return multi_token_attention(y.unsqueeze(0).mul(3.0), weight, padding=1, sparse=True).square().sum() + y.std()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = torch.randn(2, 1, 3, 3, device=device, requires_grad=True)
    for length in (4, 7):
        x = torch.randn(length, length, device=device, requires_grad=True)
        loss, expected = compiled(x, weight), step(x, weight)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight)))


@pytest.mark.kernel
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 140),
    lead=st.integers(1, 2),
    name=st.sampled_from(sorted(PAIRS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    gap=st.integers(0, 3),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    grid=st.sampled_from([None, 1.0]),
    long=st.booleans(),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_stride_dtype_and_value(rows, columns, lead, name, dtype, gap, scale, grid, long, device):
    function, reference = PAIRS[name]
    x = scale * torch.randn(lead, rows, columns + gap, device=device)[..., gap:]
    x = (x if grid is None else x.div(grid).round()).to(dtype)  # rounded: many ties
    dy = torch.randn(lead, rows, columns, device=device).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if long:
            patch.setattr(module, "MAX_IN_REGISTERS", 0)
            patch.setattr(module, "_LONG_TILE", 64)
        ours = value_and_gradient(function, x, dy)
    y, dx = value_and_gradient(reference, x.double(), dy)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours[0].double(), y, rtol=2 * eps + 1e-6, atol=1e-6)
    if name == "sparsemax":  # the gradient of the support that the result shows
        support = (ours[0] > 0).double()
        dx = support * (dy.double() - (support * dy).sum(-1, keepdim=True) / support.sum(-1, keepdim=True))
    torch.testing.assert_close(ours[1].double(), dx, rtol=8 * eps, atol=8 * eps)


@pytest.mark.kernel
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("options", [{}, {"padding": (1, 2)}, {"stride": 2, "dilation": 2, "groups": 2}], ids=str)
def test_multi_token_attention(sparse, options, device):
    weight = torch.randn(4, 4 // options.get("groups", 1), 3, 5, device=device, requires_grad=True)
    bias = torch.randn(4, device=device, requires_grad=True)
    scores = torch.randn(2, 4, 11, 11, device=device, requires_grad=True)
    leaves = (scores, weight, bias)
    ours = multi_token_attention(*leaves, sparse=sparse, **options)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = multi_token_attention_reference(*doubles, sparse=sparse, **options)
    torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours, ours.tril())
    dy = torch.randn_like(ours)
    gradients = torch.autograd.grad(ours, leaves, dy, retain_graph=True)
    for gradient, expected in zip(gradients, torch.autograd.grad(right, doubles, dy.double())):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)
    assert not gradients[0].triu(1).any()
    assert all(map(torch.equal, gradients, torch.autograd.grad(ours, leaves, dy)))
    frozen = multi_token_attention(scores, weight.detach(), sparse=sparse, **options)
    torch.testing.assert_close(torch.autograd.grad(frozen, scores, dy)[0], gradients[0])


@pytest.mark.kernel
@pytest.mark.usefixtures("_both_kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_causal_softmax_has_the_gradient_of_the_unrounded_softmax(dtype, device):
    above = torch.ones(37, 37, dtype=torch.bool, device=device).triu(1)
    scores, dy = (torch.randn(2, 37, 37, device=device).to(dtype).masked_fill(above, NAN) for _ in range(2))
    scores = torch.stack([scores, scores], dim=-2)[..., 0, :]  # rows that lie apart
    leaf = scores.detach().requires_grad_()
    y = module.row_softmax(leaf, False, True)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    exact = value_and_gradient(
        softmax_reference, scores.double().masked_fill(above, -INF), dy.double().masked_fill(above, 0.0)
    )
    for ours, right in zip((y, dx), exact):
        assert ours.dtype == dtype
        assert not ours[:, above].any()
        rounding = (right.to(dtype) - right).norm()  # one, at the end
        assert (ours - right).norm() <= 1.02 * rounding + 1e-6 * right.norm()


@pytest.mark.kernel
@pytest.mark.usefixtures("_both_kernels")
def test_rows_of_causal_softmax_without_an_answer_are_nan(device):
    scores = torch.zeros(1, 4, 4, device=device, dtype=torch.bfloat16)
    scores[0, 1, 0], scores[0, 2, :3], scores[0, 3, 2] = NAN, -INF, INF
    leaf = scores.requires_grad_()
    y = module.row_softmax(leaf, False, True)
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    for rows in (y, dx):
        assert rows.isnan().any(-1).tolist() == [[False, True, True, True]]


@pytest.mark.gpu
@functions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(8192, 4096), (70001, 128), (333, 1000), (2048, 32768), (64, 128256), (5, 1_000_003)]
)
def test_rounds_no_worse_than_eager(name, dtype, shape, device):
    function, reference = PAIRS[name]
    x, dy = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    ours = value_and_gradient(function, x, dy)
    for part in (slice(0, 64), slice(-64, None)):
        eager, exact = (
            value_and_gradient(reference, x[part], dy[part]),
            value_and_gradient(reference, x[part].double(), dy[part].double()),
        )
        for mine, theirs, right in zip(ours, eager, exact):
            assert (mine[part] - right).norm() <= 1.1 * (theirs - right).norm() + 1e-6 * right.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("columns", [4096, 100_000])
def test_sparsemax_settles_for_every_spread(scale, columns, device):
    x = scale * torch.randn(256, columns, device=device)
    x[::7] = x[::7].sign()
    x[:, ::3] = float("-inf")
    torch.testing.assert_close(sparsemax(x).double(), sparsemax_reference(x.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@functions
def test_more_than_2_to_31_elements(name, device):
    function, reference = PAIRS[name]
    x = torch.empty(2**19 + 64, 4096, device=device, dtype=torch.bfloat16).normal_()
    dy = torch.empty_like(x).normal_()
    y, dx = value_and_gradient(function, x, dy)
    right = value_and_gradient(reference, x[-64:].float(), dy[-64:].float())
    torch.testing.assert_close(y[-64:].float(), right[0], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(dx[-64:].float(), right[1], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("length", [256, 2048])
def test_multi_token_attention_of_real_lengths(sparse, length, device):
    scores = torch.randn(2, 4, length, length, device=device, dtype=torch.bfloat16)
    weight = torch.randn(4, 4, 3, 5, device=device, dtype=torch.bfloat16) / 8
    dy = torch.randn_like(scores)

    def both(function, *tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:2]]
        out = function(*leaves, padding=(1, 2), sparse=sparse)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[2])]

    ours, eager = (both(f, scores, weight, dy) for f in (multi_token_attention, multi_token_attention_reference))
    exact = both(multi_token_attention_reference, scores.double(), weight.double(), dy.double())
    assert_no_worse(ours, eager, exact)


@pytest.mark.gpu
def test_other_lengths_compile_nothing_within_a_power_of_two(device):
    """A training run with sequences of many lengths does not compile a kernel for each."""
    counts = set()
    for columns in (1040, 1056, 2000, 2032):
        for name in PAIRS:
            x = torch.randn(40, columns, device=device)
            value_and_gradient(PAIRS[name][0], x, x)
        cache = module.forward_kernel.device_caches[torch.cuda.current_device()][0]
        counts.add(len(cache))
    assert len(counts) == 1, counts


@pytest.mark.gpu
@functions
def test_peak_memory_is_the_results(name, device):
    x, dy = (torch.randn(8192, 4096, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    assert peak_memory(lambda: torch.autograd.grad(PAIRS[name][0](x), x, dy)) <= 2 * x.numel() * 2 + 2**20
