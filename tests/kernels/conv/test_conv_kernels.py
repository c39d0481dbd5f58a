"""The kernels of the convolutions against float64: documents of every kind, dtypes, taps, strides."""

from functools import partial

import pytest
import torch

from liger_trainer.functional import delta_inputs, gated_short_conv, short_conv
from liger_trainer.kernels.conv.delta_inputs import delta_inputs_reference
from liger_trainer.kernels.conv.gated_short_conv import gated_short_conv_reference
from liger_trainer.kernels.conv.short_conv import short_conv_reference
from tests.accuracy import assert_as_accurate, run
from tests.kernels.conv.loops import TOKENS, every_kind

pytestmark = pytest.mark.kernel
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taps", [4, 2, 8])
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
def test_rows_are_documents(device, name):
    ours, reference, arguments = given(name, 4, device, torch.float32, batch=3, tokens=67)
    assert_as_accurate(ours, reference, arguments)


@operations
def test_documents_depend_on_nothing_else_in_their_row(device, name):
    """Bit for bit, what is packed is what is alone; NaN elsewhere changes nothing."""
    from liger_trainer.kernels.documents import documents_of

    ours, _, (x, *parameters) = given(name, 4, device, torch.bfloat16, tokens=140)
    lengths, firsts = [2, 70, 66], [0, 2, 72]
    upstream = [torch.randn_like(y) for y in _outputs(ours, x, *parameters)]
    packed = run(ours, (x, *parameters), upstream, documents=documents_of(lengths, tokens=140, device=device))[0]
    count = len(upstream)
    for first, length in zip(firsts, lengths):
        span = slice(first, first + length)
        alone, _ = run(ours, (x[:, span], *parameters), [each[:, span] for each in upstream])
        with_nan = torch.full_like(x, torch.nan)
        with_nan[:, span] = x[:, span]
        beside_nan, _ = run(
            ours, (with_nan, *parameters), upstream, documents=documents_of(lengths, tokens=140, device=device)
        )
        for place in range(count + 1):
            assert torch.equal(packed[place][:, span], alone[place])
            assert torch.equal(beside_nan[place][:, span], alone[place])


def _outputs(function, *given):
    outputs = function(*given)
    return outputs if isinstance(outputs, tuple) else (outputs,)
