"""RoPE's other layouts: neighbouring pairs, tables of half the width, complex factors, several axes, packed tokens."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from liger_trainer.kernels.rope.layouts import rope_complex, rope_multimodal, rope_multimodal_reference, rope_vision
from liger_trainer.kernels.rope.rope import rope, rope_reference, rotate
from tests.interpreter.test_rope import values_and_gradients as _values_and_gradients

HEADS = (5, 2)


def complex_reference(q, k, freqs_cis, unsqueeze_dim=2):
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    outputs = rope_reference(
        q, k, freqs_cis.real, freqs_cis.imag, rotary_dim=2 * freqs_cis.shape[-1], interleaved=True, keep_dtype=True
    )
    return tuple(y.transpose(1, 2) for y in outputs)


def vision_reference(q, k, cos, sin):
    outputs = rope_reference(q[None], k[None], cos[None], sin[None], 2, keep_dtype=True)
    return tuple(y[0] for y in outputs)


# Name: (ours, reference, options, width of the tables for a head of 12)
LAYOUTS = {
    "half-width tables": (rope, rope_reference, {"rotary_dim": 12}, 6),
    "half-width tables, partial": (rope, rope_reference, {"rotary_dim": 8}, 4),
    "neighbours": (rope, rope_reference, {"interleaved": True}, 12),
    "neighbours, half-width, partial": (rope, rope_reference, {"interleaved": True, "rotary_dim": 8}, 4),
    "neighbours to halves": (
        rope,
        rope_reference,
        {"interleaved": True, "rotary_dim": 12, "split_output": True},
        6,
    ),
    "neighbours to halves, partial": (rope, rope_reference, {"interleaved": True, "split_output": True}, 8),
    "kept dtype": (rope, rope_reference, {"keep_dtype": True}, 12),
    "complex": (rope_complex, complex_reference, {}, 6),
    "axes": (rope_multimodal, rope_multimodal_reference, {"sections": [1, 3, 2]}, 12),
    "packed tokens": (rope_vision, vision_reference, {}, 12),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def inputs(layout, dtype=torch.float32, device="cpu", batch=2, seq=5, table_dtype=None):
    width = LAYOUTS[layout][3]
    generator = torch.Generator().manual_seed(0)

    def randn(*size, dtype=dtype):
        return torch.randn(size, generator=generator).to(device, dtype)

    q, k = (randn(batch, seq, heads, 12) for heads in HEADS)
    table_dtype = table_dtype or dtype
    if layout == "complex":
        tables = (torch.complex(randn(1, seq, width, dtype=torch.float32), randn(1, seq, width, dtype=torch.float32)),)
    else:
        planes = (3,) if layout == "axes" else ()
        tables = tuple(randn(*planes, 1, seq, width, dtype=table_dtype) for _ in range(2))
    if layout == "packed tokens":
        q, k = q[0], k[0]
        tables = tuple(x[0] for x in tables)
    elif layout != "complex":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q.requires_grad_(), k.requires_grad_(), *tables


def values_and_gradients(function, arguments):
    return _values_and_gradients(lambda q, k, *_: function(q, k, *arguments[2:]), *arguments[:2], None, None)


def ours_of(layout):
    ours, reference, options, _ = LAYOUTS[layout]
    return functools.partial(ours, **options), functools.partial(reference, **options)


def exact(layout, arguments):
    q, k, *tables = arguments
    q, k = (x.detach().double().requires_grad_() for x in (q, k))
    tables = [x.to(torch.complex128) if x.is_complex() else x.double() for x in tables]
    return values_and_gradients(ours_of(layout)[1], (q, k, *tables))


@layouts
def test_float32_equals_float64(layout, device):
    arguments = inputs(layout, device=device)
    for ours, right in zip(values_and_gradients(ours_of(layout)[0], arguments), exact(layout, arguments)):
        torch.testing.assert_close(ours.double(), right, rtol=1e-6, atol=2e-6)


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(layout, dtype, device):
    arguments = inputs(layout, dtype, device)
    ours, reference = ours_of(layout)
    results = zip(
        values_and_gradients(ours, arguments),
        values_and_gradients(reference, arguments),
        exact(layout, arguments),
    )
    for own, theirs, right in results:
        assert own.dtype == dtype
        assert (own - right).norm() <= 1.1 * (theirs - right).norm()


@pytest.mark.parametrize("layout", ["kept dtype", "packed tokens", "neighbours"])
def test_float32_tables(layout, device):
    arguments = inputs(layout, torch.bfloat16, device, table_dtype=torch.float32)
    ours, reference = ours_of(layout)
    results = zip(values_and_gradients(ours, arguments), values_and_gradients(reference, arguments))
    for (own, theirs), right in zip(results, exact(layout, arguments)):
        assert own.dtype == theirs.dtype
        assert (own - right).norm() <= 1.1 * (theirs - right).norm() + 1e-6 * right.norm()


@layouts
def test_results_and_gradients_lie_in_projection_layout(layout, device):
    arguments = inputs(layout, device=device)
    for x in values_and_gradients(ours_of(layout)[0], arguments):
        assert (x if layout in ("complex", "packed tokens") else x.transpose(1, 2)).is_contiguous()


@layouts
def test_runs_again_to_the_same_bits_and_leaves_its_inputs_alone(layout, device):
    arguments = inputs(layout, device=device)
    before = [x.detach().clone() for x in arguments]
    ours = ours_of(layout)[0]
    first = values_and_gradients(ours, arguments)
    assert all(map(torch.equal, first, values_and_gradients(ours, arguments)))
    assert all(map(torch.equal, before, arguments))


@pytest.mark.parametrize("layout", ["neighbours to halves", "complex", "axes"])
def test_frozen_input_and_second_derivative(layout, device):
    q, k, *tables = inputs(layout, device=device)
    ours, reference = ours_of(layout)
    _, k_out = ours(q.detach(), k, *tables)
    (dk,) = torch.autograd.grad(k_out.sum(), k)
    torch.testing.assert_close(dk, torch.autograd.grad(reference(q, k, *tables)[1].sum(), k)[0])

    def derivatives(function):
        loss = sum(y.pow(3).sum() for y in function(q, k, *tables))
        first = torch.autograd.grad(loss, (q, k), create_graph=True)
        return torch.autograd.grad(sum(x.pow(2).sum() for x in first), (q, k))

    for own, expected in zip(derivatives(ours), derivatives(reference)):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-4)


@layouts
def test_empty(layout, device):
    arguments = inputs(layout, device=device, seq=0)
    results = values_and_gradients(ours_of(layout)[0], arguments)
    assert [x.shape for x in results] == [x.shape for x in (*arguments[:2], *arguments[:2])]


def test_vision_tables_of_llama4(device):
    """Its tower keeps (seq, 1, pairs); without a batch dimension the meaning is the same."""
    q, k, freqs_cis = inputs("complex", device=device)
    expected = rope_complex(q, k, freqs_cis)
    for table in (freqs_cis[0], freqs_cis[0][:, None], freqs_cis.conj().conj()):
        assert all(map(torch.equal, rope_complex(q, k, table), expected))
    assert all(map(torch.equal, rope_complex(q, k, freqs_cis.conj()), rope_complex(q, k, freqs_cis.conj().clone())))


def test_opcheck(device):
    q, k, cos, sin = inputs("neighbours to halves", device=device)
    opcheck(rotate, (q, k, cos, sin, 1, False, torch.float32, "interleaved to halves", "shared"))
    q, k, cos, sin = inputs("axes", device=device)
    opcheck(rotate, (q, k, cos, sin, 1, False, torch.float32, "halves", "planes", [1, 3, 2]))


@pytest.mark.parametrize("layout", ["neighbours to halves", "complex", "axes", "packed tokens"])
def test_compiles_fullgraph(layout, device):
    ours = ours_of(layout)[0]
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (5, 9):
        arguments = inputs(layout, device=device, seq=seq)
        for one, other in zip(values_and_gradients(compiled, arguments), values_and_gradients(ours, arguments)):
            assert torch.equal(one, other)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(0, 5),
    st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1, 2]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_any_shape_and_option(
    batch, seq, q_heads, k_heads, half, tail, interleaved, split_output, shared, strided, unsqueeze_dim, dtype
):
    device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    generator = torch.Generator().manual_seed(half + 10 * tail)
    gap = 3 if strided else 0
    q, k = (
        torch.randn(batch, seq, heads, 2 * half + tail + gap, generator=generator).to(device, dtype)[..., gap:]
        for heads in (q_heads, k_heads)
    )
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    tables = [torch.randn(1, seq, half if shared else 2 * half, generator=generator).to(device, dtype) for _ in "cs"]
    options = {
        "unsqueeze_dim": unsqueeze_dim,
        "rotary_dim": 2 * half,
        "interleaved": interleaved,
        "split_output": split_output and interleaved,
    }
    got = values_and_gradients(functools.partial(rope, **options), (q, k, *tables))
    arguments = (*(x.detach().double().requires_grad_() for x in (q, k)), *(x.double() for x in tables))
    expected = values_and_gradients(functools.partial(rope_reference, **options), arguments)
    tolerance = 2**-8 if dtype == torch.bfloat16 else 2e-6
    for one, other in zip(got, expected):
        assert (one - other).norm() <= tolerance * other.norm()
