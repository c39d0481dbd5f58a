"""Linear layers of a module that runs tile by tile, with weight gradients that are summed over the tiles.

    y_t = x_t @ W.T + b        dW = sum over tiles t of dy_t.T @ x_t        db = sum over t and tokens of dy_t

Autograd would round the dW of each tile to the weight's dtype before adding it: an error that grows with the number of
tiles, and more passes over memory of the weight's size. Here the matmul adds to the sum itself, which is in fp32 where
the weight is narrower and rounded once at the end.

Where the module's result is the output of a linear layer, the backward does not need it. So the recomputation of a tile
skips that product, just as torch's checkpoint stops once it has recomputed every saved tensor.

While a tile runs, every plain `nn.Linear` of the module has the class `LinearInTile`, whose forward is ours. Everything
else goes through autograd: other modules, compiled code, and weights that an operator reads without calling their
layer, such as those of adapters, whose gradients are small and added tile by tile.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from liger_trainer.compat.hooks import is_output_hooked
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import CHANGED_IN_PLACE
from liger_trainer.kernels.runtime import matmul_into

require(CHANGED_IN_PLACE)


class GradientSum:
    """The sum of a parameter's gradients over the tiles.

    Args:
        parameter: The parameter.
        several: Whether there is more than one tile. The sum is then in fp32 at least, and rounded once at the end.
    """

    def __init__(self, parameter: torch.Tensor, several: bool) -> None:
        self._parameter = parameter
        self._wide = torch.promote_types(parameter.dtype, torch.float32) if several else parameter.dtype
        self._total: torch.Tensor | None = None
        self._is_owned = False
        self._operand = parameter

    def operand(self, dtype: torch.dtype) -> torch.Tensor:
        """The parameter in `dtype`; the cast is cached."""
        if self._operand.dtype != dtype:
            self._operand = self._parameter.to(dtype)
        return self._operand

    def add(self, gradient: torch.Tensor | None) -> None:
        """Adds a gradient; None counts as 0."""
        if gradient is None:
            return
        if self._total is None:
            self._total = gradient
        else:
            self._owned().add_(gradient)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds ``left.T @ right`` for left (n, out) and right (n, in)."""
        if self._total is None:
            dtype = torch.promote_types(self._wide, left.dtype)
            self._total, self._is_owned = right.new_empty(self._parameter.shape, dtype=dtype), True
            matmul_into(self._total, left.t(), right)
        else:
            matmul_into(self._owned(), left.t(), right, add=True)

    def add_rows(self, rows: torch.Tensor) -> None:
        """Adds the sum over n of `rows`, (n, out)."""
        self.add(rows.sum(0, dtype=torch.promote_types(self._wide, rows.dtype)))

    def _owned(self) -> torch.Tensor:
        """The total as a tensor that may be written to; a gradient from autograd may be shared, so it is copied."""
        assert self._total is not None
        if not self._is_owned:
            wide = torch.promote_types(self._total.dtype, torch.float32)
            self._total, self._is_owned = self._total.to(wide, copy=True), True
        return self._total

    def take(self) -> torch.Tensor | None:
        """The sum in the parameter's dtype, and releases it; None if there was no gradient."""
        total, self._total = self._total, None
        return None if total is None else total.to(self._parameter.dtype)


_Forward = Callable[[nn.Linear, torch.Tensor], torch.Tensor]
_FORWARDS: dict[nn.Linear, _Forward] = {}
"""The forward of each layer that is a `LinearInTile` at the moment."""

_Call = tuple[int, nn.Linear]
"""A call of a linear layer: its number in the tile, and its layer, as hooks may make the recomputation call others."""


class LinearInTile(nn.Linear):
    """The class of a plain linear layer while a tile runs; a class and not a bound forward, so that it compiles."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the forward that `_forward_of_linears` set; in compiled code, that of `nn.Linear`."""
        return super().forward(x) if torch.compiler.is_compiling() else _FORWARDS[self](self, x)


@contextlib.contextmanager
def _forward_of_linears(module: nn.Module, forward: _Forward) -> Iterator[None]:
    """A context in which `forward(linear, x)` is the forward of all plain linear layers of `module`."""
    linears = [layer for layer in module.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]
    try:
        for linear in linears:
            _FORWARDS[linear] = forward
            linear.__class__ = LinearInTile
        yield
    finally:
        for linear in linears:
            linear.__class__ = nn.Linear
            _FORWARDS.pop(linear, None)


class ResultFinder:
    """Finds the call of a linear layer whose output is the result of the module."""

    def __init__(self) -> None:
        self._calls = 0
        self._layer: nn.Linear | None = None
        self._last: weakref.ref[torch.Tensor] | None = None
        self._version = 0

    def watching(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context that watches the linear layers of `module`, which runs inside."""
        return _forward_of_linears(module, self._forward)

    def _forward(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear.forward(layer, x)
        self._calls += 1
        self._layer = layer
        self._last, self._version = None if is_output_hooked(layer) else weakref.ref(y), y._version
        return y

    def call_of(self, y: torch.Tensor) -> _Call | None:
        """The call that returned `y`; None if no call did, a hook saw `y`, or `y` was written to since."""
        if self._layer is None or self._last is None or self._last() is not y or y._version != self._version:
            return None
        return self._calls, self._layer


class SummingLinears:
    """Makes the backward of linear layers add the gradients of their parameters to the sums directly.

    Args:
        totals: The sum of each parameter that needs a gradient, by the `id` of the tensor that replaces it in the
            module.
        unread: The call whose output nothing reads; it returns zeros instead.
    """

    def __init__(self, totals: dict[int, GradientSum], unread: _Call | None) -> None:
        self._totals = totals
        self._unread = unread
        self._calls = 0

    def within(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context that acts on the linear layers of `module`, which runs inside."""
        return _forward_of_linears(module, self._forward)

    def _forward(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        weight: torch.Tensor = layer.weight
        bias: torch.Tensor | None = layer.bias
        total, bias_total = self._totals.get(id(weight)), self._totals.get(id(bias))
        if total is None or type(weight) is not torch.Tensor:  # frozen, not a parameter, or a DTensor
            return nn.Linear.forward(layer, x)
        dtype = weight.dtype
        if torch.is_autocast_enabled(x.device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
        if bias is not None and bias_total is None:
            bias = bias.to(dtype)
        return _SummedLinear.apply(x.to(dtype), weight, bias, total, bias_total, (self._calls, layer) != self._unread)


class _SummedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        total: GradientSum,
        bias_total: GradientSum | None,
        compute: bool,
    ) -> torch.Tensor:
        operand = total.operand(x.dtype)
        ctx.save_for_backward(x, operand)
        ctx.totals = total, bias_total
        shape = (*x.shape[:-1], weight.shape[0])
        if not compute:
            return x.new_zeros(shape)
        y = x.new_empty(shape)  # not F.linear, whose result may be a view, which must not be written to
        rows, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        if bias is None:
            torch.mm(rows, operand.t(), out=out)
        else:
            torch.addmm(bias if bias_total is None else bias_total.operand(x.dtype), rows, operand.t(), out=out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        total, bias_total = ctx.totals
        rows = dy.reshape(-1, dy.shape[-1]).contiguous()
        total.add_product(rows, x.reshape(-1, x.shape[-1]))
        if bias_total is not None:
            bias_total.add_rows(rows)
        dx = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dbias = rows.sum(0) if ctx.needs_input_grad[2] and bias_total is None else None
        return dx, None, dbias, None, None, None
