"""Whether two models give the same tokens the same log-probabilities, up to what rounding explains.

Equal weights give equal bits where both models run the same kernels, which is the rule. Where they do not, as with
adapters that change nothing but round, what rounding does is measured: the model runs again with its embeddings changed
by one rounding each. A change of kernels in all layers moves the log-probabilities about as far as that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.trainers.checkpoints.run_state import random_numbers, set_random_numbers

_DRAWS = 3
_FACTOR = 4.0
"""How many times further than the furthest draw rounding may move: another attention moves 0.4 to 1 times as far."""

_TF32 = 2.0**-10
"""The precision of fp32 on an accelerator, whose matmuls may run in TF32."""


@contextlib.contextmanager
def first_scored_call(model: nn.Module, ids: torch.Tensor | None = None) -> Iterator[list[dict[str, Any]]]:
    """Notes the arguments of the first call of `model` in the context that asks for per-token statistics.

    With `ids`, of the first call for these `input_ids`: KTO scores others before them.
    """
    calls: list[dict[str, Any]] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        of_these = ids is None or kwargs.get("input_ids") is ids
        if not calls and not args and kwargs.get("fused_lm_head") and of_these:
            calls.append(kwargs)

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


@contextlib.contextmanager
def as_evaluated(model: nn.Module) -> Iterator[None]:
    """Without gradients, dropout and whatever else a model draws in training; random numbers and modes come back."""
    modes = [(module, module.training) for module in model.modules()]
    numbers = random_numbers()
    device = next((each.device for each in model.parameters() if each.is_cuda), None)
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([] if device is None else [device]):
            yield
    finally:
        for module, training in modes:
            module.training = training
        set_random_numbers(numbers)


def further_than_rounding(
    computed: Callable[[], torch.Tensor],
    expected: torch.Tensor,
    embeddings: nn.Module,
    eps: float | None,
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[float, float] | None:
    """How far `computed()` is from `expected`, and rounding from it; None if rounding explains the former.

    Args:
        computed: Computes log-probabilities `(N,)`, fp32, of a model, anew in each call.
        expected: `(N,)`, fp32.
        embeddings: The module of that model whose result is changed by one rounding.
        eps: The relative precision of its matmuls; None for that of the embeddings' dtype.
        gather: Gathers a tensor from all processes, so that all of them get the same answer.

    Returns:
        Root mean squares over the N of all processes.
    """
    own = computed()
    distance = _distance(own, expected, gather)
    if distance == 0.0:
        return None
    rounding = 0.0
    for _ in range(_DRAWS):
        handle = embeddings.register_forward_hook(lambda _, __, output: _rounded(output, eps))
        try:
            rounding = max(rounding, _distance(own, computed(), gather))
        finally:
            handle.remove()
    return (distance, rounding) if distance > _FACTOR * rounding else None


def _rounded(embedded: torch.Tensor, eps: float | None) -> torch.Tensor:
    """`embedded` with each element a rounding away."""
    if eps is None:
        eps = torch.finfo(embedded.dtype).eps
        eps = max(eps, _TF32) if embedded.device.type != "cpu" else eps
    signs = torch.randint_like(embedded, 2) * 2 - 1
    return embedded * (1 + eps * signs)


def _distance(a: torch.Tensor, b: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]) -> float:
    # Of two infinities the difference is NaN.
    difference = torch.where(a == b, 0.0, a - b)
    sums = gather(torch.stack([difference.square().sum(), difference.new_tensor(difference.numel())])[None])
    square, count = sums.sum(0).tolist()
    return float((square / max(count, 1.0)) ** 0.5)
