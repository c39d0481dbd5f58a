"""Keys and values of latent attention: the formula, the models' own code, float64, and the kernels."""

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from liger_trainer.kernels.attention.latent import expand_keys, expand_keys_reference
from liger_trainer.kernels.rope.rope import rope, rope_reference
from tests.accuracy import assert_no_worse, run

NOPE, ROPE, VALUE = 20, 6, 11


def tensors(dtype=torch.float32, device="cpu", batch=2, seq=5, heads=3):
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, seq, heads, NOPE + VALUE), (batch, seq, ROPE)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def upstream(kv, r):
    """Gradients of k and v, of numbers that every dtype has."""
    generator = torch.Generator().manual_seed(1)
    widths = kv.shape[-1] - VALUE + r.shape[-1], VALUE
    return [torch.randn(*kv.shape[:-1], w, generator=generator).bfloat16().to(kv.device) for w in widths]


def copied(kv, r, nope):
    """As models write it: copies into slices of new memory."""
    module = object.__new__(DeepseekV3Attention)
    torch.nn.Module.__init__(module)
    module.qk_nope_head_dim, module.qk_rope_head_dim, module.v_head_dim = nope, r.shape[-1], kv.shape[-1] - nope
    module.kv_b_proj = torch.nn.Identity()
    k, v = module.expand_kv(kv.flatten(-2).unsqueeze(1), r.unsqueeze(1))
    return k.transpose(1, 2), v.transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reference_is_the_models_own(dtype):
    given = tensors(dtype)
    grads = upstream(*given)
    ours, _ = run(expand_keys_reference, given, grads, nope=NOPE)
    theirs, _ = run(copied, given, grads, nope=NOPE)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[2], theirs[2])
    tolerance = 1e-6 if dtype in (torch.float32, torch.float64) else 2**-7
    torch.testing.assert_close(ours[3], theirs[3], rtol=tolerance, atol=tolerance)


def test_gradients_in_float64():
    given = [each.requires_grad_() for each in tensors(torch.float64, seq=2)]
    assert torch.autograd.gradcheck(lambda *given: expand_keys(*given, NOPE), given)
    assert torch.autograd.gradgradcheck(lambda *given: expand_keys(*given, NOPE), given)


def test_the_value_is_a_view_and_the_key_is_contiguous():
    kv, r = tensors()
    k, v = expand_keys(kv, r, NOPE)
    assert v.data_ptr() == kv[..., NOPE:].data_ptr()
    assert v.stride() == kv.stride()
    assert k.is_contiguous()
    assert k.shape == (2, 5, 3, NOPE + ROPE)


def test_errors():
    kv, r = tensors()
    with pytest.raises(ValueError, match=r"they must be \(batch, seq, heads, nope \+ value\) and"):
        expand_keys(kv, r[:1], NOPE)
    with pytest.raises(ValueError, match="`nope` is 31"):
        expand_keys(kv, r, NOPE + VALUE)
    with pytest.raises(ValueError, match="give floating point tensors"):
        expand_keys(kv, r.int(), NOPE)
    with pytest.raises(ValueError, match="`r` is on meta"):
        expand_keys(kv, r.to("meta"), NOPE)


@pytest.mark.kernel
@pytest.mark.parametrize("heads", [1, 3, 130], ids="{} heads".format)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_are_as_exact_as_the_models_own(dtype, heads, device):
    given = tensors(dtype, device, heads=heads)
    grads = upstream(*given)
    ours, _ = run(expand_keys, given, grads, nope=NOPE)
    eager, _ = run(copied, given, grads, nope=NOPE)
    exact, _ = run(expand_keys_reference, [each.double() for each in given], grads, nope=NOPE)
    for own, their in zip(ours[:3], eager[:3]):  # nothing but copies
        assert torch.equal(own, their)
    assert_no_worse(ours, eager, exact)


@pytest.mark.kernel
def test_kernels_take_any_strides_and_another_dtype_of_the_shared_key(device):
    kv, r = tensors(torch.bfloat16, device)
    strided = kv.transpose(1, 2).contiguous().transpose(1, 2), r.mT.contiguous().mT.float()
    dk, dv = upstream(kv, r)
    grads = dk.mT.contiguous().mT, dv[..., :1].expand_as(dv)
    ours, _ = run(expand_keys, strided, grads, nope=NOPE)
    theirs, _ = run(copied, [each.contiguous() for each in strided], grads, nope=NOPE)
    assert all(torch.equal(*pair) for pair in zip(ours[:3], theirs))
    assert ours[3].dtype == torch.float32
    exact = dk[..., NOPE:].double().sum(2)
    torch.testing.assert_close(ours[3].double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.kernel
def test_the_sum_over_heads_is_not_rounded_in_between(device):
    kv, r = tensors(torch.bfloat16, device, heads=256)
    dk, dv = upstream(kv, r)
    dk[..., NOPE:] = 1.0
    dk[:, :, 0, NOPE:] = 256.0  # bfloat16 has no number between 256 and 258
    (*_, dr), _ = run(expand_keys, (kv, r), (dk, dv), nope=NOPE)
    assert torch.all(dr == torch.tensor(256.0 + 255, dtype=torch.bfloat16, device=device))


@pytest.mark.kernel
@pytest.mark.parametrize("used", [0, 1], ids=["keys alone", "values alone"])
def test_a_result_that_nothing_reads(used, device):
    kv, r = (each.requires_grad_() for each in tensors(device=device))
    found, expected = (f(kv, r, NOPE)[used].square().sum() for f in (expand_keys, expand_keys_reference))
    ours = torch.autograd.grad(found, (kv, r))
    theirs = torch.autograd.grad(expected, (kv, r), allow_unused=True)
    for own, their in zip(ours, theirs):
        torch.testing.assert_close(own, torch.zeros_like(own) if their is None else their)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3)], ids=str)
def test_nothing_in_nothing_out(shape, device):
    kv, r = (each.requires_grad_() for each in tensors(device=device, batch=shape[0], seq=shape[1], heads=shape[2]))
    k, v = expand_keys(kv, r, NOPE)
    assert k.shape == (*shape, NOPE + ROPE)
    assert v.shape == (*shape, VALUE)
    dkv, dr = torch.autograd.grad((k.sum(), v.sum()), (kv, r))
    assert dkv.shape == kv.shape
    assert dr.shape == r.shape


# ---------------------------------------------------------------------------------------------------------------------
# Queries, whose last columns turn
# ---------------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "halves": {},
    "neighbours": {"interleaved": True},
    "neighbours to halves": {"interleaved": True, "split_output": True, "rotary_dim": ROPE},
}


def joined(q, cos, sin, first, **options):
    front, last, behind = q.split([first, ROPE, q.shape[-1] - first - ROPE], dim=-1)
    last, _ = rope_reference(last, last[:, :0], cos, sin, **options)
    return torch.cat((front, last, behind), dim=-1)


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.kernel)], ids=str)
def test_rope_of_the_last_columns_is_that_of_these_columns(dtype, layout, behind, device):
    options, first = LAYOUTS[layout], 5
    generator = torch.Generator().manual_seed(0)
    width = ROPE // 2 if "rotary_dim" in options else ROPE
    q = torch.randn(2, 4, 3, first + ROPE + behind, generator=generator).to(device, dtype)
    tables = [torch.randn(2, 4, width, generator=generator).to(device, dtype) for _ in range(2)]

    def ours(q):
        return rope(q.transpose(1, 2), q[:, :, :0].transpose(1, 2), *tables, first=first, **options)[0]

    got, grads = run(ours, (q,))
    expected, _ = run(lambda q: joined(q.transpose(1, 2), *tables, first, **options), (q,), grads)
    for own, their in zip(got, expected):
        torch.testing.assert_close(own, their)


def test_rope_refuses_columns_that_are_not_there():
    q, cos = torch.randn(1, 2, 3, 10), torch.randn(1, 3, ROPE)
    with pytest.raises(ValueError, match=r"`first` is 5; with 6 of the 10 dimensions .* from 0 to 4"):
        rope(q, q, cos, cos, first=5)
