"""Our operators: custom operators of torch, without their dispatch in eager mode.

`torch.library` gives an operator to the compiler, to dispatch modes such as that of selective checkpointing, and to
tensor subclasses. Its way to the function takes the host longer than an autograd function's, in every call, and with
a small model the GPU waits for the host. So the function is called at once when none of these has to see it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import DISPATCH_MODES

require(DISPATCH_MODES)

R = TypeVar("R")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Operator(Generic[R]):
    """A function that torch knows as an operator; `operator` makes it.

    Attributes:
        custom: The `torch.library.custom_op`, which dispatches.
        derivative: The autograd function that calls and differentiates `function`; None if it has no derivative.
    """

    def __init__(self, name: str, function: Callable[..., R], mutates: Sequence[str]) -> None:
        self.custom = torch.library.custom_op(name, function, mutates_args=mutates)
        self.register_fake = self.custom.register_fake
        self.name = name
        self.function = function
        self.derivative: type[torch.autograd.Function] | None = None
        parameters = inspect.signature(function).parameters
        self.defaults = tuple(parameter.default for parameter in parameters.values())
        self.mutated = [place for place, name in enumerate(parameters) if name in mutates]
        self.has_lists = "Tensor[]" in torch.library.infer_schema(function, mutates_args=mutates)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, Any, Any], None] | None = None
    ) -> None:
        """Gives the operator its derivative, as `torch.library.register_autograd`."""
        self.custom.register_autograd(backward, setup_context=setup_context)
        function = self.function

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = function(*arguments)
            if setup_context is not None:
                setup_context(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.derivative = type(self.name, (torch.autograd.Function,), methods)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """The function's result, recorded for autograd if an input needs a gradient."""
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
        if (
            _is_watched()
            or any(type(tensor) not in _PLAIN or tensor.is_meta for tensor in tensors)
            or self.has_lists  # which autograd functions do not look into
            or kwargs
        ):
            return self.custom(*args, **kwargs)
        arguments = (*args, *self.defaults[len(args) :])
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            if self.derivative is None:
                return self.custom(*args)  # whose backward is an error
            return self.derivative.apply(*arguments)
        result = self.function(*arguments)
        for place in self.mutated:
            _note_change(arguments[place])
        return result


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., R]], Operator[R]]:
    """Makes a function an operator.

    Args:
        name: ``"liger_trainer::..."``.
        mutates: The arguments that it writes to. Such an operator has no derivative.

    Returns:
        A decorator. All arguments of its function are annotated, as for `torch.library`.
    """
    return lambda function: Operator(name, function, mutates)


def _note_change(tensor: torch.Tensor | None) -> None:
    """Lets autograd find that a saved tensor was overwritten, as torch's dispatch does."""
    if tensor is not None and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _is_watched() -> bool:
    """Whether a compiler or a dispatch mode has to see operators."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
