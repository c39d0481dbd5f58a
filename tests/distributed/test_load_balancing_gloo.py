"""Two gloo processes balance their global batch, and count its tokens together."""

from __future__ import annotations

import pathlib
import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from liger_trainer.functional import load_balancing_loss
from tests.distributed.two_processes import WORLD


def _layers(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [(2 * torch.randn(10, 6, generator=generator) + rank).requires_grad_() for _ in range(3)]


def _mask(rank: int) -> torch.Tensor:
    return torch.arange(10).ge(2) if rank else torch.arange(10).lt(8)  # as many tokens on both


def _loss_is_that_of_the_global_batch(rank: int) -> None:
    everything = [_layers(other) for other in range(WORLD)]
    whole = [torch.cat(parts) for parts in zip(*everything)]
    expected = load_balancing_loss(whole, 2, torch.cat([_mask(other) for other in range(WORLD)]))
    own = load_balancing_loss(everything[rank], 2, _mask(rank), process_group=dist.group.WORLD)
    alone = load_balancing_loss(everything[rank], 2, _mask(rank))
    mean = own.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / WORLD, expected.detach())
    assert (own - alone).abs() > 1e-3
    gradients = torch.autograd.grad(expected, everything[rank])
    # What data parallelism makes of the gradients is their mean.
    torch.testing.assert_close(
        [gradient / WORLD for gradient in torch.autograd.grad(own, everything[rank])], list(gradients)
    )


def _model() -> nn.Module:
    from tests.tiny_models import TINY_MODELS

    return TINY_MODELS["qwen3_moe"](output_router_logits=True, router_aux_loss_coef=1.0).train()


def _ids(rank: int) -> torch.Tensor:
    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(rank))


def _a_model_with_the_flag_trains_on_the_global_loss(rank: int) -> None:
    from liger_trainer import apply_liger_kernel

    model, reference = _model(), _model()
    apply_liger_kernel(model, {"global_load_balancing": True})
    own = model(input_ids=_ids(rank)).aux_loss
    whole = reference(input_ids=torch.cat([_ids(other) for other in range(WORLD)])).aux_loss
    mean = own.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / WORLD, whole.detach())
    if rank == 0:  # without a gradient, as in evaluation and generation, nobody waits for the others
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=_ids(0)).aux_loss, reference(input_ids=_ids(0)).aux_loss)


def _the_callbacks_sum_over_the_processes(rank: int) -> None:
    from liger_trainer.callbacks.router_balance import RouterBalanceCallback
    from liger_trainer.callbacks.router_z_loss import RouterZLossCallback

    with tempfile.TemporaryDirectory() as folder:
        args = SimpleNamespace(device=torch.device("cpu"), output_dir=folder)
        state = SimpleNamespace(global_step=1, is_world_process_zero=rank == 0)
        model, callback = _model(), RouterBalanceCallback()
        callback.on_train_begin(args, state, None, model=model)
        chosen = model(input_ids=_ids(rank)).router_logits
        callback.metrics(args, state)
        callback.on_train_end(args, state, None)
        assert (pathlib.Path(folder) / "router_balance.png").exists() == (rank == 0)
    top = torch.stack([logits.topk(2).indices.reshape(-1).bincount(minlength=4) for logits in chosen])
    dist.all_reduce(top)
    assert torch.equal(callback.history[0][1], top)

    z_losses = RouterZLossCallback()
    z_losses.observe(torch.tensor(1.0 + rank))
    assert z_losses.metrics(args, state) == {"router_z_loss": 1.5}


CASES = {
    "loss": _loss_is_that_of_the_global_batch,
    "model": _a_model_with_the_flag_trains_on_the_global_loss,
    "callbacks": _the_callbacks_sum_over_the_processes,
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
