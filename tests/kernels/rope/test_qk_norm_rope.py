"""The norm of q and k fused with their rotation: references, checks, kernels, and real shapes on a GPU."""

import re
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.qwen3 import modeling_qwen3

from liger_trainer.kernels.norms.rms_norm import rms_norm
from liger_trainer.kernels.rope import qk_norm_rope as module
from liger_trainer.kernels.rope.qk_norm_rope import (
    qk_norm_rope,
    qk_norm_rope_backward,
    qk_norm_rope_forward,
    qk_norm_rope_reference,
)
from liger_trainer.kernels.rope.qk_norm_rope_kernels import backward_kernel, forward_kernel
from liger_trainer.kernels.rope.rope import rope
from liger_trainer.kernels.rows import NormConfig
from tests.accuracy import assert_no_worse
from tests.aot import compile_launch, on_targets, recorded_launches
from tests.device import peak_memory


def tensors(q_heads=4, k_heads=2, dim=16, rotary=16, dtype=torch.float32, seq=5):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, seq, q_heads, dim), (2, seq, k_heads, dim), (dim,), (dim,), (1, seq, rotary), (1, seq, rotary)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_reference_is_the_models_own(family, dtype):
    q, k, q_weight, k_weight, cos, sin = tensors(dtype=dtype)
    modeling = modeling_qwen3 if family == "qwen3" else modeling_gemma3
    norm = (modeling_qwen3.Qwen3RMSNorm if family == "qwen3" else modeling_gemma3.Gemma3RMSNorm)(16, eps=1e-5)
    rotary = modeling.apply_rotary_pos_emb
    rotary = getattr(rotary, "forward", rotary)
    rows = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        norm.weight = torch.nn.Parameter(weight)
        rows.append(norm(x).transpose(1, 2))
    expected = rotary(*rows, cos, sin)
    options = {"casting": "llama"} if family == "qwen3" else {"casting": "gemma", "offset": 1.0}
    for function in (qk_norm_rope_reference, qk_norm_rope):
        for got, right in zip(function(q, k, q_weight, k_weight, cos, sin, 1e-5, **options), expected):
            torch.testing.assert_close(got.transpose(1, 2), right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("casting", ["llama", "none"])
def test_gradcheck(casting, device):
    arguments = [x.to(device).requires_grad_() for x in tensors(2, 1, 6, 4, torch.float64, 2)]
    assert torch.autograd.gradcheck(lambda *x: qk_norm_rope(*x, 1e-6, 0.5, casting), arguments)


def test_what_is_not_fused_is_the_two_apart(device):
    q, k, q_weight, k_weight, cos, sin = (x.to(device) for x in tensors())
    arguments = (q.bfloat16(), k, q_weight.bfloat16(), k_weight, cos, sin)
    for got, right in zip(qk_norm_rope(*arguments), qk_norm_rope_reference(*arguments)):
        assert got.dtype == right.dtype
        torch.testing.assert_close(got, right)
    cos.requires_grad_()
    loss = qk_norm_rope(q, k, q_weight, k_weight, cos, sin)[0].sum()
    assert torch.autograd.grad(loss, cos)[0].shape == cos.shape


def test_errors():
    q, k, q_weight, k_weight, cos, sin = tensors()
    with pytest.raises(ValueError, match="`casting` of qk_norm_rope is 'bf16'"):
        qk_norm_rope(q, k, q_weight, k_weight, cos, sin, casting="bf16")
    with pytest.raises(ValueError, match=r"`k_weight` of qk_norm_rope has shape \(15,\)"):
        qk_norm_rope(q, k, q_weight, k_weight[1:], cos, sin)
    with pytest.raises(ValueError, match="may differ only in dimension 2"):
        qk_norm_rope(q, k[:, 1:], q_weight, k_weight, cos, sin)
    with pytest.raises(ValueError, match=r"both must be \(batch or 1, seq, rotary_dim\)"):
        qk_norm_rope(q, k, q_weight, k_weight, cos[:, 1:], sin)


def launches(q_heads, k_heads, dim, rotary, dtype, needed=(True,) * 4):
    q, k, q_weight, k_weight, cos, sin = tensors(q_heads, k_heads, dim, rotary, dtype, seq=16)
    with recorded_launches() as recorded:
        results = qk_norm_rope_forward(q, k, q_weight, k_weight, cos, sin, 1e-6, 0.0, "llama")
        upstream = [y if needed[i] or needed[i + 2] else None for i, y in enumerate((q, k))]
        saved = (q, k, q_weight, k_weight, *results[2:], cos, sin)
        qk_norm_rope_backward(*upstream, *saved, 0.0, "llama", list(needed))
    return recorded


@pytest.mark.parametrize(
    ("target", "q_heads", "k_heads", "dim", "rotary", "dtype"),
    on_targets(
        (32, 8, 128, 128, torch.bfloat16),
        (8, 4, 256, 256, torch.bfloat16),
        (5, 1, 80, 80, torch.float32),
        (12, 2, 128, 64, torch.bfloat16),
        (8, 0, 512, 512, torch.bfloat16),
    ),
)
def test_compiles_ahead_of_time(target, q_heads, k_heads, dim, rotary, dtype):
    forward, backward, column_sum = launches(q_heads, k_heads, dim, rotary, dtype)
    for launch in (forward, backward, column_sum):
        assert compile_launch(launch, target)


@pytest.mark.parametrize(
    "needed", [(True, True, False, False), (False, False, True, True), (True, False, False, False)]
)
def test_partial_backward_compiles(needed):
    backward = launches(4, 2, 64, 64, torch.bfloat16, needed)[1]
    assert compile_launch(backward, "sm_90")


@pytest.mark.parametrize(("q_heads", "k_heads", "dim"), [(32, 8, 128), (8, 4, 256), (16, 8, 64)])
def test_kernels_read_128_bits_at_a_time_and_convert_nothing(q_heads, k_heads, dim):
    forward, backward, _ = launches(q_heads, k_heads, dim, dim, torch.bfloat16)
    for launch in (forward, backward):
        compiled = compile_launch(launch, "sm_90")
        assert compiled.asm["ptx"].count("ld.global.b16") == 0
        assert compiled.asm["ptx"].count("st.global.v4.b32") >= 4
        # Tiles stay in the layout they were read in: what goes through shared memory is one number a row or column.
        converted = re.findall(r"convert_layout.* -> tensor<(\d+)x(\d+)x(\d+)x", compiled.asm["ttgir"])
        assert not [shape for shape in converted if shape[2] != "1"]


# (batch, seq, q heads, k heads, head_dim, rotary_dim, table batch)
SHAPES = [
    (2, 5, 4, 2, 16, 16, 1),  # grouped-query
    (2, 3, 5, 1, 12, 12, 2),  # multi-query, nothing a power of two, one table a sequence
    (1, 7, 3, 3, 20, 8, 1),  # partial rotary
    (3, 1, 1, 2, 8, 6, 3),  # one token, more k heads than q heads, odd half
    (1, 2, 70, 3, 128, 128, 1),  # heads in several tiles
    (2, 5, 4, 0, 16, 16, 1),  # queries alone
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


def upstream_of(outputs):
    """Upstream gradients that every dtype holds."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(y.shape, generator=generator).to(y.device, torch.bfloat16).to(y.dtype) for y in outputs]


def values_and_gradients(function, arguments, *options):
    outputs = function(*arguments, 1e-6, *options)
    return [*outputs, *torch.autograd.grad(outputs, arguments[:4], upstream_of(outputs))]


def exact(arguments, *options):
    leaves = [x.detach().double().requires_grad_() for x in arguments[:4]]
    return values_and_gradients(qk_norm_rope_reference, (*leaves, *(x.double() for x in arguments[4:])), *options)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("casting", "offset"), NORMS)
def test_float32_equals_float64(shape, casting, offset, device):
    arguments = inputs(shape, device=device)
    results = values_and_gradients(qk_norm_rope, arguments, offset, casting)
    for ours, right in zip(results, exact(arguments, offset, casting)):
        torch.testing.assert_close(ours.double(), right, rtol=2e-6, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("casting", "offset"), NORMS)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_half_precision_is_no_worse_than_eager(dtype, shape, casting, offset, device):
    arguments = inputs(shape, dtype, device)
    eager = values_and_gradients(qk_norm_rope_reference, arguments, offset, casting)
    ours = values_and_gradients(qk_norm_rope, arguments, offset, casting)
    assert_no_worse(ours, eager, exact(arguments, offset, casting))


@pytest.mark.kernel
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


@pytest.mark.kernel
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
    upstream = upstream_of(right[:2])
    if unsqueeze_dim == 1:
        upstream = [x.transpose(1, 2) for x in upstream]
    got = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
    if unsqueeze_dim == 1:
        got[:4] = [x.transpose(1, 2) for x in got[:4]]
    assert all(x.is_contiguous() for x in got[:4])
    assert all(map(torch.equal, got, right))


@pytest.mark.kernel
@pytest.mark.parametrize("trained", [(0,), (3,), (0, 2), (1, 2), ()])
def test_frozen_inputs(trained, device):
    arguments = inputs(SHAPES[2], device=device)
    right = values_and_gradients(qk_norm_rope, arguments)[2:]
    arguments = [x.detach() for x in arguments]
    for index in trained:
        arguments[index].requires_grad_()
    outputs = qk_norm_rope(*arguments)
    upstream = upstream_of(outputs)
    if not trained:
        assert not any(y.requires_grad for y in outputs)
        return
    with mock.patch.object(module, "qk_norm_rope_backward", wraps=qk_norm_rope_backward) as backward:
        got = torch.autograd.grad(
            [y for y in outputs if y.requires_grad],
            [arguments[i] for i in trained],
            [dy for y, dy in zip(outputs, upstream) if y.requires_grad],
        )
    assert backward.call_args.args[-1] == [i in trained for i in range(4)]
    # Another compilation of the kernel, whose products and sums a GPU may fuse otherwise.
    torch.testing.assert_close(got, tuple(right[i] for i in trained))


@pytest.mark.kernel
def test_one_output_alone(device):
    arguments = inputs(SHAPES[1], device=device)
    k_out = qk_norm_rope(*arguments)[1]
    got = torch.autograd.grad(k_out.square().sum(), arguments[:4], allow_unused=True)
    assert got[0] is None
    assert got[2] is None
    expected = qk_norm_rope_reference(*arguments)[1].square().sum()
    for ours, right in zip(got[1::2], torch.autograd.grad(expected, (arguments[1], arguments[3]))):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
def test_expanded_upstream(device):
    arguments = inputs(SHAPES[0], device=device)
    ours, right = (
        torch.autograd.grad(sum(y.sum() for y in function(*arguments)), arguments[:4])
        for function in (qk_norm_rope, qk_norm_rope_reference)
    )
    torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("config", [NormConfig(1, 4, 1, 1), NormConfig(8, 4, 3, 2)])
def test_every_tiling_gives_the_same(config, device, monkeypatch):
    arguments = inputs(SHAPES[2], device=device)
    expected = values_and_gradients(qk_norm_rope, arguments)
    monkeypatch.setattr(module, "forward_config", lambda block: config)
    monkeypatch.setattr(module, "backward_config", lambda block: config)
    for one, other in zip(values_and_gradients(qk_norm_rope, arguments), expected):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(0, 4, 2, 1, 8, 8, 1), (2, 0, 2, 1, 8, 8, 1), (1, 2, 0, 0, 8, 8, 1)])
def test_empty(shape, device):
    arguments = inputs(shape, device=device)
    results = values_and_gradients(qk_norm_rope, arguments)
    assert [x.shape for x in results] == [x.shape for x in (*arguments[:2], *arguments[:4])]
    assert not results[4].any()


@pytest.mark.kernel
def test_compiles_fullgraph_for_any_batch_and_length(device):
    compiled = torch.compile(qk_norm_rope, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seq in ((2, 5), (3, 9)):
        arguments = inputs((batch, seq, 4, 2, 16, 16, 1), device=device)
        for ours, eager in zip(
            values_and_gradients(compiled, arguments), values_and_gradients(qk_norm_rope, arguments)
        ):
            assert torch.equal(ours, eager)
            assert ours.stride() == eager.stride()


@pytest.mark.kernel
@settings(max_examples=15)
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


@pytest.mark.kernel
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
    with mock.patch.object(module, "qk_norm_rope_forward", wraps=qk_norm_rope_forward) as forward:
        got = run()
    assert forward.call_count == 1
    for ours, right in zip(got, expected):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)


def real_inputs(device, batch=2, seq=2048, q_heads=32, k_heads=8, dim=128, rotary=None, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(batch, seq, q_heads, dim), (batch, seq, k_heads, dim), (dim,), (dim,)]
    leaves = [torch.randn(s, device=device, generator=generator).to(dtype).requires_grad_() for s in shapes]
    half = (rotary or dim) // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.outer(torch.arange(seq, device=device), frequencies).repeat(1, 2)[None]
    return *leaves, angles.cos().to(dtype), angles.sin().to(dtype)


def real_upstream(arguments):
    generator = torch.Generator(arguments[0].device).manual_seed(1)
    return [torch.randn(x.shape, device=x.device, generator=generator).bfloat16().to(x.dtype) for x in arguments[:2]]


def real_results(function, arguments, leaves=4):
    outputs = function(*arguments)
    gradients = [dy.to(y.dtype) for y, dy in zip(outputs, real_upstream(arguments))]
    return [*outputs, *torch.autograd.grad(outputs, arguments[:leaves], gradients)]


def apart(q, k, q_weight, k_weight, cos, sin):
    return rope(rms_norm(q, q_weight), rms_norm(k, k_weight), cos, sin, unsqueeze_dim=2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"q_heads": 8, "k_heads": 4, "dim": 256},
        {"q_heads": 64, "k_heads": 4, "dim": 128},
        {"q_heads": 96, "k_heads": 8, "dim": 128, "rotary": 64},
        {"q_heads": 3, "k_heads": 1, "dim": 80, "seq": 1025},
        {"q_heads": 16, "k_heads": 16, "dim": 64, "seq": 333},
    ],
    ids=str,
)
def test_rounds_no_worse_than_eager(shape, device):
    arguments = real_inputs(device, **shape)
    exact_leaves = [x.detach().double().requires_grad_() for x in arguments[:4]]
    exact = real_results(qk_norm_rope_reference, (*exact_leaves, *(x.double() for x in arguments[4:])))
    eager = real_results(qk_norm_rope_reference, arguments)
    assert_no_worse(real_results(qk_norm_rope, arguments), eager, exact)


@pytest.mark.gpu
def test_values_are_those_of_the_kernels_apart(device):
    arguments = real_inputs(device)
    for ours, theirs in zip(qk_norm_rope(*arguments), apart(*arguments)):
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-8)


@pytest.mark.gpu
def test_one_compilation_for_every_batch_and_length(device):
    def compilations():
        kernels = (forward_kernel, backward_kernel)
        return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())

    real_results(qk_norm_rope, real_inputs(device, batch=2, seq=7))
    before = compilations()
    for batch, seq in ((1, 1), (1, 16), (3, 1), (16, 33), (2, 4096)):
        real_results(qk_norm_rope, real_inputs(device, batch=batch, seq=seq))
    assert compilations() == before


@pytest.mark.gpu
def test_more_than_2_to_31_elements(device):
    arguments = [x.detach() for x in real_inputs(device, batch=1, seq=2**19 + 8, q_heads=33, k_heads=1)]
    assert arguments[0].numel() > 2**31
    last = [x[:, -4:] if x.dim() == 4 else x[:, -4:] if x.dim() == 3 else x for x in arguments]
    for ours, right in zip(qk_norm_rope(*arguments), qk_norm_rope_reference(*last)):
        torch.testing.assert_close(ours[:, -4:], right, rtol=2**-6, atol=2**-5)


@pytest.mark.gpu
def test_memory_is_the_results_and_one_number_a_head(device):
    arguments = real_inputs(device)
    upstream = real_upstream(arguments)
    peak = peak_memory(lambda: torch.autograd.grad(qk_norm_rope(*arguments), arguments[:4], upstream))
    size = sum(x.numel() * x.element_size() for x in arguments[:2])
    assert peak <= 2 * size + 4 * size // (2 * 128) + 2**20
