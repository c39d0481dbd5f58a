"""Matrices in 4 bits under torch.compile, whose CUDA graphs allow no memory of theirs to be kept between calls."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.functional import LoRA, LoRALayer, lora_mlp
from tests.interpreter.test_nf4 import moved
from tests.kernels.test_nf4 import random_weight

pytestmark = pytest.mark.gpu

HIDDEN, INTERMEDIATE, RANK = 256, 512, 8


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_training_steps(mode, device):
    torch.manual_seed(0)
    layers, leaves = [], []
    for rows, columns in ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
        a, b = (torch.randn(shape, device=device) / 16 for shape in ((RANK, columns), (rows, RANK)))
        leaves += [a.requires_grad_(), b.requires_grad_()]
        layers.append(LoRALayer(moved(random_weight(rows, columns), device), None, (LoRA(a, b, 0.5),)))

    def loss(x):
        return lora_mlp(x, *layers).float().square().mean()

    torch.compiler.reset()
    compiled = torch.compile(loss, mode=mode, fullgraph=True)
    for _ in range(4):  # warm-up, recording, replays
        x = torch.randn(64, HIDDEN, device=device).bfloat16()
        torch.compiler.cudagraph_mark_step_begin()
        got = [each.clone() for each in torch.autograd.grad(compiled(x), leaves)]
        for one, other in zip(got, torch.autograd.grad(loss(x), leaves)):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-2 * float(other.abs().max()))
