"""The kernels of the recurrences against the recurrence token by token in float64, and against themselves alone."""

import pytest
import torch

from liger_trainer.functional import decayed_attention, delta_rule, state_space
from liger_trainer.kernels.documents import ROWS, documents_of, resolved
from liger_trainer.kernels.recurrence.decayed_attention import decayed_attention_reference
from liger_trainer.kernels.recurrence.delta_rule import delta_rule_reference
from liger_trainer.kernels.recurrence.state_space import state_space_reference
from tests.kernels.document_places import places
from tests.kernels.recurrence.oracle import sequential

pytestmark = pytest.mark.kernel

FP32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
PACKED = {
    "a fork": ([65, 2, 0, 1], [-1, 0, -1, 0]),
    "whole chunks": ([64, 63, 1], [-1, -1, -1]),
    "an empty parent": ([0, 3, 66], [-1, 0, 0]),
}


def packed(name, device):
    """Documents with a token of padding before each of them, and how many tokens that makes."""
    lengths, parents = PACKED[name]
    firsts = [sum(lengths[:number]) + number + 1 for number in range(len(lengths))]
    tokens = sum(lengths) + len(lengths) + 2
    return documents_of(lengths, firsts, parents, tokens=tokens, device=device), tokens


def inputs_of(tokens, gates, beta, sizes=(1, 2, 16, 24), batch=1, device="cpu"):
    """q and k of length 1, v, g from -gates to 0, and beta from 0 to `beta`."""
    key_heads, heads, rows, columns = sizes
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(batch, tokens, *shape, generator=generator)

    q, k = (torch.nn.functional.normalize(random(key_heads, rows), dim=-1) for _ in range(2))
    g = -gates * torch.rand(batch, tokens, heads, generator=generator)
    factor = beta * torch.rand(batch, tokens, heads, generator=generator)
    return [x.to(device) for x in (q, k, random(heads, columns), g, factor)]


def leaves_of(tensors, dtype):
    """Copies that need gradients; g, the fourth, is fp32 at least."""
    dtypes = [FP32 if place == 3 and dtype == BF16 else dtype for place in range(len(tensors))]
    return [x.detach().to(each).requires_grad_() for x, each in zip(tensors, dtypes, strict=True)]


def with_gradients(function, leaves):
    """The results, and the gradients of the leaves for random upstream gradients."""
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).to(BF16).to(x.device, x.dtype) for x in outputs]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, upstream))]


def errors(results, exact):
    """The norms of the differences from `exact`, of its norms."""
    norms = [y.norm().clamp_min(1e-6 * y.numel() ** 0.5) for y in exact]
    return [float((x.double() - y).norm() / norm) for x, y, norm in zip(results, exact, norms, strict=True)]


def assert_near(function, plain, oracle, tensors, dtype):
    """`function` is near the float64 `oracle`, or in fp32 at most half as far again from it as `plain` torch is."""
    exact = with_gradients(oracle, leaves_of(tensors, F64))
    ours = errors(with_gradients(function, leaves_of(tensors, dtype)), exact)
    allowed = [LIMITS[dtype]] * len(ours)
    if dtype == FP32:
        torchs = errors(with_gradients(plain, leaves_of(tensors, dtype)), exact)
        allowed = [max(limit, 1.5 * error) for limit, error in zip(allowed, torchs, strict=True)]
    assert all(error <= limit for error, limit in zip(ours, allowed, strict=True)), (ours, allowed)


def rounded(tensors, dtype):
    """The values that `dtype` keeps."""
    return [x if place == 3 else x.to(dtype).to(x.dtype) for place, x in enumerate(tensors)]


LIMITS = {FP32: 1e-5, BF16: 1.5e-2}
"""Norms of differences from float64, of the norm: bf16 rounds states, U and Y, each by 2e-3."""


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("gates", "beta"), [(0.0, 1.0), (1e-3, 2.0), (30.0, 1.0), (1e4, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_delta_rule(name, gates, beta, dtype, device):
    documents, tokens = packed(name, device)
    tensors = inputs_of(tokens, gates, beta, device=device)
    tensors.append(torch.randn(documents.roots, 2, 16, 24, generator=torch.Generator().manual_seed(2)).to(device))

    def run(function):
        options = {"documents": documents, "final_state": True}
        return lambda *leaves: function(*leaves[:5], initial_state=leaves[5].float(), **options)

    def oracle(*leaves):
        return sequential(*leaves[:5], None, leaves[5], 0.25, True, documents)

    tensors = rounded(tensors, dtype)
    assert_near(run(delta_rule), run(delta_rule_reference), oracle, tensors, dtype)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.5, 1.0)])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_state_space(limit, dtype, device):
    documents, tokens = packed("a fork", device)
    C, B, x, _, dt = rounded(inputs_of(tokens, 1.0, 1.0, (1, 2, 20, 16), device=device), dtype)
    A, D, bias = (torch.tensor(each, device=device) for each in ([-0.5, -8.0], [0.5, 2.0], [0.25, -0.5]))
    tensors = [x, dt, B, A, C, D, bias]  # A, in the fourth place, is fp32

    def run(function):
        options = {"dt_limit": limit, "documents": documents, "final_state": True}
        return lambda x, dt, B, A, C, D, bias: function(x, dt, A, B, C, D=D, dt_bias=bias, **options)

    def exact(x, dt, B, A, C, D, bias):
        steps = torch.nn.functional.softplus(dt + bias).clamp(*limit)
        return sequential(C, B, x, steps * A, steps, D, None, 1.0, False, documents)

    assert_near(run(state_space), run(state_space_reference), exact, tensors, dtype)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_decayed_attention_of_rows(dtype, device):
    q, k, v, _, _ = rounded(inputs_of(70, 1.0, 1.0, (2, 2, 16, 16), batch=2, device=device), dtype)
    tensors = [q, k, v, torch.tensor([0.02, 3.0], device=device)]

    def oracle(q, k, v, slope):
        return sequential(q, k, v, -slope.expand(v.shape[:3]), None, None, None, 1.0, False, resolved(ROWS, v))[0]

    assert_near(decayed_attention, decayed_attention_reference, oracle, tensors, dtype)


def test_many_heads_of_a_group_are_added_up_by_several_programs(device):
    C, B, x, _, dt = inputs_of(3, 1.0, 1.0, (1, 32, 16, 16), device=device)
    tensors = [x, dt, B, -torch.rand(32, device=device), C]

    def run(function):
        return lambda x, dt, B, A, C: function(x, dt, A, B, C)

    assert_near(run(state_space), run(state_space_reference), run(state_space_reference), tensors, FP32)


def test_a_document_has_the_same_bits_alone_and_beside_nan(device):
    documents, tokens = packed("a fork", device)
    tensors = inputs_of(tokens, 1.0, 1.0, device=device)
    (begin, end, _), second = places(documents)[0], places(documents)[1]
    for x in tensors:
        x[:, second[0] : second[1]] = float("nan")
    alone = [x[:, begin:end].contiguous() for x in tensors]
    independent = documents_of([end - begin, 3], [begin, 66], tokens=tokens, device=device)
    dy = torch.randn(1, tokens, 2, 24, generator=torch.Generator().manual_seed(3)).to(device)

    def run(tensors, dy, documents):
        leaves = leaves_of(tensors, FP32)
        o = delta_rule(*leaves, documents=documents)
        return [x.detach() for x in (o, *torch.autograd.grad(o, leaves, dy))]

    packed_results, alone_results = run(tensors, dy, independent), run(alone, dy[:, begin:end], ROWS)
    for x, y in zip(packed_results, alone_results, strict=True):
        assert torch.equal(x[:, begin:end], y)
        assert not x[:, -1].any()  # padding


def test_strided_inputs_and_gradients(device):
    q, k, v, g, beta = inputs_of(10, 1.0, 1.0, (2, 2, 16, 16), batch=2, device=device)
    projection = torch.cat([x.flatten(2) for x in (q, k, v)], -1)
    gates = torch.stack([g, beta], -1)

    def run(projection, gates):
        q, k, v = (x.unflatten(2, (2, 16)) for x in projection.split(32, -1))
        return delta_rule(q, k, v, gates[..., 0], gates[..., 1]).transpose(0, 1)

    strided = with_gradients(run, leaves_of([projection, gates], FP32))
    parts = [q, k, v, g, beta]
    plain = with_gradients(lambda *leaves: delta_rule(*leaves).transpose(0, 1), leaves_of(parts, FP32))
    assert torch.equal(strided[0], plain[0])
    assert torch.equal(strided[1], torch.cat([x.flatten(2) for x in plain[1:4]], -1))
    assert torch.equal(strided[2], torch.stack(plain[4:], -1))


def test_what_the_kernels_do_not_take_runs_in_torch(device):
    for sizes in ((1, 1, 264, 16), (1, 1, 144, 16)):  # more than 256 rows, or 128 in fp32
        tensors = inputs_of(3, 1.0, 1.0, sizes, device=device)
        assert torch.equal(delta_rule(*tensors), delta_rule_reference(*tensors))
    q, k, v, _, _ = inputs_of(3, 1.0, 1.0, device=device)
    with torch.no_grad():
        empty = decayed_attention(q[:, :0], k[:, :0], v[:, :0], torch.ones(2, device=device))
    assert empty.shape == (1, 0, 2, 24)
