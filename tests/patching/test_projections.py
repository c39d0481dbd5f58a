"""Where projections of one input add up its gradient in their products, and where they are called one by one."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_trainer.patching import as_written
from liger_trainer.patching.as_written import project

SIZE = 16


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(as_written, "_WORTH_IT", 0)


class Additions(TorchDispatchMode):
    """How many tensors of a shape are added, outside of products."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
            self.count += result.shape == self.shape
        return result


def _layers(kind=nn.Linear):
    torch.manual_seed(0)
    return kind(SIZE, 24), kind(SIZE, 8, bias=False), kind(SIZE, 4)


def _input():
    return torch.randn(3, 5, SIZE, generator=torch.Generator().manual_seed(1)).requires_grad_()


def _run(compute, x):
    """How often autograd adds gradients of the input, and that gradient."""
    loss = sum(each.square().sum() for each in compute(x))
    with Additions(x.shape) as additions:
        loss.backward()
    return additions.count, x.grad


def _one_by_one(layers):
    return lambda x: tuple(layer(x) for layer in layers)


def test_gradients_are_added_in_the_products():
    layers = _layers()
    count, gradient = _run(lambda x: project(x, *layers), _input())
    theirs, expected = _run(_one_by_one(layers), _input())
    assert (count, theirs) == (0, 2)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(reentrant):
    layers = _layers()
    ours = _run(lambda x: checkpoint(lambda x: project(x, *layers), x, use_reentrant=reentrant), _input())[1]
    torch.testing.assert_close(ours, _run(_one_by_one(layers), _input())[1])


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _hooked():
    layers = _layers()
    layers[1].register_forward_hook(lambda module, args, result: 2 * result)
    return layers


def _rebound():
    layers = _layers()
    layers[1].forward = lambda x: 2 * nn.Linear.forward(layers[1], x)
    return layers


@pytest.mark.parametrize("make", [lambda: _layers(Doubled), _hooked, _rebound], ids=["class", "hook", "forward"])
def test_layers_that_are_not_plain_are_called(make):
    layers = make()
    count, gradient = _run(lambda x: project(x, *layers), _input())
    theirs, expected = _run(_one_by_one(layers), _input())
    assert count == theirs
    assert torch.equal(gradient, expected)


def test_small_inputs_and_evaluation_take_no_detour(monkeypatch):
    layers, x = _layers(), _input()
    with torch.no_grad():
        assert all(map(torch.equal, project(x, *layers), _one_by_one(layers)(x)))
    monkeypatch.setattr(as_written, "_WORTH_IT", x.numel() + 1)
    assert all(each.grad_fn.name() != "_HandingOnBackward" for each in project(x, *layers))


def test_in_a_compiled_function():
    layers = _layers()
    compiled = torch.compile(lambda x: project(x, *layers), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(_run(compiled, _input())[1], _run(_one_by_one(layers), _input())[1])


def test_under_a_transform_of_torch_func():
    layers, x = _layers(), _input().detach()
    gradient = torch.func.grad(lambda x: sum(each.square().sum() for each in project(x, *layers)))(x)
    torch.testing.assert_close(gradient, _run(_one_by_one(layers), _input())[1])
