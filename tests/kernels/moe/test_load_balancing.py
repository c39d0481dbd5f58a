"""Auxiliary losses of routers: against transformers and the papers, kernels against float64, real sizes on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from liger_trainer import apply_liger_kernel
from liger_trainer.callbacks.router_balance import RouterBalanceCallback
from liger_trainer.functional import load_balancing_loss, router_losses, router_z_loss, topk_softmax_routing
from liger_trainer.kernels.moe import router_statistics as operators
from liger_trainer.parallel.router_losses import router_losses_reference
from tests.accuracy import seeded_randn
from tests.aot import TARGETS, compile_launch, recorded_launches
from tests.device import no_host_sync
from tests.steps import step_with

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
    errors = []
    for logits in layers(count=10, tokens=400, dtype=torch.bfloat16):
        exact = load_balancing_loss((logits.double(),), 2)
        ours, theirs = load_balancing_loss((logits,), 2), load_balancing_loss_func((logits,), 7, 2)
        assert ours.dtype == torch.float32
        assert abs(ours - exact) <= 2e-6 * exact
        errors.append(abs(theirs - exact).item())  # of one draw it may be next to nothing
    assert sum(errors) / len(errors) > 8e-6


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


def both(function, tensors, top_k, mask):
    losses = function(tensors, top_k, mask)
    gradients = [torch.autograd.grad(loss, tensors, retain_graph=True) for loss in losses]
    return [loss.detach() for loss in losses], [*gradients[0], *gradients[1]]


@pytest.mark.kernel
@given(
    tokens=st.integers(1, 200),
    experts=st.integers(1, 70),
    top_k=st.integers(1, 8),
    masked=st.booleans(),
    transposed=st.booleans(),
)
@settings(max_examples=5)
def test_equals_the_reference_in_float64(tokens, experts, top_k, masked, transposed):
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    tensors = [seeded_randn(tokens, experts, seed=seed, scale=2.0, device=device) for seed in range(2)]
    if transposed:
        tensors = [logits.mT.contiguous().mT for logits in tensors]
    mask = torch.arange(tokens, device=device).remainder(3).sign() if masked and tokens > 1 else None
    exact = [logits.double().requires_grad_() for logits in tensors]
    ours = both(router_losses, [logits.requires_grad_() for logits in tensors], min(top_k, experts), mask)
    expected = both(router_losses_reference, exact, min(top_k, experts), mask)
    for mine, right in zip([*ours[0], *ours[1]], [*expected[0], *expected[1]]):
        torch.testing.assert_close(mine.double(), right, rtol=2e-5, atol=1e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, device):
    tensors = [seeded_randn(50, 16, dtype=dtype, device=device).requires_grad_()]
    wide = [logits.detach().double().requires_grad_() for logits in tensors]
    losses, gradients = both(router_losses, tensors, 3, None)
    exact, exact_gradients = both(router_losses_reference, wide, 3, None)
    torch.testing.assert_close(losses, exact, rtol=1e-5, atol=0.0, check_dtype=False)
    for mine, right in zip(gradients, exact_gradients):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.kernel
def test_counts_of_equal_and_infinite_logits(device):
    """Every token has k experts: the first of equal logits, also where fewer than k are finite."""
    infinity = float("inf")
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [-infinity, 2.0, -infinity, -infinity, -3.0]], device=device)
    counts = operators.router_statistics([logits], None, 3)[:5]
    assert counts.tolist() == [2.0, 2.0, 1.0, 0.0, 1.0]


@pytest.mark.kernel
def test_zeros_of_either_sign_are_equal(device):
    """As they are to the router, which gives the token to the first of them."""
    logits = torch.tensor([[-0.0, 0.0, -1.0]], device=device)
    assert operators.router_statistics([logits], None, 1)[:3].tolist() == [1.0, 0.0, 0.0]
    assert topk_softmax_routing(logits, 1)[1].tolist() == [[0]]


@pytest.mark.kernel
def test_no_tokens(device):
    logits = torch.empty(0, 4, device=device).requires_grad_()
    statistics = operators.router_statistics([logits, logits], None, 2)
    assert statistics.tolist() == [0.0] * 9
    assert torch.autograd.grad(statistics.sum(), logits)[0].shape == (0, 4)


@pytest.mark.kernel
def test_a_padded_token_gets_no_gradient(device):
    logits = seeded_randn(6, 5, device=device).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 0, 1], device=device)
    (gradient,) = torch.autograd.grad(load_balancing_loss(logits, 2, mask), logits)
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[mask == 1] != 0).all()


# Real sizes. That the losses are those of transformers is shown above, with the reference.


def large_layers(count, tokens, experts, device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return tuple(torch.randn(tokens, experts, device=device, dtype=dtype).requires_grad_() for _ in range(count))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(8192, 128, 8), (70001, 8, 2), (333, 512, 10), (64, 60, 4)])
def test_real_sizes_equal_the_reference_in_float64(tokens, experts, top_k, dtype, device):
    tensors = large_layers(3, tokens, experts, device, dtype)
    mask = torch.arange(tokens, device=device).remainder(5).sign()
    exact = tuple(logits.detach().double().requires_grad_() for logits in tensors)
    for weights in (None, mask):
        losses, gradients = both(router_losses, tensors, top_k, weights)
        right, right_gradients = both(router_losses_reference, exact, top_k, weights)
        torch.testing.assert_close(losses, right, rtol=1e-5, atol=0.0, check_dtype=False)
        for mine, expected in zip(gradients, right_gradients):
            assert mine.dtype == dtype
            # Where experts are used equally, the terms of a gradient nearly cancel: its norm is compared.
            # float16 underflows for a gradient that is divided by this many tokens.
            rounding = torch.finfo(dtype)
            least = rounding.tiny * rounding.eps * expected.numel() ** 0.5
            assert (mine.double() - expected).norm() <= max(rounding.eps, 1e-4) * expected.norm() + least


@pytest.mark.gpu
def test_more_than_2_to_31_elements(device):
    logits = torch.empty(2**22 + 64, 512, device=device, dtype=torch.bfloat16).normal_().requires_grad_()
    mask = torch.zeros(logits.shape[0], device=device)
    mask[-64:] = 1.0
    last = logits.detach()[-64:].double().requires_grad_()
    losses, (balance, z) = both(router_losses, (logits,), 8, mask)
    right, expected = both(router_losses_reference, (last,), 8, None)
    torch.testing.assert_close(losses, right, rtol=1e-5, atol=0.0, check_dtype=False)
    for mine, exact in zip((balance, z), expected):
        torch.testing.assert_close(mine[-64:].double(), exact, rtol=1e-2, atol=1e-8)


@pytest.mark.gpu
def test_the_same_bits_in_every_run_and_no_host_sync(device):
    tensors = large_layers(6, 8192, 128, device)
    mask = torch.ones(8, 1024, device=device, dtype=torch.long)
    first = both(router_losses, tensors, 8, mask)
    with no_host_sync():
        again = both(router_losses, tensors, 8, mask)
        both(router_losses, tensors, 8, None)
    assert all(map(torch.equal, [*first[0], *first[1]], [*again[0], *again[1]]))


@pytest.mark.gpu
def test_forward_keeps_nothing_and_backward_makes_the_gradients_alone(device):
    tensors = large_layers(8, 32768, 128, device)
    one = tensors[0].numel() * tensors[0].element_size()
    torch.autograd.grad(load_balancing_loss(tensors, 8), tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = load_balancing_loss(tensors, 8)
    assert torch.cuda.max_memory_allocated() - before < one / 2
    gradients = torch.autograd.grad(loss, tensors)
    assert torch.cuda.max_memory_allocated() - before < (len(gradients) + 0.5) * one


@pytest.mark.gpu
def test_a_training_step_of_a_model_does_not_wait_for_the_device(device):
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True))
    model = model.to(device, torch.bfloat16).train()
    report = apply_liger_kernel(model)
    assert any(row.component == "load_balancing_loss" and row.applied for row in report)
    callback = RouterBalanceCallback()
    callback.on_train_begin(None, None, None, model=model)
    ids = torch.randint(512, (2, 64), device=device)

    def step():
        z_losses = []
        with step_with(z_losses=z_losses):
            outputs = model(input_ids=ids, labels=ids)
        (outputs.loss + 0.01 * z_losses[0]).backward()

    step()
    callback._take(torch.device(device))
    with no_host_sync():
        step()
    tokens, dropped = callback._take(torch.device(device))
    assert tokens.sum(1).tolist() == [2 * 64 * 2] * 2
    assert dropped == 0
    callback._release()
