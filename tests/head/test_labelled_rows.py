"""With a bound of the labelled rows: the same values and gradients, from a head that multiplies no other rows."""

from __future__ import annotations

import functools
import itertools
import math

import peft
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from liger_trainer.head import divergence, fused_loss, lm_head
from liger_trainer.head.chunked_module import ModuleCall
from liger_trainer.head.forward import make_head_forward
from liger_trainer.head.fused_loss import chunked_log_probs, head_log_probs, labelled_rows
from liger_trainer.head.labelled_rows import LabelledRows
from liger_trainer.head.step import Forward
from liger_trainer.kernels.head import linear_log_probs
from liger_trainer.patching.binding import bind_forward
from tests.calls import saved_tensors
from tests.steps import step_with

ROWS, LENGTH, H, V = 2, 700, 6, 11
N = ROWS * LENGTH
KEPT = 512
OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")
HEADS = ("trained", "frozen", "lora", "unfused")
CHAINS = {
    "plain": lambda x: x,
    "soft-cap": lambda x: torch.tanh(x * 1.5 / 2.0) * 2.0,
}


def make_head(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    head: nn.Module = nn.Linear(H, V, dtype=dtype)
    if kind == "frozen":
        head.requires_grad_(False)
    if kind == "lora":
        holder = nn.ModuleDict({"head": head})
        config = peft.LoraConfig(target_modules=["head"], r=2, init_lora_weights=False)
        head = peft.inject_adapter_in_model(config, holder, low_cpu_mem_usage=False)["head"].to(dtype)
    bind_forward(head, make_head_forward(kind != "unfused", 2**20, whole_module=kind == "lora"))
    return head


def make_hidden(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, LENGTH, H).to(dtype).requires_grad_()


def make_labels(count: int) -> torch.Tensor:
    """`count` labels at random places."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.full((N,), -100)
    places = torch.randperm(N, generator=generator)[:count]
    labels[places] = torch.randint(V, (count,), generator=generator)
    return labels.view(ROWS, LENGTH)


def defer(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    with step_with(forward=Forward(has_labels=True), loss_follows=True):
        return head(hidden)


@pytest.fixture
def multiplied(monkeypatch):
    """How many rows each operator over a head was given."""
    seen = []

    def spied(module, name):
        original = getattr(module, name)

        @functools.wraps(original)
        def spy(hidden, *args, **kwargs):
            seen.append(hidden.shape[:-1].numel())
            return original(hidden, *args, **kwargs)

        monkeypatch.setattr(module, name, spy)

    for name in ("linear_cross_entropy", "log_probs_of_head", "linear"):
        spied(fused_loss, name)
    spied(divergence, "linear_jsd")
    spied(lm_head, "linear")  # of a chunked head that is a plain linear layer, and of its teacher
    run = ModuleCall._run

    def counted(self, parameters, part):
        seen.append(part.shape[:-1].numel())
        return run(self, parameters, part)

    monkeypatch.setattr(ModuleCall, "_run", counted)
    return seen


def loss_of(found: torch.Tensor) -> torch.Tensor:
    """Weighs every token differently."""
    return (found.float() * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum()


def cross_entropy(logits, labels, reduction):
    weight = torch.linspace(0.5, 2.0, V, dtype=logits.dtype)
    found = F.cross_entropy(logits.view(-1, V), labels.view(-1), weight, reduction=reduction, label_smoothing=0.1)
    return [found], loss_of(found) if reduction == "none" else found


def log_probs(logits, labels, expected_grad):
    if isinstance(logits.recorded.call, ModuleCall) or not logits.recorded.call.fused:
        found = chunked_log_probs(logits, labels, OUTPUTS, 0.7)
    elif expected_grad is None:
        found = head_log_probs(logits, labels, OUTPUTS, 0.7)
    else:
        found = head_log_probs(logits, labels, OUTPUTS[:2], 0.7, expected_grad=expected_grad)
    values = [found.log_probs, *(getattr(found, name) for name in OUTPUTS if getattr(found, name) is not None)]
    loss = -0.5 * found.log_probs.sum() if expected_grad else loss_of(found.log_probs) + loss_of(found.entropy)
    return values, loss


def jsd(logits, labels, beta):
    torch.manual_seed(3)
    with torch.no_grad():
        teacher = defer(make_head("trained", logits.dtype, seed=5), torch.randn(ROWS, LENGTH, H, dtype=logits.dtype))
    found = divergence.divergence(logits, teacher, labels, beta)
    return [found.loss, found.entropy], found.loss


LOSSES = {
    **{reduction: functools.partial(cross_entropy, reduction=reduction) for reduction in ("mean", "sum", "none")},
    "log-probs": functools.partial(log_probs, expected_grad=None),
    "expected": functools.partial(log_probs, expected_grad=0.5),
    "jsd": functools.partial(jsd, beta=0.3),
}


# An expected gradient is for fused heads.
LOSSES_OF_HEADS = [
    (loss_name, kind)
    for loss_name, kind in itertools.product(LOSSES, HEADS)
    if loss_name != "expected" or kind not in ("lora", "unfused")
]


def run(kind, chain, loss_name, labels, bound, dtype=torch.float32):
    """All values, and the gradients of hidden states and head."""
    head, hidden = make_head(kind, dtype), make_hidden(dtype)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    logits = CHAINS[chain](defer(head, hidden))
    with step_with(labelled=None if bound is None else lambda: bound):
        values, loss = LOSSES[loss_name](logits, labels)
    gradients = torch.autograd.grad(loss, [hidden, *parameters])
    return [value.detach() for value in values], list(gradients)


def assert_as_all_rows(kind, chain, loss_name, labels, bound, dtype=torch.float32, tolerance=1e-5):
    ours, ours_gradients = run(kind, chain, loss_name, labels, bound, dtype)
    native, native_gradients = run(kind, chain, loss_name, labels, None, dtype)
    # Sums over rows, with either sign, are of more than is left; one row fewer would change them by 1 / rows ** 0.5.
    of_sums = 1e-6 * labels.ne(-100).sum().item() ** 0.5
    for left, right in zip([*ours, *ours_gradients], [*native, *native_gradients], strict=True):
        assert left.dtype == right.dtype
        size = right.float().abs().amax().item()
        torch.testing.assert_close(left, right, rtol=tolerance, atol=(tolerance + of_sums) * max(size, 1e-3))


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(("loss_name", "kind"), LOSSES_OF_HEADS)
def test_values_and_gradients_are_those_of_all_rows(loss_name, kind, chain, multiplied):
    run(kind, chain, loss_name, make_labels(300), 300)
    assert set(multiplied) == {KEPT}
    assert_as_all_rows(kind, chain, loss_name, make_labels(300), 300)


@pytest.mark.parametrize(("loss_name", "kind"), [case for case in LOSSES_OF_HEADS if case[1] != "unfused"])
def test_in_half_precision(loss_name, kind):
    assert_as_all_rows(kind, "plain", loss_name, make_labels(300), 300, torch.bfloat16, tolerance=2**-6)


@pytest.mark.parametrize(
    ("count", "bound", "kept"),
    [
        (0, 0, 512), (1, 1, 512), (511, 512, 512), (512, 512, 512), (513, 513, 1024), (20, 1000, 1024),
        (1024, 1024, 1024), (1260, 1260, N), (N, N, N),
    ],
)  # fmt: skip
@pytest.mark.parametrize("loss_name", ["mean", "none", "log-probs", "expected", "jsd"])
def test_every_number_of_labels(loss_name, count, bound, kept, multiplied):
    labels = make_labels(count)
    if count == 1:
        labels = labels.flip(0, 1)  # another place
    run("trained", "plain", loss_name, labels, bound)
    assert multiplied == [kept]
    assert_as_all_rows("trained", "plain", loss_name, labels, bound)


@pytest.mark.parametrize(("loss_name", "kind"), LOSSES_OF_HEADS)
def test_a_bound_that_is_too_low_makes_the_loss_nan(loss_name, kind):
    labels = make_labels(KEPT + 1)
    head, hidden = make_head(kind), make_hidden()
    with step_with(labelled=lambda: KEPT):
        _, loss = LOSSES[loss_name](defer(head, hidden), labels)
    assert math.isnan(loss.detach())
    with step_with(labelled=lambda: KEPT + 1):
        _, loss = LOSSES[loss_name](defer(head, hidden), labels)
    assert math.isfinite(loss.detach())


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_a_sum_is_seen_to_be_one_number(weighted, monkeypatch):
    """Without reading it, for which the host would wait."""
    read = []
    by_values = linear_log_probs.number_by_values
    monkeypatch.setattr(linear_log_probs, "number_by_values", lambda *args: read.append(1) or by_values(*args))
    head, hidden = make_head("trained"), make_hidden()
    with step_with(labelled=lambda: 300):
        found = head_log_probs(defer(head, hidden), make_labels(300), ("top1",), expected_grad=1.0).log_probs
    (loss_of(found) if weighted else -found.sum()).backward()
    assert bool(read) is weighted


class Sink(torch.autograd.Function):
    """Passes on gradients that are missing, as DistributedDataParallel does."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def test_a_missing_gradient_stays_missing(monkeypatch):
    """One of zeros would make the head compute its logits again."""
    again = lambda *args: pytest.fail("the logits were recomputed")  # noqa: E731
    monkeypatch.setattr(linear_log_probs, "recomputed_gradients", again)
    head, hidden = make_head("trained"), make_hidden()
    with step_with(labelled=lambda: 300):
        found = head_log_probs(defer(head, hidden), make_labels(300), ("entropy",), expected_grad=1.0)
    chosen, _ = Sink.apply(found.log_probs, found.entropy)
    (-chosen).sum().backward()
    assert hidden.grad.any()
    with step_with(labelled=lambda: 300):
        rows = labelled_rows(hidden, make_labels(300), -100, 2**20)
    hidden.grad = None
    Sink.apply(rows.gathered(hidden), hidden)[1].sum().backward()
    assert torch.equal(hidden.grad, torch.ones_like(hidden))


def test_nothing_is_read_by_the_host():
    """Fake tensors have no values: reading one is an error."""
    with FakeTensorMode(), step_with(labelled=lambda: 300):
        hidden, labels = torch.randn(N, H, requires_grad=True), torch.zeros(N, dtype=torch.int64)
        rows = labelled_rows(hidden, labels, -100, 2**20)
        assert isinstance(rows, LabelledRows)
        part = rows.gathered(hidden)
        assert part.shape == (KEPT, H)
        assert rows.target.shape == (KEPT,)
        found = rows.scattered(part.sum(-1))
        assert found.shape == labels.shape
        found.square().sum().backward()
        assert hidden.grad.shape == hidden.shape


@pytest.mark.parametrize(
    ("count", "differentiable", "memory"),
    [
        (300, True, 4096),  # 512 rows and their gradient take less than the gradient of 1,400
        (1000, True, 4096 + 4 * H * (1400 - 2 * 1024)),
        (300, False, 4096 - 4 * H * 512),
    ],
)
def test_what_more_than_half_of_the_rows_take_comes_out_of_the_logits(count, differentiable, memory):
    hidden, labels = make_hidden().detach(), make_labels(count)
    big = 2**16
    with step_with(labelled=lambda: count):
        rows = labelled_rows(hidden.requires_grad_(differentiable), labels, -100, big)
        assert isinstance(rows, LabelledRows)
        assert rows.logits_memory == big - 4096 + memory
        # Where that is more than half, all rows are multiplied.
        assert (labelled_rows(hidden, labels, -100, 1024) is not None) == (memory == 4096)


def test_a_teacher_takes_memory_too():
    hidden, labels = make_hidden(), make_labels(300)
    teacher = torch.randn(ROWS, LENGTH, 10 * H)
    with step_with(labelled=lambda: 300):
        rows = labelled_rows(hidden, labels, -100, 2**20, teacher)
    assert rows.logits_memory == 2**20 - 4 * H * (512 - (N - 512)) - 4 * 10 * H * 512


def test_all_rows_without_a_bound_and_for_few_tokens():
    hidden, labels = make_hidden(), make_labels(10)
    assert labelled_rows(hidden, labels, -100, 2**20) is None
    asked = []
    with step_with(labelled=lambda: asked.append(1) or 10):
        assert labelled_rows(hidden[:1, :560], labels[:1, :560], -100, 2**20) is None
        assert not asked, "a count may have to be waited for"
        assert labelled_rows(hidden, labels, -100, 2**20) is not None


def test_not_while_tracing(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with step_with(labelled=lambda: 10):
        assert labelled_rows(make_hidden(), make_labels(10), -100, 2**20) is None


def test_chunks_of_labelled_rows(multiplied):
    """A chunked head runs on chunks of the labelled rows; what is saved of a built teacher is no copy of its rows."""
    head, hidden, labels = make_head("lora"), make_hidden(), make_labels(300)
    teacher = torch.randn(ROWS, LENGTH, V)
    with step_with(labelled=lambda: 300), saved_tensors() as saved:
        logits = defer(head, hidden)
        logits.recorded.call.logits_memory = 100 * 4 * V
        loss = divergence.divergence(logits, teacher, labels, 0.5).loss
    assert multiplied == [100] * 5 + [12]
    loss.backward()
    assert (100, V) not in {tensor.shape for tensor in saved}


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (make_labels(300)[:, :-1], {}, r"`target` has shape \(2, 699\); `hidden` of shape"),
        (make_labels(300).float(), {}, "`target` has dtype torch.float32; class ids must be int64 or int32"),
        (make_labels(300), {"temperature": 0.0}, "`temperature` is 0.0; it must be more than 0"),
        (make_labels(300), {"retain_memory": -1}, "`retain_memory` is -1; it must be 0 bytes or more"),
        (make_labels(300).clamp(min=V), {}, r"`target` holds the label 11, outside \[0, 11\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(labels, options, message):
    deferred = defer(make_head("trained"), make_hidden())
    with pytest.raises(ValueError, match=message):
        head_log_probs(deferred, labels, ("top1",), **options)
