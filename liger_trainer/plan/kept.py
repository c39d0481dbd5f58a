"""Which results checkpointed layers keep for the backward pass, instead of computing them again (`activation_memory`).

A layer can keep the results of its matmuls and of its attention. With the widths of `activations`, elements and FLOP a
token, where a token attends to C tokens in the mean:

    residual    H                       2 Q H           the attention's output projection
    attention   Q, log-sum-exps         4 Q C           C is half the length, less with a window
    q, k, v     Q + 2 K                 2 H (Q + 2 K)
    gate, up    2 I                     4 H I           not with `tiled_mlp`
    experts     2 k E                   4 H k E         gate and up of k experts a token, in our operator

Adapters change none of these widths. The down projection is not repeated by a recomputation. Norms, rope and
activations come last, as they save little time for their bytes; they are not counted here.

A result with more time a byte is kept before others; where two are equal, in this order. Time is counted in FLOP of
matmuls; attention takes `ATTENTION_TIME` as long for as many. Each is kept in the last
layers first: their bytes are free again before the gradients of the first layers exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from liger_trainer.plan.shapes import LayerShape

ATTENTION_TIME = 1.1
"""Time of attention's FLOP relative to a matmul's: Llama-3 8B at 4096 and 16384 tokens on an H200."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A result that a layer computes again, or keeps.

    Args:
        name: What it is.
        bytes: Bytes a token.
        time: Time a token that keeping it saves, in FLOP of matmuls.
        can_be_kept: Whether it can be.
    """

    name: str
    bytes: int
    time: float
    can_be_kept: bool = True


@dataclasses.dataclass(frozen=True)
class Kept:
    """What is kept.

    Args:
        layers: For each result, in how many of the last layers.
        bytes: Bytes of all layers.
        in_last: Bytes of the last layer.
        saved: Fraction of the recomputation's time that is saved.
    """

    layers: dict[str, int]
    bytes: int
    in_last: int
    saved: float


def layer_results(
    shape: LayerShape, compute: int, length: int, implementation: str = "sdpa", tiled_mlp: bool = False
) -> list[Result]:
    """The results of one layer.

    Args:
        shape: The layer.
        compute: Bytes per element of outputs of linear layers and attention.
        length: Tokens in a sequence.
        implementation: The attention implementation; ``"eager"`` has no attention in one call, which could be kept.
        tiled_mlp: Whether gated MLPs run in tiles of tokens; experts do not.
    """
    hidden, query, projected = shape.hidden, shape.query, shape.query + 2 * shape.key_value
    attended = ATTENTION_TIME * 4 * query * attended_tokens(shape, length)
    chosen = 2 * shape.experts_per_token * shape.expert_intermediate
    tiled = tiled_mlp and not shape.experts_per_token
    found = [
        Result("residual", compute * hidden, 2 * query * hidden),
        Result("attention", compute * query + 4 * shape.heads, attended, implementation != "eager"),
        Result("q, k, v", compute * projected, 2 * hidden * projected),
        Result("gate, up", compute * 2 * shape.intermediate, 4 * hidden * shape.intermediate, not tiled),
        Result("experts", compute * chosen, 2 * hidden * chosen, shape.fused_experts),
    ]
    return [result for result in found if result.bytes]


def attended_tokens(shape: LayerShape, length: int) -> float:
    """Tokens that a token attends to, in the mean over a sequence and over the layers, with and without windows."""
    window = min(shape.sliding_window or length, length)
    return shape.full_layers * length / 2 + (1 - shape.full_layers) * window * (1 - window / (2 * length))


def keep(results: Iterable[Result], layers: int, tokens: int, budget: int) -> Kept:
    """What fits into a budget.

    Args:
        results: The results of each layer.
        layers: Checkpointed layers.
        tokens: Tokens in a micro-batch on one GPU.
        budget: Bytes that all layers may keep.
    """
    results = list(results)
    left, kept = budget, dict.fromkeys((result.name for result in results), 0)
    best_first = sorted(results, key=lambda result: -result.time / result.bytes)
    for result in best_first:
        if result.can_be_kept:
            kept[result.name] = min(layers, left // (tokens * result.bytes))
            left -= kept[result.name] * tokens * result.bytes
    in_last = tokens * sum(result.bytes for result in results if kept[result.name])
    saved = sum(result.time * kept[result.name] for result in results)
    return Kept(kept, budget - left, in_last, saved / max(layers * sum(result.time for result in results), 1))


def most(results: Iterable[Result], layers: int, tokens: int) -> int:
    """Bytes of everything that can be kept; the arguments are those of `keep`."""
    return layers * tokens * sum(result.bytes for result in results if result.can_be_kept)
