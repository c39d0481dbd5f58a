"""RoPE's other layouts: the models that use them, checks, kernels, and the shapes of real models on a GPU."""

import functools
import types
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama4 import modeling_llama4
from transformers.models.qwen2_vl import modeling_qwen2_vl

from liger_trainer.kernels.rope import rope as rope_module
from liger_trainer.kernels.rope.layouts import rope_complex, rope_multimodal, rope_multimodal_reference, rope_vision
from liger_trainer.kernels.rope.rope import rope, rope_reference, rotate
from tests.accuracy import assert_no_worse
from tests.aot import compile_launch, on_targets, recorded_launches
from tests.kernels.rope.test_qk_norm_rope import real_inputs, real_results
from tests.kernels.rope.test_rope import original
from tests.kernels.rope.test_rope import values_and_gradients as _values_and_gradients


def tensors(*widths, dtype=torch.float32, seq=5, dim=16, batch=2):
    """q and k of (batch, heads, seq, head_dim), and tables of the given widths."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, seq, heads, dim, generator=generator).to(dtype).transpose(1, 2) for heads in (4, 2))
    return q, k, *(torch.randn(1, seq, width, generator=generator).to(dtype) for width in widths)


def assert_same(got, expected, device="cpu"):
    for one, other in zip(got, expected):
        assert one.dtype == other.dtype
        if device == "cpu":
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other)


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@dtypes
def test_glm4(dtype):
    q, k, cos, sin = tensors(8, 8, dtype=dtype)  # half of a head is rotated
    halves = cos[..., :4], sin[..., :4]
    assert_same(rope(q, k, *halves, rotary_dim=8, interleaved=True), original(modeling_glm4)(q, k, cos, sin))


@dtypes
def test_cohere(dtype):
    q, k, cos, sin = tensors(16, 16, dtype=dtype)
    got = rope(q, k, cos, sin, interleaved=True, keep_dtype=True)
    assert_same(got, original(modeling_cohere)(q, k, cos, sin))


@dtypes
def test_deepseek_v3(dtype):
    q, k, cos, sin = tensors(16, 16, dtype=dtype)
    got = rope(q, k, cos[..., :8], sin[..., :8], rotary_dim=16, interleaved=True, split_output=True)
    assert_same(got, original(modeling_deepseek_v3, "apply_rotary_pos_emb_interleave")(q, k, cos, sin))


@dtypes
def test_gpt_oss(dtype):
    q, k, cos, sin = tensors(8, 8, dtype=dtype)
    assert_same(rope(q, k, cos, sin, rotary_dim=16), original(modeling_gpt_oss)(q, k, cos, sin))


@dtypes
def test_complex_of_llama4_and_deepseek_v2(dtype):
    q, k, cos, sin = tensors(8, 8, dtype=torch.float32)
    q, k, freqs_cis = q.to(dtype), k.to(dtype), torch.complex(cos, sin)
    expected = original(modeling_deepseek_v2, "apply_rotary_emb")(q, k, freqs_cis)
    for one, other in zip(rope_complex(q, k, freqs_cis, unsqueeze_dim=1), expected):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    text = original(modeling_llama4, "apply_rotary_emb")(q, k, freqs_cis)
    vision = original(modeling_llama4, "vision_apply_rotary_emb")(q, k, freqs_cis[0][:, None])
    for got in (rope_complex(q, k, freqs_cis), rope_complex(q, k, freqs_cis[0][:, None])):
        for one, other, another in zip(got, text, vision):
            torch.testing.assert_close(one, other, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
            assert torch.equal(other, another)


@dtypes
def test_vision_tower_of_qwen2_vl(dtype):
    q, k, cos, sin = tensors(16, 16)
    q, k = q.transpose(1, 2)[0].to(dtype), k.transpose(1, 2)[0].to(dtype)
    expected = original(modeling_qwen2_vl, "apply_rotary_pos_emb_vision")(q, k, cos[0], sin[0])
    assert_same(rope_vision(q, k, cos[0], sin[0]), expected)


def test_axes_of_qwen2_vl():
    q, k, *_ = tensors()
    angles = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    embedding = types.SimpleNamespace(mrope_section=[1, 4, 3])
    together = modeling_qwen2_vl.Qwen2VLRotaryEmbedding.recomposition_frequencies
    tables = [together(embedding, table) for table in (angles.cos(), angles.sin())]
    planes = [torch.cat((table, table), -1) for table in (angles.cos(), angles.sin())]
    expected = original(modeling_qwen2_vl)(q, k, *tables)
    assert_same(rope_multimodal(q, k, *planes, [1, 4, 3]), expected)


def test_split_output_keeps_the_dot_products():
    q, k, cos, sin = tensors(16, 16, dtype=torch.float64)  # sums that may cancel
    k = k.repeat_interleave(2, dim=1)
    scores = [
        a @ b.mT for a, b in (rope(q, k, cos, sin, interleaved=True, split_output=split) for split in (False, True))
    ]
    torch.testing.assert_close(*scores)


@pytest.mark.parametrize("split_output", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients(split_output, shared):
    q, k, cos, sin = (
        x.requires_grad_() for x in tensors(*(2 if shared else 4,) * 2, dtype=torch.float64, seq=2, dim=6)
    )
    options = {"rotary_dim": 4, "interleaved": True, "split_output": split_output}
    assert torch.autograd.gradcheck(lambda *x: rope(*x, **options), (q, k, cos, sin))


def test_errors():
    q, k, cos, sin = tensors(8, 8)
    with pytest.raises(ValueError, match="`rotary_dim` is 12; with tables 8 wide it is that or twice that"):
        rope(q, k, cos, sin, rotary_dim=12)
    with pytest.raises(ValueError, match="rotate 32 of the 16"):
        rope(q, k, *tensors(16, 16)[2:], rotary_dim=32)
    with pytest.raises(ValueError, match="`split_output` needs `interleaved`"):
        rope(q, k, cos, sin, split_output=True)
    with pytest.raises(ValueError, match=r"`freqs_cis` has dtype torch\.float32; it must be complex"):
        rope_complex(q, k, cos, 1)
    with pytest.raises(ValueError, match="both must be"):
        rope_complex(q, k, torch.complex(cos, sin)[:, 1:], 1)
    with pytest.raises(ValueError, match=r"must be \(planes, batch or 1, seq, rotary_dim\), here \(3, 2 or 1, 5"):
        rope_multimodal(q, k, cos, sin, [4, 2, 2])
    planes = [x.expand(3, 2, 5, 8) for x in (cos, sin)]
    with pytest.raises(ValueError, match=r"`sections` is \[4, 2, 2\]; it must add up to 4"):
        rope_multimodal(q, k, *planes, [4, 2, 2])
    with pytest.raises(ValueError, match="they must be \\(seq, heads, head_dim\\), twice"):
        rope_vision(q, k, cos, sin)


# pairs, table, bytes of a table entry
LAUNCHES = [
    ("halves", "shared", torch.bfloat16),
    ("interleaved", "interleaved", torch.float32),
    ("interleaved", "shared", torch.bfloat16),
    ("interleaved", "complex", torch.float32),
    ("interleaved to halves", "shared", torch.bfloat16),
    ("halves", "planes", torch.bfloat16),
]


def launch_of(pairs, table, table_dtype, transposed, dtype=torch.bfloat16, dim=128, rotary=128):
    width = rotary // 2 if table == "shared" else rotary
    q, k = (torch.empty(2, 5, heads, dim, dtype=dtype) for heads in (32, 8))
    cos = torch.empty(*([3] if table == "planes" else []), 1, 5, width, dtype=table_dtype)
    sections = [rotary // 4, rotary // 8, rotary // 8] if table == "planes" else None
    with recorded_launches() as launches:
        rotate(q, k, cos, cos.clone(), 2, transposed, dtype, pairs, table, sections)
    return launches[0]


@pytest.mark.parametrize(("target", "pairs", "table", "table_dtype"), on_targets(*LAUNCHES))
def test_compiles_ahead_of_time(target, pairs, table, table_dtype):
    assert compile_launch(launch_of(pairs, table, table_dtype, False), target)
    backward = "halves to interleaved" if pairs.endswith("to halves") else pairs
    launch = launch_of(backward, table, torch.float32, True, torch.float32, dim=80, rotary=48)
    assert compile_launch(launch, target)


@pytest.mark.parametrize(("pairs", "table", "table_dtype"), LAUNCHES)
def test_kernels_read_128_bits_at_a_time(pairs, table, table_dtype):
    assembly = compile_launch(launch_of(pairs, table, table_dtype, False), "sm_90").asm["ptx"]
    # 2,048 pairs of queries and 512 of keys: 4 + 2 wide stores as halves, 4 + 1 of both members together.
    assert assembly.count("st.global.v4.b32") >= 4
    assert assembly.count("st.global.b16") == 0
    assert assembly.count("ld.global.v4.b32") >= 5
    assert assembly.count("ld.global.b16") <= (2 if table == "interleaved" else 0)


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


@pytest.mark.kernel
@layouts
def test_float32_equals_float64(layout, device):
    arguments = inputs(layout, device=device)
    for ours, right in zip(values_and_gradients(ours_of(layout)[0], arguments), exact(layout, arguments)):
        torch.testing.assert_close(ours.double(), right, rtol=1e-6, atol=2e-6)


@pytest.mark.kernel
@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_eager(layout, dtype, device):
    arguments = inputs(layout, dtype, device)
    results, eager = (values_and_gradients(function, arguments) for function in ours_of(layout))
    assert all(result.dtype == dtype for result in results)
    assert_no_worse(results, eager, exact(layout, arguments))


@pytest.mark.kernel
@pytest.mark.parametrize("layout", ["kept dtype", "packed tokens", "neighbours"])
def test_float32_tables(layout, device):
    arguments = inputs(layout, torch.bfloat16, device, table_dtype=torch.float32)
    ours, reference = ours_of(layout)
    results = zip(values_and_gradients(ours, arguments), values_and_gradients(reference, arguments))
    for (own, theirs), right in zip(results, exact(layout, arguments)):
        assert own.dtype == theirs.dtype
        assert (own - right).norm() <= 1.1 * (theirs - right).norm() + 1e-6 * right.norm()


@pytest.mark.kernel
@layouts
def test_results_and_gradients_lie_in_projection_layout(layout, device):
    arguments = inputs(layout, device=device)
    for x in values_and_gradients(ours_of(layout)[0], arguments):
        assert (x if layout in ("complex", "packed tokens") else x.transpose(1, 2)).is_contiguous()


@pytest.mark.kernel
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


@pytest.mark.kernel
@layouts
def test_empty(layout, device):
    arguments = inputs(layout, device=device, seq=0)
    results = values_and_gradients(ours_of(layout)[0], arguments)
    assert [x.shape for x in results] == [x.shape for x in (*arguments[:2], *arguments[:2])]


@pytest.mark.kernel
def test_vision_tables_of_llama4(device):
    """Its tower keeps (seq, 1, pairs); without a batch dimension the meaning is the same."""
    q, k, freqs_cis = inputs("complex", device=device)
    expected = rope_complex(q, k, freqs_cis)
    for table in (freqs_cis[0], freqs_cis[0][:, None], freqs_cis.conj().conj()):
        assert all(map(torch.equal, rope_complex(q, k, table), expected))
    assert all(map(torch.equal, rope_complex(q, k, freqs_cis.conj()), rope_complex(q, k, freqs_cis.conj().clone())))


@pytest.mark.kernel
@pytest.mark.parametrize("layout", ["neighbours to halves", "complex", "axes", "packed tokens"])
def test_compiles_fullgraph(layout, device):
    ours = ours_of(layout)[0]
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (5, 9):
        arguments = inputs(layout, device=device, seq=seq)
        for one, other in zip(values_and_gradients(compiled, arguments), values_and_gradients(ours, arguments)):
            assert torch.equal(one, other)


@pytest.mark.kernel
@settings(max_examples=15)
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


REAL_LAYOUTS = {  # name: (ours, options of the reference)
    "half-width tables": (lambda q, k, cos, sin: rope(q, k, *halves(cos, sin), 2, rotary_dim=128), {}),
    "neighbours": (
        functools.partial(rope, unsqueeze_dim=2, interleaved=True, keep_dtype=True),
        {"interleaved": True, "keep_dtype": True},
    ),
    "neighbours to halves": (
        lambda q, k, cos, sin: rope(q, k, *halves(cos, sin), 2, rotary_dim=128, interleaved=True, split_output=True),
        {"interleaved": True, "split_output": True},
    ),
    "complex": (
        lambda q, k, cos, sin: rope_complex(q, k, torch.complex(*halves(cos.float(), sin.float()))),
        {"interleaved": True, "keep_dtype": True},
    ),
    "axes": (
        lambda q, k, cos, sin: rope_multimodal(
            q, k, cos.expand(3, 1, -1, -1), sin.expand(3, 1, -1, -1), [16, 24, 24], 2
        ),
        {},
    ),
}


def halves(cos, sin):
    return cos[..., :64], sin[..., :64]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", REAL_LAYOUTS)
def test_real_shapes_round_no_worse_than_eager(layout, device):
    ours, options = REAL_LAYOUTS[layout]
    q, k, _, _, cos, sin = real_inputs(device)

    def reference(q, k, cos, sin):
        tables = halves(cos, sin) if layout in ("neighbours to halves", "complex") else (cos, sin)
        return rope_reference(q, k, *tables, 2, rotary_dim=128, **options)

    arguments = (q, k, cos, sin)
    exact_leaves = [x.detach().double().requires_grad_() for x in (q, k)]
    exact = real_results(reference, (*exact_leaves, cos.double(), sin.double()), 2)
    eager = real_results(reference, arguments, 2)
    with mock.patch.object(rope_module, "launch", wraps=rope_module.launch) as launch:
        results = real_results(ours, arguments, 2)
    assert launch.call_count == 2
    assert all(result.is_contiguous() for result in results)
    assert_no_worse(results, eager, exact)
