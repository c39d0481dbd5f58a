"""A clear error where somebody differentiates a gradient that has no derivative of its own."""

from __future__ import annotations

from typing import Any

import torch


def refuse_second_derivative(operator: Any, functions: str) -> None:
    """Makes `operator`, which computes a gradient, raise once that gradient is differentiated.

    ``backward(create_graph=True)`` itself goes on working, as the rest of a graph may well have second derivatives.

    Args:
        operator: A registered operator that mutates nothing.
        functions: The public functions whose gradient it is, for the message.
    """

    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise RuntimeError(second_derivative_message(functions))

    operator.register_autograd(backward)


def second_derivative_message(functions: str) -> str:
    """What is said to somebody who asks for a second derivative of `functions`."""
    return (
        f"The gradient of {functions} cannot itself be differentiated (create_graph=True); use the *_reference "
        "function of the same name, which is plain torch, where a second derivative is needed."
    )
