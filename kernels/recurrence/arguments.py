"""What the recurrences check of their arguments."""

from __future__ import annotations

from typing import NamedTuple

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


class Sizes(NamedTuple):
    """The sizes of a recurrence; those of its queries and keys are (batch, tokens, key heads, rows)."""

    batch: int
    tokens: int
    heads: int
    rows: int
    columns: int


def check_heads(
    function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str, str] = ("q", "k", "v")
) -> Sizes:
    """The sizes that queries, keys and values agree in.

    Args:
        function: Whose they are.
        q: Queries.
        k: Keys, of heads that divide those of the values.
        v: Values, (batch, tokens, heads, columns).
        names: The names of the three arguments.

    Raises:
        ValueError: If they do not.
    """
    for name, x in zip(names[1:], (k, v)):
        if x.dim() != 4:
            raise ValueError(f"`{name}` of {function} has {x.dim()} dimensions; give (batch, tokens, heads, channels).")
    batch, tokens, heads, columns = v.shape
    key_heads, rows = k.shape[2:]
    if key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"`{names[2]}` of {function} has {heads} heads and `{names[1]}` {key_heads}; give a multiple of those of "
            f"`{names[1]}`."
        )
    check_shape(function, names[1], k, (batch, tokens, key_heads, rows), f"the batch and tokens of `{names[2]}`")
    check_shape(function, names[0], q, (batch, tokens, key_heads, rows), f"the shape of `{names[1]}`")
    return Sizes(batch, tokens, heads, rows, columns)


def check_initial_state(function: str, initial_state: torch.Tensor | None, documents: Documents, sizes: Sizes) -> None:
    """Raises ValueError if there is an `initial_state` that is not (roots, heads, rows, columns)."""
    if initial_state is not None:
        roots = sizes.batch if documents.spans is None else documents.roots
        shape = (roots, sizes.heads, sizes.rows, sizes.columns)
        check_shape(function, "initial_state", initial_state, shape, "(documents without a parent, heads, K, V)")
