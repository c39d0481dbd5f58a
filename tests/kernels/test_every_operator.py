"""What every operator promises: the same bits in every run, kept graphs, inputs left alone, one graph when compiled."""

import contextlib

import pytest
import torch

from liger_trainer import functional
from liger_trainer.kernels.runtime import plain_torch
from tests.operators import OPERATORS

pytestmark = pytest.mark.kernel
operators = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)

# Whose arguments are no tensors alone, or which need several processes: their own test files ask the same of them.
ELSEWHERE = {"documents_of", "embedding_backward_", "tiled_mlp"} | {
    name for name in functional.__all__ if name.startswith("vocab_")
}


def test_every_public_function_has_a_row():
    functions = {name for name in functional.__all__ if not isinstance(getattr(functional, name), type)}
    assert functions - ELSEWHERE == {name.split(",")[0] for name in OPERATORS}


@operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_give_the_same_bits_and_leave_their_inputs_alone(operator, dtype, device):
    tensors = operator.tensors(device, dtype)
    before = [tensor.detach().clone() for tensor in tensors]
    first, second = operator(*tensors), operator(*tensors)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, before, tensors))
    assert not any(result.isnan().any() for result in first)


RECURRENCES = ("delta_rule", "state_space", "decayed_attention")  # whose states are fp32, whatever they are given


def dtype_of_kernels(name, device):
    """Some GPUs run the recurrences of fp32 in plain torch, which is in no graph and has second derivatives."""
    return torch.bfloat16 if device != "cpu" and name.split(",")[0] in RECURRENCES else torch.float32


AS_TORCH = ("layer_norm", "fused_add_layer_norm", "group_norm", "grpo_loss_from_log_probs")
"""Whose results are fp32 under autocast on an accelerator, as those of torch's functions."""


@operators
@pytest.mark.parametrize("where", [contextlib.nullcontext, plain_torch], ids=["kernels", "plain"])
def test_autocast_changes_nothing_in_its_own_dtype(operator, where, device, request):
    """A kernel's sums are no products that autocast could cast; those of plain torch in its place are not cast."""
    name = request.node.callspec.id.split("-")[1].split(",")[0]
    if name in AS_TORCH and device != "cpu":
        with where(), torch.autocast(device, torch.bfloat16):
            assert operator(*operator.tensors(device, torch.bfloat16))[0].dtype == torch.float32
        return
    for dtype in [torch.bfloat16, *[torch.float32] * (name in RECURRENCES)]:
        tensors = operator.tensors(device, dtype)
        needed, results = [tensor for tensor in tensors if tensor.requires_grad], []
        for enabled in (False, True):
            with where():
                with torch.autocast(device, torch.bfloat16, enabled=enabled):  # the backward is outside, as torch asks
                    outputs = operator.function(*tensors)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                upstream = [torch.full_like(output, 0.5) for output in outputs]
                results.append([*outputs, *torch.autograd.grad(outputs, needed, upstream)])
        assert all(map(torch.equal, *results))


@operators
def test_a_kept_graph_gives_the_same_gradients_again(operator, device):
    tensors = operator.tensors(device)
    outputs = operator.function(*tensors)
    loss = sum(y.sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
    needed = [tensor for tensor in tensors if tensor.requires_grad]
    first = [gradient.clone() for gradient in torch.autograd.grad(loss, needed, retain_graph=True)]
    for keep in (True, False):
        assert all(map(torch.equal, first, torch.autograd.grad(loss, needed, retain_graph=keep)))


# A result that the backward needs, as that of `torch.softmax`; torch says so where it was written over.
SAVED_RESULTS = {
    "softmax": {0},
    "sparsemax": {0},
    "sparsemax, dim": {0},
    "log_probs, entropy": {1},
}
NO_RESULTS = {"tied_embedding": {1}}  # the weight itself


@operators
def test_results_may_be_changed_in_place(operator, device, request):
    name = request.node.callspec.id
    tensors = operator.tensors(device)
    needed = [tensor for tensor in tensors if tensor.requires_grad]

    def scaled(place, in_place):
        outputs = operator.function(*tensors)
        output = (outputs if isinstance(outputs, tuple) else (outputs,))[place]
        if in_place:
            output *= 0.5
        else:
            output = output * 0.5
        wave = torch.arange(output.numel(), device=device).view(output.shape).cos()
        return [output.detach(), *torch.autograd.grad((output * wave).sum(), needed, allow_unused=True)]

    outputs = operator.function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    places = [place for place, each in enumerate(outputs) if each is not None and each.requires_grad]
    for place in set(places) - NO_RESULTS.get(name, set()):
        expected = scaled(place, False)
        if place in SAVED_RESULTS.get(name, ()):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                scaled(place, True)
        else:
            torch.testing.assert_close(scaled(place, True), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPERATORS)
def test_compiles_to_one_graph_forward_and_backward(name, device):
    torch.compiler.reset()
    operator = OPERATORS[name]
    tensors = operator.tensors(device, dtype_of_kernels(name, device))
    needed = [tensor for tensor in tensors if tensor.requires_grad]

    def loss_of(*tensors):
        outputs = operator.function(*tensors)
        return sum(y.float().square().sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))

    loss, expected = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(*tensors), loss_of(*tensors)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, needed), torch.autograd.grad(expected, needed))


@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if operator.refuses])
def test_a_second_derivative_is_refused_by_name(name, device):
    operator = OPERATORS[name]
    tensors = operator.tensors(device, dtype_of_kernels(name, device))
    outputs = operator.function(*tensors)
    loss = sum(y.square().sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
    needed = [tensor for tensor in tensors if tensor.requires_grad]
    with pytest.raises(RuntimeError, match=rf"gradient of .*{operator.refuses}.* cannot .*_reference function"):
        sum(g.square().sum() for g in torch.autograd.grad(loss, needed, create_graph=True)).backward()
