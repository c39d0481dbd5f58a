"""The inputs of every proof, by kind of part.

A proof starts from random tensors of about size 1, in float32 and bfloat16, in training mode. There, many formulas look
alike: an epsilon outside the root, a clamp at 10, a threshold on small weights, a rank of saturated sigmoids, another
rule in evaluation. So the original and ours must agree on every [`Case`] of the lists at the end of this file too, in
float32. Values differ from case to case, dtypes and the size of a row do not, so that a GPU compiles few kernels for
them; the numbers of rows and of dimensions before them do in a few.

To add one, write a function that makes the inputs from the random ones, and a row in the list of its kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One more input of a proof."""

    name: str  # the inputs' name in a report of a difference
    # Makes its tensors from the random ones; the first is the input of the part, the others its weights.
    change: Callable[[Tensors], Tensors] = list
    training: bool = True  # whether the part is in training mode
    gradients: bool = True  # whether gradients are compared too; otherwise both run without
    # Whether the original has to run; otherwise one that raises, as on tensors of other dimensions than it takes, says
    # nothing.
    required: bool = True


AS_DRAWN = Case("")
"""The random tensors themselves."""


def _times(factor: float, place: int = 0) -> Callable[[Tensors], Tensors]:
    return lambda tensors: [*tensors[:place], tensors[place] * factor, *tensors[place + 1 :]]


def _all_times(factor: float) -> Callable[[Tensors], Tensors]:
    return lambda tensors: [tensor * factor for tensor in tensors]


def _zero_rows(tensors: Tensors) -> Tensors:
    """Every other row is zero."""
    x = tensors[0].clone()
    x[..., ::2, :] = 0.0
    return [x, *tensors[1:]]


def _one_large_element(tensors: Tensors) -> Tensors:
    """One element of a row is nearly all of its norm, so that its normalised value is as large as can be.

    In each row another one, as large terms of a weight's gradient could cancel to little but their rounding.
    """
    x = tensors[0].clone()
    rows = x.view(-1, x.shape[-1])
    index = torch.arange(len(rows), device=x.device)
    places = index, index % rows.shape[-1]
    rows[places] = rows[places].sign() * 300.0
    return [x, *tensors[1:]]


def _not_finite(tensors: Tensors) -> Tensors:
    """Rows with one infinity of either sign, and one of numbers that are none."""
    x = tensors[0].clone()
    rows = x if x.shape[-2] > 2 else x.transpose(-2, -3)  # the tokens of one or two heads
    rows[..., 0, 0], rows[..., 1, -1], rows[..., 2, :] = math.inf, -math.inf, math.nan
    return [x, *tensors[1:]]


def _inputs(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    """Changes the first tensor, and a gate of its shape."""

    def changed(tensors: Tensors) -> Tensors:
        shape = tensors[0].shape
        return [change(each) if each.shape == shape else each for each in tensors]

    return changed


def _same_experts(tensors: Tensors) -> Tensors:
    """Eight times as many tokens, all with the experts of the first one; more than a capacity lets through."""
    hidden, weights, *parameters, index = tensors
    return [hidden.repeat(8, 1), weights.repeat(8, 1), *parameters, index[:1].repeat(8 * len(index), 1)]


def _large_weights(tensors: Tensors) -> Tensors:
    return [tensors[0], *(tensor * 300.0 for tensor in tensors[1:])]


def _gates(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: [tensors[0], change(tensors[1]), *tensors[2:]]


def _biases(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: [*tensors[:2], *map(change, tensors[2:])]


def _small_biases(tensors: Tensors) -> Tensors:
    """Small inputs too, whose scores are near enough to each other for biases to choose."""
    hidden, weight, *biases = tensors
    return [hidden * 1e-3, weight, *(bias * 1e-3 for bias in biases)]


def _biases_from(size: float) -> Callable[[Tensors], Tensors]:
    """All of one sign, so that a limit makes them all equal, and none of them zero."""
    return _biases(lambda bias: size * (1 + bias.abs()))


def _without_some(bias: torch.Tensor) -> torch.Tensor:
    """Every fourth expert is out of reach."""
    bias = bias.clone()
    bias[3::4] = -math.inf
    return bias


def _near_epsilon(eps: float) -> Callable[[Tensors], Tensors]:
    """Mean squares from a hundredth of `eps` to a hundred times it, and a row of zeros."""

    def change(tensors: Tensors) -> Tensors:
        x = tensors[0]
        rows = x.numel() // x.shape[-1]
        sizes = eps**0.5 * 10 ** torch.linspace(-1.0, 1.0, rows, device=x.device)
        sizes[0] = 0.0
        return [x * sizes.view(*x.shape[:-1], 1), *tensors[1:]]

    return change


def _equal_logits(tensors: Tensors) -> Tensors:
    """Each second expert has the weight and the biases of the one before it, so that all logits come in pairs."""
    hidden, *of_experts = tensors
    return [hidden, *(each[torch.arange(len(each), device=each.device) // 2 * 2] for each in of_experts)]


def _saturated_logits(tensors: Tensors) -> Tensors:
    """Sigmoids that are all 0 or 1, and no biases to tell them apart."""
    hidden, weight, *biases = tensors
    return [hidden * 300.0, weight, *(torch.zeros_like(bias) for bias in biases)]


def _low_logits(tensors: Tensors) -> Tensors:
    """Logits from -20 to -80, whose sigmoids are far below what their sum may be increased by."""
    hidden, weight, *biases = tensors
    direction = hidden[0] / hidden[0].norm()
    of_tokens = torch.linspace(1.0, 2.0, len(hidden), device=hidden.device)
    of_experts = torch.linspace(-40.0, -20.0, len(weight), device=weight.device)
    return [of_tokens[:, None] * direction, of_experts[:, None] * direction, *biases]


def _close_scores(tensors: Tensors) -> Tensors:
    """Logits of about 1/32 and biases of about 1/128, of more digits than bfloat16 has, so that no sums are equal."""
    hidden, weight, *biases = tensors
    return [hidden / 32, weight, *(bias * 0.0078 for bias in biases)]


SIZES = tuple(Case(f"inputs of about {size:g}", _times(size)) for size in (1e-3, 30.0, 300.0))
VERY_LARGE = Case("inputs of about 1e4", _times(1e4))
NOT_FINITE = Case("rows that are not finite", _not_finite, gradients=False)
ZERO_ROWS = Case("rows of zeros", _zero_rows)
MODES = (
    Case("evaluation mode", training=False),
    Case("evaluation mode without gradients", training=False, gradients=False),
)

ROTATION = (
    *(Case(f"queries and keys of about {size:g}", _all_times(size)) for size in (1e-3, 30.0, 300.0, 1e4)),
    ZERO_ROWS,
    NOT_FINITE,
)
"""A rotary function of queries and keys, which is called in both modes alike."""

BALANCE = tuple(Case(f"logits of about {size:g}", _all_times(size)) for size in (1e-3, 30.0))
"""A load-balancing loss. Larger logits give probabilities of 0, which tie for the second place of a token."""

ATTENTION = (
    *MODES,
    Case("queries of about 1e-3", _times(1e-3)),
    Case("scores of about 8", _times(8.0), gradients=False),
    Case("values of about 300", _times(300.0, place=2)),
    ZERO_ROWS,
)
"""An attention function: queries, whose scores are about 1, keys, values, and the parameters of the attention. The
gradients through large scores round in float32 by more than two equal functions may differ."""

LATENTS = (*MODES, *SIZES, VERY_LARGE, ZERO_ROWS, NOT_FINITE)
"""The expansion of latents to keys and values: latents, the key that all heads share, and the projection's weight."""

HEAD = (*SIZES, ZERO_ROWS)
"""The LM head: hidden states."""

ADAPTER = (*MODES, *SIZES, VERY_LARGE, ZERO_ROWS)
"""A LoRA layer that we compute as one product with zeros, which give NaN times a number that is not finite."""

MLP = (*ADAPTER, NOT_FINITE)
"""An MLP, a LoRA layer, or a block with experts."""

EXPERTS = (
    *MLP,
    Case("routing weights of about 300", _times(300.0, place=1), gradients=False),
    Case("all tokens on the same experts", _same_experts, gradients=False),
)
"""Experts: hidden states, routing weights, the weights of the experts, and the experts of each token. They run on the
CPU, so that the last case may have more tokens."""

ROUTER = (
    *MODES,
    *SIZES,
    ZERO_ROWS,
    NOT_FINITE,
    Case("equal logits", _equal_logits),
    Case("logits of about 300 without biases", _saturated_logits),
    Case("logits far below 0", _low_logits),
)
"""A router. All of it runs on the CPU, where torch breaks the ties of both. [`crowded`] is one more case."""

BIASES = (
    Case("inputs and biases of about 0.001", _small_biases),
    *(Case(f"biases from {size:g}", _biases_from(size)) for size in (30.0, 300.0, -30.0, -300.0)),
    Case("equal biases", _biases(torch.ones_like)),
    Case("biases of minus infinity", _biases(_without_some), gradients=False),
)
"""A router with a bias or a correction, its own or an argument, has those of `ROUTER` and these."""

CLOSE_SCORES = Case("scores that bfloat16 hardly tells apart", _close_scores, gradients=False)
"""A router that ranks sums of scores, in bfloat16: it has to choose the same experts."""


GATES = (
    Case("gates of about 1e-3", _gates(lambda gate: gate * 1e-3)),
    Case("gates of about 1e4", _gates(lambda gate: gate * 1e4)),
    Case("gates of zeros", _gates(torch.zeros_like)),
    Case("gates that are not finite", _gates(lambda gate: _not_finite([gate])[0]), gradients=False),
)
"""A norm with a gate, which is the second tensor, has those of [`norm_inputs`], with gates of about 300, and these."""


_SHAPES = tuple(
    Case(name, _inputs(change), gradients=False, required=False)
    for name, change in (
        ("long sequences", lambda x: x[:1].repeat_interleave(120, 1)),
        ("one token", lambda x: x[:, :1]),
        ("a batch of one", lambda x: x[:1]),
        ("a dimension less", lambda x: x.flatten(0, 1)),
        ("a dimension more", lambda x: x.unsqueeze(2).repeat_interleave(2, 2)),
    )
)


def _tokens(number: int) -> Callable[[Tensors], Tensors]:
    """The first tokens of each row, and their mask."""
    return lambda tensors: [tensors[0][:, :number], *tensors[1:-1], tensors[-1][:, :number]]


def _padded(first: float, behind: float) -> Callable[[Tensors], Tensors]:
    """The mask of the first row hides all but what is between these shares of its tokens, that of the last the rest."""

    def change(tensors: Tensors) -> Tensors:
        mask = tensors[-1].clone()
        begin, end = (int(share * mask.shape[1]) for share in (first, behind))
        mask[0, :begin] = mask[0, end:] = mask[-1, begin:end] = 0
        return [*tensors[:-1], mask]

    return change


SEQUENCES = (
    *MODES,
    *(Case(f"{number} tokens", _tokens(number)) for number in (1, 2, 64, 65)),
    Case("padding on the left", _padded(0.4, 1.0)),
    Case("padding on the right", _padded(0.0, 0.7)),
    Case("padding between tokens", _padded(0.3, 0.6)),
    Case("inputs of about 1e-3", _times(1e-3)),
    Case("inputs of about 8", _times(8.0), gradients=False),
    ZERO_ROWS,
)
"""A layer that mixes tokens: hidden states of more than a chunk, parameters, and a mask of the tokens."""


def norm_inputs(eps: float) -> tuple[Case, ...]:
    """A norm with this epsilon, over hidden states, queries or keys, with a gate or without."""
    return (
        Case("mean squares near epsilon", _near_epsilon(eps)),
        *MODES,
        *SIZES,
        VERY_LARGE,
        ZERO_ROWS,
        NOT_FINITE,
        *_SHAPES,
        Case("one large element in a row", _one_large_element),
        Case("weights of about 300", _large_weights),
    )


def crowded(num_experts: int, top_k: int) -> Case:
    """Many tokens for a router, all of them alike, so that k experts get every token.

    A capacity may be a share of the tokens or a number, and may hold from some number of tokens on, such as a multiple
    of experts x k.
    """

    def change(tensors: Tensors) -> Tensors:
        hidden, *others = tensors
        return [hidden[:1].expand(1000 + 5 * num_experts * top_k, -1), *others]

    return Case("more tokens than experts x k", change, gradients=False)
