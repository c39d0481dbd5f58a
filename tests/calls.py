"""What a run does on its way: the calls of functions, and the tensors that operations create and autograd saves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def recorded_calls(
    monkeypatch: pytest.MonkeyPatch, module: Any, *names: str
) -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """A list that grows with every call of these functions of `module`: name, function and positional arguments."""
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = []

    def record(name: str, native: Callable[..., Any]) -> None:
        def recording(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, native, args))
            return native(*args, **kwargs)

        monkeypatch.setattr(module, name, recording)

    for name in names:
        record(name, getattr(module, name))
    return calls


class _Sizes(TorchDispatchMode):
    """Collects the numbers of elements of all tensors that operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.created: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {x.data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta and tensor.data_ptr() not in inputs:
                self.created.add(tensor.numel())
        return result


def created_sizes(run: Callable[[], Any]) -> set[int]:
    """The numbers of elements of all tensors that operations create while `run` runs."""
    with _Sizes() as sizes:
        run()
    return sizes.created


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """A list that grows with every tensor that autograd saves inside."""
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        yield saved
