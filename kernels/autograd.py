"""What the operators share for autograd: errors for second derivatives, expanded gradients.

Most backwards here are operators of their own without a derivative. Where the first gradient is computed in the
backward, it stays available with ``create_graph=True`` and only differentiating it is an error
(`refuse_second_derivative`). Where a gradient was computed in the forward, autograd would take it for a constant and
silently give wrong second derivatives, so there the backward itself raises (`refuse_double_backward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch


def refuse_double_backward(function: str = "this operator") -> None:
    """Raises RuntimeError inside a backward that runs with ``create_graph=True``.

    Args:
        function: Name of the public function, for the message.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"The gradient of {function} cannot itself be differentiated, so backward(create_graph=True) would be "
            "silently wrong; compute it with the *_reference function instead."
        )


def refuse_second_derivative(backward: Any, functions: str) -> None:
    """Makes differentiating the operator `backward` raise a RuntimeError that names its public functions.

    Args:
        backward: A `kernels.operator.operator`.
        functions: Names of the public functions whose gradient it computes.
    """

    def refuse(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
        raise RuntimeError(second_derivative_message(functions))

    backward.register_autograd(refuse)


def second_derivative_message(functions: str) -> str:
    """The error message for a second derivative of `functions`."""
    return (
        f"The gradient of {functions} cannot itself be differentiated (create_graph=True, or the gradient of a "
        "gradient); for that, use the *_reference function, which is plain torch."
    )


def where_needed(needs: Sequence[bool], *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """`gradients` with None for each that is not needed, as the first entries of `ctx.needs_input_grad` say."""
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs))


def differentiate_norm(operator: Any, backward: Any, function: str, places: Sequence[int]) -> None:
    """Gives the operator of a norm its derivative.

    Args:
        operator: Returns the result, and statistics of the rows after it if the backward needs them.
        backward: The operator that takes the gradient of the result, the tensors at `places`, the statistics, and which
            gradients of these tensors are needed.
        function: Name of the public function.
        places: Which arguments of `operator` have gradients.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        statistics = output[1:] if isinstance(output, tuple) else ()
        ctx.save_for_backward(*(inputs[place] for place in places), *statistics)

    def gradients(ctx: Any, dy: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        needed = [ctx.needs_input_grad[place] for place in places]
        found = dict(zip(places, where_needed(needed, *backward(dy, *ctx.saved_tensors, needed))))
        return tuple(found.get(place) for place in range(len(ctx.needs_input_grad)))

    operator.register_autograd(gradients, setup_context=setup_context)
    refuse_second_derivative(backward, function)


def one_number(tensor: torch.Tensor) -> torch.Tensor | None:
    """The common value of all elements of `tensor`, 0-d, if its strides show that they share memory; else None.

    The gradient of a sum is such a tensor: autograd expands one value to the shape of the summands.
    """
    expanded = all(stride == 0 or size == 1 for size, stride in zip(tensor.shape, tensor.stride()))
    if not expanded or tensor.numel() == 0:
        return None
    return tensor[(0,) * tensor.dim()]


def input_gradients(ctx: Any, *first: Any) -> tuple[Any, ...]:
    """What a backward returns: `first`, the gradients of the first inputs, and no gradient for every input after them.

    For a list of tensors that is a list of None. torch takes an empty list of numbers for one, too.
    """
    rest = ctx.needs_input_grad[len(first) :]
    return (*first, *([None] * len(needed) if isinstance(needed, list) else None for needed in rest))


def pass_to_placeholder(operator: Any) -> None:
    """Makes the gradient of the result of `operator` that of its first argument, a placeholder of the result's shape.

    For pairs of operators as in `kernels/mlp/gated_down.py`, where another operator made the placeholder.

    Args:
        operator: A `kernels.operator.operator`.
    """
    operator.register_autograd(input_gradients)
