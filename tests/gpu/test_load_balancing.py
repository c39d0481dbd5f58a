"""The routers' auxiliary losses and their callback on a GPU: real shapes, index width, memory, sums, host syncs."""

import contextlib

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM, masking_utils
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from liger_trainer import apply_liger_kernel
from liger_trainer.callbacks.router_balance import RouterBalanceCallback
from liger_trainer.functional import load_balancing_loss, router_losses
from liger_trainer.kernels.moe.load_balancing import router_losses_reference
from liger_trainer.patching.moe.load_balancing import recorded_z_losses

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def no_sync():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layers(count, tokens, experts, device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return tuple(torch.randn(tokens, experts, device=device, dtype=dtype).requires_grad_() for _ in range(count))


def both(function, tensors, top_k, mask):
    losses = function(tensors, top_k, mask)
    gradients = [torch.autograd.grad(loss, tensors, retain_graph=True) for loss in losses]
    return [loss.detach() for loss in losses], [*gradients[0], *gradients[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(8192, 128, 8), (70001, 8, 2), (333, 512, 10), (64, 60, 4)])
def test_equals_the_reference_in_float64(tokens, experts, top_k, dtype, device):
    tensors = layers(3, tokens, experts, device, dtype)
    mask = torch.arange(tokens, device=device).remainder(5).sign()
    exact = tuple(logits.detach().double().requires_grad_() for logits in tensors)
    for weights in (None, mask):
        losses, gradients = both(router_losses, tensors, top_k, weights)
        right, right_gradients = both(router_losses_reference, exact, top_k, weights)
        torch.testing.assert_close(losses, right, rtol=1e-5, atol=0.0, check_dtype=False)
        for mine, expected in zip(gradients, right_gradients):
            assert mine.dtype == dtype
            # Where experts are used alike the terms of a gradient nearly cancel: the rest is compared as a whole.
            # float16 cannot hold much of one that is divided by this many tokens.
            rounding = torch.finfo(dtype)
            least = rounding.tiny * rounding.eps * expected.numel() ** 0.5
            assert (mine.double() - expected).norm() <= max(rounding.eps, 1e-4) * expected.norm() + least


def test_equals_transformers(device):
    tensors = layers(4, 4096, 128, device, torch.float32)
    mask = torch.ones(4, 1024, device=device)
    mask[:, 900:] = 0
    for weights in (None, mask):
        expected = load_balancing_loss_func(tensors, 128, 8, weights)
        ours = load_balancing_loss(tensors, 8, weights)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0.0)
        gradients = [torch.autograd.grad(loss, tensors) for loss in (ours, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-9)


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


def test_the_same_bits_in_every_run_and_no_host_sync(device):
    tensors = layers(6, 8192, 128, device)
    mask = torch.ones(8, 1024, device=device, dtype=torch.long)
    first = both(router_losses, tensors, 8, mask)
    with no_sync():
        again = both(router_losses, tensors, 8, mask)
        both(router_losses, tensors, 8, None)
    assert all(map(torch.equal, [*first[0], *first[1]], [*again[0], *again[1]]))


def test_forward_keeps_nothing_and_backward_makes_the_gradients_alone(device):
    tensors = layers(8, 32768, 128, device)
    one = tensors[0].numel() * tensors[0].element_size()
    torch.autograd.grad(load_balancing_loss(tensors, 8), tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = load_balancing_loss(tensors, 8)
    assert torch.cuda.max_memory_allocated() - before < one / 2
    gradients = torch.autograd.grad(loss, tensors)
    assert torch.cuda.max_memory_allocated() - before < (len(gradients) + 0.5) * one


def test_a_training_step_of_a_model_does_not_wait_for_the_device(device, monkeypatch):
    # transformers itself reads the position ids back to choose its attention kernel.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
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
        with recorded_z_losses() as z_losses:
            outputs = model(input_ids=ids, labels=ids)
        (outputs.loss + 0.01 * z_losses[0]).backward()

    step()
    callback._take(torch.device(device))
    with no_sync():
        step()
    tokens, dropped = callback._take(torch.device(device))
    assert tokens.sum(1).tolist() == [2 * 64 * 2] * 2
    assert dropped == 0
    callback._release()
