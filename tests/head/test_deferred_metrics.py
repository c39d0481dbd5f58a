"""Functions over the vocabulary of deferred logits: the values of the built logits, one chunk of tokens at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.head import DeferredLogits
from liger_trainer.head.forward import make_head_forward
from liger_trainer.head.step import Forward
from liger_trainer.head.vocab_functions import padded_logits, runs_in_chunks
from liger_trainer.patching.binding import bind_forward
from tests.calls import created_sizes
from tests.head.deferring import real
from tests.steps import step_with

B, S, H, V = 3, 8, 4, 96
ROWS = 5  # tokens in a chunk of fp32 logits
IDS = torch.arange(B * S * 2).view(B, S, 2) % V
LABELS = torch.arange(B * S).view(B, S) * 7 % V
MASK = torch.arange(B * S).view(B, S) % 3 > 0


class Another(nn.Linear):
    """A head whose own forward has to run."""

    def forward(self, hidden):
        return super().forward(hidden) * 2.0


def head(kind=nn.Linear, dtype=torch.float32):
    """Small whole numbers: every product is exact, in chunks of any size, and many logits are equal."""
    linear = kind(H, V, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
    return linear


def states(dtype=torch.float32):
    return torch.randint(-3, 4, (B, S, H), generator=torch.Generator().manual_seed(1)).to(dtype)


def patched(linear, memory=ROWS * V * 4):
    bind_forward(linear, make_head_forward(True, memory, whole_module=type(linear) is not nn.Linear))
    return linear


@torch.no_grad()
def deferred(memory=ROWS * V * 4, kind=nn.Linear, dtype=torch.float32):
    with step_with(forward=Forward(has_labels=False, read_later=True)):
        logits = patched(head(kind, dtype), memory)(states(dtype))
    assert type(logits) is DeferredLogits
    return logits


@torch.no_grad()
def built(kind=nn.Linear, dtype=torch.float32):
    return head(kind, dtype)(states(dtype))


CHAINS = {
    "plain": lambda x: x,
    "float": lambda x: x.float(),
    "shifted": lambda x: x[:, :-1],
    "contiguous": lambda x: x[..., :-1, :].contiguous(),
    "soft-cap": lambda x: torch.tanh(x / 8.0) * 8.0,
    "temperature": lambda x: x.float() / 0.7,
    "masked": lambda x: x[MASK],
    "detached": lambda x: x.detach(),
    "without padding of the vocabulary": lambda x: x[..., :90],
    "of a tuple": lambda x: (x, None)[0],
}

FUNCTIONS = {
    "argmax": lambda x: x.argmax(-1),
    "torch.argmax": lambda x: torch.argmax(x, dim=-1),
    "argmax with keepdim": lambda x: x.argmax(dim=-1, keepdim=True),
    "argmax along an axis": lambda x: torch.argmax(x, axis=x.ndim - 1),
    "argmin": lambda x: x.argmin(-1),
    "max": lambda x: x.max(-1),
    "max with keepdim": lambda x: torch.max(x, -1, keepdim=True),
    "min": lambda x: x.min(dim=-1),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: torch.amin(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "special.logsumexp": lambda x: torch.special.logsumexp(x, -1),
    "topk": lambda x: x.topk(5),
    "torch.topk": lambda x: torch.topk(x, 3, dim=-1, largest=False),
    "softmax and max": lambda x: F.softmax(x, dim=-1).max(-1),
    "softmax in fp32": lambda x: x.softmax(-1, dtype=torch.float32).amax(-1),
    "softmax and topk": lambda x: torch.softmax(x, -1).topk(2),
    "ids": lambda x: x[..., [3, 1, 2]],
    "ids in a tensor": lambda x: x[..., torch.tensor([[3, 1], [0, 2]])],
    "a mask of the vocabulary": lambda x: x[..., torch.arange(x.shape[-1]) % 7 == 0],
    "index_select": lambda x: x.index_select(-1, torch.tensor([4, 4, 0])),
    "slice": lambda x: x[..., :10] + 0,
    "slice of a slice": lambda x: x[..., 5:60:2][..., :3] * 2,
    "slice and argmax": lambda x: x[..., 5:60].argmax(-1),
}
OF_TOKENS = {
    "log-probabilities": lambda x: x.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1),
    "F.log_softmax": lambda x: F.log_softmax(x.float(), dim=-1).gather(2, IDS),
    "torch.gather": lambda x: torch.gather(torch.log_softmax(x, -1), -1, IDS),
    "shifted": lambda x: x[:, :-1].log_softmax(-1).gather(-1, LABELS[:, 1:, None]),
    "take_along_dim": lambda x: torch.take_along_dim(x, IDS, dim=-1),
    "gathered logits": lambda x: x.gather(-1, IDS) - x.logsumexp(-1, keepdim=True),
    "last token": lambda x: x[:, -1] + 0,
    "last tokens": lambda x: x[:, -2:].softmax(-1),
    "last token, ids": lambda x: x[:, -1, [7, 9]],
    "last token, one id": lambda x: x[:, -1, 7] - x[:, -1, 9],
    "last token, slice": lambda x: x[:, -1, :10] + 0,
    "one row": lambda x: x[0, 2:5, 3:7] + 0,
    "a new dimension": lambda x: x[:, None, :, 2:4] + 0,
    "rows of tokens": lambda x: x.view(-1, V).argmax(-1),
}


def assert_same(ours, native):
    ours = real(ours)
    assert type(ours) is type(native)
    for mine, theirs in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (ours, native)), strict=True):
        assert type(mine) is torch.Tensor
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.fixture
def products(monkeypatch):
    """The numbers of tokens in the products of the head."""
    seen = []
    linear = F.linear

    def counted(hidden, weight, bias=None):
        if weight.shape == (V, H):
            seen.append(hidden.shape[:-1].numel())
        return linear(hidden, weight, bias)

    monkeypatch.setattr(F, "linear", counted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_of_the_built_logits(name, chain, dtype, products):
    function = lambda x: FUNCTIONS[name](CHAINS[chain](x))  # noqa: E731
    native = function(built(dtype=dtype))
    ours = deferred(dtype=dtype)
    products.clear()
    assert_same(function(ours), native)
    assert max(products) <= ROWS * (4 // dtype.itemsize)


@pytest.mark.parametrize("kind", [nn.Linear, Another])
@pytest.mark.parametrize("name", OF_TOKENS)
def test_values_of_single_tokens(name, kind, products):
    native = OF_TOKENS[name](built(kind))
    ours = deferred(kind=kind)
    products.clear()
    assert_same(OF_TOKENS[name](ours), native)
    assert max(products) <= max(ROWS, 2 * B), "a chunk, or the last two tokens of each row"


@pytest.mark.parametrize("name", ["argmax", "topk", "softmax and max", "slice", "ids"])
def test_nothing_of_the_size_of_the_logits(name):
    logits = deferred()
    assert max(created_sizes(lambda: FUNCTIONS[name](logits))) <= ROWS * V
    assert B * S * V in created_sizes(lambda: logits.sort(-1)), "what this can see"


OTHERS = {
    "sort": lambda x: x.sort(-1),
    "std": lambda x: x.std(-1),
    "argmax of all": lambda x: x.argmax(),
    "argmax over tokens": lambda x: x.argmax(1),
    "max of all": lambda x: x.max(),
    "max of two": lambda x: x.max(torch.zeros(V)),
    "amax of two dimensions": lambda x: x.amax((-1, -2)),
    "softmax over tokens": lambda x: x.softmax(1),
    "gather over tokens": lambda x: x.gather(1, torch.zeros(B, 1, V, dtype=torch.long)),
    "gather of fewer rows": lambda x: x.gather(-1, IDS[:2]),
    "ids of rows and vocabulary": lambda x: x[torch.tensor([0, 1]), :, torch.tensor([3, 4])],
    "one id": lambda x: x[..., 5],
    "a last dimension": lambda x: x[..., None],
    "numpy": lambda x: torch.tensor(np.argmax(x.numpy(), axis=-1)),
    "out": lambda x: torch.argmax(x, -1, out=torch.empty(0, dtype=torch.long)),
    "softmax read whole": lambda x: x.softmax(-1) + 1,
    "cross entropy of log-probabilities": lambda x: F.cross_entropy(x.log_softmax(-1).view(-1, V), LABELS.view(-1)),
    "two ellipses": lambda x: (_raises(IndexError, lambda: x[..., ..., 0]), x + 0)[1],
}


def _raises(error, function):
    with pytest.raises(error):
        function()


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_get_the_built_logits(name):
    assert_same(OTHERS[name](deferred()), OTHERS[name](built()))


def test_small_logits_are_built_once_for_all_functions(products):
    logits = deferred(memory=B * S * V * 4)
    products.clear()
    assert_same((logits.argmax(-1), logits.topk(2).values), (built().argmax(-1), built().topk(2).values))
    assert products.count(B * S) == 3, "one for ours and two for the native ones"


def test_built_logits_are_read(products):
    logits = deferred()
    logits.sort(-1)
    products.clear()
    logits.argmax(-1)
    logits[:, :-1].argmax(-1)
    assert products == []


def test_a_write_into_a_slice_reaches_the_logits():
    def written(x):
        x[..., 90:].fill_(-100.0)
        part = x[:, -1, :3]
        part.add_(50.0)
        return x.float().argmax(-1), x + 0

    assert_same(written(deferred()), written(built()))


def test_logits_with_a_gradient_keep_it():
    results = []
    for ours in (True, False):
        linear = patched(head()) if ours else head()
        hidden = states().requires_grad_()
        with step_with(forward=Forward(has_labels=True)):
            logits = linear(hidden)
        assert not isinstance(logits, DeferredLogits) or not runs_in_chunks(logits)
        loss = (
            logits.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).sum()
            + logits[..., :7].sum()
            + logits.amax(-1).sum()
        )
        results.append([loss, *torch.autograd.grad(loss, [hidden, *linear.parameters()])])
    for mine, theirs in zip(*results):
        torch.testing.assert_close(mine, theirs)


def test_predictions_of_a_training_step_run_in_chunks_beside_the_loss():
    results = []
    for linear in (patched(head()), head()):
        hidden = states().requires_grad_()
        with step_with(forward=Forward(has_labels=True)):
            logits = linear(hidden)
        loss = F.cross_entropy(logits.float().view(-1, V), LABELS.view(-1))
        found = []
        sizes = created_sizes(lambda: found.append((logits.argmax(-1), logits.argmin(dim=-1, keepdim=True))))  # noqa: B023
        results.append([*found[0], loss, *torch.autograd.grad(loss, [hidden, *linear.parameters()])])
        if type(logits) is DeferredLogits:
            assert max(sizes) <= ROWS * V
            assert not any(each.requires_grad for each in found[0])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_autocast_is_that_of_the_built_logits():
    functions = (lambda x: x.log_softmax(-1).amax(-1), lambda x: x.logsumexp(-1), lambda x: x.argmax(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for function in functions:
            ours, native = deferred(dtype=torch.bfloat16), built(dtype=torch.bfloat16)
            assert_same(function(ours), function(native))


def test_errors_are_those_of_torch():
    logits = deferred()
    with pytest.raises(RuntimeError, match="selected index k out of range"):
        logits.topk(V + 1)
    with pytest.raises(RuntimeError, match="out of bounds"):
        logits.log_softmax(-1).gather(-1, torch.full((B, S, 1), -100))
    with pytest.raises(IndexError, match="Dimension out of range"):
        logits.argmax(3)
    with pytest.raises(TypeError):
        logits.topk()


def test_changed_weights_are_an_error():
    logits = deferred()
    with torch.no_grad():
        logits.recorded.call.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="head's parameters have since been changed"):
        logits.argmax(-1)


@pytest.mark.parametrize("kind", [nn.Linear, Another])
@pytest.mark.parametrize("name", ["argmax", "log-probabilities", "slice"])
def test_padding_of_tokens(name, kind, products):
    ids = F.pad(LABELS, (0, 3))[..., None]
    functions = {**FUNCTIONS, "log-probabilities": lambda x: x.log_softmax(-1).gather(-1, ids)}
    chain = CHAINS["soft-cap"]
    native = F.pad(chain(built(kind)), (0, 0, 0, 3), value=-100.0)
    ours = padded_logits(chain(deferred(kind=kind)), S + 3, -100.0)
    products.clear()
    assert_same(functions[name](ours), functions[name](native))
    assert max(products) <= ROWS
    assert_same(ours[:, -4:] + 0, native[:, -4:])
