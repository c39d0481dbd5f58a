"""Whether two models compute the same logits, within the rounding of a dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

ROWS, TOKENS = 4, 64
"""Random rows: with 256 tokens, each of 128 experts of which a token takes 8 is left out with probability 1e-7."""

_PRODUCTS = 8
"""Of a layer: q, k, v, o, gate, up and down, and the sum; their relative errors add up as random numbers do."""

_AMPLIFIED = 4.0
"""What later layers may make of an error: nonlinear functions, and differences of large numbers."""


def random_rows(model: Any, left_out: set[int]) -> torch.Tensor:
    """Token ids `(ROWS, TOKENS)`, the same at each call, without special ones, which may stand for images."""
    config = model.config.get_text_config()
    special = left_out | _ids_in(model.config.to_dict())
    ids = [id for id in range(config.vocab_size) if id not in special]
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    drawn = torch.randint(len(ids), (ROWS, length), generator=torch.Generator().manual_seed(0))
    return torch.tensor(ids)[drawn]


def _ids_in(settings: dict[str, Any]) -> set[int]:
    """The ids that a configuration names, such as ``image_token_id``, at any depth."""
    found: set[int] = set()
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= _ids_in(value)
        elif str(key).endswith(("token_id", "token_index")):
            found |= {one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int)}
    return found


@torch.no_grad()
def logits_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The logits of each position of `rows`, or the scores of each row, `(positions, vocabulary)` in fp32."""
    found = [model(input_ids=row[None], use_cache=False).logits.float() for row in rows]
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in found])


def distances(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The distance of each position's logits, relative to the root mean square of all expected ones."""
    size = expected.square().mean(dim=-1).mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return (expected - found).square().mean(dim=-1).sqrt() / size


def tolerance(dtype: torch.dtype, layers: int) -> float:
    """How far logits may be apart, relative to their size, after each weight was rounded to `dtype`.

    A rounding to nearest is an error of up to ``eps / 2``, of ``eps / 2 / sqrt(3)`` on average, relative to the weight
    and so to a product with it. The errors of the layers' products are independent, so their squares add up. fp32
    arithmetic has errors of the same form: the adapted model adds two products, the merged one computes one.
    """
    rounding = torch.finfo(dtype).eps / 2 / math.sqrt(3)
    arithmetic = 8 * torch.finfo(torch.float32).eps  # sums over rows of a weight, in another order
    return _AMPLIFIED * math.sqrt(_PRODUCTS * layers) * (rounding + arithmetic)
