"""One cast for the layers that read the same input: when it is shared, when not, and that nothing stays alive."""

import gc
import threading
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.fp8 import linear, shared_cast
from liger_trainer.kernels.fp8.linear import fp8_linear
from liger_trainer.kernels.fp8.shared_cast import cast_input, drop, may_share, shared
from tests.accuracy import seeded_randn as randn
from tests.calls import recorded_calls

BF16 = {"dtype": torch.bfloat16}


@pytest.fixture
def x(device):
    drop()
    yield randn(6, 64, device=device, **BF16)
    drop()


@pytest.fixture
def weights(device):
    return [randn(outputs, 64, seed=outputs, device=device, **BF16) for outputs in (64, 16, 16)]


@pytest.fixture
def casts(monkeypatch):
    return recorded_calls(monkeypatch, shared_cast, "cast_rows")


def assert_fresh(x, weight):
    """That a layer has the bits of one that shares nothing."""
    expected = linear.product(x, weight, None, "rowwise_gw_hp", shares=False)
    assert torch.equal(fp8_linear(x, weight), expected)


@pytest.mark.parametrize("grad", [True, False])
def test_layers_share_the_cast_of_their_input(grad, x, weights, casts):
    with torch.set_grad_enabled(grad):
        results = [fp8_linear(x.requires_grad_(grad), weight) for weight in weights]
    assert len(casts) == 1
    for weight, y in zip(weights, results):
        assert torch.equal(y, linear.product(x, weight, None, "rowwise_gw_hp", shares=False))


def test_a_tensor_that_was_written_to_is_cast_again(x, weights, casts):
    def replace():
        x.data = x * 2

    for write in (lambda: x.mul_(2), lambda: x[2:].zero_(), lambda: x.detach().add_(1), replace):
        fp8_linear(x, weights[0])
        write()
        assert_fresh(x, weights[1])
    assert len(casts) == 8


def test_other_tensors_in_the_same_memory_are_cast(x, weights, casts):
    fp8_linear(x, weights[0])
    for other in (x[:], x.view(2, 3, 64), x.detach(), x.clone(), x.new_empty(0).set_(x)):
        assert_fresh(other, weights[1])
        assert_fresh(x, weights[0])
    assert len(casts) == 11


def test_a_cast_is_freed_with_its_tensor(x, weights):
    y = x + 1
    fp8_linear(y, weights[0])
    codes = weakref.ref(shared(y)[0])
    tensor = weakref.ref(y)
    del y
    assert tensor() is None
    assert codes() is None


def test_the_cast_stays_while_autograd_alone_holds_the_tensor(x, weights):
    """And is freed with the graph."""
    weight = weights[0].requires_grad_()
    y = fp8_linear(x + 1, weight)
    assert shared_cast._last is not None
    del y
    gc.collect()
    assert shared_cast._last is None


def test_one_cast_is_held_and_none_of_an_input_with_one_reader(x, weights):
    other = x + 1
    fp8_linear(x, weights[0])
    codes = weakref.ref(shared(x)[0])
    fp8_linear(other, weights[0])
    assert codes() is None
    fp8_linear(x, weights[1])  # it narrows, as a down projection
    assert shared(x) is None
    assert shared(other) is None


def test_inference_tensors_are_not_shared(x, weights, casts):
    """They have no counter of writes."""
    with torch.inference_mode():
        y = x + 1
        for _ in range(2):
            fp8_linear(y, weights[0])
    assert len(casts) == 0
    assert not may_share(y)


def test_compiled_code_shares_nothing(x, weights):
    """It writes into memory of tensors whose counters stay."""
    fp8_linear(x, weights[0])
    before = shared(x)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x):
        return fp8_linear(x + 1, weights[0]), fp8_linear(x, weights[0])

    _, again = compiled(x)
    assert shared(x) is before
    before[0].zero_()
    assert torch.equal(compiled(x)[1], again)


def test_threads_may_share(x, weights):
    expected = [linear.product(x, weight, None, "rowwise_gw_hp", shares=False) for weight in weights]
    failures = []

    def run(own):
        for _ in range(20):
            for weight, right in zip(weights, expected):
                if not torch.equal(fp8_linear(own, weight), right):
                    failures.append(weight.shape)

    threads = [threading.Thread(target=run, args=(tensor,)) for tensor in (x, x, x.clone())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_shares_too(reentrant, x, weights, monkeypatch):
    def layer(x):
        hidden = x * 2
        return sum(fp8_linear(hidden, weight).sin().sum() for weight in weights)

    def gradients():
        leaves = [x.detach().requires_grad_(), *(weight.detach().requires_grad_() for weight in weights)]
        weights[:] = leaves[1:]
        checkpoint(layer, leaves[0], use_reentrant=reentrant).backward()
        return [leaf.grad for leaf in leaves]

    casts = recorded_calls(monkeypatch, shared_cast, "cast_rows")
    ours = gradients()
    assert len(casts) == 2
    monkeypatch.setattr(linear, "may_share", lambda x: False)
    for mine, theirs in zip(ours, gradients(), strict=True):
        assert torch.equal(mine, theirs)


def test_views_of_one_object_share(x, casts):
    """Of any number of dimensions."""
    view = x.view(2, 3, 64)
    codes, scales = cast_input(view, keep=True)
    assert codes.shape == (6, 64)
    assert scales.shape == (6, 1)
    assert cast_input(view, keep=True)[0] is codes
    assert len(casts) == 1


@pytest.mark.gpu
def test_streams_and_graphs_cast_themselves(weights):
    x = randn(6, 64, device="cuda", **BF16)
    fp8_linear(x, weights[0])
    assert shared(x) is not None
    with torch.cuda.stream(torch.cuda.Stream()):
        assert shared(x) is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fp8_linear(x, weights[0])
    x.mul_(3)
    graph.replay()
    assert torch.equal(y, linear.product(x, weights[0], None, "rowwise_gw_hp", shares=False))
