"""Operators: called past torch's dispatch, with the same results, unless something has to see them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_trainer.kernels.operator import operator


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
    calls, custom = [], product.custom

    def record(*args, **kwargs):
        calls.append(args)
        return custom(*args, **kwargs)

    monkeypatch.setattr(product, "custom", record)
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
