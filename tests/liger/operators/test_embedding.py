"""The embedding: its reference, sums over runs of every length, adding in place, and real shapes on a GPU."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from liger_trainer.liger.operators import embedding as operators
from liger_trainer.liger.operators.embedding import embedding, embedding_backward_, embedding_reference, tied_embedding
from tests.accuracy import seeded_randn as randn
from tests.aot import TARGETS, compile_launch, recorded_launches
from tests.device import assert_replayed_without_host_sync, peak_memory


def test_float64_runs_as_reference(device):
    ids = torch.tensor([[0, 3], [3, 1]], device=device)
    weight = torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.equal(embedding(ids, weight, -1), F.embedding(ids, weight, -1))
    assert torch.autograd.gradcheck(lambda weight: embedding(ids, weight), weight)
    hidden, head = tied_embedding(ids, weight)
    assert head is weight
    there = torch.ones_like(weight)
    (expected,) = torch.autograd.grad(embedding(ids, weight, 3), weight, torch.ones_like(hidden))
    torch.testing.assert_close(embedding_backward_(there, torch.ones_like(hidden), ids, 3), 1 + expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_ahead_of_time(target, dtype):
    ids, weight = torch.zeros(64, dtype=torch.int64), torch.zeros(100, 1024, dtype=dtype)
    dy = torch.zeros(64, 1024, dtype=dtype)
    with recorded_launches() as launches:
        operators._embedding(ids, weight, -1)
        operators._embedding_backward(dy, ids.int(), 100, 3)
        operators._embedding_backward_(weight, dy, ids, -1)
    assert len(launches) == 7
    for launch in launches:
        compiled = compile_launch(launch, target)
        if target == "sm_90" and launch.kernel.fn.__name__ in ("_gather_kernel", "_sum_runs_kernel"):
            assert "ld.global.v4.b32" in compiled.asm["ptx"]


HALF = [torch.bfloat16, torch.float16]


def randint(high, *shape, seed=0, device="cpu"):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def sums(ids, dy, vocab, padding_idx=None):
    """The gradient in float64."""
    rows = torch.zeros(vocab, dy.shape[-1], dtype=torch.float64, device=dy.device)
    rows.index_add_(0, ids.reshape(-1), dy.reshape(-1, dy.shape[-1]).double())
    if padding_idx is not None:
        rows[padding_idx] = 0
    return rows


def gradient(ids, weight, dy, padding_idx=None):
    return torch.autograd.grad(embedding(ids, weight, padding_idx), weight, dy)[0]


RUNS = {
    "all different": lambda: torch.arange(100).flip(0),
    "all equal": lambda: torch.full((700,), 5),  # 22 blocks of 32 tokens: two turns of the loop that joins
    "runs as long as a block": lambda: torch.arange(5).repeat_interleave(32),
    "runs over two and three blocks": lambda: torch.arange(4).repeat_interleave(torch.tensor([40, 1, 80, 20])),
    "one block": lambda: torch.arange(3).repeat_interleave(5),
    "one token": lambda: torch.tensor([2]),
}


@pytest.mark.kernel
@pytest.mark.parametrize("runs", RUNS)
def test_runs_of_every_kind(runs, device):
    ids = RUNS[runs]()
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].to(device)
    weight, dy = randn(101, 13, device=device).requires_grad_(), randn(len(ids), 13, seed=1, device=device)
    assert torch.equal(embedding(ids, weight), weight[ids])
    torch.testing.assert_close(gradient(ids, weight, dy).double(), sums(ids, dy, 101), rtol=1e-5, atol=1e-5)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_summed_in_float32_and_rounded_once(dtype, device):
    ids, weight = randint(7, 300, device=device), randn(7, 600, dtype=dtype, device=device).requires_grad_()
    dy = randn(300, 600, seed=1, dtype=dtype, device=device)
    exact = sums(ids, dy, 7)
    ours = gradient(ids, weight, dy)
    assert ours.dtype == dtype
    assert (ours - exact).norm() <= 1.01 * (exact.to(dtype) - exact).norm()


@pytest.mark.kernel
@given(
    shape=st.lists(st.integers(0, 7), max_size=3),
    vocab=st.integers(1, 40),
    hidden=st.integers(1, 600),
    dtype=st.sampled_from([torch.float32, *HALF]),
    int32=st.booleans(),
    strided=st.booleans(),
    padding=st.one_of(st.none(), st.integers(-40, 39)),
)
@settings(max_examples=15)
def test_any_shape_and_layout(shape, vocab, hidden, dtype, int32, strided, padding):
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    padding = None if padding is None else padding % (2 * vocab) - vocab
    ids, weight = randint(vocab, *shape, device=device), randn(vocab, hidden, dtype=dtype, device=device)
    dy = randn(*shape, hidden, seed=1, dtype=dtype, device=device)
    if strided:
        ids, weight, dy = (torch.stack((x, x), -1)[..., 0] for x in (ids, weight, dy))
    ids, weight = ids.int() if int32 else ids, weight.requires_grad_()
    assert torch.equal(embedding(ids, weight, padding), embedding_reference(ids, weight, padding))
    ours, exact = gradient(ids, weight, dy, padding), sums(ids, dy, vocab, padding)
    limit = {torch.float32: 1e-6, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}[dtype]
    assert (ours - exact).norm() <= limit * exact.norm()
    assert (ours - exact)[exact == 0].abs().sum() == 0


@pytest.mark.kernel
def test_ids_outside_of_the_table_read_and_write_nothing(device):
    ids = torch.tensor([3, -1, 2, 4, 2**40 + 1, 3], device=device)
    weight = randn(4, 5, device=device).requires_grad_()
    y = embedding(ids, weight)
    assert y.isnan().all(-1).tolist() == [False, True, False, True, True, False]
    (ours,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    assert ours[:, 0].tolist() == [0, 0, 1, 2]


@pytest.mark.kernel
def test_frozen_undefined_and_empty(device):
    ids, weight = randint(4, 3, device=device), randn(4, 5, device=device)
    assert not embedding(ids, weight).requires_grad
    assert gradient(ids[:0], weight.requires_grad_(), weight.detach()[:0]).eq(0).all()
    assert embedding(ids, weight[:, :0]).shape == (3, 0)


@pytest.mark.kernel
def test_second_derivative_is_a_lookup(device):
    ids = torch.tensor([0, 2, 2, 1], device=device)
    weight = randn(3, 4, device=device).requires_grad_()

    def penalty(function):
        y = function(ids, weight, 1)
        (dweight,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
        return torch.autograd.grad(dweight.square().sum(), weight)[0]

    torch.testing.assert_close(penalty(embedding), penalty(embedding_reference))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_adding_in_place_rounds_once_and_leaves_other_rows_alone(dtype, device):
    ids, dy = randint(6, 90, device=device), randn(90, 40, seed=1, dtype=dtype, device=device)
    there = randn(9, 80, seed=2, dtype=dtype, device=device)[:, :40]  # rows apart
    there[6:] = float("nan")
    before = there.clone()
    exact = before.double() + sums(ids, dy, 9, 2)
    assert embedding_backward_(there, dy, ids, 2) is there
    assert torch.equal(there[2], before[2])
    assert there[6:].isnan().all()
    assert (there - exact)[:6].norm() <= 1.01 * (exact.to(dtype) - exact)[:6].norm() + 1e-5


@pytest.mark.kernel
def test_errors(device):
    ids, weight = randint(4, 3, device=device), randn(4, 5, device=device)
    with pytest.raises(ValueError, match=r"`weight` is \(5,\)"):
        embedding(ids, weight[0])
    with pytest.raises(ValueError, match=r"`ids` is torch.float32"):
        embedding(ids.float(), weight)
    with pytest.raises(ValueError, match=r"they must be on one device"):
        embedding(ids.to("meta"), weight)
    with pytest.raises(ValueError, match=r"`padding_idx` is 4, but the vocabulary has 4 rows"):
        embedding(ids, weight, 4)
    with pytest.raises(ValueError, match=r"`dy` is \(3, 4\); it must be \(3, 5\)"):
        embedding_backward_(weight, weight[:3, 1:], ids)
    with pytest.raises(ValueError, match=r"`grad_weight` is written in place"):
        embedding_backward_(weight[:1].expand(4, 5), weight[:3], ids)


def tied(ids, weight, padding_idx=None, lookup=tied_embedding):
    hidden, head = lookup(ids, weight, padding_idx)
    return F.linear(hidden.tanh(), head).square().sum()


def separate(ids, weight, padding_idx=None):
    return embedding_reference(ids, weight, padding_idx), weight


@pytest.mark.kernel
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_tied_gradients_are_one(padding_idx, device):
    ids, weight = randint(5, 8, device=device), randn(5, 6, device=device).requires_grad_()
    expected = torch.autograd.grad(tied(ids, weight, padding_idx, separate), weight)[0]
    loss = tied(ids, weight, padding_idx)
    for retain in (True, False):  # with a retained graph, its gradients are not written to
        with mock.patch.object(operators, "_embedding_backward", side_effect=AssertionError("a second gradient")):
            ours = torch.autograd.grad(loss, weight, retain_graph=retain)[0]
        torch.testing.assert_close(ours, expected)


@pytest.mark.kernel
def test_tied_with_one_use_only_or_recorded(device):
    ids, weight = randint(5, 8, device=device), randn(5, 6, device=device).requires_grad_()
    hidden, head = tied_embedding(ids, weight)
    assert torch.equal(torch.autograd.grad(head.sum(), weight)[0], torch.ones_like(weight))
    hidden, head = tied_embedding(ids, weight)
    dy = randn(8, 6, seed=1, device=device)
    assert torch.equal(torch.autograd.grad(hidden, weight, dy)[0], gradient(ids, weight, dy))
    recorded = [
        torch.autograd.grad(tied(ids, weight, None, lookup), weight, create_graph=True)[0].square().sum()
        for lookup in (tied_embedding, separate)
    ]
    torch.testing.assert_close(*(torch.autograd.grad(x, weight)[0] for x in recorded))


@pytest.mark.kernel
@pytest.mark.parametrize("function", [tied, lambda ids, weight: embedding(ids, weight, 1).square().sum()])
def test_compiles_fullgraph(function, device):
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if device != "cpu" else "aot_eager")
    ids, weight = randint(5, 8, device=device), randn(5, 6, device=device).requires_grad_()
    expected = torch.autograd.grad(function(ids, weight), weight)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(ids, weight), weight)[0], expected)


VOCAB, HIDDEN, TOKENS = 128256, 4096, 16384


def real_inputs(device, vocab=VOCAB, hidden=HIDDEN, tokens=TOKENS, dtype=torch.bfloat16):
    """Ids as text has them: a few very frequent ones (a quarter is padding), many rare ones."""
    torch.manual_seed(0)
    ids = (vocab * torch.rand(tokens, device=device) ** 4).long().clamp_(max=vocab - 1)
    ids[: tokens // 4] = 7
    weight = torch.randn(vocab, hidden, device=device, dtype=dtype).requires_grad_()
    return ids[torch.randperm(tokens, device=device)], weight, torch.randn(tokens, hidden, device=device, dtype=dtype)


def real_gradient(ids, weight, dy):
    return torch.autograd.grad(embedding(ids, weight), weight, dy)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("vocab", "hidden"), [(VOCAB, HIDDEN), (151936, 896), (1000, 100), (262208, 2560)])
def test_rounds_once(vocab, hidden, dtype, device):
    ids, weight, dy = real_inputs(device, vocab, hidden, dtype=dtype)
    assert torch.equal(embedding(ids, weight), weight[ids])
    ours = real_gradient(ids, weight, dy)
    assert torch.equal(ours, real_gradient(ids, weight, dy))
    used = torch.unique(ids)
    exact = torch.zeros(vocab, hidden, device=device, dtype=torch.float64).index_add_(0, ids, dy.double())[used]
    rounding = (exact.to(dtype) - exact).norm()
    assert (ours[used] - exact).norm() <= 1.01 * rounding + 2e-7 * exact.norm()
    ours[used] = 0
    assert not ours.any()


@pytest.mark.gpu
def test_more_than_2_to_31_elements(device):
    ids, weight, _ = real_inputs(device, 2**19 + 5, 4100, tokens=600_000)
    ids = ids % 5 + 2**19
    assert weight.numel() > 2**31
    dy = torch.ones((), device=device, dtype=torch.bfloat16).expand(600_000, 4100)
    assert torch.equal(embedding(ids, weight)[-1], weight[ids[-1]])
    counts = torch.bincount(ids - 2**19, minlength=5).bfloat16()
    assert torch.equal(real_gradient(ids, weight, dy)[2**19 :, 4099], counts)


@pytest.mark.gpu
def test_no_host_sync_and_cuda_graph(device):
    ids, weight, dy = real_inputs(device, 32000, 1024, 4096)
    there = torch.zeros_like(weight)

    def everything():
        embedding_backward_(there.zero_(), dy, ids, 7)
        hidden, head = tied_embedding(ids, weight)
        (tied,) = torch.autograd.grad((hidden * dy).sum() + head.sum(), weight)
        return real_gradient(ids, weight, dy), tied, there

    assert_replayed_without_host_sync(everything)


@pytest.mark.gpu
def test_peak_memory(device):
    """The gradient of the weight, and little for the tokens; next to a tied head there is no second gradient."""
    ids, weight, dy = real_inputs(device)
    table = weight.numel() * weight.element_size()

    def next_to_a_tied_head():
        hidden, head = tied_embedding(ids, weight)
        return torch.autograd.grad((hidden, head), weight, (dy, torch.zeros_like(head)))

    for run in (lambda: real_gradient(ids, weight, dy), next_to_a_tied_head):
        assert peak_memory(run) <= table + 2 * dy.numel() * dy.element_size() + 2**20
