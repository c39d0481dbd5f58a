"""The kernels of decays by channel (KDA) against float64, with gates that forget at once, and against themselves."""

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.functional import delta_rule
from liger_trainer.kernels.documents import ROWS, documents_of, resolved
from liger_trainer.kernels.recurrence.channel_launch import channel_factors
from liger_trainer.kernels.recurrence.chunked import Arguments, chunked_recurrence
from liger_trainer.kernels.recurrence.launch import Inputs
from tests.kernels.document_places import places
from tests.kernels.recurrence.oracle import hard_documents, hard_tokens, sequential

pytestmark = pytest.mark.kernel

FP32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
GATES = {
    "none": lambda x: 0.0 * x,
    "slow": lambda x: -1e-3 * x.abs(),
    "bounded, at its bound": lambda x: torch.full_like(x, -5.0),
    "Kimi, A of 16": lambda x: -16.0 * F.softplus(x),
    "some channels forget": lambda x: -1e4 * (x > 1.5) - 0.01,
}


def inputs_of(tokens, key_heads, heads, rows, columns, gates, beta, dtype=FP32, device="cpu", batch=1):
    """q and k of length 1, v, g by channel, beta from 0 to `beta`."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(batch, tokens, *shape, generator=generator)

    q, k = (F.normalize(random(key_heads, rows), dim=-1) for _ in range(2))
    v, g = random(heads, columns), GATES[gates](random(heads, rows))
    factor = beta * random(heads).sigmoid()
    tensors = zip((q, k, v, g, factor), (dtype, dtype, dtype, FP32, dtype), strict=True)
    return [x.to(device, each).requires_grad_() for x, each in tensors]


def outcome(function, leaves, dtype):
    """Results and gradients, for upstream gradients of `dtype`'s precision whatever that of the results."""
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator).to(x.device, dtype).to(x.dtype) for x in outputs]
    return [x.detach().double() for x in (*outputs, *torch.autograd.grad(outputs, leaves, upstream))]


def kernels(documents):
    return lambda *x: delta_rule(*x[:5], initial_state=x[5], documents=documents, final_state=True)


def in_chunks(q, k, v, g, beta, skip, initial_state, scale, delta, documents):
    return chunked_recurrence(Arguments(q, k, v, g, beta, skip, initial_state), scale, delta, documents)


def plain(documents, compute=in_chunks):
    return lambda *x: compute(*x[:5], None, x[5], x[1].shape[-1] ** -0.5, True, documents)


def error(x, exact):
    assert bool(x.isfinite().all())
    return float((x - exact).norm() / exact.norm().clamp_min(1e-30))


def compare(documents, tensors, dtype):
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = outcome(plain(documents, sequential), exact, dtype)
    ours, torchs = outcome(kernels(documents), tensors, dtype), outcome(plain(documents), tensors, dtype)
    # Operands of half precision, where plain torch has fp32: q, k and U are rounded once more, decays into them.
    floor = 1e-6 if dtype == FP32 else 6e-3
    for got, reference, want in zip(ours, torchs, expected, strict=True):
        assert error(got, want) <= max(floor, 2.0 * error(reference, want))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("gates", "beta", "sizes"),
    [
        ("none", 1.0, (1, 1, 32, 16)),
        ("slow", 1.0, (1, 2, 24, 40)),
        ("bounded, at its bound", 1.0, (2, 2, 32, 16)),
        ("Kimi, A of 16", 1.0, (1, 1, 32, 16)),
        ("some channels forget", 0.0, (1, 1, 16, 16)),
        ("some channels forget", 1.0, (1, 1, 32, 16)),
    ],
)
def test_documents_against_float64(gates, beta, sizes, dtype, device):
    documents = hard_documents(device)
    tensors = inputs_of(hard_tokens(), *sizes, gates, beta, dtype, device)
    initial = torch.randn(documents.roots, *sizes[1:], generator=torch.Generator().manual_seed(2))
    compare(documents, [*tensors, initial.to(device).requires_grad_()], dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("gates", ["none", "slow"])
def test_equal_decays_are_one_decay_a_head(gates, dtype, device):
    """With a beta of up to 2 as well, where rounding counts most: as exact as the kernels for one decay a head."""
    documents = resolved(ROWS, torch.empty(1, 100, device=device))
    q, k, v, g, beta = inputs_of(100, 1, 1, 16, 16, gates, 2.0, dtype, device)
    one = g.detach()[..., 0].requires_grad_()
    states = [torch.zeros(1, 1, 16, 16, device=device).requires_grad_() for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, one, beta, states[0])]
    expected = outcome(plain(documents), exact, dtype)
    by_head = outcome(kernels(documents), (q, k, v, one, beta, states[1]), dtype)
    many = one.detach()[..., None].expand(*one.shape, 16).requires_grad_()
    by_channel = outcome(kernels(documents), (q, k, v, many, beta, states[2]), dtype)
    by_channel[5] = by_channel[5].sum(-1)
    for got, other, want in zip(by_channel, by_head, expected, strict=True):
        assert error(got, want) <= max(1e-6, 1.5 * error(other, want))


@pytest.mark.parametrize("gates", GATES)
def test_products_of_a_chunk(gates, device):
    """P and M are those of the formula, pair by pair, also where a chunk spans more than an exponential can."""
    q, k, v, g, beta = (x.detach() for x in inputs_of(100, 1, 2, 24, 16, gates, 1.0, FP32, device))
    documents = resolved(ROWS, v)
    inputs = Inputs(*(x.flatten(0, 1) for x in (q, k, v, g, beta)), None, 1.0, True)
    solve = torch.full((2, 2, 64, 64), float("nan"), device=device)
    of_scan, _ = channel_factors(inputs, documents, solve)
    for chunk, (begin, end) in enumerate(((0, 64), (64, 100))):
        for head in range(2):
            total = g[0, begin:end, head].double().clamp(min=-100.0).cumsum(0)
            exponent = 1e-6 + 2e-7 * float(total.abs().max())  # what fp32 leaves of differences of the sums
            earlier = torch.ones(end - begin, end - begin, device=device, dtype=torch.bool).tril()
            decay = (total[:, None] - total[None]).masked_fill(~earlier[..., None], -torch.inf).exp()
            asked, known = q[0, begin:end, 0].double(), k[0, begin:end, 0].double()
            products = torch.einsum("ic,jc,ijc->ij", asked, known, decay)
            below = torch.einsum("ic,jc,ijc->ij", known, known, decay).tril(-1) * beta[0, begin:end, head, None]
            for got, want in ((of_scan.channels.products, products), (solve, below)):
                padded = F.pad(want, (0, 64 - len(want), 0, 64 - len(want)))
                torch.testing.assert_close(got[chunk, head].double(), padded, rtol=1e-4, atol=exponent)
            torch.testing.assert_close(
                of_scan.channels.decay[chunk, head].double(), total[-1].exp(), rtol=1e-4, atol=1e-30
            )


def test_a_document_is_as_if_alone(device):
    """Bit for bit, gradients too; also beside a document of NaN, and in strided rows."""
    lengths = [70, 1, 64, 3]
    documents = documents_of(lengths, tokens=sum(lengths), device=device)
    tensors = inputs_of(sum(lengths), 1, 2, 16, 16, "Kimi, A of 16", 1.0, BF16, device)
    upstream = torch.randn(1, sum(lengths), 2, 16, device=device).to(BF16)
    with torch.no_grad():
        for x in tensors:
            x[:, 70:71] = float("nan")

    def run(leaves, gradient, **options):
        o = delta_rule(*leaves, **options)
        return [o, *torch.autograd.grad(o, leaves, gradient)]

    together = run(tensors, upstream, documents=documents)
    again = run(tensors, upstream, documents=documents)
    for x, y in zip(together, again, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
    for begin, end, _ in places(documents):
        wide = [torch.cat([x.detach(), x.detach()], -1)[:, begin:end] for x in tensors]
        alone = [x.split(x.shape[-1] // 2, -1)[0].requires_grad_() for x in wide]
        for x, y in zip(together, run(alone, upstream[:, begin:end]), strict=True):
            torch.testing.assert_close(x[:, begin:end], y, rtol=0, atol=0, equal_nan=True)
        assert bool(together[0][:, begin:end].isfinite().all()) == (begin != 70)
