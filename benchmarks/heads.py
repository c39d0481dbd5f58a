"""Shared by the operations on an LM head: inputs, logits, the matmuls of their floor, and float64 in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, wide


def head_cases(data: Data, model: Model, tokens: int, upstream: bool = False) -> Iterator[Case]:
    """The head trained, and frozen. Logits have a standard deviation of 3, so probabilities are far from uniform.

    Args:
        data: Makes the inputs.
        model: Gives the sizes.
        tokens: Rows of hidden states.
        upstream: Whether the result is one number per token, each with its own gradient.
    """
    hidden = data.normal(tokens, model.hidden)
    weight = data.normal(model.vocab, model.hidden, scale=3 * model.hidden**-0.5)
    target = data.integers(model.vocab, tokens)
    gradients = (data.upstream(tokens, dtype=torch.float32),) if upstream else ()
    shape = f"N={tokens} H={model.hidden} V={model.vocab}"
    shape += "" if model.softcap is None else f" soft-cap {model.softcap:g}"
    for variant in ("", "frozen"):
        weight = weight.detach().requires_grad_(variant != "frozen")
        arguments = {"hidden": hidden, "weight": weight, "target": target, "softcap": model.softcap}
        yield Case(arguments, shape, Floor(matmuls=matmuls((hidden, weight))), gradients, variant)


def matmuls(*heads: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    """The matmuls of heads, given as (hidden, weight): the logits, and the gradients that are required."""

    def run() -> None:
        for hidden, weight in heads:
            inputs, matrix = hidden.detach(), weight.detach()
            logits = inputs @ matrix.T
            if hidden.requires_grad:
                torch.mm(logits, matrix)
            if weight.requires_grad:
                torch.mm(logits.T, inputs)

    return run


def head_logits(hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
    """Logits as models compute them, in float32 (or wider) after the matmul."""
    logits = wide(hidden @ weight.T)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def in_parts(
    function: Callable[..., torch.Tensor], *rows: torch.Tensor, size: int = 1024, **others: Any
) -> torch.Tensor:
    """Concatenated results of `function(*some_rows, **others)`, with the logits of only `size` rows at a time."""
    parts = [
        checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False, **others)
        for part in zip(*(tensor.split(size) for tensor in rows))
    ]
    return torch.cat(parts)
