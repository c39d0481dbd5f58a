"""Modulated RMSNorm's groups of tokens: every shape of scale and shift, and every split over programs."""

import pytest
import torch

from liger_trainer.kernels.norms.rms_norm import rms_norm_reference
from liger_trainer.kernels.rows import NormConfig
from liger_trainer.liger.operators import modulated_rms_norm as modulated_rms_norm_module
from liger_trainer.liger.operators.modulated_rms_norm import modulated_rms_norm
from tests.accuracy import assert_as_accurate

SHAPES = {  # shape of x: shapes of scale and shift, and the same as they broadcast
    "a row a sample": ((3, 7, 24), (3, 24), (3, 1, 24)),
    "a row a sample, kept dimension": ((3, 7, 24), (3, 1, 24), (3, 1, 24)),
    "one row": ((3, 7, 24), (24,), (24,)),
    "one row of two dimensions": ((3, 7, 24), (1, 24), (1, 24)),
    "a row a token": ((3, 7, 24), (3, 7, 24), (3, 7, 24)),
    "a row a token, flat": ((3, 7, 24), (21, 24), (3, 7, 24)),
    "a row a position": ((3, 7, 24), (1, 7, 24), (1, 7, 24)),
    "a row a frame": ((2, 3, 4, 24), (2, 3, 1, 24), (2, 3, 1, 24)),
    "as many samples as tokens": ((3, 3, 24), (3, 24), (3, 1, 24)),
    "one token": ((1, 24), (24,), (24,)),
}


def direct(shape, casting="llama", offset=0.0):
    """The formula, with scale and shift viewed in the shape in which they broadcast."""

    def formula(x, weight, scale, shift):
        compute = torch.promote_types(x.dtype, torch.float32)
        y = rms_norm_reference(x, weight, 1e-6, offset, casting).to(compute) * (1 + scale.to(compute).view(shape))
        return (y if shift is None else y + shift.to(compute).view(shape)).to(x.dtype)

    return formula


@pytest.mark.kernel
@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("programs_per_sm", [1, 4, 40])
def test_scale_and_shift_reach_their_tokens(device, monkeypatch, layout, programs_per_sm):
    # One program for all groups, one for each, several for each.
    config = NormConfig(rows=2, num_warps=4, num_stages=2, programs_per_sm=programs_per_sm)
    monkeypatch.setattr(modulated_rms_norm_module, "num_sms", lambda device: 1)
    monkeypatch.setattr(modulated_rms_norm_module, "backward_config", lambda hidden_size: config)
    shape, given, broadcast = SHAPES[layout]
    tensors = [torch.randn(size, device=device) for size in (shape, shape[-1:], given, given)]
    assert_as_accurate(modulated_rms_norm, direct(broadcast), tensors)
    assert_as_accurate(modulated_rms_norm, direct(broadcast), [tensors[0], None, tensors[2], None])


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("casting", "hidden_size"), [("llama", 40), ("gemma", 40), ("olmo2", 40), ("none", 40), ("llama", 1100)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_castings(device, casting, dtype, hidden_size):
    sizes = ((2, 5, hidden_size), (hidden_size,), (2, hidden_size), (2, hidden_size))
    tensors = [torch.randn(size, device=device, dtype=dtype) for size in sizes]
    assert_as_accurate(
        lambda *given: modulated_rms_norm(*given, 1e-6, 0.5, casting),
        direct((2, 1, hidden_size), casting, 0.5),
        tensors,
    )


@pytest.mark.kernel
def test_runs_of_tokens_without_a_batch_dimension(device):
    x, scale = torch.randn(12, 24, device=device), torch.randn(4, 24, device=device)
    ours = modulated_rms_norm(x, None, scale)
    torch.testing.assert_close(ours, direct((4, 1, 24))(x.view(4, 3, 24), None, scale, None).view(12, 24))


@pytest.mark.kernel
def test_scale_a_sample_and_shift_a_token(device):
    sizes = ((2, 5, 24), (24,), (2, 24), (2, 5, 24))
    tensors = [torch.randn(size, device=device) for size in sizes]

    def formula(x, weight, scale, shift):
        return rms_norm_reference(x, weight) * (1 + scale[:, None]) + shift

    assert_as_accurate(modulated_rms_norm, formula, tensors)


@pytest.mark.kernel
def test_chunks_of_one_projection_are_read_where_they_lie(device):
    projection = torch.randn(2, 1, 6 * 24, device=device, requires_grad=True)
    x = torch.randn(2, 5, 24, device=device)
    dy = torch.randn_like(x)

    def gradient(function):
        shift, scale, *_ = projection.chunk(6, dim=-1)
        return torch.autograd.grad(function(x, None, scale, shift), projection, dy)

    torch.testing.assert_close(gradient(modulated_rms_norm), gradient(direct((2, 1, 24))), rtol=1e-4, atol=1e-5)
