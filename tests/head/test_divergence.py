"""The divergence of deferred logits against its formula in float64 on logits that are built."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from liger_trainer.head import DeferredLogits
from liger_trainer.head.divergence import divergence
from liger_trainer.patching.head import patch_head
from tests.head.deferring import B, H, S, V, defer
from tests.steps import step_with
from tests.tiny_models import TINY_MODELS, tiny_batch

CHAINS = {
    "plain": lambda x: x,
    "scale": lambda x: x * 0.5,
    "soft-cap": lambda x: torch.tanh(x / 2.0) * 2.0,
    "scale and soft-cap": lambda x: torch.tanh(x * 1.5 / 2.0) * 2.0,
    "shifted": lambda x: x[:, :-1],
    "cast": lambda x: x.float(),
    "capped twice": lambda x: torch.tanh(torch.tanh(x)),  # not what the operator does: a chunk at a time
}
BUILT = {"squared": lambda x: x * x}


@pytest.fixture
def teacher():
    torch.manual_seed(2)
    return nn.Linear(H + 3, V), torch.randn(B, S, H + 3)


def labels_of(rows):
    return torch.where(torch.arange(rows.numel()).view(rows.shape) % 4 == 1, -100, 0)


def expected(student, teacher, labels, beta, temperature, num_items):
    """The formula, every class of every token at once."""
    s, t = (logits.double().div(temperature).log_softmax(-1) for logits in (student, teacher))
    if beta == 0.0:
        tokens = (t.exp() * (t - s)).sum(-1)
    elif beta == 1.0:
        tokens = (s.exp() * (s - t)).sum(-1)
    else:
        m = (beta * t.exp() + (1 - beta) * s.exp()).log()
        tokens = beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)
    valid = labels != -100
    entropy = -(s.exp() * s).sum(-1)
    items = valid.sum() if num_items is None else num_items
    return tokens[valid].sum() / items, entropy.masked_fill(~valid, 0.0)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", [*CHAINS, *BUILT])
@pytest.mark.parametrize(("temperature", "num_items"), [(1.0, None), (0.6, torch.tensor(7.0))])
def test_value_and_gradients(beta, name, temperature, num_items, head, hidden, teacher, request):
    if name in CHAINS:
        request.getfixturevalue("never_built")
    chain = (CHAINS | BUILT)[name]
    teacher_head, teacher_hidden = teacher
    parameters = [hidden, *head.parameters()]
    with torch.no_grad():
        teacher_logits = chain(defer(teacher_head, teacher_hidden))
    student_logits = chain(defer(head, hidden))
    labels = labels_of(hidden[: student_logits.shape[0], : student_logits.shape[1], 0])
    found = divergence(student_logits, teacher_logits, labels, beta, temperature, num_items)
    gradients = torch.autograd.grad(found.loss, parameters)

    native, native_teacher = chain(head(hidden)), chain(teacher_head(teacher_hidden)).detach()
    loss, entropy = expected(native, native_teacher, labels, beta, temperature, num_items)
    torch.testing.assert_close(found.loss, loss.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.entropy, entropy.float(), rtol=1e-5, atol=1e-5)
    for ours, wanted in zip(gradients, torch.autograd.grad(loss, parameters)):
        # What is summed is as large as the largest: an element may be next to nothing.
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("built", ["student", "teacher"])
def test_logits_that_one_model_built(built, head, hidden, teacher):
    """What an adapter on the head gives: its logits are there, those of the other model are built for them."""
    teacher_head, teacher_hidden = teacher
    student_logits = head(hidden) if built == "student" else defer(head, hidden)
    teacher_logits = teacher_head(teacher_hidden) if built == "teacher" else defer(teacher_head, teacher_hidden)
    labels = labels_of(hidden[..., 0])
    found = divergence(student_logits, teacher_logits, labels, 0.5)
    loss, entropy = expected(head(hidden), teacher_head(teacher_hidden).detach(), labels, 0.5, 1.0, None)
    torch.testing.assert_close(found.loss, loss.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.entropy, entropy.float(), rtol=1e-5, atol=1e-5)
    parameters = [hidden, *head.parameters(), *teacher_head.parameters()]
    gradients = torch.autograd.grad(found.loss, parameters, allow_unused=True)
    assert gradients[-1] is gradients[-2] is None
    for ours, wanted in zip(gradients, torch.autograd.grad(loss, parameters[:-2])):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)


def test_any_expected_gradient_gives_the_same(head, hidden, teacher, never_built):
    def gradient(expected_factor):
        with step_with(expected_gradient=expected_factor):
            loss = divergence(defer(head, hidden), defer(*teacher), labels_of(hidden[..., 0]), 0.5).loss
        return torch.autograd.grad(loss / 4, hidden)[0]

    torch.testing.assert_close(gradient(0.25), gradient(None), rtol=1e-5, atol=1e-7)


def test_other_vocabulary(head, hidden):
    other = nn.Linear(H, V - 2)
    with pytest.raises(ValueError, match=f"over {V} tokens and the teacher's over {V - 2}"):
        divergence(defer(head, hidden), defer(other, hidden), labels_of(hidden[..., 0]), 0.5)


def test_no_host_reads(head, hidden, teacher, never_built):
    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    names: set[str] = set()
    labels, items = labels_of(hidden[..., 0]), torch.tensor(7)
    student_logits, teacher_logits = defer(head, hidden), defer(*teacher)
    with Reads():
        divergence(student_logits, teacher_logits, labels, 0.5, 1.0, items).loss.backward()
    assert "liger_trainer::linear_divergence" in names
    assert not names & {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero"}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_logits_are_deferred_where_a_loss_follows(training, grad):
    model = TINY_MODELS["llama"]().train(training)
    inputs = tiny_batch("llama", model)
    inputs.pop("labels")
    with torch.set_grad_enabled(grad):
        native = model(**inputs).logits
        assert patch_head(model, fused=True, logits_memory=2**20).applied
        with step_with(loss_follows=True):
            logits = model(**inputs).logits
        assert type(logits) is DeferredLogits
        torch.testing.assert_close(logits + 0, native)
        assert (type(model(**inputs).logits) is DeferredLogits) is (training and grad)
