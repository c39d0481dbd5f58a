"""DeferredLogits against the logits it stands for: values, dtypes and gradients, recorded and built."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.head import DeferredLogits, deferred_logits
from liger_trainer.head.context import ForwardContext, forward_context
from liger_trainer.head.patch import make_head_forward
from liger_trainer.patching.binding import bind_forward

B, S, H, V = 2, 5, 6, 11


@pytest.fixture(autouse=True)
def _nothing_announced():
    deferred_logits._announced.clear()


@pytest.fixture
def head():
    torch.manual_seed(0)
    return nn.Linear(H, V)


@pytest.fixture
def hidden():
    torch.manual_seed(1)
    return torch.randn(B, S, H, requires_grad=True)


def defer(head: nn.Linear, hidden: torch.Tensor, fused: bool = True) -> DeferredLogits:
    patched = copy.copy(head)
    patched.__dict__ = {**head.__dict__}
    bind_forward(patched, make_head_forward(fused, 2**20))
    with forward_context(ForwardContext(has_labels=True)):
        logits = patched(hidden)
    assert type(logits) is DeferredLogits
    return logits


@pytest.fixture
def never_built(monkeypatch):
    def fail(self):
        raise AssertionError("the logits were built")

    monkeypatch.setattr(DeferredLogits, "_compute", fail)


def gradients(value: torch.Tensor, head: nn.Linear, hidden: torch.Tensor) -> list[torch.Tensor | None]:
    weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view(value.shape)
    return list(torch.autograd.grad((value * weights).sum(), [hidden, *head.parameters()], allow_unused=True))


def assert_equal(ours, native, head, hidden, tolerance=1e-6):
    assert ours.shape == native.shape
    assert ours.dtype == native.dtype
    torch.testing.assert_close(ours, native, rtol=tolerance, atol=tolerance)
    if native.requires_grad:
        for mine, theirs in zip(gradients(ours, head, hidden), gradients(native, head, hidden)):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    else:
        assert not ours.requires_grad


MASK = torch.arange(B * S).view(B, S) % 3 == 0
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


CHAINS = {
    "plain": lambda x: x.view(-1, V),
    "float": lambda x: x.float().view(-1, V),
    "scale": lambda x: (x * 0.5).view(-1, V).float(),
    "tensor scale": lambda x: (x / torch.tensor(4.0)).view(-1, V),
    "soft-cap": lambda x: (torch.tanh(x / 2.0) * 2.0).view(-1, V),
    "scale and soft-cap": lambda x: (torch.tanh(x * 1.5 / 2.0) * 2.0).view(-1, V),
    "in place": lambda x: x.mul_(1.5).view(-1, V),
    "shifted": lambda x: x[..., :-1, :].contiguous().view(-1, V),
    "masked": lambda x: x[MASK],
}
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
def test_cross_entropy(chain, options, fused, head, hidden, monkeypatch):
    native_logits = CHAINS[chain](head(hidden) + 0)
    target = torch.arange(native_logits.shape[0]) % V
    target[1] = -100 if options != "ignore" else 3
    native = F.cross_entropy(native_logits, target, **LOSSES[options])
    monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built"))
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
    "chunk": lambda x: x.chunk(2, dim=0)[1],
    "einsum": lambda x: torch.einsum("bsv,bsv->bs", x, x),
}


@pytest.mark.parametrize("name", MATERIALISED)
def test_anything_else_builds_and_is_right(name, head, hidden):
    operation = MATERIALISED[name]
    native, ours = operation(head(hidden) + 0), operation(defer(head, hidden))
    ours = ours.build() if isinstance(ours, DeferredLogits) else ours
    assert_equal(ours, native, head, hidden)


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

    assert_equal(_real(through_view(defer(head, hidden))), through_view(head(hidden)), head, hidden)

    def copy_is_apart(x):
        shifted = x[:, :-1].contiguous()
        shifted.mul_(2.0)
        return x * 1

    assert_equal(_real(copy_is_apart(defer(head, hidden))), copy_is_apart(head(hidden)), head, hidden)


def _real(x):
    return x.build() if isinstance(x, DeferredLogits) else x


class _Scaled(torch.autograd.Function):
    """Takes its input past ``__torch_function__``; its gradient is not the identity's."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0]


@pytest.mark.parametrize("function", [_Scaled, _Square])
@pytest.mark.parametrize("chain", ["plain", "soft-cap", "in place", "shifted"])
def test_autograd_functions_get_right_gradients(function, chain, head, hidden):
    def loss(x):
        logits = function.apply(CHAINS[chain](x))
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))

    assert_equal(loss(defer(head, hidden)), loss(head(hidden) + 0), head, hidden)


def test_hooks_see_and_change_the_gradient(head, hidden):
    def loss(x, seen):
        x.register_hook(lambda grad: (seen.append(grad), grad * 2)[1])
        return F.cross_entropy(x.view(-1, V), torch.zeros(B * S, dtype=torch.long))

    ours, native = [], []
    assert_equal(loss(defer(head, hidden), ours), loss(head(hidden), native), head, hidden)
    torch.testing.assert_close(_real(ours[0]), native[0])


def test_metadata_needs_no_logits(head, hidden, never_built):
    logits = defer(head, hidden)
    assert logits.shape == (B, S, V) == logits.size()
    assert (logits.dim(), logits.ndim, logits.numel(), len(logits)) == (3, 3, B * S * V, B)
    assert logits.dtype == torch.float32
    assert logits.device == hidden.device
    assert logits.is_floating_point()
    assert torch.is_floating_point(logits)
    assert logits.size(-1) == V
    assert logits.requires_grad
    assert not logits.is_cuda
    assert isinstance(logits, torch.Tensor)
    assert hash(logits) == id(logits)
    assert "DeferredLogits" in repr(logits)
    assert "DeferredLogits" in f"{logits}"
    assert torch.utils._pytree.tree_map(lambda x: x, {"logits": logits})["logits"] is logits


def test_detached_and_no_grad(head, hidden, never_built):
    target = torch.zeros(B * S, dtype=torch.long)
    assert not defer(head, hidden).detach().requires_grad
    assert not F.cross_entropy(defer(head, hidden).detach().view(-1, V), target).requires_grad
    with torch.no_grad():
        viewed = defer(head, hidden).view(-1, V)
    assert not F.cross_entropy(viewed, target).requires_grad


def test_reading_under_no_grad_keeps_the_loss_fused(head, hidden, monkeypatch):
    logits = defer(head, hidden)
    with torch.no_grad():
        torch.testing.assert_close(logits.argmax(-1), head(hidden).argmax(-1))
        assert not (logits + 1).requires_grad
    monkeypatch.setattr(DeferredLogits, "_compute", lambda self: pytest.fail("the logits were built again"))
    target = torch.zeros(B * S, dtype=torch.long)
    ours = F.cross_entropy(logits.view(-1, V), target)
    assert_equal(ours, F.cross_entropy(head(hidden).view(-1, V), target), head, hidden)


@pytest.mark.parametrize("frozen", ["head", "hidden", "both"])
def test_frozen(frozen, head, hidden):
    head.requires_grad_(frozen == "hidden")
    hidden.requires_grad_(frozen == "head")
    target = torch.zeros(B * S, dtype=torch.long)
    losses = [F.cross_entropy(x.view(-1, V), target) for x in (defer(head, hidden), head(hidden))]
    assert losses[0].requires_grad == losses[1].requires_grad == (frozen != "both")
    leaves = [x for x in (hidden, *head.parameters()) if x.requires_grad]
    if leaves:
        for ours, native in zip(*(torch.autograd.grad(loss, leaves) for loss in losses)):
            torch.testing.assert_close(ours, native)


def test_leaving_for_python_builds(head, hidden):
    logits, native = defer(head, hidden), head(hidden).detach()
    assert logits.tolist() == native.tolist()
    assert (logits.detach().numpy() == native.numpy()).all()
    assert type(logits.cpu()) is torch.Tensor
    torch.testing.assert_close(pickle.loads(pickle.dumps(defer(head, hidden).detach())), native)
    torch.testing.assert_close(copy.deepcopy(defer(head, hidden).detach()), native)
    buffer = io.BytesIO()
    torch.save(defer(head, hidden).detach(), buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer), native)
    assert torch.equal(defer(head, hidden), native)
    torch.testing.assert_close(defer(head, hidden).detach().build(), native)


def test_autocast_casts_hidden_and_weight(head, hidden):
    target = torch.arange(B * S) % V
    with torch.autocast("cpu", torch.bfloat16):
        ours, native = defer(head, hidden), head(hidden)
        assert ours.dtype == native.dtype == torch.bfloat16
        assert F.cross_entropy(ours.view(-1, V), target).dtype == torch.float32
    assert torch.equal(ours.build(), native)
    fused = F.cross_entropy(defer_under_autocast(head, hidden).float().view(-1, V), target)
    reference = F.cross_entropy(native.float().view(-1, V), target)
    assert fused.dtype == torch.float32
    torch.testing.assert_close(fused, reference, rtol=2**-9, atol=0)  # the logits are bf16 on both sides
    grads = torch.autograd.grad(fused, [hidden, *head.parameters()])
    exact = [x.detach().double().requires_grad_() for x in (hidden, *head.parameters())]
    exact_loss = F.cross_entropy(F.linear(*exact).view(-1, V), target)
    for mine, theirs, true in zip(
        grads, torch.autograd.grad(reference, [hidden, *head.parameters()]), torch.autograd.grad(exact_loss, exact)
    ):
        assert mine.dtype == torch.float32
        # bf16 products on both sides: ours may be no further from float64 than native, up to one rounding
        scale = true.abs().max() * 2**-8
        assert (mine - true).abs().max() <= 1.1 * (theirs - true).abs().max() + scale


def defer_under_autocast(head, hidden):
    with torch.autocast("cpu", torch.bfloat16):
        return defer(head, hidden)


def test_target_elsewhere_and_wrong_shapes(head, hidden):
    with pytest.raises((ValueError, RuntimeError)):
        F.cross_entropy(defer(head, hidden).view(-1, V), torch.zeros(3, dtype=torch.long))
    patched = copy.deepcopy(head)
    bind_forward(patched, make_head_forward(True, 2**20))
    with forward_context(ForwardContext(True)):
        with pytest.raises(RuntimeError):  # as nn.Linear's own
            patched(torch.randn(2, H + 1))
        with pytest.raises(RuntimeError):
            patched(torch.randn(2, H, dtype=torch.bfloat16))
        assert type(patched.double()(hidden.double())) is torch.Tensor, "float64 runs as nn.Linear"
    assert type(copy.deepcopy(patched).float()(hidden)) is torch.Tensor, "outside of a model's forward too"


@pytest.mark.parametrize("changed", ["weight", "bias", "hidden"])
@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.argmax(-1),
        lambda x: x.detach().tolist(),
        lambda x: F.cross_entropy(x.view(-1, V), torch.zeros(B * S, dtype=torch.long)),
        lambda x: F.cross_entropy(x[MASK], torch.zeros(int(MASK.sum()), dtype=torch.long)),
    ],
)
def test_logits_of_what_has_been_changed_since_are_refused(changed, use, head, hidden):
    """As after an optimizer step; native logits would still be those of the forward."""
    hidden = hidden * 1
    logits, read_before = defer(head, hidden), defer(head, hidden)
    expected = read_before.build().detach().clone()
    with torch.no_grad():
        {"weight": head.weight, "bias": head.bias, "hidden": hidden}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="since been changed in place"):
        use(logits)
    assert torch.equal(read_before.detach(), expected), "what was built stays"


def test_backward_past_torch_function_refuses_changed_weights(head, hidden):
    value = _Scaled.apply(defer(head, hidden))
    with torch.no_grad():
        head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="since been changed in place"):
        torch.autograd.grad(value, hidden, torch.ones(B, S, V))


def test_inference_tensors_have_no_versions_to_compare(head, hidden):
    with torch.inference_mode():
        logits = defer(head, hidden * 1)
        torch.testing.assert_close(logits.argmax(-1), head(hidden).argmax(-1))


def test_functional_call_keeps_the_parameters_of_the_call(head, hidden):
    bind_forward(head, make_head_forward(True, 2**20))
    lent = {name: (2 * parameter).detach().requires_grad_() for name, parameter in head.named_parameters()}
    with forward_context(ForwardContext(has_labels=True)):
        logits = torch.func.functional_call(head, lent, (hidden,))
    assert type(logits) is DeferredLogits
    target = torch.zeros(B * S, dtype=torch.long)
    native = F.linear(hidden, lent["weight"], lent["bias"])
    losses = [F.cross_entropy(x.view(-1, V), target) for x in (logits, native)]
    leaves = [hidden, *lent.values()]
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses))
    torch.testing.assert_close(logits.detach().build(), native.detach())


def test_gradient_of_the_logits_asked_for_too_late(head, hidden, caplog):
    target = torch.zeros(B * S, dtype=torch.long)
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        for ask in (lambda x: x.retain_grad(), lambda x: x.register_hook(lambda grad: None)):
            deferred_logits._announced.clear()
            early, late = defer(head, hidden), defer(head, hidden)
            ask(early)
            assert not [record for record in caplog.records if "asked for after a loss" in record.message]
            F.cross_entropy(late.view(-1, V), target).backward()
            ask(late)
            assert "asked for after a loss" in " ".join(record.message for record in caplog.records)
            caplog.clear()
    early = defer(head, hidden)
    early.retain_grad()
    F.cross_entropy(early.view(-1, V), target).backward()
    native = head(hidden)
    native.retain_grad()
    F.cross_entropy(native.view(-1, V), target).backward()
    torch.testing.assert_close(early.grad, native.grad)


def test_says_once_what_built_the_logits(head, hidden, caplog):
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        for _ in range(2):
            defer(head, hidden).log_softmax(-1)
        defer(head, hidden).logsumexp(-1)
        assert [record.message.split("`")[1] for record in caplog.records] == ["log_softmax", "logsumexp"]
        caplog.clear()
        repr(defer(head, hidden))
        with torch.no_grad():
            defer(head, hidden).argmax(-1)
        defer(head.eval(), hidden).exp()
        assert not caplog.records
