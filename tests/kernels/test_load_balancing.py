"""The auxiliary losses of mixtures of experts: against transformers and the formulas; arguments; compilation."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from liger_trainer.functional import load_balancing_loss, router_losses, router_z_loss
from liger_trainer.kernels.moe import router_statistics as operators
from tests.accuracy import seeded_randn
from tests.aot import TARGETS, compile_launch, recorded_launches

MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]])


def layers(count=3, tokens=12, experts=7, dtype=torch.float32, scale=2.0):
    return tuple(
        seeded_randn(tokens, experts, seed=seed, dtype=dtype, scale=scale).requires_grad_() for seed in range(count)
    )


def with_gradients(loss, tensors):
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("mask", [None, MASK, MASK.bool()], ids=["no mask", "mask", "booleans"])
@pytest.mark.parametrize("top_k", [1, 2, 7])
def test_equals_transformers(mask, top_k):
    tensors = layers()
    expected = with_gradients(load_balancing_loss_func(tensors, 7, top_k, mask), tensors)
    torch.testing.assert_close(with_gradients(load_balancing_loss(tensors, top_k, mask), tensors), expected)


def written_out(tensors, top_k, mask):
    """Both losses from their papers, token by token, in float64."""
    rows = [(x, m) for logits in tensors for x, m in zip(logits.double(), mask.reshape(-1).double())]
    tokens = sum(m for _, m in rows)
    chosen, average, squares = torch.zeros(7).double(), torch.zeros(7).double(), 0.0
    for x, m in rows:
        chosen = chosen.index_add(0, x.argsort(descending=True)[:top_k], m.expand(top_k))
        average = average + m * (x.exp() / x.exp().sum())
        squares = squares + m * x.exp().sum().log() ** 2
    return 7 * (chosen / tokens * average / tokens).sum(), squares / tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_formulas_in_float64(dtype):
    tensors = layers(dtype=dtype)
    balance, z = written_out(tensors, 2, MASK)
    ours = router_losses(tensors, 2, MASK)
    assert ours.z.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 1e-7, "atol": 1e-12}
    for loss, expected in ((ours.load_balancing, balance), (ours.z, z), (router_z_loss(tensors, MASK), z)):
        mine = torch.autograd.grad(loss, tensors, retain_graph=True)
        theirs = torch.autograd.grad(expected, tensors, retain_graph=True)
        torch.testing.assert_close(loss.double(), expected, **tolerance)
        torch.testing.assert_close(mine, theirs, **tolerance)


def test_half_precision_is_nearer_to_float64_than_transformers():
    tensors = layers(tokens=400, dtype=torch.bfloat16)
    exact = load_balancing_loss(tuple(logits.double() for logits in tensors), 2)
    ours, theirs = load_balancing_loss(tensors, 2), load_balancing_loss_func(tensors, 7, 2)
    assert ours.dtype == torch.float32
    assert abs(ours - exact) <= 1e-6 < abs(theirs - exact)


def test_least_where_all_experts_get_as_much_and_most_where_one_gets_all():
    balanced = torch.eye(4).repeat(3, 1).requires_grad_()
    torch.testing.assert_close(load_balancing_loss(balanced, 1), torch.tensor(1.0))
    collapsed = torch.zeros(12, 4)
    collapsed[:, 2] = 50.0
    torch.testing.assert_close(load_balancing_loss(collapsed, 1), torch.tensor(4.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_balancing_loss((), 1), "`router_logits` has the shapes"),
        (lambda: load_balancing_loss((torch.ones(3, 4), torch.ones(3, 5)), 1), "`router_logits` has the shapes"),
        (lambda: load_balancing_loss(torch.ones(1, 3, 4), 1), "`router_logits` has the shapes"),
        (lambda: load_balancing_loss(torch.ones(3, 4, dtype=torch.long), 1), "give floats"),
        (lambda: load_balancing_loss(torch.ones(3, 4), 5), "`top_k` is 5; with 4 experts"),
        (lambda: load_balancing_loss(torch.ones(3, 4), 0), "`top_k` is 0"),
        (lambda: router_z_loss(torch.ones(3, 4), torch.ones(2)), r"`attention_mask` has shape \(2,\)"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_ahead_of_time(target):
    tensors, mask = [torch.zeros(40, 128, dtype=torch.bfloat16)], torch.ones(40)
    with recorded_launches() as launches:
        operators.router_statistics(tensors, mask, 8)
        operators.router_statistics_backward(torch.zeros(257), tensors, mask)
    assert len(launches) == 2
    for launch in launches:
        compile_launch(launch, target)
