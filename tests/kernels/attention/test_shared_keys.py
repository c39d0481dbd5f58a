"""Attention of completions to a prompt that is computed once for all of them, against the dense mask in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.attention import attention_launch
from liger_trainer.kernels.attention.attention import attention, attention_reference
from liger_trainer.kernels.attention.attention_launch import Spans, Tile
from liger_trainer.kernels.attention.plan import dense
from liger_trainer.kernels.rows import DeviceLimits
from tests.accuracy import seeded_randn
from tests.aot import compile_launch, recorded_launches
from tests.calls import saved_tensors
from tests.kernels.attention.shared_prompts import Group, mask_of, plan_of, tokens_of
from tests.kernels.attention.test_attention import check, check_operator, distances, in_double, operands, results

GROUPS = {
    "one": (Group(5, (2,)),),
    "three": (Group(64, (1, 2, 63)),),
    "eight": (Group(70, (65, 1, 2, 63, 1, 0, 2, 5)),),
    "several": (Group(1, (63,)), Group(5, (1, 65, 2)), Group(64, (2, 0)), Group(0, (3,)), Group(7, ())),
}
SEVERAL = GROUPS["several"]
FEW = Group(5, (9, 0)), Group(0, (3,))
WINDOWS = [0, 1, 2, 40, 68, 1000]  # all; itself; below a completion; between; a prompt and some; beyond everything


def tensors_of(groups, device, dtype=torch.float32, heads=(2, 1), head_dim=16):
    return operands(device, dtype, heads, head_dim, length=tokens_of(groups), batch=1)


@pytest.mark.parametrize("trimmed", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_the_plan_is_the_mask(groups, window, trimmed):
    tokens, plan = tokens_of(groups), plan_of(groups, window, trimmed=trimmed)
    assert torch.equal(dense(plan, 1, tokens, torch.device("cpu"))[0, 0], mask_of(groups, window))
    assert not plan.masks_nothing


def test_a_plan_with_keys_is_for_one_row():
    with pytest.raises(ValueError, match="`batch` is 2; a plan with `keys` is for one row"):
        dense(plan_of(SEVERAL, 0), 2, tokens_of(SEVERAL) // 2, torch.device("cpu"))


@pytest.mark.kernel
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_values_and_gradients(groups, window, device):
    # The weight of one key is 1, whatever its score; beside a sink it has gradients.
    sinks = seeded_randn(2, seed=5, device=device) if window == 1 else None
    check(tensors_of(groups, device), sinks, plan_of(groups, window, device))


@pytest.mark.kernel
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((6, 2), 16), ((3, 1), 80), ((2, 2), 64), ((2, 1), 256), ((2, 1), 512)], ids=str
)
def test_heads_soft_caps_and_sinks(heads, head_dim, softcap, window, device):
    groups = Group(9, (1, 20, 0)), Group(1, (17, 2))
    for dtype in (torch.float32, torch.bfloat16):
        sinks = seeded_randn(heads[0], seed=5, dtype=dtype, device=device)
        check(
            tensors_of(groups, device, dtype, heads, head_dim), sinks, plan_of(groups, window, device), softcap=softcap
        )


@pytest.mark.kernel
@pytest.mark.parametrize("tile", [(16, 16), (16, 64), (64, 16)], ids=str)
@pytest.mark.parametrize("window", [0, 2, 33])
@pytest.mark.parametrize("trimmed", [True, False])
def test_any_tile(window, trimmed, tile, device, monkeypatch):
    """Prompts of more and fewer keys than a tile, and keys that no query of their document sees."""
    monkeypatch.setattr(attention_launch, "tile_for", lambda *kernel: Tile(*tile, 4, 1))
    groups = Group(70, (1, 40)), Group(3, (20,))
    check(tensors_of(groups, device), None, plan_of(groups, window, device, trimmed))


@pytest.mark.kernel
@pytest.mark.parametrize("window", [2, 40, 68])
@pytest.mark.parametrize("step", [-1, 1])
def test_a_window_off_by_one_is_seen(window, step, device):
    groups = GROUPS["eight"]
    tensors = tensors_of(groups, device)
    truth = results(attention_reference, in_double(*tensors), None, plan_of(groups, window, device))
    off = results(attention, tensors, None, plan_of(groups, window + step, device))
    assert min(distances(off, truth)) > 1e-3


@pytest.mark.kernel
def test_every_element_is_written_with_the_same_bits(device):
    """New memory holds NaN: `tests/uninitialised.py`."""
    tensors, plan = tensors_of(SEVERAL, device), plan_of(SEVERAL, 40, device)
    first, second = (results(attention, tensors, None, plan) for _ in range(2))
    assert all(x.isfinite().all() for x in first)
    assert all(map(torch.equal, first, second))


@pytest.mark.kernel
@pytest.mark.parametrize("heads_first", [False, True])
def test_opcheck(heads_first, device):
    check_operator(tensors_of(FEW, device), True, plan_of(FEW, 7, device), 2.0, heads_first)


@pytest.mark.kernel
def test_traced_in_one_graph(device):
    tensors, plan = tensors_of(SEVERAL, device), plan_of(SEVERAL, 7, device)
    torch.compiler.reset()
    traced = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for one, other in zip(*(results(run, tensors, None, plan) for run in (traced, attention)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.kernel
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant, device):
    def checkpointed(q, k, v, **options):
        return checkpoint(lambda *x: attention(*x, **options), q, k, v, use_reentrant=reentrant)

    tensors, plan = tensors_of(SEVERAL, device), plan_of(SEVERAL, 7, device)
    gradients = []
    for function in (attention, checkpointed):
        leaves = [x.detach().requires_grad_() for x in tensors]
        function(*leaves, plan=plan).square().sum().backward()
        gradients.append([x.grad for x in leaves])
    assert all(map(torch.equal, *gradients))


@pytest.mark.kernel
def test_copies_of_keys_are_not_kept(device):
    """They would take as much memory as the prompts that are not computed again."""
    q, k, v = (x.requires_grad_() for x in tensors_of(SEVERAL, device))
    with saved_tensors() as saved:
        attention(q, k, v, plan=plan_of(SEVERAL, 0, device))
    assert [x.shape for x in saved if x.dim() == 4] == [q.shape, k.shape, v.shape, q.shape]


def test_kernels_compile(monkeypatch):
    """On one target: keys elsewhere than their queries are other addresses, and take no other memory."""
    limits = DeviceLimits(max_warps=16, shared_memory=227 * 1024)
    monkeypatch.setattr(attention_launch, "device_limits", lambda device: limits)
    q, k = (torch.zeros(n, heads, 256, dtype=torch.bfloat16) for n, heads in ((640, 4), (1024, 2)))
    offsets, keys = torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    spans = Spans(offsets, 128, 100, 1.0, 50.0, keys, 256)
    with recorded_launches() as launches:
        out, lse = attention_launch.forward(q, k, k, spans)
        attention_launch.backward(q, q, k, k, out, lse, spans)
    assert len(launches) == 5
    for launch in launches:
        assert compile_launch(launch, "sm_90").metadata.shared <= 227 * 1024


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU: real sizes, on torch's flash operator and, with a soft-cap, on our kernels
# ---------------------------------------------------------------------------------------------------------------------

REAL = (Group(1024, (512, 64, 1, 300, 700, 65, 0, 2)), Group(70, (900, 63)), Group(1, (2,)))


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("window", [0, 1, 256, 1100])
@pytest.mark.parametrize(("heads", "head_dim"), [((6, 2), 64), ((4, 1), 80), ((4, 4), 128), ((4, 2), 256)], ids=str)
def test_real_sizes(heads, head_dim, window, softcap, device):
    for dtype in (torch.bfloat16, torch.float16):
        sinks = seeded_randn(heads[0], seed=5, dtype=dtype, device=device)
        tensors = tensors_of(REAL, device, dtype, heads, head_dim)
        for b in [sinks] if window == 1 else [None, sinks]:
            check(tensors, b, plan_of(REAL, window, device), softcap=softcap)


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [False, True])
def test_opcheck_on_flash(heads_first, device):
    check_operator(tensors_of(FEW, device, torch.bfloat16), True, plan_of(FEW, 7, device), 0.0, heads_first)
