"""Where a host would wait for the device, found on a CPU.

What a trainer is given, its parameters, what is made with a `device`, and all that is computed from these, are taken
for tensors on the device; what numpy or a list gives, for tensors on the host.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_trainer.head.on_host import values_of
from tests.graphs.recorded import WAITING

_READS = {"cpu", "numpy", "tolist", "__array__"}
_MADE = {"tensor", "as_tensor", "from_numpy"}
_CODE = ("trl", "liger_trainer", "kernels", "transformers", "accelerate")


class HostWaits:
    """In the context, `found` counts the waits by the file and line that waits.

    Args:
        on_device: Tensors on the device, in any containers.
    """

    def __init__(self, *on_device: Any) -> None:
        self.found: Counter[str] = Counter()
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no other gets the same memory
        self.put(on_device)
        self._modes = _Operators(self), _Functions(self)

    def __enter__(self) -> HostWaits:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def put(self, values: Any) -> Any:
        """`values`, whose tensors are on the device from now on."""
        for each in _tensors(values):
            storage = each.untyped_storage()
            self._storages[storage._cdata] = storage
        return values

    def holds(self, values: Any) -> bool:
        """Whether any tensor in `values` is on the device."""
        return any(each.untyped_storage()._cdata in self._storages for each in _tensors(values))

    def wait(self) -> None:
        """Counts a wait of the code that runs."""
        self.found[_place()] += 1

    def of(self, library: str) -> int:
        """How many are in the code of `library`; of `liger_trainer` with the kernels."""
        return sum(count for place, count in self.found.items() if place.startswith(f"{library}/"))


class _Operators(TorchDispatchMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self._waits.holds((args, kwargs)):
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        by_mask = name.startswith(("index", "_index_put")) and any(
            each.dtype in (torch.bool, torch.uint8) and each.dim() for each in _tensors(args[1:2])
        )
        if name in WAITING or by_mask:
            self._waits.wait()
        return self._waits.put(func(*args, **(kwargs or {})))


class _Functions(TorchFunctionMode):
    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name, waits = getattr(func, "__name__", ""), self._waits
        on_device = waits.holds(args[:1])
        if name in _READS and on_device and values_of(args[0]) is None:
            waits.wait()
            return func(args[0].detach().clone(), *args[1:], **kwargs) if name != "cpu" else copied(args[0])
        if name == "to" and args and not on_device and _device_of(args, kwargs):
            if not kwargs.get("non_blocking"):
                waits.wait()
            return waits.put(copied(func(*args, **kwargs)))
        result = func(*args, **kwargs)
        if kwargs.get("device") is not None and not _tensors(args):
            if name in _MADE:
                waits.wait()
            waits.put(result)
        return result


def _device_of(args: tuple, kwargs: dict) -> bool:
    """Whether `Tensor.to` is given a device."""
    return kwargs.get("device") is not None or any(isinstance(each, str | torch.device) for each in args[1:])


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """In memory of its own, which the modes do not see."""
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        return tensor.detach().clone()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.device.type == "cpu"]


def _place() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        library = next((each for each in _CODE if each in path.parts), None)
        if library is not None and "tests" not in path.parts:
            return f"{'liger_trainer' if library == 'kernels' else library}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"
