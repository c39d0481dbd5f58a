"""CUDA graphs: forward and backward of every operator, and a training step made of them, replayed on new inputs."""

from __future__ import annotations

import pytest
import torch

from liger_trainer import functional as ops
from liger_trainer.kernels.recurrence import launch
from tests.device import captured
from tests.kernels.test_every_operator import RECURRENCES
from tests.operators import OPERATORS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_operator(operator, dtype, device, monkeypatch, request):
    name = request.node.callspec.id.split("-")[0].split(",")[0]
    if name in RECURRENCES and not launch.takes(16, 16, dtype, torch.empty(0, device=device).device, False):
        pytest.skip("plain torch runs in place of its kernels there, and the host reads where documents begin")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    tensors = operator.tensors(device, dtype)
    graph, results = captured(lambda: operator(*tensors))
    for seed in (1, 2):
        with torch.no_grad():
            for tensor, fresh in zip(tensors, operator.tensors(device, dtype, seed)):
                tensor.copy_(fresh)
        graph.replay()
        assert all(map(torch.equal, results, operator(*tensors)))


def test_training_step(device):
    """A decoder layer, the head and an update in one graph: the losses of ten replays are those of ten eager steps."""
    batch, length, heads, dim, vocab = 2, 64, 4, 32, 1000
    hidden = heads * dim
    generator = torch.Generator(device).manual_seed(0)

    def parameter(*shape):
        weight = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
        return weight.bfloat16().requires_grad_()

    def parameters():
        generator.manual_seed(0)
        shapes = {"embed": (vocab, hidden), "qkv": (3 * hidden, hidden), "out": (hidden, hidden)}
        shapes |= {"gate_up": (8 * hidden, hidden), "down": (hidden, 4 * hidden), "norms": (3, hidden)}
        return {name: parameter(*shape) for name, shape in shapes.items()}

    ids = torch.randint(0, vocab, (batch, length), generator=generator, device=device)
    angles = torch.rand(1, length, dim, generator=generator, device=device)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def step(p):
        x = torch.nn.functional.embedding(ids, p["embed"])
        normed = ops.rms_norm(x, p["norms"][0])
        qkv = (normed @ p["qkv"].t()).view(batch, length, 3, heads, dim)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        q, k = ops.rope(q, k, cos, sin)
        mixed = ops.softmax((q @ k.mT * dim**-0.5).float().tril()).to(v.dtype) @ v
        attended = mixed.transpose(1, 2).reshape(batch, length, hidden) @ p["out"].t()
        normed, x = ops.fused_add_rms_norm(attended, x, p["norms"][1])
        mlp = ops.swiglu_fused(normed @ p["gate_up"].t(), inplace_backward=True) @ p["down"].t()
        last = ops.rms_norm(x + mlp, p["norms"][2])
        loss = ops.linear_cross_entropy(last, p["embed"], ids.roll(-1, 1), logits_memory=2**18)
        given = ops.cross_entropy(last @ p["embed"].t(), ids.roll(-1, 1), inplace=True)
        total = loss + 0.5 * given
        gradients = torch.autograd.grad(total, list(p.values()))
        with torch.no_grad():
            for weight, gradient in zip(p.values(), gradients):
                weight.sub_(gradient, alpha=1.0)
        return total.detach()

    eager, replayed = parameters(), parameters()
    graph, loss = captured(lambda: step(replayed))
    with torch.no_grad():
        for weight, fresh in zip(replayed.values(), parameters().values()):
            weight.copy_(fresh)
    losses, expected = [], []
    for _ in range(10):
        graph.replay()
        losses.append(loss.clone())
        expected.append(step(eager))
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-2, atol=1e-2)
    assert losses[-1] < losses[0] - 0.3
