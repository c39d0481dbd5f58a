"""What a layer could keep: results that are new, not random, and not written to afterwards."""

import ctypes
import itertools
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.fp8.linear import fp8_linear
from liger_trainer.recompute.budget import Call
from liger_trainer.recompute.keeping import Proof, keeping_contexts
from liger_trainer.recompute.recording import StepRecorder


@torch.library.custom_op("liger_trainer_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """An operator that draws random numbers without saying so."""
    return x + torch.rand_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, grad: grad)


@torch.library.custom_op("liger_trainer_tests::sent", mutates_args=())
def sent(x: torch.Tensor, group: str) -> torch.Tensor:
    """An operator that all processes of a group have to call."""
    return x.sin()


sent.register_fake(lambda x, group: torch.empty_like(x))
sent.register_autograd(lambda ctx, grad: (grad, None))

A, B = torch.randn(64, 64), torch.randn(64, 64)


def record(function, *shape):
    recorder = StepRecorder(torch.device("cpu"), None)
    recorder.begin()
    x = torch.randn(*(shape or (256, 64)), requires_grad=True)
    contexts = recorder.contexts("layer", x)
    checkpoint(function, x, use_reentrant=False, context_fn=lambda: contexts).sum().backward()
    step = recorder.step()
    return {one.call: one for layer in step.layers for one in layer.candidates}, step


def test_results_of_matmuls_are_candidates_with_their_bytes():
    found, step = record(lambda x: (x @ A).sin() @ B)
    assert found[Call("aten::mm", 0)].bytes == 256 * 64 * 4
    assert found[Call("aten::mm", 0)].seconds > 0
    assert step.layers[0].tokens == 256


def test_nothing_behind_the_last_saved_tensor_is_a_candidate():
    found, _ = record(lambda x: (x @ A).sin() @ B)
    assert Call("aten::mm", 1) not in found  # nothing needs its result


def test_views_are_no_candidates():
    found, _ = record(lambda x: (x.view(64, 256).t().sin() @ A).sin())
    assert not {call.operator for call in found} & {"aten::view", "aten::t"}


@pytest.mark.parametrize("through_view", [False, True])
def test_what_is_written_to_afterwards_is_no_candidate(through_view):
    def function(x):
        y = x @ A
        (y.view(-1) if through_view else y).add_(1.0)
        return (y.sin() @ B).sin()

    found, _ = record(function)
    assert Call("aten::mm", 0) not in found
    assert Call("aten::mm", 1) in found


def test_random_results_are_no_candidates():
    found, _ = record(lambda x: (noisy(x @ A).sin() @ B).sin(), 512, 64)
    assert not {call.operator for call in found} & {"liger_trainer_tests::noisy"}
    assert Call("aten::mm", 0) in found


def test_what_other_processes_send_is_no_candidate():
    found, _ = record(lambda x: (sent(x @ A, "world").sin() @ B).sin(), 512, 64)
    assert not {call.operator for call in found} & {"liger_trainer_tests::sent"}
    assert Call("aten::mm", 0) in found


def test_what_does_not_depend_on_the_input_is_no_candidate():
    """Weights that are cast, and empty memory: they do not shrink with the batch, or are written to later."""
    found, _ = record(lambda x: ((x @ A.double().float()) + torch.zeros(64)).sin())
    assert {call.operator for call in found} <= {"aten::mm", "aten::add.Tensor"}
    assert Call("aten::mm", 0) in found


def test_a_layer_that_calls_more_in_its_recomputation_keeps_nothing():
    calls = []

    def function(x):
        calls.append(1)
        return ((x @ A).sin() @ (B if len(calls) == 1 else B @ B)).sin()

    found, _ = record(function)
    assert not found


@torch.library.custom_op("liger_trainer_tests::with_nothing", mutates_args=())
def with_nothing(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator whose second result is empty where nobody needs it, as several of ours."""
    return x.sin(), x.new_empty(0)


with_nothing.register_fake(lambda x: (torch.empty_like(x), x.new_empty(0)))
with_nothing.register_autograd(lambda ctx, grad, _: grad)


def test_an_empty_result_beside_another_is_no_obstacle():
    found, _ = record(lambda x: (with_nothing(x @ A)[0] @ B).sin())
    assert found[Call("liger_trainer_tests::with_nothing", 0)].bytes == 256 * 64 * 4


def test_memory_is_noted_from_one_recomputation_to_the_next():
    class Memory:
        def __init__(self):
            self.peaks = iter([999, 50, 70, 60])

        def allocated(self):
            return 40

        def take_peak(self):
            return next(self.peaks)

    recorder = StepRecorder(torch.device("cpu"), Memory())
    recorder.begin()
    x = torch.randn(64, 64, requires_grad=True)
    for name in ("first", "second"):
        contexts = recorder.contexts(name, x)
        x = checkpoint(lambda x: (x @ A).sin(), x, use_reentrant=False, context_fn=lambda: contexts)  # noqa: B023
    x.sum().backward()
    step = recorder.step()
    assert (step.start, step.peak) == (40, 50)
    assert [(layer.name, layer.peak) for layer in step.layers] == [("first", 60), ("second", 70)]


class Calls(TorchDispatchMode):
    """Counts the calls of operators."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))


def function(x):
    return torch.nn.functional.dropout((x @ A).sin() @ B, 0.5).sin() @ A


@pytest.mark.parametrize("calls", [set(), {Call("aten::mm", 0)}, {Call("aten::mm", 0), Call("aten::mm", 1)}])
def test_kept_results_are_not_computed_again_and_all_bits_stay(calls):
    torch.manual_seed(0)
    x = torch.randn(256, 64, requires_grad=True)
    state = torch.get_rng_state()
    expected = checkpoint(function, x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    torch.set_rng_state(state)
    ours = checkpoint(function, x, use_reentrant=False, context_fn=lambda: keeping_contexts(frozenset(calls)))
    with Calls() as calls_of_backward:
        (own,) = torch.autograd.grad(ours.square().sum(), x)
    assert torch.equal(ours, expected)
    assert torch.equal(own, gradient)
    assert calls_of_backward.count["aten::mm"] == 3 + 2 - len(calls)  # three are of the gradient


NUMBERS = itertools.count()


@torch.library.custom_op("liger_trainer_tests::unseeded", mutates_args=())
def unseeded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As attention without dropout: the second result is memory that nobody has written, and another each time."""
    return x.sin(), torch.tensor(float(next(NUMBERS)))


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


unseeded.register_fake(lambda x: (torch.empty_like(x), x.new_empty(())))
unseeded.register_autograd(lambda ctx, grad, _: grad * ctx.saved_tensors[0].cos(), setup_context=save)


def written(x):
    """Its second matmul gets a result that a writer whom torch does not see changes afterwards."""
    y = x @ A
    z = y.sin()
    ctypes.memset(y.data_ptr(), 0, 64)
    return (z @ B).sin()


@pytest.mark.parametrize(
    ("function", "failed"),
    [
        (lambda x: (unseeded(x @ A)[0] @ B).sin(), set()),
        (written, {("layer", Call("aten::mm", 0))}),
    ],
)
def test_the_proof_finds_what_is_not_the_same(function, failed):
    proof, x = Proof(), torch.randn(64, 64, requires_grad=True)
    calls = {Call("aten::mm", 0), Call("liger_trainer_tests::unseeded", 0)}
    contexts = proof.contexts("layer", frozenset(calls))
    checkpoint(function, x, use_reentrant=False, context_fn=lambda: contexts).sum().backward()
    assert proof.failed() == failed


def test_products_in_fp8_are_candidates_and_are_not_computed_again():
    weight = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)

    def layer(x):
        return fp8_linear(x.bfloat16(), weight).sin()

    found, _ = record(layer)
    first = Call("liger_trainer::fp8_linear", 0)
    assert first in found
    x = torch.randn(256, 64, requires_grad=True)
    expected = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), (x, weight))
    ours = checkpoint(layer, x, use_reentrant=False, context_fn=lambda: keeping_contexts(frozenset({first})))
    with Calls() as calls_of_backward:
        gradients = torch.autograd.grad(ours.square().sum(), (x, weight))
    assert all(map(torch.equal, gradients, expected))
    assert calls_of_backward.count["liger_trainer::fp8_linear"] == 0
