"""The ways in which a linear layer multiplies in fp8: how each operand of its three products is scaled.

    y = X @ W^T            dx = dY @ W            dW = dY^T @ X

An operand has a scale for each row, rows being what the product does not sum over, or one scale for all of it. The
modes, their operands and their formats are those of torchao's recipes ``rowwise``, ``rowwise_with_gw_hp`` and
``tensorwise``. torchao rounds the scales of rows to powers of two. Ours are as they come, since rounding makes most
errors larger (`docs/guides/fp8.md`).

Nothing of torch is imported, since `configs/kernel_config.py` has the names from here.
"""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

Fp8Mode = Literal["rowwise", "rowwise_gw_hp", "tensorwise"]


class Scaling(enum.Enum):
    """How many scales an operand has."""

    ROWS = "a scale for each row"
    ONE = "one scale"


class Products(NamedTuple):
    """The three products of a mode.

    Args:
        output: Scaling of X, (tokens, inputs), and W, (outputs, inputs).
        input_gradient: Scaling of dY, (tokens, outputs), and W^T, (inputs, outputs).
        weight_gradient: Scaling of dY^T, (outputs, tokens), and X^T, (inputs, tokens); None for a product in bf16.
        gradient_dtype: Name of the dtype of dY: e5m2 for one scale, as e4m3 would lose tokens with small gradients.
    """

    output: tuple[Scaling, Scaling]
    input_gradient: tuple[Scaling, Scaling]
    weight_gradient: tuple[Scaling, Scaling] | None
    gradient_dtype: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn"

    @property
    def one_scale(self) -> bool:
        """Whether every operand of every product has one scale."""
        return Scaling.ROWS not in self.output


_ROWS, _ONE = Scaling.ROWS, Scaling.ONE
_MODES: dict[str, Products] = {
    "rowwise": Products(
        output=(_ROWS, _ROWS),
        input_gradient=(_ROWS, _ROWS),
        weight_gradient=(_ROWS, _ROWS),
    ),
    "rowwise_gw_hp": Products(
        output=(_ROWS, _ROWS),
        input_gradient=(_ROWS, _ONE),
        weight_gradient=None,
    ),
    "tensorwise": Products(
        output=(_ONE, _ONE),
        input_gradient=(_ONE, _ONE),
        weight_gradient=(_ONE, _ONE),
        gradient_dtype="float8_e5m2",
    ),
}


def products_of(mode: str) -> Products:
    """The three products of `mode`.

    Raises:
        ValueError: if there is no such mode.
    """
    if mode not in _MODES:
        raise ValueError(f"The mode of fp8 is {mode!r}; it must be {', '.join(map(repr, _MODES))}.")
    return _MODES[mode]
