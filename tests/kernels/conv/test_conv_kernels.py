"""The kernels of the convolutions against float64: documents of every kind, dtypes, taps, strides."""

from functools import partial

import pytest
import torch

from liger_trainer.functional import delta_gates, delta_inputs, gated_short_conv, short_conv
from liger_trainer.kernels.conv.delta_gates import delta_gates_reference
from liger_trainer.kernels.conv.delta_inputs import delta_inputs_reference
from liger_trainer.kernels.conv.gated_short_conv import gated_short_conv_reference
from liger_trainer.kernels.conv.short_conv import short_conv_reference
from liger_trainer.kernels.documents import documents_of
from tests.accuracy import assert_as_accurate, run
from tests.kernels.conv.loops import TOKENS, every_kind

pytestmark = pytest.mark.kernel
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = [*((4, dtype) for dtype in DTYPES), (2, torch.float32), (3, torch.bfloat16), (8, torch.float32)]
HEADS = {"key_heads": 3, "value_heads": 5, "key_dim": 12, "value_dim": 7}
OPERATIONS = {  # the function, its reference, columns of x, channels
    "short_conv": (short_conv, short_conv_reference, 20, 20),
    "silu": (partial(short_conv, activation="silu"), partial(short_conv_reference, activation="silu"), 20, 20),
    "silu and residual": (
        partial(short_conv, activation="silu", residual=True),
        partial(short_conv_reference, activation="silu", residual=True),
        20,
        20,
    ),
    "gated_short_conv": (gated_short_conv, gated_short_conv_reference, 60, 20),
    "delta_inputs": (partial(delta_inputs, **HEADS), partial(delta_inputs_reference, **HEADS), 107, 107),
}
operations = pytest.mark.parametrize("name", OPERATIONS)


def tensors(columns, channels, taps, device, dtype, batch=1, tokens=TOKENS):
    shapes = (batch, tokens, columns), (channels, taps), (channels,)
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def given(name, taps, device, dtype, **shape):
    """The function, its reference, and arguments, of which `delta_inputs` takes no bias."""
    ours, reference, columns, channels = OPERATIONS[name]
    arguments = tensors(columns, channels, taps, device, dtype, **shape)
    return ours, reference, arguments[:2] if name == "delta_inputs" else arguments


@operations
@pytest.mark.parametrize(("taps", "dtype"), CASES, ids=str)
def test_is_as_accurate_as_plain_torch(device, name, taps, dtype):
    ours, reference, arguments = given(name, taps, device, dtype)
    assert_as_accurate(ours, reference, arguments, documents=every_kind(device))


@pytest.mark.parametrize("taps", [3, 4])
def test_initial_and_final_states(device, taps):
    documents = every_kind(device)
    arguments = tensors(20, 20, taps, device, torch.float32)
    state = torch.randn(documents.roots, taps - 1, 20, device=device)

    def with_state(function, x, weight, bias, state):
        return function(x, weight, bias, activation="silu", documents=documents, initial_state=state, final_state=True)

    assert_as_accurate(partial(with_state, short_conv), partial(with_state, short_conv_reference), [*arguments, state])


@operations
def test_rows_of_a_batch_are_documents(device, name):
    ours, reference, arguments = given(name, 4, device, torch.float32, batch=3, tokens=67)
    assert_as_accurate(ours, reference, arguments)


@operations
def test_documents_depend_on_nothing_else_in_their_row(device, name):
    """Bit for bit, what is packed is what is alone; NaN elsewhere changes nothing."""
    ours, _, (x, *parameters) = given(name, 4, device, torch.bfloat16, tokens=72)
    lengths, firsts = [2, 66, 4], [0, 2, 68]
    outputs = ours(x, *parameters)
    upstream = [torch.randn_like(y) for y in (outputs if isinstance(outputs, tuple) else (outputs,))]
    documents = documents_of(lengths, tokens=72, device=device)
    packed, _ = run(ours, (x, *parameters), upstream, documents=documents)
    count = len(upstream)
    for first, length in zip(firsts, lengths):
        span = slice(first, first + length)
        alone, _ = run(ours, (x[:, span], *parameters), [each[:, span] for each in upstream])
        with_nan = torch.full_like(x, torch.nan)
        with_nan[:, span] = x[:, span]
        beside_nan, _ = run(ours, (with_nan, *parameters), upstream, documents=documents)
        for place in range(count + 1):
            assert torch.equal(packed[place][:, span], alone[place])
            assert torch.equal(beside_nan[place][:, span], alone[place])


@operations
def test_parts_of_a_projection_and_gradients_of_any_strides(device, name):
    ours, reference, (x, *parameters) = given(name, 4, device, torch.float32, tokens=37)
    columns = x.shape[-1]
    projection = torch.randn(1, 37, columns + 9, device=device)

    def of_part(function, projection, *parameters):
        outputs = function(projection[..., 5 : 5 + columns], *parameters)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(y.transpose(1, 2) for y in outputs)

    assert_as_accurate(partial(of_part, ours), partial(of_part, reference), [projection, *parameters])
    expanded = [y.sum() for y in of_part(ours, projection.requires_grad_(), *parameters)]
    assert torch.autograd.grad(sum(expanded), projection)[0].isfinite().all()


@operations
def test_no_tokens(device, name):
    ours, _, arguments = given(name, 4, device, torch.float32, tokens=0)
    results, _ = run(ours, arguments)
    assert all(not gradient.any() for gradient in results[-len(arguments) :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta_gates_are_as_accurate_as_plain_torch(device, dtype):
    a, b = torch.randn(2, 2, 57, 2 * 12, device=device).to(dtype)[..., :12] * 8
    a[0, 0] = torch.tensor([0.0, -0.0, 30.0, 88.0, 1e4, -30.0, -88.0, -1e4, 19.9, 20.1, -16.0, -17.0]).to(a)
    rate, bias = torch.randn(2, 12, device=device).to(dtype)
    scaled = [partial(function, beta_scale=2.0) for function in (delta_gates, delta_gates_reference)]
    assert_as_accurate(*scaled, [a, b, rate, bias])


def test_small_decays_keep_their_digits(device):
    a = torch.linspace(-60, 25, 200, device=device).view(1, 200, 1)
    zero = torch.zeros(1, device=device)
    g, _ = delta_gates(a, a, zero, zero)
    torch.testing.assert_close(g.double(), -torch.nn.functional.softplus(a.double(), threshold=30), rtol=1e-5, atol=0)


def test_the_projection_alone_is_saved(device):
    x = torch.randn(1, 9, 96, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_short_conv(x, torch.randn(32, 3, device=device))
    assert sum(each.nbytes for each in saved) == x.nbytes + 32 * 3 * 4
