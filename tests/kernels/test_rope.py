"""RoPE's reference against transformers, its checks, and its kernels compiled for every kind of GPU."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3 import modeling_qwen3

from liger_trainer.kernels.rope.rope import rope, rope_reference, rotate
from tests.aot import TARGETS, compile_launch, recorded_launches


def tensors(q_heads=4, k_heads=2, seq=5, dim=16, rotary=16, dtype=torch.float32, table_batch=1):
    torch.manual_seed(0)
    q = torch.randn(2, seq, q_heads, dim, dtype=dtype).transpose(1, 2)
    k = torch.randn(2, seq, k_heads, dim, dtype=dtype).transpose(1, 2)
    return q, k, torch.randn(table_batch, seq, rotary, dtype=dtype), torch.randn(table_batch, seq, rotary, dtype=dtype)


def original(module):
    """The module's own function, also when Hugging Face's kernels have wrapped it."""
    function = module.apply_rotary_pos_emb
    return getattr(function, "forward", function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("module", [modeling_llama, modeling_qwen3])
def test_reference_is_the_models_own(module, unsqueeze_dim, dtype):
    q, k, cos, sin = tensors(dtype=dtype)
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    expected = original(module)(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    assert all(map(torch.equal, rope_reference(q, k, cos, sin, unsqueeze_dim), expected))


@pytest.mark.parametrize("own_tables", [True, False])
def test_a_new_batch_size_or_length_does_not_compile_again(own_tables):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rope, backend=counter, fullgraph=True, dynamic=True)
    for batch, seq in ((3, 5), (6, 7), (9, 10)):
        q, k = torch.randn(batch, 4, seq, 16), torch.randn(batch, 2, seq, 16)
        cos, sin = torch.randn(2, batch if own_tables else 1, seq, 16)
        torch.testing.assert_close(compiled(q, k, cos, sin), rope_reference(q, k, cos, sin))
    assert counter.frame_count == 1


def test_reference_of_partial_rotary_is_phi3s():
    q, k, cos, sin = tensors(rotary=8, dtype=torch.bfloat16)
    assert all(map(torch.equal, rope_reference(q, k, cos, sin), original(modeling_phi3)(q, k, cos, sin)))


def test_matches_llama_on_this_device(device):
    q, k, cos, sin = (x.to(device) for x in tensors())
    for ours, expected in zip(rope(q, k, cos, sin), original(modeling_llama)(q, k, cos, sin)):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_gradients_of_the_formula():
    """dx1 = dy1 c1 + dy2 s2 and dx2 = dy2 c2 - dy1 s1, with halves of the tables that differ."""
    q, k, cos, sin = tensors(dtype=torch.float64)
    q.requires_grad_()
    dy = torch.randn_like(q)
    (dq,) = torch.autograd.grad(rope_reference(q, k, cos, sin)[0], q, dy)
    (c1, c2), (s1, s2), (dy1, dy2) = (x.chunk(2, -1) for x in (cos[:, None], sin[:, None], dy))
    torch.testing.assert_close(dq, torch.cat((dy1 * c1 + dy2 * s2, dy2 * c2 - dy1 * s1), -1))


def test_float64_and_table_gradients_run_as_reference(device):
    arguments = [x.to(device).requires_grad_() for x in tensors(rotary=6, dim=8, seq=3, dtype=torch.float64)]
    assert torch.autograd.gradcheck(rope, arguments)
    q, k, cos, sin = (x.to(device) for x in tensors())
    cos.requires_grad_()
    assert torch.autograd.grad(rope(q, k, cos, sin)[0].sum(), cos)[0].shape == cos.shape


def test_mixed_dtypes_promote_as_torch_does(device):
    q, k, cos, sin = (x.to(device) for x in tensors())
    q_out, k_out = rope(q.bfloat16(), k, cos.bfloat16(), sin.bfloat16())
    assert (q_out.dtype, k_out.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("change", ["dims", "seq", "dim", "table", "odd", "wide", "sin", "unsqueeze"])
def test_errors_name_what_is_wrong(change, device):
    q, k, cos, sin = (x.to(device) for x in tensors())
    unsqueeze_dim, message = 1, ""
    if change == "dims":
        q, message = q[0], "both must have 4 dimensions"
    elif change == "seq":
        k, message = k[:, :, 1:], r"`k` is \(2, 2, 4, 16\).*they may differ only in dimension 1"
    elif change == "dim":
        k, message = k[..., 2:], "they may differ only in dimension 1"
    elif change == "table":
        cos, sin, message = cos[:, 1:], sin[:, 1:], r"here \(2 or 1, 5, up to 16\)"
    elif change == "odd":
        cos, sin, message = cos[..., 1:], sin[..., 1:], "rotate 15 of the 16 dimensions"
    elif change == "wide":
        cos, sin, message = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2), "at most head_dim"
    elif change == "sin":
        sin, message = sin[..., 2:], "`sin` is"
    else:
        unsqueeze_dim, message = 0, "`unsqueeze_dim` is 0; it must be 1"
    with pytest.raises(ValueError, match=message):
        rope(q, k, cos, sin, unsqueeze_dim)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "dim", "rotary"),
    [(32, 8, 128, 128), (40, 8, 128, 96), (128, 1, 256, 256), (5, 5, 12, 8)],
)
def test_compiles_ahead_of_time(target, q_heads, k_heads, dim, rotary):
    q, k, cos, sin = tensors(q_heads, k_heads, dim=dim, rotary=rotary, dtype=torch.bfloat16)
    none = q[:, :0]
    with recorded_launches() as launches:
        rotate(q, k, cos, sin, 1, False, torch.bfloat16)
        rotate(q, none, cos.float(), sin.float(), 1, True, torch.float32)
    assert len(launches) == 2
    for launch in launches:
        assert compile_launch(launch, target)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_fake_has_the_strides_of_the_real_operator(unsqueeze_dim):
    q, k, cos, sin = tensors(q_heads=5, k_heads=5)
    arguments = (unsqueeze_dim, False, torch.bfloat16)
    with recorded_launches():
        real = rotate(q, k, cos, sin, *arguments)
    fake = rotate(*(x.to("meta") for x in (q, k, cos, sin)), *arguments)
    assert [(x.shape, x.stride(), x.dtype) for x in real] == [(x.shape, x.stride(), x.dtype) for x in fake]


def test_kernel_reads_128_bits_at_a_time():
    """A mask or an offset that the compiler cannot see through makes loads 16 bits wide, at a fraction of the speed."""
    q, k, cos, sin = tensors(32, 32, dim=128, rotary=128, dtype=torch.bfloat16)
    with recorded_launches() as launches:
        rotate(q, k, cos, sin, 1, False, torch.bfloat16)
    assembly = compile_launch(launches[0], "sm_90").asm["ptx"]
    # A half of a tile is 2,048 elements, 16 a thread of 4 warps: two wide accesses, for two halves each of q and k.
    assert assembly.count("st.global.v4.b32") == 8
    assert assembly.count("ld.global.b16") == 0
