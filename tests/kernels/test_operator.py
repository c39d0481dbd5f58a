"""Operators: called past torch's dispatch, with the same results, unless something has to see them."""

import gc
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.operator import operator
from tests.operators import of_schema


@operator("liger_trainer_tests::product")
def product(x: torch.Tensor, y: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """``x * y * scale``."""
    return x * y * scale


product.register_fake(lambda x, y, scale=2.0: torch.empty_like(x))


def _save(ctx, inputs, output):
    *ctx.saved, ctx.scale = inputs


def _gradients(ctx, gradient):
    x, y = ctx.saved
    return gradient * y * ctx.scale, gradient * x * ctx.scale if ctx.needs_input_grad[1] else None, None


product.register_autograd(_gradients, setup_context=_save)


@operator("liger_trainer_tests::without_derivative")
def without_derivative(x: torch.Tensor) -> torch.Tensor:
    """``x + 1``."""
    return x + 1


@operator("liger_trainer_tests::add_one_", mutates=("x", "y"))
def add_one_(x: torch.Tensor, y: torch.Tensor | None) -> None:
    """Adds 1 to x and y in place."""
    for tensor in (x, y):
        if tensor is not None:
            tensor.data.add_(1)


@operator("liger_trainer_tests::scaled")
def scaled(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    factors: Sequence[float],
    none: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    exponent: float,
) -> list[torch.Tensor]:
    """``factor * weight * x ** exponent + bias`` for each weight and its factor."""
    return [factor * weight * x**exponent + (0 if bias is None else bias) for weight, factor in zip(weights, factors)]


scaled.register_fake(lambda x, weights, *rest: [torch.empty_like(x) for _ in weights])
seen_by_scaled = []  # what the functions of its derivative are given


def _save_scaled(ctx, inputs, output):
    seen_by_scaled.append((inputs, output))
    x, weights, ctx.factors, _, _, ctx.exponent = inputs
    ctx.save_for_backward(x, *weights)


def _gradients_of_scaled(ctx, gradients):
    seen_by_scaled.append((ctx.needs_input_grad, gradients))
    x, *weights = ctx.saved_tensors
    triples = [(0.0 if g is None else g, *rest) for g, *rest in zip(gradients, weights, ctx.factors)]
    dx = sum(g * factor * weight * ctx.exponent * x ** (ctx.exponent - 1) for g, weight, factor in triples)
    needed = ctx.needs_input_grad[1]
    dweights = [g * factor * x**ctx.exponent if need else None for (g, _, factor), need in zip(triples, needed)]
    return dx, dweights, None, [], sum(g for g, *_ in triples) if ctx.needs_input_grad[4] else None, None


scaled.register_autograd(_gradients_of_scaled, setup_context=_save_scaled)


@operator("liger_trainer_tests::negative")
def negative(x: torch.Tensor) -> torch.Tensor:
    """``-x``, whose backward returns a tensor and no tuple."""
    return -x


negative.register_autograd(lambda ctx, gradient: -gradient)


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A tensor subclass, whose operators torch has to dispatch."""


@pytest.fixture
def pair():
    return torch.randn(3, requires_grad=True), torch.randn(3)


@pytest.fixture
def dispatched(monkeypatch):
    """The arguments of the calls that torch dispatched."""
    calls = []

    def recorded(custom):
        def record(*args, **kwargs):
            calls.append(args)
            return custom(*args, **kwargs)

        return record

    for each in (product, scaled):
        monkeypatch.setattr(each, "custom", recorded(each.custom))
    return calls


def test_eager_call_is_not_dispatched(pair, dispatched):
    x, y = pair
    result = product(x, y, 3.0)
    result.sum().backward()
    torch.testing.assert_close(result, x * y * 3)
    torch.testing.assert_close(x.grad, y * 3)
    assert y.grad is None
    assert not dispatched
    assert type(result.grad_fn).__name__.startswith("liger_trainer_tests::product")


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: product(x, y, scale=2.0),
        lambda x, y: product(x.as_subclass(Marked), y, 2.0),
    ],
    ids=["keyword", "subclass"],
)
def test_other_calls_are_dispatched(pair, dispatched, call):
    x, y = pair
    result = call(x, y)
    result.sum().backward()
    torch.testing.assert_close(torch.Tensor(result), x * y * 2)
    torch.testing.assert_close(x.grad, y * 2)
    assert len(dispatched) == 1


def test_defaults_are_filled_in(pair, dispatched):
    x, y = pair
    result = product(x, y)
    torch.testing.assert_close(result, x * y * 2)
    result.sum().backward()
    torch.testing.assert_close(x.grad, y * 2)
    assert not dispatched


def test_tensors_without_memory_get_the_fake(dispatched):
    result = product(torch.empty(3, device="meta", requires_grad=True), torch.empty(3, device="meta"), 2.0)
    assert result.is_meta
    assert len(dispatched) == 1


def test_changed_inputs_are_noticed():
    x = torch.randn(3, requires_grad=True)
    saved = torch.randn(3)
    loss = (x * saved).sum()
    add_one_(saved, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_of_inference_mode_can_be_changed():
    with torch.inference_mode():
        x = torch.zeros(2)
    add_one_(x, None)
    torch.testing.assert_close(torch.tensor(x.tolist()), torch.ones(2))


def test_dispatch_modes_see_the_operator(pair, dispatched):
    with Watching() as mode:
        product(*pair, 2.0)
    assert "liger_trainer_tests.product.default" in mode.seen
    assert len(dispatched) == 1


def test_compiler_sees_the_operator(pair):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    x, y = pair
    result = torch.compile(lambda x, y: product(x, y, 2.0) + 1, backend=keep, fullgraph=True)(x, y)
    torch.testing.assert_close(result, x * y * 2 + 1)
    assert "liger_trainer_tests.product" in graphs[0].code


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_recorded(pair, dispatched, context):
    with context():
        assert product(*pair, 2.0).grad_fn is None
    assert not dispatched


def test_missing_derivative_is_an_error_in_the_backward():
    result = without_derivative(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="no autograd formula"):
        result.sum().backward()


def test_a_backward_is_not_called_without_a_gradient():
    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return None

    x = torch.randn(3, requires_grad=True)
    for function in (negative, negative.custom):
        assert torch.autograd.grad(Lost.apply(function(x)).sum(), x, allow_unused=True) == (None,)


def test_a_single_gradient_needs_no_tuple():
    x = torch.randn(3, requires_grad=True)
    negative(x).sum().backward()
    assert torch.equal(x.grad, -torch.ones(3))


# ---------------------------------------------------------------------------------------------------------------------
# Named tuples
# ---------------------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    slope: float
    offset: float | None


class Power(NamedTuple):
    exponent: int
    factors: Sequence[torch.Tensor]
    summand: torch.Tensor | None


@operator("liger_trainer_tests::of_records")
def of_records(x: torch.Tensor, line: Line, name: str, power: Power) -> torch.Tensor:
    """``product of the factors * (slope * x + offset) ** exponent + summand``."""
    assert type(line) is Line
    assert type(power) is Power
    assert name == "name"
    y = (line.slope * x + (line.offset or 0.0)) ** power.exponent
    for factor in power.factors:
        y = y * factor
    return y if power.summand is None else y + power.summand


@of_records.register_fake
def _(x, line, name, power):
    assert type(line) is Line
    return x.new_empty(x.shape)


def _save_records(ctx, inputs, output):
    x, ctx.line, _, power = inputs
    ctx.exponent = power.exponent
    ctx.save_for_backward(x, *power.factors)


def _gradient_of_records(ctx, gradient):
    (x, factor), (slope, offset), exponent = ctx.saved_tensors, ctx.line, ctx.exponent
    need_x, *_, need_factors, need_summand = ctx.needs_input_grad
    assert need_factors == [True]
    base = slope * x + (offset or 0.0)
    dx = gradient * factor * exponent * slope * base ** (exponent - 1) if need_x else None
    return dx, None, None, None, None, [gradient * base**exponent], gradient if need_summand else None


of_records.register_autograd(_gradient_of_records, setup_context=_save_records)


def test_torch_sees_the_fields_of_named_tuples():
    arguments = [argument.name for argument in torch.ops.liger_trainer_tests.of_records.default._schema.arguments]
    assert arguments == ["x", "slope", "offset", "name", "exponent", "factors", "summand"]


@pytest.mark.parametrize("summand", [True, False])
@pytest.mark.parametrize("offset", [None, 0.5])
def test_named_tuples_in_every_way_of_calling(offset, summand):
    def call(x, factor, term):
        return of_records(x, Line(3.0, offset), "name", Power(2, [factor], term))

    def call_of_marked(x, *rest):
        return call(x.as_subclass(Marked), *rest)

    leaves = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2 + summand)]
    x, factor, term = (*leaves, None)[:3]
    plain = factor * (3.0 * x + (offset or 0.0)) ** 2 + (term if summand else 0.0)
    expected = torch.autograd.grad(plain.sum(), leaves)
    for function in (call, call_of_marked, torch.compile(call, backend="aot_eager")):
        result = function(x, factor, term)
        torch.testing.assert_close(torch.Tensor(result), plain)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), leaves), expected)
    arguments = (x, Line(3.0, offset), "name", Power(2, [factor], term))
    torch.library.opcheck(of_records.custom, of_schema(of_records, arguments))


# ---------------------------------------------------------------------------------------------------------------------
# Lists of tensors
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def listed():
    """The arguments of `scaled`: the second weight is frozen, and its first argument and the bias are trained."""
    x, first, second, bias = (torch.randn(3, dtype=torch.float64) for _ in range(4))
    return x.requires_grad_(), [first.requires_grad_(), second], [0.5, 3.0], [], bias.requires_grad_(), 3.0


def expected(x, weights, factors, none, bias, exponent):
    return [factor * weight * x**exponent + bias for weight, factor in zip(weights, factors)]


def loss_of(outputs):
    return sum((index + 1) * output.square().sum() for index, output in enumerate(outputs))


def leaves_of(x, weights, factors, none, bias, exponent):
    return [x, weights[0], bias]


def test_lists_are_not_dispatched(listed, dispatched):
    outputs, plain, leaves = scaled(*listed), expected(*listed), leaves_of(*listed)
    assert type(outputs) is list
    torch.testing.assert_close(outputs, plain)
    gradients = torch.autograd.grad(loss_of(plain), leaves)
    for kept in (True, False):
        torch.testing.assert_close(torch.autograd.grad(loss_of(outputs), leaves, retain_graph=kept), gradients)
    assert not dispatched
    assert type(outputs[0].grad_fn).__name__.startswith("liger_trainer_tests::scaled")


def test_derivatives_are_given_what_torch_gives_them(listed):
    def seen(function):
        seen_by_scaled.clear()
        outputs = function(*listed)
        outputs[1].sum().backward()
        return seen_by_scaled[:]

    (inputs, output), (needs, gradients) = seen(scaled)
    (torch_inputs, torch_output), (torch_needs, torch_gradients) = seen(scaled.custom)
    assert needs == torch_needs == (True, [True, False], False, [], True, False)
    assert [type(each) for each in inputs] == [type(each) for each in torch_inputs]
    assert all(ours is theirs for ours, theirs in zip(inputs[1], torch_inputs[1]))
    assert type(output) is type(torch_output) is type(gradients) is type(torch_gradients) is list
    assert gradients[0] is torch_gradients[0] is None  # of the result that is not used
    torch.testing.assert_close(gradients[1], torch_gradients[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_lists_in_a_checkpoint(listed, reentrant, dispatched):
    x, weights, *rest = listed
    outputs = checkpoint(lambda x, *weights: tuple(scaled(x, weights, *rest)), x, *weights, use_reentrant=reentrant)
    loss_of(outputs).backward()
    leaves = leaves_of(*listed)
    gradients = torch.autograd.grad(loss_of(expected(*listed)), leaves)
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), gradients)
    assert not dispatched


def test_hooks_get_the_saved_tensors_of_lists(listed):
    x, weights, *_ = listed
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.clone()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = scaled(*listed)
    assert [each.data_ptr() for each in packed] == [each.data_ptr() for each in (x, *weights)]
    leaves = leaves_of(*listed)
    gradients = torch.autograd.grad(loss_of(outputs), leaves)
    torch.testing.assert_close(gradients, torch.autograd.grad(loss_of(expected(*listed)), leaves))


@pytest.mark.parametrize("released", ["by the backward", "with the result"])
def test_nothing_of_lists_outlives_the_graph(listed, released):
    x, weights, *rest = listed
    hidden = [weight * 1 for weight in weights]  # what only the graph holds, once the call has returned
    outputs = scaled(x, hidden, *rest)
    saved, results = [weakref.ref(each) for each in hidden], [weakref.ref(each) for each in outputs]
    gc.disable()  # so that a reference cycle shows
    try:
        seen_by_scaled.clear()
        del hidden
        assert all(each() is not None for each in saved)
        if released == "by the backward":
            loss_of(outputs).backward()
            seen_by_scaled.clear()
        else:
            del outputs
            assert all(each() is None for each in results)
        assert all(each() is None for each in saved)
    finally:
        gc.enable()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_lists_without_gradients(listed, dispatched, context):
    x, weights, factors, none, _, exponent = listed
    seen_by_scaled.clear()
    with context():
        outputs = scaled(x, weights, factors, none, None, exponent)
    assert type(outputs) is list
    assert all(output.grad_fn is None for output in outputs)
    assert not dispatched
    assert not seen_by_scaled


def test_lists_are_dispatched_to_who_looks_on(listed, dispatched):
    x, weights, *rest = listed
    with Watching() as mode:
        scaled(*listed)
    assert "liger_trainer_tests.scaled.default" in mode.seen
    scaled(x, [weights[0], weights[1].as_subclass(Marked)], *rest)
    on_meta = [each.to("meta") for each in weights]
    assert all(each.is_meta for each in scaled(x.to("meta"), on_meta, *rest[:2], None, 3.0))
    assert len(dispatched) == 3
    graphs = []
    compiled = torch.compile(scaled, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)
    torch.testing.assert_close(compiled(*listed), expected(*listed))
    assert "liger_trainer_tests.scaled" in graphs[0].code
