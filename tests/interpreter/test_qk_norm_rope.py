"""The fused norm and rotation of q and k: values, gradients, layouts and registration."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from liger_trainer.kernels.norms.launch import NormConfig
from liger_trainer.kernels.norms.rms_norm import rms_norm
from liger_trainer.kernels.rope import qk_norm_rope as module
from liger_trainer.kernels.rope.qk_norm_rope import (
    qk_norm_rope,
    qk_norm_rope_backward,
    qk_norm_rope_forward,
    qk_norm_rope_reference,
)
from liger_trainer.kernels.rope.rope import rope

# (batch, seq, q heads, k heads, head_dim, rotary_dim, table batch)
SHAPES = [
    (2, 5, 4, 2, 16, 16, 1),  # grouped-query
    (2, 3, 5, 1, 12, 12, 2),  # multi-query, nothing a power of two, one table a sequence
    (1, 7, 3, 3, 20, 8, 1),  # partial rotary
    (3, 1, 1, 2, 8, 6, 3),  # one token, more k heads than q heads, odd half
    (1, 2, 70, 3, 128, 128, 1),  # heads in several tiles
]
NORMS = [("llama", 0.0), ("gemma", 1.0), ("olmo2", 0.0)]


def inputs(shape, dtype=torch.float32, device="cpu", table_dtype=None, weight_dtype=None):
    batch, seq, q_heads, k_heads, dim, rotary, table_batch = shape
    generator = torch.Generator().manual_seed(0)

    def randn(*size, dtype=dtype):
        return torch.randn(size, generator=generator).to(device, dtype)

    leaves = [randn(batch, seq, q_heads, dim), randn(batch, seq, k_heads, dim)]
    leaves += [randn(dim, dtype=weight_dtype or dtype) for _ in range(2)]
    tables = [randn(table_batch, seq, rotary, dtype=table_dtype or dtype) for _ in range(2)]
    return *(leaf.requires_grad_() for leaf in leaves), *tables


def values_and_gradients(function, arguments, *options):
    generator = torch.Generator().manual_seed(1)
    outputs = function(*arguments, 1e-6, *options)
    gradients = [torch.randn(y.shape, generator=generator).to(y.device, torch.bfloat16).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, arguments[:4], gradients)]


def exact(arguments, *options):
    leaves = [x.detach().double().requires_grad_() for x in arguments[:4]]
    return values_and_gradients(qk_norm_rope_reference, (*leaves, *(x.double() for x in arguments[4:])), *options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("casting", "offset"), NORMS)
def test_float32_equals_float64(shape, casting, offset, device):
    arguments = inputs(shape, device=device)
    results = values_and_gradients(qk_norm_rope, arguments, offset, casting)
    for ours, right in zip(results, exact(arguments, offset, casting)):
        torch.testing.assert_close(ours.double(), right, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("casting", "offset"), NORMS)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_half_precision_is_no_worse_than_eager(dtype, shape, casting, offset, device):
    arguments = inputs(shape, dtype, device)
    eager = values_and_gradients(qk_norm_rope_reference, arguments, offset, casting)
    ours = values_and_gradients(qk_norm_rope, arguments, offset, casting)
    for own, theirs, right in zip(ours, eager, exact(arguments, offset, casting)):
        assert own.dtype == dtype
        assert (own - right).norm() <= 1.1 * (theirs - right).norm()


@pytest.mark.parametrize(("casting", "offset"), NORMS)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_values_are_those_of_the_two_kernels(casting, offset, weight_dtype, device):
    arguments = inputs(SHAPES[0], torch.bfloat16, device, table_dtype=torch.float32, weight_dtype=weight_dtype)
    q, k, q_weight, k_weight, cos, sin = arguments
    norms = [rms_norm(x, weight, 1e-6, offset, casting) for x, weight in ((q, q_weight), (k, k_weight))]
    expected = rope(*norms, cos, sin, unsqueeze_dim=2)
    for ours, apart in zip(qk_norm_rope(*arguments, 1e-6, offset, casting), expected):
        assert ours.dtype == apart.dtype
        # Apart from contracted products of the rotation, which is fp32.
        torch.testing.assert_close(ours, apart, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_layouts_and_strides(unsqueeze_dim, device):
    arguments = inputs(SHAPES[0], device=device)
    right = values_and_gradients(qk_norm_rope, arguments)
    q, k, q_weight, k_weight, cos, sin = (x.detach() for x in arguments)
    q = torch.stack([q, q + 1], dim=-1)[..., 0]  # last dimension of stride 2
    k = torch.cat([k, k], dim=-1)[..., : k.shape[-1]]
    q_weight = torch.stack([q_weight, q_weight], dim=-1)[..., 0]
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    leaves = [x.detach().requires_grad_() for x in (q, k, q_weight, k_weight)]
    outputs = qk_norm_rope(
        *leaves, cos.expand(2, -1, -1), sin.mT.contiguous().mT.expand(2, -1, -1), unsqueeze_dim=unsqueeze_dim
    )
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(y.device, torch.bfloat16).float() for y in right[:2]]
    if unsqueeze_dim == 1:
        upstream = [x.transpose(1, 2) for x in upstream]
    got = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
    if unsqueeze_dim == 1:
        got[:4] = [x.transpose(1, 2) for x in got[:4]]
    assert all(x.is_contiguous() for x in got[:4])
    assert all(map(torch.equal, got, right))


@pytest.mark.parametrize("trained", [(0,), (3,), (0, 2), (1, 2), ()])
def test_frozen_inputs(trained, device):
    arguments = inputs(SHAPES[2], device=device)
    right = values_and_gradients(qk_norm_rope, arguments)[2:]
    arguments = [x.detach() for x in arguments]
    for index in trained:
        arguments[index].requires_grad_()
    outputs = qk_norm_rope(*arguments)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(y.device, torch.bfloat16).float() for y in outputs]
    if not trained:
        assert not any(y.requires_grad for y in outputs)
        return
    with mock.patch.object(module, "launch_backward", wraps=module.launch_backward) as launch:
        got = torch.autograd.grad(
            [y for y in outputs if y.requires_grad],
            [arguments[i] for i in trained],
            [dy for y, dy in zip(outputs, upstream) if y.requires_grad],
        )
    wanted = launch.call_args.args[10:14]
    assert [gradient is not None for gradient in wanted] == [i in trained for i in range(4)]
    # Another compilation of the kernel, whose products and sums a GPU may fuse otherwise.
    torch.testing.assert_close(got, tuple(right[i] for i in trained))


def test_one_output_alone(device):
    arguments = inputs(SHAPES[1], device=device)
    k_out = qk_norm_rope(*arguments)[1]
    got = torch.autograd.grad(k_out.square().sum(), arguments[:4], allow_unused=True)
    assert got[0] is None
    assert got[2] is None
    expected = qk_norm_rope_reference(*arguments)[1].square().sum()
    for ours, right in zip(got[1::2], torch.autograd.grad(expected, (arguments[1], arguments[3]))):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_expanded_upstream_and_second_backward(device):
    arguments = inputs(SHAPES[0], device=device)
    loss = sum(y.sum() for y in qk_norm_rope(*arguments))
    first = torch.autograd.grad(loss, arguments[:4], retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, arguments[:4])))
    expected = torch.autograd.grad(sum(y.sum() for y in qk_norm_rope_reference(*arguments)), arguments[:4])
    for ours, right in zip(first, expected):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


def test_second_derivative_is_refused_by_name(device):
    arguments = inputs(SHAPES[0], device=device)
    loss = sum(y.square().sum() for y in qk_norm_rope(*arguments))
    (dq,) = torch.autograd.grad(loss, arguments[0], create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of qk_norm_rope cannot itself be differentiated"):
        dq.sum().backward()


def test_same_bits_and_inputs_left_alone(device):
    arguments = inputs(SHAPES[0], torch.bfloat16, device)
    before = [x.detach().clone() for x in arguments]
    first = values_and_gradients(qk_norm_rope, arguments)
    assert all(map(torch.equal, first, values_and_gradients(qk_norm_rope, arguments)))
    assert all(map(torch.equal, before, arguments))


@pytest.mark.parametrize("config", [NormConfig(1, 4, 1, 1), NormConfig(8, 4, 3, 2)])
def test_every_tiling_gives_the_same(config, device, monkeypatch):
    from liger_trainer.kernels.rope import qk_norm_rope as launch

    arguments = inputs(SHAPES[2], device=device)
    expected = values_and_gradients(qk_norm_rope, arguments)
    monkeypatch.setattr(launch, "forward_config", lambda block: config)
    monkeypatch.setattr(launch, "backward_config", lambda block: config)
    for one, other in zip(values_and_gradients(qk_norm_rope, arguments), expected):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4, 2, 1, 8, 8, 1), (2, 0, 2, 1, 8, 8, 1), (1, 2, 0, 0, 8, 8, 1)])
def test_empty(shape, device):
    arguments = inputs(shape, device=device)
    results = values_and_gradients(qk_norm_rope, arguments)
    assert [x.shape for x in results] == [x.shape for x in (*arguments[:2], *arguments[:4])]
    assert not results[4].any()


def test_opcheck(device):
    arguments = inputs(SHAPES[2], device=device)
    opcheck(qk_norm_rope_forward, (*arguments, 1e-6, 1.0, "gemma"))
    with torch.no_grad():
        q_out, k_out, q_rstd, k_rstd = qk_norm_rope_forward(*arguments, 1e-6, 1.0, "gemma")
    saved = [x.detach() for x in (*arguments[:4], q_rstd, k_rstd, *arguments[4:])]
    utilities = ("test_schema", "test_faketensor")
    opcheck(qk_norm_rope_backward, (q_out, k_out, *saved, 1.0, "gemma", [True] * 4), test_utils=utilities)
    opcheck(
        qk_norm_rope_backward, (q_out, None, *saved, 1.0, "gemma", [True, False, False, False]), test_utils=utilities
    )


def test_compiles_fullgraph_for_any_batch_and_length(device):
    compiled = torch.compile(qk_norm_rope, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seq in ((2, 5), (3, 9)):
        arguments = inputs((batch, seq, 4, 2, 16, 16, 1), device=device)
        for ours, eager in zip(
            values_and_gradients(compiled, arguments), values_and_gradients(qk_norm_rope, arguments)
        ):
            assert torch.equal(ours, eager)
            assert ours.stride() == eager.stride()


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 9), st.integers(0, 5),
    st.sampled_from(NORMS), st.booleans(), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_any_shape_and_option(batch, seq, q_heads, k_heads, half, tail, norm, strided, shared_table, dtype):
    device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    dim = 2 * half + tail
    arguments = list(inputs((batch, seq, q_heads, k_heads, dim, 2 * half, 1 if shared_table else batch), dtype, device))
    if strided:
        for index in (0, 1):
            arguments[index] = torch.nn.functional.pad(arguments[index].detach(), (3, 0))[..., 3:].requires_grad_()
    casting, offset = norm
    got = values_and_gradients(qk_norm_rope, arguments, offset, casting)
    eager = values_and_gradients(qk_norm_rope_reference, arguments, offset, casting)
    for own, theirs, right in zip(got, eager, exact(arguments, offset, casting)):
        # A single number has little to be averaged over: three bf16 roundings of the largest is what eager may make.
        floor = (2e-6 if dtype == torch.float32 else 3 * 2**-9) * right.norm()
        assert (own - right).norm() <= 1.1 * (theirs - right).norm() + floor + 1e-6


def test_in_the_attention_of_a_model(device):
    """The norms wait for the rotary function, and one launch does both."""
    from transformers.models.qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    from liger_trainer import apply_liger_kernel

    torch.manual_seed(0)
    config = Qwen3Config(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config._attn_implementation = "eager"
    attention = Qwen3Attention(config, 0).to(device)
    hidden = torch.randn(2, 5, 16, device=device)
    tables = torch.randn(1, 5, 8, device=device), torch.randn(1, 5, 8, device=device)

    def run():
        attention.zero_grad()
        y = attention(hidden, position_embeddings=tables, attention_mask=None)[0]
        y.square().sum().backward()
        return [y.detach(), *(parameter.grad.clone() for parameter in attention.parameters())]

    expected = run()
    report = apply_liger_kernel(attention, {"linear_cross_entropy": False, "cross_entropy": False})
    assert "rope with the norms of q and k" in {row.kernel for row in report}
    with mock.patch.object(module, "launch_forward", wraps=module.launch_forward) as launch:
        got = run()
    assert launch.call_count == 1
    for ours, right in zip(got, expected):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
