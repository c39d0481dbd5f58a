"""RoPE: its reference against transformers, its checks, its kernel, and the shapes of real models on a GPU."""

from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3 import modeling_qwen3

from liger_trainer.kernels.rope import rope as rope_module
from liger_trainer.kernels.rope.rope import rope, rope_reference, rotate
from liger_trainer.kernels.rope.rope_kernel import rope_kernel
from tests.accuracy import assert_no_worse
from tests.aot import compile_launch, on_targets, recorded_launches
from tests.device import peak_memory


def tensors(q_heads=4, k_heads=2, seq=5, dim=16, rotary=16, dtype=torch.float32, table_batch=1):
    torch.manual_seed(0)
    q = torch.randn(2, seq, q_heads, dim, dtype=dtype).transpose(1, 2)
    k = torch.randn(2, seq, k_heads, dim, dtype=dtype).transpose(1, 2)
    return q, k, torch.randn(table_batch, seq, rotary, dtype=dtype), torch.randn(table_batch, seq, rotary, dtype=dtype)


def original(module, name="apply_rotary_pos_emb"):
    """The module's own function, also when Hugging Face's kernels have wrapped it."""
    function = getattr(module, name)
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
    torch.testing.assert_close(rope(q, k, cos, sin, unsqueeze_dim), expected)


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


@pytest.mark.parametrize(
    ("target", "q_heads", "k_heads", "dim", "rotary"),
    on_targets((40, 8, 128, 96), (32, 8, 128, 128), (128, 1, 256, 256), (5, 5, 12, 8)),
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


# (batch, seq, q heads, k heads, head_dim, rotary_dim, table batch)
SHAPES = [
    (2, 5, 4, 2, 16, 16, 1),  # grouped-query
    (2, 3, 5, 1, 12, 12, 2),  # multi-query, nothing a power of two, one table a sequence
    (1, 7, 3, 3, 20, 8, 1),  # partial rotary
    (3, 1, 1, 2, 8, 6, 3),  # one token, more k heads than q heads, odd half
    (1, 33, 2, 1, 2, 2, 1),  # one pair a head, several blocks of tokens
    (1, 2, 160, 8, 128, 128, 1),  # heads split over programs
]


def inputs(shape, dtype=torch.float32, device="cpu", unsqueeze_dim=1, table_dtype=None):
    """q and k as projections leave them: (batch, seq, heads, head_dim) memory; halves of the tables differ."""
    batch, seq, q_heads, k_heads, dim, rotary, table_batch = shape
    generator = torch.Generator().manual_seed(0)

    def randn(*size):
        return torch.randn(size, generator=generator).to(device, dtype)

    q, k = randn(batch, seq, q_heads, dim), randn(batch, seq, k_heads, dim)
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = (randn(table_batch, seq, rotary).to(table_dtype or dtype) for _ in range(2))
    return q.requires_grad_(), k.requires_grad_(), cos, sin


def values_and_gradients(function, q, k, cos, sin, unsqueeze_dim=1):
    generator = torch.Generator().manual_seed(1)
    outputs = function(q, k, cos, sin, unsqueeze_dim)
    gradients = [torch.randn(y.shape, generator=generator).to(y.device, torch.bfloat16).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (q, k), gradients)]


def exact(q, k, cos, sin, unsqueeze_dim=1):
    q, k = (x.detach().double().requires_grad_() for x in (q, k))
    return values_and_gradients(rope_reference, q, k, cos.double(), sin.double(), unsqueeze_dim)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_float32_equals_float64(shape, unsqueeze_dim, device):
    arguments = (*inputs(shape, device=device, unsqueeze_dim=unsqueeze_dim), unsqueeze_dim)
    for ours, right in zip(values_and_gradients(rope, *arguments), exact(*arguments)):
        # Two products and a sum of fp32 values of size about 1 to 10, one rounding each.
        torch.testing.assert_close(ours.double(), right, rtol=1e-6, atol=2e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_half_precision_is_no_worse_than_eager(dtype, shape, device):
    arguments = inputs(shape, dtype, device)
    eager = values_and_gradients(rope_reference, *arguments)
    assert_no_worse(values_and_gradients(rope, *arguments), eager, exact(*arguments))


@pytest.mark.kernel
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_results_and_gradients_lie_in_projection_layout(unsqueeze_dim, device):
    shape = SHAPES[0]
    q, k, cos, sin = inputs(shape, device=device, unsqueeze_dim=unsqueeze_dim)
    if unsqueeze_dim == 1:  # also when q comes as contiguous (batch, heads, seq, head_dim) memory
        q = q.detach().contiguous().requires_grad_()
    for x in values_and_gradients(rope, q, k, cos, sin, unsqueeze_dim):
        assert (x.transpose(1, 2) if unsqueeze_dim == 1 else x).is_contiguous()


@pytest.mark.kernel
def test_any_strides(device):
    q, k, cos, sin = inputs(SHAPES[0], device=device)
    right = values_and_gradients(rope, q, k, cos, sin)
    wide = torch.stack([q.detach(), q.detach() + 1], dim=-1)[..., 0].requires_grad_()  # last dimension of stride 2
    sliced = torch.cat([k.detach(), k.detach()], dim=-1)[..., : k.shape[-1]].requires_grad_()
    table = cos[:, :, None].expand(-1, -1, 2, -1)[:, :, 1]
    for ours, expected in zip(values_and_gradients(rope, wide, sliced, table, sin.mT.contiguous().mT), right):
        assert torch.equal(ours, expected)


@pytest.mark.kernel
def test_gradients_of_any_strides_and_missing_ones(device):
    q, k, cos, sin = inputs(SHAPES[1], device=device)
    q_out, k_out = rope(q, k, cos, sin)
    expanded = torch.ones((), device=device).expand(q_out.shape)
    (dq,) = torch.autograd.grad(q_out, q, expanded, retain_graph=True)
    (expected,) = torch.autograd.grad(rope_reference(q, k, cos, sin)[0], q, expanded)
    torch.testing.assert_close(dq, expected, rtol=1e-6, atol=1e-6)
    # Only one of the two outputs is used: the other input has no gradient at all, rather than zeros.
    dq, dk = torch.autograd.grad(k_out, (q, k), torch.ones_like(k_out), retain_graph=True, allow_unused=True)
    assert dq is None
    (expected,) = torch.autograd.grad(rope_reference(q, k, cos, sin)[1].sum(), k)
    torch.testing.assert_close(dk, expected, rtol=1e-6, atol=1e-6)
    # A frozen q.
    q_out, k_out = rope(q.detach(), k, cos, sin)
    (dk,) = torch.autograd.grad(q_out.sum() + k_out.sum(), k)
    torch.testing.assert_close(dk, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.kernel
def test_second_derivative_and_second_backward(device):
    q, k, cos, sin = inputs(SHAPES[2], device=device)

    def derivatives(function):
        loss = sum(y.pow(3).sum() for y in function(q, k, cos, sin))
        again = torch.autograd.grad(loss, (q, k), retain_graph=True)
        first = torch.autograd.grad(loss, (q, k), create_graph=True)
        assert all(map(torch.equal, first, again))
        return [*first, *torch.autograd.grad(sum(x.pow(2).sum() for x in first), (q, k))]

    for ours, expected in zip(derivatives(rope), derivatives(rope_reference)):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wider_table_promotes_as_torch_does(dtype, device):
    """Under autocast, projections give q and k in bf16 while the tables follow fp32 hidden states."""
    arguments = inputs(SHAPES[0], dtype, device, table_dtype=torch.float32)
    eager = values_and_gradients(rope_reference, *arguments)
    with mock.patch.object(rope_module, "launch", wraps=rope_module.launch) as launch:
        results = values_and_gradients(rope, *arguments)
    # The gradients are rounded by the kernel, not by autograd in a pass of its own.
    assert [call.args[4].dtype for call in launch.call_args_list] == [torch.float32, dtype]
    for ours, theirs, right in zip(results, eager, exact(*arguments)):
        assert ours.dtype == theirs.dtype
        assert (ours - right).norm() <= 1.1 * (theirs - right).norm() + 1e-6 * right.norm()


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(0, 4, 2, 1, 8, 8, 1), (2, 0, 2, 1, 8, 8, 1)])
def test_empty(shape, device):
    arguments = inputs(shape, device=device)
    q_out, k_out, dq, dk = values_and_gradients(rope, *arguments)
    assert q_out.shape == dq.shape == arguments[0].shape
    assert k_out.shape == dk.shape == arguments[1].shape


@pytest.mark.kernel
def test_tables_that_rotate_nothing(device):
    q, k, cos, sin = inputs((1, 3, 2, 1, 8, 0, 1), device=device)
    assert all(map(torch.equal, rope(q, k, cos, sin), (q, k)))


@pytest.mark.kernel
def test_compiles_fullgraph_for_any_batch_and_length(device):
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend="inductor" if device != "cpu" else "aot_eager")
    for batch, seq in ((2, 5), (3, 9)):
        arguments = inputs((batch, seq, 4, 2, 16, 16, 1), device=device)
        for ours, eager in zip(values_and_gradients(compiled, *arguments), values_and_gradients(rope, *arguments)):
            assert torch.equal(ours, eager)
            assert ours.stride() == eager.stride()


BATCH, SEQ, Q_HEADS, K_HEADS, DIM = 4, 4096, 32, 8, 128


def real_inputs(
    device, batch=BATCH, seq=SEQ, q_heads=Q_HEADS, k_heads=K_HEADS, dim=DIM, rotary=None, dtype=torch.bfloat16
):
    q = torch.randn(batch, seq, q_heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    k = torch.randn(batch, seq, k_heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
    half = (rotary or dim) // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.outer(torch.arange(seq, device=device), frequencies).repeat(1, 2)[None]
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


def real_results(function, q, k, cos, sin):
    torch.manual_seed(1)
    outputs = function(q, k, cos, sin)
    # Not randn_like, which fills in memory order, which may differ for the results of the reference.
    gradients = [torch.randn(y.shape, device=y.device, dtype=torch.bfloat16).to(y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, (q, k), gradients)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"q_heads": 40, "k_heads": 8},
        {"q_heads": 8, "k_heads": 4, "dim": 256},
        {"q_heads": 24, "k_heads": 1, "dim": 96, "rotary": 64},
        {"q_heads": 128, "k_heads": 128, "dim": 192, "seq": 333},
        {"q_heads": 3, "k_heads": 3, "dim": 80, "seq": 1025},
    ],
    ids=str,
)
def test_rounds_no_worse_than_eager(shape, device):
    arguments = real_inputs(device, **{"batch": 2, **shape})
    q, k, cos, sin = (x.detach().double() for x in arguments)
    exact = real_results(rope_reference, q.requires_grad_(), k.requires_grad_(), cos, sin)
    eager = real_results(rope_reference, *arguments)
    for ours, theirs, right in zip(real_results(rope, *arguments), eager, exact):
        assert (ours - right).norm() <= (theirs - right).norm()
        assert (ours - right).abs().max() <= 2**-8 * right.abs().max()


@pytest.mark.gpu
def test_one_compilation_for_every_batch_and_length(device):
    def compilations():
        return sum(len(caches[0]) for caches in rope_kernel.device_caches.values())

    real_results(rope, *real_inputs(device, batch=2, seq=7))
    before = compilations()
    for batch, seq in ((1, 1), (1, 16), (3, 1), (16, 33), (2, 4096), (1, 100_000)):
        real_results(rope, *real_inputs(device, batch=batch, seq=seq))
    assert compilations() == before


@pytest.mark.gpu
def test_many_sequences(device):
    arguments = real_inputs(device, batch=70_000, seq=2, q_heads=2, k_heads=1, dim=16, dtype=torch.float32)
    for ours, right in zip(real_results(rope, *arguments), real_results(rope_reference, *arguments)):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [False, True])
def test_more_than_2_to_31_elements(heads_first, device):
    q, k, cos, sin = (x.detach() for x in real_inputs(device, batch=1, seq=2**19 + 8, q_heads=33, k_heads=1))
    assert q.numel() > 2**31
    last = slice(-4, None)
    expected = rope_reference(q[:, :, last], k[:, :, last], cos[:, last], sin[:, last])
    if heads_first:  # strides between heads, rather than tokens, then go beyond 31 bits
        q = q.contiguous()
    q_out, k_out = rope(q, k, cos, sin)
    for ours, right in zip((q_out, k_out), expected):
        torch.testing.assert_close(ours[:, :, last], right, rtol=2**-7, atol=2**-6)


@pytest.mark.gpu
def test_peak_memory_is_the_results(device):
    q, k, cos, sin = real_inputs(device)
    gradients = [torch.randn_like(q), torch.randn_like(k)]

    def run():
        results = torch.autograd.grad(rope(q, k, cos, sin), (q, k), gradients)
        assert all(x.transpose(1, 2).is_contiguous() for x in results)

    assert peak_memory(run) <= 2 * sum(x.numel() * x.element_size() for x in (q, k)) + 2**20
