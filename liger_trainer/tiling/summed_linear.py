"""The linear layers of a module that runs piece by piece, and whose weight gradients are sums over the pieces.

    y_t = x_t @ W.T + b        dW = sum over pieces t of dy_t.T @ x_t        db = sum over t and tokens of dy_t

Autograd would round dW of every piece to the weight's dtype and hand it over to be added: an error that grows with the
pieces, and more passes over memory of the weight's size. Here the matmul adds to the sum itself, which is in fp32 where
the weight is narrower, and rounded once.

Where a piece's result is that of a linear layer, the backward does not look at it: it is not computed a second time, as
torch's checkpoint does not, which stops when it has what was saved.

For the time of a piece every plain `nn.Linear` is of a class with another forward. What else a module is made of goes
the way of autograd, as does compiled code, and so do weights that an operator takes without calling their layer, as
those of adapters: their gradients are small, and are added piece by piece.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from liger_trainer.kernels.matmul import matmul_into


class GradientSum:
    """The sum of a parameter's gradients: of several ones in fp32 where they are narrower, rounded once at the end."""

    def __init__(self, parameter: torch.Tensor, several: bool) -> None:
        self._parameter = parameter
        self._wide = torch.promote_types(parameter.dtype, torch.float32) if several else parameter.dtype
        self._total: torch.Tensor | None = None
        self._is_ours = False
        self._operand = parameter

    def operand(self, dtype: torch.dtype) -> torch.Tensor:
        """The parameter in `dtype`, cast once."""
        if self._operand.dtype != dtype:
            self._operand = self._parameter.to(dtype)
        return self._operand

    def add(self, gradient: torch.Tensor | None) -> None:
        """Adds a gradient; None is 0."""
        if gradient is None:
            return
        if self._total is None:
            self._total = gradient
        else:
            self._ours().add_(gradient)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds ``left.T @ right``, of (n, out) and (n, in)."""
        if self._total is None:
            dtype = torch.promote_types(self._wide, left.dtype)
            self._total, self._is_ours = right.new_empty(self._parameter.shape, dtype=dtype), True
            matmul_into(self._total, left.t(), right)
        else:
            matmul_into(self._ours(), left.t(), right, add=True)

    def add_rows(self, rows: torch.Tensor) -> None:
        """Adds the sum of `rows`, (n, out)."""
        self.add(rows.sum(0, dtype=torch.promote_types(self._wide, rows.dtype)))

    def _ours(self) -> torch.Tensor:
        """The total, to be added to in place; what autograd returned may be shared."""
        assert self._total is not None
        if not self._is_ours:
            wide = torch.promote_types(self._total.dtype, torch.float32)
            self._total, self._is_ours = self._total.to(wide, copy=True), True
        return self._total

    def take(self) -> torch.Tensor | None:
        """The sum in the parameter's dtype, which is then no longer held here; None without a gradient."""
        total, self._total = self._total, None
        return None if total is None else total.to(self._parameter.dtype)


_Forward = Callable[[nn.Linear, torch.Tensor], torch.Tensor]
_FORWARDS: dict[nn.Linear, _Forward] = {}
_CallOf = tuple[int, nn.Linear]
"""A call by its number and its layer, as hooks that are there in the backward alone may change what is called."""


class LinearOfPiece(nn.Linear):
    """What a plain linear layer is for the time of a piece; a class, which compiled code recognises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if torch.compiler.is_compiling() else _FORWARDS[self](self, x)


@contextlib.contextmanager
def _forward_of_linears(module: nn.Module, forward: _Forward) -> Iterator[None]:
    """Within it `forward(linear, x)` is the forward of all plain linear layers of `module`."""
    linears = [layer for layer in module.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]
    try:
        for linear in linears:
            _FORWARDS[linear] = forward
            linear.__class__ = LinearOfPiece
        yield
    finally:
        for linear in linears:
            linear.__class__ = nn.Linear
            _FORWARDS.pop(linear, None)


class ResultOfLinear:
    """Finds out which call of a linear layer gives a module's result, if one does."""

    def __init__(self) -> None:
        self._calls = 0
        self._layer: nn.Linear | None = None
        self._last: weakref.ref[torch.Tensor] | None = None
        self._version = 0

    def watching(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Watches the layers of `module` while it runs."""
        return _forward_of_linears(module, self._forward)

    def _forward(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        y = nn.Linear.forward(layer, x)
        self._calls += 1
        self._layer = layer
        seen = layer._forward_hooks or nn.modules.module._has_any_global_hook()
        self._last, self._version = None if seen else weakref.ref(y), y._version
        return y

    def call_of(self, y: torch.Tensor) -> _CallOf | None:
        """The call whose result `y` is, untouched and without a hook that has seen it; else None."""
        if self._layer is None or self._last is None or self._last() is not y or y._version != self._version:
            return None
        return self._calls, self._layer


class SummingLinears:
    """Adds the gradients of the weights of linear layers to their sums as soon as a backward comes by.

    Args:
        totals: The sums of the parameters that need a gradient, by the `id` of the tensors that stand for them.
        unread: Which call's result nobody reads: it is not computed, but 0.
    """

    def __init__(self, totals: dict[int, GradientSum], unread: _CallOf | None) -> None:
        self._totals = totals
        self._unread = unread
        self._calls = 0

    def within(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Acts on the layers of `module` while it runs."""
        return _forward_of_linears(module, self._forward)

    def _forward(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        weight: torch.Tensor = layer.weight
        bias: torch.Tensor | None = layer.bias
        total, bias_total = self._totals.get(id(weight)), self._totals.get(id(bias))
        if total is None or type(weight) is not torch.Tensor:  # frozen, computed, or a DTensor
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
        y = x.new_empty(shape)  # what F.linear returns may be a view, and then nobody may write over it
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
