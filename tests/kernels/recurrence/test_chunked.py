"""The recurrences in plain torch against the recurrence token by token, values and all gradients, in float64."""

import pytest
import torch

from liger_trainer.functional import decayed_attention, delta_rule, state_space
from liger_trainer.kernels.documents import ROWS, documents_of, resolved
from tests.kernels.recurrence.oracle import hard_documents, hard_tokens, sequential

F64 = torch.float64
_ROWS_OF = {"rows": (3, 70), "documents": (1, hard_tokens()), "documents over rows": (2, hard_tokens())}


def _documents(kind, x):
    if kind == "rows":
        return resolved(ROWS, x)
    documents = hard_documents()
    if kind == "documents":
        return documents
    moved = documents.spans[:, :2].long().T.tolist()
    lengths, firsts = moved[1], [first + hard_tokens() - 20 for first in moved[0]]
    return documents_of(lengths, firsts, documents.spans[:, 2].tolist(), tokens=2 * hard_tokens())


def _inputs(kind, gates, beta, key_heads=2, heads=4, rows=6, columns=5):
    generator = torch.Generator().manual_seed(0)
    shape = _ROWS_OF[kind]

    def random(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=F64)

    q, k = (torch.nn.functional.normalize(random(*shape, key_heads, rows), dim=-1) for _ in range(2))
    v = random(*shape, heads, columns)
    g = -gates * torch.rand(*shape, heads, generator=generator, dtype=F64)
    factor = beta * torch.rand(*shape, heads, generator=generator, dtype=F64)
    documents = _documents(kind, v)
    return q, k, v, g, factor, random(documents.roots, heads, rows, columns), documents


def _compare(function, expected, leaves):
    generator = torch.Generator().manual_seed(1)
    results = []
    for compute in (function, expected):
        outputs = compute()
        upstream = [torch.randn(x.shape, generator=generator.manual_seed(1), dtype=F64) for x in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * float(theirs.detach().abs().max()))


@pytest.mark.parametrize("kind", _ROWS_OF)
@pytest.mark.parametrize(("gates", "beta"), [(0.0, 1.0), (1e-3, 2.0), (30.0, 1.0), (1e4, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("by_channel", [False, True])
def test_delta_rule_in_chunks(kind, gates, beta, by_channel):
    q, k, v, g, factor, initial, documents = _inputs(kind, gates, beta)
    if by_channel:
        g = g[..., None] * torch.linspace(0.1, 1.0, k.shape[-1], dtype=F64)
    leaves = [x.requires_grad_() for x in (q, k, v, g, factor, initial)]
    _compare(
        lambda: delta_rule(*leaves[:5], initial_state=initial, documents=documents, final_state=True),
        lambda: sequential(*leaves[:5], None, initial, k.shape[-1] ** -0.5, True, documents),
        leaves,
    )


@pytest.mark.parametrize("kind", _ROWS_OF)
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.5, 1.0)])
def test_state_space_in_chunks(kind, limit):
    C, B, x, dt, _, initial, documents = _inputs(kind, 8.0, 1.0)
    A, D, bias = -torch.tensor([0.01, 0.5, 4.0, 16.0], dtype=F64), torch.randn(4, dtype=F64), torch.randn(4, dtype=F64)
    leaves = [each.requires_grad_() for each in (x, dt, A, B, C, D, bias, initial)]

    def expected():
        steps = torch.nn.functional.softplus(dt + bias).clamp(*limit)
        return sequential(C, B, x, steps * A, steps, D, initial, 1.0, False, documents)

    _compare(
        lambda: state_space(
            *leaves[:5],
            D=D,
            dt_bias=bias,
            dt_limit=limit,
            initial_state=initial,
            documents=documents,
            final_state=True,
        ),
        expected,
        leaves,
    )


@pytest.mark.parametrize("kind", _ROWS_OF)
def test_decayed_attention(kind):
    q, k, v, _, _, initial, documents = _inputs(kind, 1.0, 1.0)
    slope = torch.tensor([0.0, 0.03, 0.5, 100.0], dtype=F64)
    leaves = [each.requires_grad_() for each in (q, k, v, slope, initial)]
    _compare(
        lambda: decayed_attention(*leaves[:4], initial_state=initial, documents=documents, final_state=True),
        lambda: sequential(q, k, v, -slope.expand(v.shape[:3]), None, None, initial, 1.0, False, documents),
        leaves,
    )


def test_shapes_that_do_not_fit_are_refused_by_name():
    q, k, v, g, beta, initial, _ = _inputs("rows", 1.0, 1.0)
    with pytest.raises(ValueError, match=r"`q` of delta_rule has shape .* give the shape of `k`"):
        delta_rule(q[..., :3], k, v, g, beta)
    with pytest.raises(ValueError, match="`v` of delta_rule has 3 heads and `k` 2; give a multiple"):
        delta_rule(q, k, v[:, :, :3], g, beta)
    with pytest.raises(ValueError, match="`initial_state` of delta_rule has shape"):
        delta_rule(q, k, v, g, beta, initial_state=initial[:1])
    with pytest.raises(ValueError, match=r"`dt` of state_space has shape .* give \(batch, tokens, heads\)"):
        state_space(v, g[..., :1], -beta[0, 0], k, q)
    for limit in ((2.0, 0.1), (0.0,)):
        with pytest.raises(ValueError, match=r"`dt_limit` of state_space is .*; give the least and the largest"):
            state_space(v, g, -beta[0, 0], k, q, dt_limit=limit)
    with pytest.raises(ValueError, match=r"`slope` of decayed_attention has dtype torch.int64"):
        decayed_attention(q, k, v, torch.ones(4, dtype=torch.int64))
