"""Gradient error of the linear cross entropy against float64: `python -m benchmarks.gradient_error`.

Inputs and weights are bf16; the reference runs in float64 on the same values. "eager" is what a model without kernels
does (bf16 matmul, float32 loss), the yardstick: no provider should be further from the truth than it.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks.workloads import liger_linear_cross_entropy, randn

SHAPES = {
    "llama_8k": (8192, 4096, 128256, None),
    "llama_32k": (32768, 4096, 128256, None),
    "gemma_8k": (8192, 2560, 262208, 30.0),
    "qwen_16k": (16384, 2048, 151936, None),
}


def float64_gradients(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the mean loss with respect to hidden states and weight, 1024 rows at a time, in float64."""
    weight64 = weight.double().requires_grad_()
    dx, total = [], torch.zeros_like(weight64)
    for rows in torch.arange(len(x), device=x.device).split(1024):
        x64 = x[rows].double().requires_grad_()
        logits = x64 @ weight64.T
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        loss = F.cross_entropy(logits, target[rows], reduction="sum") / len(x)
        x_gradient, weight_gradient = torch.autograd.grad(loss, (x64, weight64))
        dx.append(x_gradient)
        total += weight_gradient
    return torch.cat(dx), total


def distance(gradient: torch.Tensor, truth: torch.Tensor) -> float:
    """‖gradient - truth‖ / ‖truth‖, a slice at a time to bound memory."""
    difference = sum((g.double() - t).pow(2).sum() for g, t in zip(gradient.split(8192), truth.split(8192)))
    return (difference.sqrt() / truth.norm()).item()


def main() -> None:
    """Prints one row per shape and provider."""
    from liger_trainer.functional import linear_cross_entropy

    table = Table("shape", "provider", "error of dX", "error of dW")
    for name, (rows, hidden, vocab, softcap) in SHAPES.items():
        x, weight = randn(rows, hidden), randn(vocab, hidden, scale=3 * hidden**-0.5)
        target = torch.randint(vocab, (rows,), device="cuda")
        truth = float64_gradients(x.detach(), weight.detach(), target, softcap)

        def eager(x: torch.Tensor, weight: torch.Tensor, cap: float | None = softcap, t: torch.Tensor = target):
            total = x.new_zeros((), dtype=torch.float32)
            for rows in range(0, len(x), 8192):
                logits = F.linear(x[rows : rows + 8192], weight).float()
                logits = logits if cap is None else cap * torch.tanh(logits / cap)
                total = total + F.cross_entropy(logits, t[rows : rows + 8192], reduction="sum")
            return total / len(x)

        providers = {
            "eager": eager,
            "liger_trainer": lambda x, w, t=target, c=softcap: linear_cross_entropy(x, w, t, softcap=c),
        }
        if importlib.util.find_spec("liger_kernel"):
            providers["liger C=8"] = liger_linear_cross_entropy(target, softcap, 8)
        for provider, function in providers.items():
            gradients = torch.autograd.grad(function(x, weight), (x, weight))
            table.add_row(name, provider, *(f"{distance(own, true):.2e}" for own, true in zip(gradients, truth)))
            torch.cuda.empty_cache()
        table.add_section()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
