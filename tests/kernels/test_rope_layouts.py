"""RoPE's other layouts: the models that use them, their checks, and their kernels compiled for every kind of GPU."""

import types

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama4 import modeling_llama4
from transformers.models.qwen2_vl import modeling_qwen2_vl

from liger_trainer.functional import rope, rope_complex, rope_multimodal, rope_vision
from liger_trainer.kernels.rope.rope import rotate
from tests.aot import TARGETS, compile_launch, recorded_launches


def tensors(*widths, dtype=torch.float32, seq=5, dim=16, batch=2):
    """q and k of (batch, heads, seq, head_dim), and tables of the given widths."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(batch, seq, heads, dim, generator=generator).to(dtype).transpose(1, 2) for heads in (4, 2))
    return q, k, *(torch.randn(1, seq, width, generator=generator).to(dtype) for width in widths)


def original(module, name="apply_rotary_pos_emb"):
    function = getattr(module, name)
    return getattr(function, "forward", function)


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
    q, k, cos, sin = tensors(16, 16)
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
    with pytest.raises(ValueError, match="`split_output` is set without `interleaved`"):
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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("pairs", "table", "table_dtype"), LAUNCHES)
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
