"""RoPE's kernel: values, gradients, layouts and registration, under the interpreter or on a GPU."""

from unittest import mock

import pytest
import torch
from torch.library import opcheck

from liger_trainer.kernels.rope import rope as rope_kernel
from liger_trainer.kernels.rope.rope import rope, rope_reference, rotate
from liger_trainer.kernels.runtime import INTERPRETED

# (batch, seq, q heads, k heads, head_dim, rotary_dim, table batch)
SHAPES = [
    (2, 5, 4, 2, 16, 16, 1),  # grouped-query
    (2, 3, 5, 1, 12, 12, 2),  # multi-query, nothing a power of two, one table a sequence
    (1, 7, 3, 3, 20, 8, 1),  # partial rotary
    (3, 1, 1, 2, 8, 6, 3),  # one token, more k heads than q heads, odd half
    (1, 33, 2, 1, 2, 2, 1),  # one pair a head, several blocks of tokens
    (1, 2, 160, 8, 128, 128, 1),  # heads split over programs
]


def inputs(shape, dtype=torch.float32, device="cpu", unsqueeze_dim=1, table_dtype=None):
    """q and k as projections leave them: (batch, seq, heads, head_dim) memory; halves of the tables differ."""
    batch, seq, q_heads, k_heads, dim, rotary, table_batch = shape
    generator = torch.Generator().manual_seed(0)

    def randn(*size):
        return torch.randn(size, generator=generator).to(device, dtype)

    q, k = randn(batch, seq, q_heads, dim), randn(batch, seq, k_heads, dim)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = (randn(table_batch, seq, rotary).to(table_dtype or dtype) for _ in range(2))
    return q.requires_grad_(), k.requires_grad_(), cos, sin


def values_and_gradients(function, q, k, cos, sin, unsqueeze_dim=1):
    generator = torch.Generator().manual_seed(1)
    outputs = function(q, k, cos, sin, unsqueeze_dim)
    gradients = [torch.randn(y.shape, generator=generator).to(y.device, torch.bfloat16).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (q, k), gradients)]


def exact(q, k, cos, sin, unsqueeze_dim=1):
    q, k = (x.detach().double().requires_grad_() for x in (q, k))
    return values_and_gradients(rope_reference, q, k, cos.double(), sin.double(), unsqueeze_dim)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_float32_equals_float64(shape, unsqueeze_dim, device):
    arguments = (*inputs(shape, device=device, unsqueeze_dim=unsqueeze_dim), unsqueeze_dim)
    for ours, right in zip(values_and_gradients(rope, *arguments), exact(*arguments)):
        # Two products and a sum of fp32 values of size about 1 to 10, one rounding each.
        torch.testing.assert_close(ours.double(), right, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_half_precision_is_no_worse_than_eager(dtype, shape, device):
    arguments = inputs(shape, dtype, device)
    # The interpreter's conversion to bf16 truncates, which doubles the rounding error; a GPU rounds to nearest.
    slack = 2.2 if INTERPRETED and dtype == torch.bfloat16 else 1.1
    eager = values_and_gradients(rope_reference, *arguments)
    for ours, theirs, right in zip(values_and_gradients(rope, *arguments), eager, exact(*arguments)):
        assert ours.dtype == dtype
        assert (ours - right).norm() <= slack * (theirs - right).norm()


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_results_and_gradients_lie_in_projection_layout(unsqueeze_dim, device):
    shape = SHAPES[0]
    q, k, cos, sin = inputs(shape, device=device, unsqueeze_dim=unsqueeze_dim)
    if unsqueeze_dim == 1:  # also when q comes as contiguous (batch, heads, seq, head_dim) memory
        q = q.detach().contiguous().requires_grad_()
    for x in values_and_gradients(rope, q, k, cos, sin, unsqueeze_dim):
        assert (x.transpose(1, 2) if unsqueeze_dim == 1 else x).is_contiguous()


def test_any_strides(device):
    q, k, cos, sin = inputs(SHAPES[0], device=device)
    right = values_and_gradients(rope, q, k, cos, sin)
    wide = torch.stack([q.detach(), q.detach() + 1], dim=-1)[..., 0].requires_grad_()  # last dimension of stride 2
    sliced = torch.cat([k.detach(), k.detach()], dim=-1)[..., : k.shape[-1]].requires_grad_()
    table = cos[:, :, None].expand(-1, -1, 2, -1)[:, :, 1]
    for ours, expected in zip(values_and_gradients(rope, wide, sliced, table, sin.mT.contiguous().mT), right):
        assert torch.equal(ours, expected)


def test_gradients_of_any_strides_and_missing_ones(device):
    q, k, cos, sin = inputs(SHAPES[1], device=device)
    q_out, k_out = rope(q, k, cos, sin)
    expanded = torch.ones((), device=device).expand(q_out.shape)
    (dq,) = torch.autograd.grad(q_out, q, expanded, retain_graph=True)
    (expected,) = torch.autograd.grad(rope_reference(q, k, cos, sin)[0], q, expanded)
    torch.testing.assert_close(dq, expected, rtol=1e-6, atol=1e-6)
    # Only one of the two outputs is used: the other input has no gradient at all, rather than zeros.
    dq, dk = torch.autograd.grad(k_out, (q, k), torch.ones_like(k_out), retain_graph=True, allow_unused=True)
    assert dq is None
    (expected,) = torch.autograd.grad(rope_reference(q, k, cos, sin)[1].sum(), k)
    torch.testing.assert_close(dk, expected, rtol=1e-6, atol=1e-6)
    # A frozen q.
    q_out, k_out = rope(q.detach(), k, cos, sin)
    (dk,) = torch.autograd.grad(q_out.sum() + k_out.sum(), k)
    torch.testing.assert_close(dk, expected, rtol=1e-6, atol=1e-6)


def test_second_derivative_and_second_backward(device):
    q, k, cos, sin = inputs(SHAPES[2], device=device)

    def derivatives(function):
        loss = sum(y.pow(3).sum() for y in function(q, k, cos, sin))
        again = torch.autograd.grad(loss, (q, k), retain_graph=True)
        first = torch.autograd.grad(loss, (q, k), create_graph=True)
        assert all(map(torch.equal, first, again))
        return [*first, *torch.autograd.grad(sum(x.pow(2).sum() for x in first), (q, k))]

    for ours, expected in zip(derivatives(rope), derivatives(rope_reference)):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)


def test_inputs_are_left_alone(device):
    arguments = inputs(SHAPES[0], device=device)
    before = [x.detach().clone() for x in arguments]
    values_and_gradients(rope, *arguments)
    assert all(map(torch.equal, before, arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wider_table_promotes_as_torch_does(dtype, device):
    """Under autocast, projections give q and k in bf16 while the tables follow fp32 hidden states."""
    arguments = inputs(SHAPES[0], dtype, device, table_dtype=torch.float32)
    slack = 2.2 if INTERPRETED and dtype == torch.bfloat16 else 1.1
    eager = values_and_gradients(rope_reference, *arguments)
    with mock.patch.object(rope_kernel, "launch", wraps=rope_kernel.launch) as launch:
        results = values_and_gradients(rope, *arguments)
    # The gradients are rounded by the kernel, not by autograd in a pass of its own.
    assert [call.args[4].dtype for call in launch.call_args_list] == [torch.float32, dtype]
    for ours, theirs, right in zip(results, eager, exact(*arguments)):
        assert ours.dtype == theirs.dtype
        assert (ours - right).norm() <= slack * (theirs - right).norm() + 1e-6 * right.norm()


@pytest.mark.parametrize("shape", [(0, 4, 2, 1, 8, 8, 1), (2, 0, 2, 1, 8, 8, 1)])
def test_empty(shape, device):
    arguments = inputs(shape, device=device)
    q_out, k_out, dq, dk = values_and_gradients(rope, *arguments)
    assert q_out.shape == dq.shape == arguments[0].shape
    assert k_out.shape == dk.shape == arguments[1].shape


def test_tables_that_rotate_nothing(device):
    q, k, cos, sin = inputs((1, 3, 2, 1, 8, 0, 1), device=device)
    assert all(map(torch.equal, rope(q, k, cos, sin), (q, k)))


def test_opcheck(device):
    for shape, unsqueeze_dim in ((SHAPES[2], 1), (SHAPES[3], 2)):
        arguments = inputs(shape, device=device, unsqueeze_dim=unsqueeze_dim)
        opcheck(rotate, (*arguments, unsqueeze_dim, False, torch.float32))


def test_compiles_fullgraph_for_any_batch_and_length(device):
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend="inductor" if device != "cpu" else "aot_eager")
    for batch, seq in ((2, 5), (3, 9)):
        arguments = inputs((batch, seq, 4, 2, 16, 16, 1), device=device)
        for ours, eager in zip(values_and_gradients(compiled, *arguments), values_and_gradients(rope, *arguments)):
            assert torch.equal(ours, eager)
            assert ours.stride() == eager.stride()
