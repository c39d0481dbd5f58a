"""DeferredLogits in other code's hands: autograd functions, hooks, no_grad, autocast, changed weights."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
from torch.nn import functional as F

from liger_trainer import apply_liger_kernel
from liger_trainer.head import DeferredLogits, warn_once
from liger_trainer.head.forward import make_head_forward
from liger_trainer.head.step import Forward
from liger_trainer.patching.binding import bind_forward
from tests.accuracy import as_large_as
from tests.head.deferring import CHAINS, MASK, B, H, S, V, assert_equal, defer, real
from tests.steps import step_with
from tests.tiny_models import TINY_MODELS


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
    torch.testing.assert_close(real(ours[0]), native[0])


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


def test_autocast_casts_hidden_and_weight():
    head, hidden = torch.nn.Linear(64, 256), torch.randn(4, 32, 64, requires_grad=True)  # of few, errors are chance
    target = torch.arange(128) % 256
    with torch.autocast("cpu", torch.bfloat16):
        ours, native = defer(head, hidden), head(hidden)
        assert ours.dtype == native.dtype == torch.bfloat16
        assert F.cross_entropy(ours.view(-1, 256), target).dtype == torch.float32
    assert torch.equal(ours.build(), native)
    fused = F.cross_entropy(defer_under_autocast(head, hidden).float().view(-1, 256), target)
    reference = F.cross_entropy(native.float().view(-1, 256), target)
    assert fused.dtype == torch.float32
    torch.testing.assert_close(fused, reference, rtol=2**-11, atol=0)  # the logits are bf16 on both sides
    grads = torch.autograd.grad(fused, [hidden, *head.parameters()])
    exact = [x.detach().double().requires_grad_() for x in (hidden, *head.parameters())]
    exact_loss = F.cross_entropy(F.linear(*exact).view(-1, 256), target)
    for mine, theirs, true in zip(
        grads, torch.autograd.grad(reference, [hidden, *head.parameters()]), torch.autograd.grad(exact_loss, exact)
    ):
        assert mine.dtype == torch.float32
        # bf16 products on both sides: ours may be no further from float64 than native
        errors = [float((gradient - true).norm() / true.norm()) for gradient in (mine, theirs)]
        assert errors[0] <= as_large_as(errors[1], mine.numel(), 2**-8)


def defer_under_autocast(head, hidden):
    with torch.autocast("cpu", torch.bfloat16):
        return defer(head, hidden)


def test_target_elsewhere_and_wrong_shapes(head, hidden):
    with pytest.raises((ValueError, RuntimeError)):
        F.cross_entropy(defer(head, hidden).view(-1, V), torch.zeros(3, dtype=torch.long))
    patched = copy.deepcopy(head)
    bind_forward(patched, make_head_forward(True, 2**20))
    with step_with(forward=Forward(True)):
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
def test_logits_are_refused_after_their_inputs_have_changed(changed, use, head, hidden):
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
    given = {name: (2 * parameter).detach().requires_grad_() for name, parameter in head.named_parameters()}
    with step_with(forward=Forward(has_labels=True)):
        logits = torch.func.functional_call(head, given, (hidden,))
    assert type(logits) is DeferredLogits
    target = torch.zeros(B * S, dtype=torch.long)
    native = F.linear(hidden, given["weight"], given["bias"])
    losses = [F.cross_entropy(x.view(-1, V), target) for x in (logits, native)]
    leaves = [hidden, *given.values()]
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses))
    torch.testing.assert_close(logits.detach().build(), native.detach())


def test_gradient_of_the_logits_asked_for_too_late(head, hidden, caplog):
    target = torch.zeros(B * S, dtype=torch.long)
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        for ask in (lambda x: x.retain_grad(), lambda x: x.register_hook(lambda grad: None)):
            warn_once._said.clear()
            early, late = defer(head, hidden), defer(head, hidden)
            ask(early)
            assert not [record for record in caplog.records if "requested after a loss" in record.message]
            F.cross_entropy(late.view(-1, V), target).backward()
            ask(late)
            assert "requested after a loss" in " ".join(record.message for record in caplog.records)
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


@pytest.mark.parametrize("name", ["cross_entropy", "log_softmax", "softmax", "nll_loss", "gelu"])
def test_what_stands_in_the_place_of_a_function_of_torch_runs_once(name, monkeypatch):
    """torch hands a function over by its global name, where a user's own is found after it was replaced."""
    native, patched = TINY_MODELS["llama"](), TINY_MODELS["llama"]()
    apply_liger_kernel(patched)
    plain, calls = getattr(F, name), []

    def twice(*args, **kwargs):
        calls.append(args)
        return 2 * plain(*args, **kwargs)

    monkeypatch.setattr(F, name, twice)
    target = torch.arange(8)

    def loss(model):
        logits = model(input_ids=target[None] + 3, labels=target[None] + 3).logits[0].float()
        operands = (logits, target) if name in ("cross_entropy", "nll_loss") else (logits, -1)
        return getattr(F, name)(*operands[: 1 if name == "gelu" else 2]).sum()

    expected = loss(native)
    counted = len(calls)
    torch.testing.assert_close(loss(patched), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 2 * counted
