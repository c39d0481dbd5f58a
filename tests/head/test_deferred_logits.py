"""DeferredLogits against the logits it stands for: values, dtypes and gradients, recorded and built."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.head import DeferredLogits
from tests.head.deferring import CHAINS, MASK, B, S, V, assert_equal, defer, real

RECORDED = {
    "float": lambda x: x.float(),
    "bfloat16": lambda x: x.bfloat16(),
    "half": lambda x: x.half(),
    "to dtype": lambda x: x.to(torch.bfloat16),
    "to dtype copy": lambda x: x.to(dtype=torch.float32, copy=True),
    "to device": lambda x: x.to("cpu"),
    "to device dtype": lambda x: x.to("cpu", torch.bfloat16),
    "to other": lambda x: x.to(torch.empty(0, dtype=torch.bfloat16)),
    "type": lambda x: x.type(torch.bfloat16),
    "type_as": lambda x: x.type_as(torch.empty(0, dtype=torch.bfloat16)),
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "torch.clone": lambda x: torch.clone(x),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "mul": lambda x: x * 0.3,
    "rmul": lambda x: 3 * x,
    "torch.mul": lambda x: torch.mul(x, 0.3),
    "method mul": lambda x: x.mul(0.3),
    "mul tensor": lambda x: x * torch.tensor(0.3),
    "mul double tensor": lambda x: x * torch.tensor(0.3, dtype=torch.float64),
    "div": lambda x: x / 8,
    "torch.div": lambda x: torch.div(x, 8.0),
    "true_divide": lambda x: x.true_divide(8),
    "div tensor": lambda x: x / torch.tensor(8),
    "tanh": lambda x: x.tanh(),
    "torch.tanh": lambda x: torch.tanh(x),
    "soft-cap": lambda x: 3 * torch.tanh(x / 3),
    "mul_": lambda x: x.mul_(0.3),
    "imul": lambda x: x.__imul__(0.3),
    "div_": lambda x: x.div_(4),
    "soft-cap in place": lambda x: x.div_(3).tanh().clone().mul_(3),
    "bf16 scale": lambda x: x.bfloat16() * 0.3,
    "slice": lambda x: x[:, :-1],
    "slice all": lambda x: x[..., :-1, :],
    "slice vocabulary whole": lambda x: x[:, 1:, 0:V],
    "step": lambda x: x[:, ::2],
    "int": lambda x: x[0],
    "two ints": lambda x: x[0, -1],
    "negative": lambda x: x[:, -1, :],
    "ellipsis alone": lambda x: x[...],
    "none": lambda x: x[None],
    "none inside": lambda x: x[:, None, 1:],
    "index list": lambda x: x[[1, 0]],
    "index tensor": lambda x: x[:, torch.tensor([0, 3])],
    "index pair": lambda x: x[torch.tensor([0, 1]), torch.tensor([2, 4])],
    "mask": lambda x: x[MASK],
    "row mask": lambda x: x[torch.tensor([True, False])],
    "view": lambda x: x.view(-1, V),
    "view same": lambda x: x.view(B * S, -1),
    "view size": lambda x: x.view(torch.Size([S, B, V])),
    "view_as": lambda x: x.view_as(torch.empty(B * S, V)),
    "reshape": lambda x: x.reshape(-1, V),
    "torch.reshape": lambda x: torch.reshape(x, (1, B * S, V)),
    "reshape of slice": lambda x: x[:, :-1].reshape(-1, V),
    "contiguous slice view": lambda x: x[..., :-1, :].contiguous().view(-1, V),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten keyword": lambda x: torch.flatten(x, end_dim=-2),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "squeeze all": lambda x: x[:1].squeeze(),
    "split": lambda x: x.split(2, dim=1)[1],
    "split by keyword": lambda x: x.split(split_size=1)[-1],
    "torch.split in sections": lambda x: torch.split(x, [1, 4], 1)[1],
    "split of rows": lambda x: x.view(-1, V).split(4)[2],
    "chunk": lambda x: x.chunk(2, dim=0)[1],
    "torch.chunk": lambda x: torch.chunk(x, 3, -2)[2],
    "chain": lambda x: (x[:, :-1].float() / 2).contiguous().view(-1, V),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_without_building_then_builds_the_same(name, head, hidden, monkeypatch):
    operation = RECORDED[name]
    native = operation(head(hidden) + 0)
    with monkeypatch.context() as patch:
        patch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))
        ours = operation(defer(head, hidden))
    assert type(ours) is DeferredLogits
    assert ours.stride() == native.stride()
    assert ours.is_contiguous() == native.is_contiguous()
    assert_equal(ours.build(), native, head, hidden)


LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "ignore": {"ignore_index": 3},
    "weights": {"weight": torch.linspace(0.5, 1.5, V)},
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("chain", CHAINS)
def test_cross_entropy(chain, options, fused, head, hidden, never_built):
    native_logits = CHAINS[chain](head(hidden) + 0)
    target = torch.arange(native_logits.shape[0]) % V
    target[1] = -100 if options != "ignore" else 3
    native = F.cross_entropy(native_logits, target, **LOSSES[options])
    ours = F.cross_entropy(CHAINS[chain](defer(head, hidden, fused)), target, **LOSSES[options])
    assert type(ours) is torch.Tensor
    assert_equal(ours, native, head, hidden, 1e-5)


def test_cross_entropy_module_and_int32_target(head, hidden, never_built):
    target = torch.arange(B * S) % V
    loss = nn.CrossEntropyLoss()(defer(head, hidden).view(-1, V), target)
    torch.testing.assert_close(loss, F.cross_entropy(head(hidden).view(-1, V), target))


MATERIALISED = {
    "class dimension 1": lambda x: F.cross_entropy(x, torch.zeros(B, V, dtype=torch.long).clamp(max=S - 1)),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, V), torch.full((B * S, V), 1 / V)),
    "legacy": lambda x: F.cross_entropy(x.view(-1, V), torch.zeros(B * S, dtype=torch.long), reduce=False),
    "log_softmax": lambda x: x.log_softmax(-1),
    "functional": lambda x: F.log_softmax(x.float(), dim=-1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "gather": lambda x: x.gather(-1, torch.zeros(B, S, 1, dtype=torch.long)),
    "vocabulary slice": lambda x: x[..., :5],
    "transpose": lambda x: x.transpose(1, 2),
    "view through vocabulary": lambda x: x.view(-1),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "none last": lambda x: x[..., None],
    "add": lambda x: x + 1,
    "reverse divide": lambda x: 1 / (x + 10),
    "bool factor": lambda x: x * True,
    "cat": lambda x: torch.cat([x, x], 0),
    "iteration": lambda x: torch.stack(list(x)),
    "two soft-caps": lambda x: F.cross_entropy(x.tanh().tanh().view(-1, V), torch.zeros(B * S, dtype=torch.long)),
    "double": lambda x: x.double(),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "setitem": lambda x: [y := x.clone(), y.__setitem__((..., 0), 0.0)][0] * 1,
    "add_": lambda x: x.add_(1.0) * 2,
    "chunk of the vocabulary": lambda x: x.chunk(2, dim=-1)[1],
    "split of the vocabulary": lambda x: x.split([1, V - 1], 2)[1],
    "einsum": lambda x: torch.einsum("bsv,bsv->bs", x, x),
}


@pytest.mark.parametrize("name", MATERIALISED)
def test_anything_else_builds_and_is_right(name, head, hidden):
    operation = MATERIALISED[name]
    assert_equal(real(operation(defer(head, hidden))), operation(head(hidden) + 0), head, hidden)


def test_built_once_and_shared(head, hidden):
    logits = defer(head, hidden)
    flat = logits.view(-1, V)
    first, second = logits.build(), logits.build()
    assert first is second
    assert flat.build().data_ptr() == first.data_ptr()
    assert logits.float() is first, "once built, functions run on the real logits"


def test_gradients_of_two_readers_add_up(head, hidden):
    def loss(x):
        return x.logsumexp(-1).sum() + F.cross_entropy(x.view(-1, V), torch.zeros(B * S, dtype=torch.long))

    assert_equal(loss(defer(head, hidden)), loss(head(hidden)), head, hidden)

    # and with the fused loss first
    def other(x):
        return F.cross_entropy(x.view(-1, V), torch.zeros(B * S, dtype=torch.long)) + x.logsumexp(-1).sum()

    assert_equal(other(defer(head, hidden)), other(head(hidden)), head, hidden)


def test_changes_in_place_are_seen_by_views(head, hidden):
    def change(x):
        flat, detached = x.view(-1, V), x.detach()
        with torch.no_grad():
            x.mul_(2.0)
        return torch.cat([flat.detach() * 1, detached.view(-1, V) * 1])

    torch.testing.assert_close(change(defer(head, hidden)), change(head(hidden)))

    def through_view(x):
        flat = x.view(-1, V)
        flat[0] = 7.0
        return x * 1

    assert_equal(real(through_view(defer(head, hidden))), through_view(head(hidden)), head, hidden)

    def copy_is_apart(x):
        shifted = x[:, :-1].contiguous()
        shifted.mul_(2.0)
        return x * 1

    assert_equal(real(copy_is_apart(defer(head, hidden))), copy_is_apart(head(hidden)), head, hidden)
