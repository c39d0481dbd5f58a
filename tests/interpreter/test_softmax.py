"""Softmax, sparsemax and multi-token attention as kernels: values, gradients, masks, layouts and registration."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from liger_trainer.kernels.parity import row_softmax as launches
from liger_trainer.kernels.parity import row_softmax as operators
from liger_trainer.kernels.parity.multi_token_attention import multi_token_attention, multi_token_attention_reference
from liger_trainer.kernels.parity.softmax import softmax, softmax_reference
from liger_trainer.kernels.parity.sparsemax import sparsemax, sparsemax_reference
from liger_trainer.kernels.runtime import use_triton

INF, NAN = float("inf"), float("nan")
PAIRS = {"softmax": (softmax, softmax_reference), "sparsemax": (sparsemax, sparsemax_reference)}
functions = pytest.mark.parametrize("name", PAIRS)
from liger_trainer.kernels.runtime import INTERPRETED


@pytest.fixture(autouse=True)
def _kernels_run(device):
    if not use_triton(torch.empty(1, device=device)):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    torch.manual_seed(0)


@pytest.fixture(params=[False, True], ids=["in registers", "tile by tile"])
def _both_kernels(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(launches, "MAX_IN_REGISTERS", 0)
        monkeypatch.setattr(launches, "_LONG_TILE", 32)


def value_and_gradient(function, x, dy):
    x = x.detach().requires_grad_()
    y = function(x)
    return y, torch.autograd.grad(y, x, dy.to(y.dtype))[0]


def assert_exact(name, x, atol=3e-7):
    function, reference = PAIRS[name]
    dy = torch.randn(x.shape, device=x.device)
    ours, right = value_and_gradient(function, x, dy), value_and_gradient(reference, x.double(), dy)
    torch.testing.assert_close(ours[0].double(), right[0], rtol=2e-6, atol=atol)
    torch.testing.assert_close(ours[1].double(), right[1], rtol=1e-5, atol=2e-6)


@functions
@pytest.mark.usefixtures("_both_kernels")
@pytest.mark.parametrize("columns", [1, 2, 17, 100, 300])
@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 1e4])
def test_float32_equals_float64(name, columns, scale, device):
    assert_exact(name, scale * torch.randn(3, columns, device=device))


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


@pytest.mark.usefixtures("_both_kernels")
def test_sparsemax_threshold_takes_few_steps_whatever_the_row(device):
    # Newton's method is finite: rows made to shed one entry of the support at a time, and one of all sizes of steps.
    halving = -torch.arange(60.0, device=device).exp2().reciprocal().flip(0)
    geometric = torch.logspace(0, -7, 60, device=device).neg()
    assert_exact("sparsemax", torch.stack([halving, geometric, -geometric, torch.linspace(0, 1, 60, device=device)]))


@functions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(name, dtype, device):
    function, reference = PAIRS[name]
    rows = 4 if INTERPRETED else 4096  # enough that chance does not move the norms
    x = torch.randn(rows, 500, device=device).to(dtype)
    dy = torch.randn(rows, 500, device=device).to(dtype)
    exact = value_and_gradient(reference, x.double(), dy)
    results = zip(value_and_gradient(function, x, dy), value_and_gradient(reference, x, dy), exact)
    for ours, theirs, right in results:
        assert ours.dtype == dtype
        assert (ours - right).norm() <= 1.1 * (theirs - right).norm()


@functions
@pytest.mark.usefixtures("_both_kernels")
def test_causal_rows_ignore_what_is_above_the_diagonal(name, device):
    _, reference = PAIRS[name]
    above = torch.ones(37, 37, dtype=torch.bool, device=device).triu(1)
    x = torch.randn(2, 37, 37, device=device).masked_fill(above, NAN).requires_grad_()
    dy = torch.randn(2, 37, 37, device=device).masked_fill(above, NAN)
    y = operators.row_softmax(x, name == "sparsemax", True)
    (dx,) = torch.autograd.grad(y, x, dy)
    expected = value_and_gradient(reference, x.masked_fill(above, -INF), dy.masked_fill(above, 0.0))
    torch.testing.assert_close((y, dx), expected)
    assert not y[:, above].any()
    assert not dx[:, above].any()


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


@pytest.mark.parametrize("dim", [0, 1, -2, 2])
def test_sparsemax_along_any_dimension(dim, device):
    x = torch.randn(3, 5, 4, device=device)
    dy = torch.randn_like(x)
    ours = value_and_gradient(partial(sparsemax, dim=dim), x, dy)
    torch.testing.assert_close(ours, value_and_gradient(partial(sparsemax_reference, dim=dim), x, dy))
    torch.testing.assert_close(ours[0].sum(dim), torch.ones_like(ours[0].sum(dim)))


@functions
def test_empty(name, device):
    for shape in ((0, 8), (3, 0), (2, 0, 5)):
        x = torch.zeros(shape, device=device, requires_grad=True)
        y = PAIRS[name][0](x)
        assert y.shape == torch.Size(shape)
        assert torch.autograd.grad(y.sum(), x)[0].shape == torch.Size(shape)


@functions
def test_runs_give_the_same_bits_and_graphs_may_be_kept(name, device):
    function, _ = PAIRS[name]
    x, dy = torch.randn(5, 70, device=device), torch.randn(5, 70, device=device)
    first, second = value_and_gradient(function, x, dy), value_and_gradient(function, x, dy)
    assert all(map(torch.equal, first, second))
    x.requires_grad_()
    y = function(x)
    kept = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    assert torch.equal(kept, torch.autograd.grad(y, x, dy)[0])
    assert torch.equal(kept, first[1])


@functions
def test_second_derivative_is_refused(name, device):
    x = torch.randn(2, 9, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(PAIRS[name][0](x).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(PAIRS[name][1](x).square().sum(), x)
    torch.testing.assert_close(dx, expected)  # the first is right
    with pytest.raises(RuntimeError, match="The gradient of softmax and sparsemax cannot itself be differentiated"):
        dx.sum().backward()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_opcheck(sparse, causal, device):
    x = torch.randn(2, 5, 5, device=device)
    opcheck(operators.row_softmax, (x.requires_grad_(), sparse, causal))
    opcheck(operators.row_softmax, (x.detach().mT.requires_grad_(), sparse, causal))
    y = operators.row_softmax(x.detach(), sparse, causal)
    opcheck(operators._row_softmax_backward, (x.detach().mT, y, sparse, causal))


def test_opcheck_of_causal_softmax(device):
    x = torch.randn(2, 5, 5, device=device, dtype=torch.bfloat16)
    opcheck(operators._causal_softmax, (x.mT.requires_grad_(),))
    y, lse = operators._causal_softmax(x.detach())
    opcheck(operators._causal_softmax_backward, (y.mT, x.detach(), lse))


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
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shape_stride_dtype_and_value(rows, columns, lead, name, dtype, gap, scale, grid, long, device):
    function, reference = PAIRS[name]
    x = scale * torch.randn(lead, rows, columns + gap, device=device)[..., gap:]
    x = (x if grid is None else x.div(grid).round()).to(dtype)  # rounded: many ties
    dy = torch.randn(lead, rows, columns, device=device).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        if long:
            patch.setattr(launches, "MAX_IN_REGISTERS", 0)
            patch.setattr(launches, "_LONG_TILE", 64)
        ours = value_and_gradient(function, x, dy)
    y, dx = value_and_gradient(reference, x.double(), dy)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours[0].double(), y, rtol=2 * eps + 1e-6, atol=1e-6)
    if name == "sparsemax":  # the gradient of the support that the result shows
        support = (ours[0] > 0).double()
        dx = support * (dy.double() - (support * dy).sum(-1, keepdim=True) / support.sum(-1, keepdim=True))
    torch.testing.assert_close(ours[1].double(), dx, rtol=8 * eps, atol=8 * eps)


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


@pytest.mark.usefixtures("_both_kernels")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_causal_softmax_has_the_gradient_of_the_unrounded_softmax(dtype, device):
    above = torch.ones(37, 37, dtype=torch.bool, device=device).triu(1)
    scores, dy = (torch.randn(2, 37, 37, device=device).to(dtype).masked_fill(above, NAN) for _ in range(2))
    scores = torch.stack([scores, scores], dim=-2)[..., 0, :]  # rows that lie apart
    leaf = scores.detach().requires_grad_()
    y = operators.causal_softmax(leaf)
    (dx,) = torch.autograd.grad(y, leaf, dy)
    exact = value_and_gradient(
        softmax_reference, scores.double().masked_fill(above, -INF), dy.double().masked_fill(above, 0.0)
    )
    for ours, right in zip((y, dx), exact):
        assert ours.dtype == dtype
        assert not ours[:, above].any()
        rounding = (right.to(dtype) - right).norm()  # one, at the end
        assert (ours - right).norm() <= 1.02 * rounding + 1e-6 * right.norm()


@pytest.mark.usefixtures("_both_kernels")
def test_rows_of_causal_softmax_without_an_answer_are_nan(device):
    scores = torch.zeros(1, 4, 4, device=device, dtype=torch.bfloat16)
    scores[0, 1, 0], scores[0, 2, :3], scores[0, 3, 2] = NAN, -INF, INF
    leaf = scores.requires_grad_()
    y = operators.causal_softmax(leaf)
    (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    for rows in (y, dx):
        assert rows.isnan().any(-1).tolist() == [[False, True, True, True]]


def test_multi_token_attention_second_derivative_is_refused(device):
    scores = torch.randn(1, 5, 5, device=device, requires_grad=True)
    out = multi_token_attention(scores, torch.ones(1, 1, 3, 3, device=device), padding=1)
    (gradient,) = torch.autograd.grad(out.square().sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="softmax and sparsemax cannot itself be differentiated"):
        gradient.sum().backward()
