"""A gated MLP in tiles at the shape of a real model."""

import pytest
import torch

from liger_trainer.nn import LigerSwiGLUMLP
from liger_trainer.tiling.tiled_mlp import tiled_mlp


def randn(*shape, device="cuda", dtype=torch.bfloat16, scale=2.0):
    return scale * torch.randn(shape, device=device, dtype=dtype)


def peak(run):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


HIDDEN, INTERMEDIATE = 4096, 14336


@pytest.mark.gpu
def test_tiles_need_the_memory_of_a_tile(device):
    class Config:
        hidden_size, intermediate_size, hidden_act = HIDDEN, INTERMEDIATE, "silu"

    with torch.device(device):
        mlp = LigerSwiGLUMLP(Config()).bfloat16()
    x, dy = randn(1, 32768, HIDDEN, scale=1.0).requires_grad_(), randn(1, 32768, HIDDEN, scale=1.0)
    leaves = [x, *mlp.parameters()]

    def tiled(num_tiles=None):
        y = tiled_mlp(LigerSwiGLUMLP.forward, mlp, x, num_tiles)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    tiled(8)
    weights = sum(p.numel() for p in mlp.parameters())
    floor = 2 * x.numel() * 2 + weights * (4 + 2)  # y, dx; the summed and the rounded gradients
    whole = peak(lambda: torch.autograd.grad(mlp(x), leaves, dy))
    assert peak(tiled) <= floor + 640 * 2**20 < whole
    expected = [mlp(x), *torch.autograd.grad(mlp(x), leaves, dy)]
    for ours, right in zip(tiled(), expected):
        assert (ours - right).norm() <= 5e-3 * right.norm()
