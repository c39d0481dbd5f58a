"""What operators do alike beside their gradients: refuse a second one, keep what they save, know an expanded number.

Most backwards here are operators of their own without a derivative. Where the first gradient is right on its own, it
stays available with ``create_graph=True`` and only its derivative is refused (`refuse_second_derivative`). Where a
gradient was computed in the forward, even the recorded first one would be a constant in the eyes of autograd, and wrong
without a word; there the backward itself refuses (`refuse_double_backward`).
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import torch
from torch.autograd.graph import saved_tensors_hooks


def refuse_double_backward(function: str = "this operator") -> None:
    """Raises RuntimeError inside a backward that runs with ``create_graph=True``, whose result would be wrong.

    Args:
        function: Name of the public function, for the message.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"The gradient of {function} cannot itself be differentiated, so backward(create_graph=True) would be "
            "silently wrong; compute it with the *_reference function instead."
        )


def refuse_second_derivative(backward: Any, functions: str) -> None:
    """Makes differentiating the operator `backward` a RuntimeError that names the public functions it belongs to.

    Args:
        backward: A `torch.library.custom_op` that mutates nothing.
        functions: The public function whose gradient it computes, or several.
    """

    def refuse(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
        raise RuntimeError(second_derivative_message(functions))

    backward.register_autograd(refuse)


def second_derivative_message(functions: str) -> str:
    """What is said to somebody who asks for a second derivative of `functions`."""
    return (
        f"The gradient of {functions} cannot itself be differentiated (create_graph=True was given, or a gradient of a "
        "gradient asked for); use the *_reference function, which is plain torch, where you need that."
    )


def saved_as_is() -> contextlib.AbstractContextManager:
    """A context in which saved tensors stay as they are, whatever hooks are on around it.

    Activation offloading puts hooks around a whole step. What the backward wants at once, such as a tile's
    intermediates or the gradients of the LM head, they would move to and fro for nothing.
    """
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if not enabled:  # inside torch.func, where none are on
        return contextlib.nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def one_number(tensor: torch.Tensor) -> torch.Tensor | None:
    """The number that is every element of `tensor`, 0-d, where the strides show that it is one; None elsewhere.

    That is the gradient of a sum, which autograd expands to the shape of what was summed and does not write out.
    """
    expanded = all(stride == 0 or size == 1 for size, stride in zip(tensor.shape, tensor.stride()))
    if not expanded or tensor.numel() == 0:
        return None
    return tensor[(0,) * tensor.dim()]


def input_gradients(ctx: Any, *first: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """What a backward returns: `first`, the gradients of the first inputs, and None for every input after them."""
    return (*first, *[None] * (len(ctx.needs_input_grad) - len(first)))
