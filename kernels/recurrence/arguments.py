"""What the recurrences check of their arguments."""

from __future__ import annotations

import torch

from liger_trainer.kernels.documents import Documents
from liger_trainer.kernels.runtime import check_all_dtensors


def check_shape(function: str, argument: str, tensor: torch.Tensor, shape: tuple[int, ...], named: str) -> None:
    """Raises ValueError if `tensor` is not of this shape, which is called `named`, such as ``"(batch, tokens)"``."""
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"`{argument}` of {function} has shape {tuple(tensor.shape)}; give {named}, which is {shape} here."
        )


def check_tensors(function: str, first: str, **tensors: torch.Tensor | None) -> None:
    """Checks that tensors lie beside each other: floating point, on one device, all or none of them DTensors.

    Args:
        function: Whose they are.
        first: The name of the one that the others are compared with.
        tensors: By their argument names.

    Raises:
        ValueError: If they do not.
    """
    main = tensors[first]
    assert main is not None
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` of {function} has dtype {tensor.dtype}; give a floating point tensor.")
        if tensor.device != main.device:
            raise ValueError(
                f"`{name}` of {function} is on {tensor.device}, but `{first}` is on {main.device}; move one of them."
            )
    check_all_dtensors(function, main, **{name: tensor for name, tensor in given.items() if name != first})


def check_heads(function: str, few: str, few_heads: int, many: str, heads: int) -> None:
    """Raises ValueError unless `few_heads`, of the argument `few`, divides `heads`, of the argument `many`."""
    if few_heads < 1 or heads % few_heads:
        raise ValueError(
            f"`{many}` of {function} has {heads} heads and `{few}` {few_heads}; give a multiple of those of `{few}`."
        )


def check_initial_state(
    function: str,
    initial_state: torch.Tensor | None,
    documents: Documents,
    batch: int,
    heads: int,
    rows: int,
    columns: int,
) -> None:
    """Raises ValueError if there is an `initial_state` that is not (roots, heads, rows, columns)."""
    if initial_state is not None:
        shape = (batch if documents.spans is None else documents.roots, heads, rows, columns)
        check_shape(function, "initial_state", initial_state, shape, "(documents without a parent, heads, K, V)")
