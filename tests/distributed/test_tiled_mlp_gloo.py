"""tiled_mlp on two gloo processes: the gradients of one process on both batches, and one gradient for each hook."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.distributed.tensor_parallel import gradients
from tests.distributed.two_processes import WORLD

HIDDEN, INTERMEDIATE, LAYERS = 8, 12, 2


class Layer(nn.Module):
    def __init__(self, tiled: bool, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.ModuleDict({"up": nn.Linear(HIDDEN, INTERMEDIATE), "down": nn.Linear(INTERMEDIATE, HIDDEN)})
        self.tiled, self.checkpointed = tiled, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        from liger_trainer.tiling.tiled_mlp import tiled_mlp

        def forward(module: nn.Module, tile: torch.Tensor) -> torch.Tensor:
            return module["down"](F.gelu(module["up"](tile)))

        normed = self.norm(x)
        return x + (tiled_mlp(forward, self.mlp, normed, 3) if self.tiled else forward(self.mlp, normed))


def _model(**options: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(**options) for _ in range(LAYERS)))


def _batch() -> torch.Tensor:
    return torch.randn(2 * WORLD, 5, HIDDEN, generator=torch.Generator().manual_seed(1))


def _check(model: nn.Module) -> None:
    single = _model(tiled=False)
    single(_batch()).square().mean().backward()
    torch.testing.assert_close(gradients(model), gradients(single), rtol=1e-5, atol=1e-6)


def _ddp(rank: int) -> None:
    model = _model(tiled=True)
    wrapped, seen = nn.parallel.DistributedDataParallel(model), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(id(parameter)))
    for _ in range(2):
        model.zero_grad()
        seen.clear()
        wrapped(_batch().chunk(WORLD)[rank]).square().mean().backward()
        _check(model)
        assert sorted(seen) == sorted(id(parameter) for parameter in model.parameters())


def _fsdp2(rank: int, reshard: bool, checkpointed: bool) -> None:
    model = _model(tiled=True, checkpointed=checkpointed)
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=reshard)
    for _ in range(2):
        model.zero_grad()
        model(_batch().chunk(WORLD)[rank]).square().mean().backward()
        _check(model)


def _patched(rank: int) -> None:
    """A model with the `tiled_mlp` switch, its layers checkpointed, as the Trainer runs it."""
    from liger_trainer import apply_liger_kernel
    from tests.tiny_models import TINY_MODELS

    ids = torch.randint(3, 120, (2 * WORLD, 9), generator=torch.Generator().manual_seed(1))
    single, model = TINY_MODELS["llama"](), TINY_MODELS["llama"]()
    assert any(row.kernel == "swiglu, in tiles" for row in apply_liger_kernel(model, {"tiled_mlp": True}))
    model.train().gradient_checkpointing_enable()
    wrapped = nn.parallel.DistributedDataParallel(model)
    single(input_ids=ids, labels=ids).loss.backward()
    for _ in range(2):
        model.zero_grad()
        mine = ids.chunk(WORLD)[rank]
        wrapped(input_ids=mine, labels=mine).loss.backward()
        torch.testing.assert_close(gradients(model), gradients(single), rtol=1e-4, atol=1e-5)


CASES = {
    "ddp": _ddp,
    "a patched model under ddp, its layers checkpointed": _patched,
    "fsdp2": partial(_fsdp2, reshard=False, checkpointed=False),
    "fsdp2, resharded": partial(_fsdp2, reshard=True, checkpointed=False),
    "fsdp2, resharded, in a checkpointed layer": partial(_fsdp2, reshard=True, checkpointed=True),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
