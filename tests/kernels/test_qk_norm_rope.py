"""The fused norm and rotation: its reference against Qwen3 and Gemma3, its checks, and its kernels compiled."""

import re

import pytest
import torch
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.qwen3 import modeling_qwen3

from liger_trainer.functional import qk_norm_rope
from liger_trainer.kernels.rope.qk_norm_rope import (
    qk_norm_rope_backward,
    qk_norm_rope_forward,
    qk_norm_rope_reference,
)
from tests.aot import compile_launch, on_targets, recorded_launches


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
