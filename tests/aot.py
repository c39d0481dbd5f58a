"""Ahead-of-time compilation of every kernel a function launches, for GPUs this machine does not have.

`recorded_launches` runs a launcher on CPU tensors with the launches recorded instead of run; `compile_launch` compiles
one recorded launch for a target with Triton's own compiler, which needs no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from liger_trainer.kernels import rows
from liger_trainer.kernels.compile_together import Compiler
from liger_trainer.kernels.rows import DeviceLimits

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


CARDS = {
    "sm_75": (GPUTarget("cuda", 75, 32), 64),  # T4, RTX 20
    "sm_80": (GPUTarget("cuda", 80, 32), 163),  # A100
    "sm_86": (GPUTarget("cuda", 86, 32), 99),  # A10, RTX 30
    "sm_89": (GPUTarget("cuda", 89, 32), 99),  # L4, RTX 40
    "sm_90": (GPUTarget("cuda", 90, 32), 227),  # H100, H200
    "sm_100": (GPUTarget("cuda", 100, 32), 227),  # B200
    "sm_120": (GPUTarget("cuda", 120, 32), 99),  # RTX 50
}
"""NVIDIA's cards: the target, and the KiB of shared memory that a program may have."""


def on_targets(*cases: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """`(target, *case)` of the first case for every target, and of the others for one: a compilation takes seconds."""
    return [*((target, *cases[0]) for target in TARGETS), *(("sm_90", *case) for case in cases[1:])]


_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
_COMPILED = ("num_warps", "num_stages", "num_ctas", "enable_fp_fusion")
_OPTIONS = (*_COMPILED, "grid", "warmup")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch: the kernel, its arguments by name, and its compile options."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Records the launches made inside the block; no kernel runs, so outputs hold garbage."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in _OPTIONS if key in kwargs}
        arguments = dict(zip(self.arg_names, args)) | kwargs
        for parameter in self.params:
            if parameter.name not in arguments and parameter.has_default:
                arguments[parameter.name] = parameter.default
        launches.append(Launch(self, arguments, {k: v for k, v in options.items() if k in _COMPILED}))

    with mock.patch.object(JITFunction, "run", record):
        yield launches


@contextlib.contextmanager
def launches_on(card: str) -> Iterator[list[Launch]]:
    """Records the launches of operators on CPU tensors, with the tiles that they take on `card`, a key of `CARDS`.

    New memory is zero, so that operators which look at results that no kernel wrote go on.
    """
    with tiles_of(card), recorded_launches() as launches:
        yield launches


@contextlib.contextmanager
def tiles_of(card: str) -> Iterator[None]:
    """Operators on CPU tensors launch kernels, with the tiles that they take on `card`; new memory is zero."""
    limits = DeviceLimits(32, CARDS[card][1] * 1024, card == "sm_75", card == "sm_100")
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("liger_trainer.")]
    rows.fit_config.cache_clear()
    with contextlib.ExitStack() as stack:
        for module in modules:
            if "TRITON_DEVICES" in vars(module):
                stack.enter_context(mock.patch.object(module, "TRITON_DEVICES", ("cpu",)))
            if "device_limits" in vars(module):
                stack.enter_context(mock.patch.object(module, "device_limits", return_value=limits))
        for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty",))):
            for name in names:
                native = getattr(owner, name)
                stack.enter_context(mock.patch.object(owner, name, lambda *a, n=native, **k: n(*a, **k).zero_()))
        stack.enter_context(mock.patch.object(torch, "_assert_async"))  # of what a kernel would have written
        yield
    rows.fit_config.cache_clear()


class _Driver:
    """What a launch asks of a device: one card, which has no memory and launches nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self.launched: list[str] = []  # the kernels whose launchers were made

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        assert metadata.name == source.fn.__name__
        self.launched.append(metadata.name)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def compiled_for(card: str, folder: Path) -> Iterator[list[str]]:
    """Launches of operators on CPU tensors compile their kernels for `card`, into a cache in `folder`; none runs.

    The names of those that a launch itself has to compile are added to the result.
    """
    late: list[str] = []
    native, launching = JITFunction.run, threading.local()

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        launching.name = self.__name__
        try:
            return native(self, *args, **kwargs | {"warmup": True})
        finally:
            del launching.name

    def listener(cache_hit: bool, **known: Any) -> None:
        if not cache_hit and hasattr(launching, "name"):
            late.append(launching.name)

    kernels = [*_kernels()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(tiles_of(card))
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": str(folder)}))
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(_Driver(CARDS[card][0]))
        for kernel in kernels:
            stack.enter_context(mock.patch.object(kernel, "device_caches", defaultdict(kernel.create_binder)))
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.object(knobs.compilation, "listener", listener))
        yield late


def _kernels() -> Iterator[JITFunction]:
    """The kernels of all operators that are imported."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("liger_trainer."):
            yield from (each for each in vars(module).values() if isinstance(each, JITFunction))


class NotedKernels(Compiler):
    """Counts what it is given, by name, and compiles nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), None)  # type: ignore[arg-type]
        self._names: dict[tuple[str, str], str] = {}

    def _submit(self, kernel: Any, known: dict[str, Any]) -> None:
        self._names[kernel.__name__, known["key"]] = kernel.__name__

    def wait(self) -> None:
        """Nothing runs."""

    def names(self, *others: NotedKernels) -> Counter[str]:
        """How many of each it was given that no one of the `others` was."""
        return Counter(name for key, name in self._names.items() if not any(key in each._names for each in others))


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _DTYPES[value.dtype]
    if hasattr(value, "block_shape"):  # a tensor descriptor; Gluon's has a layout too
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        return f"tensordesc<{_DTYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _source_of(kernel: JITFunction) -> type[ASTSource]:
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def compile_launch(launch: Launch, target: str) -> Any:
    """Compiles `launch` for `target`, a key of `TARGETS` or `CARDS`; Triton's own error comes through if it cannot."""
    signature, constants, attributes = {}, {}, {}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize  # a launch makes it a constant
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = _type_name(value)
            # What a launch on aligned tensors tells the compiler, which decides how wide loads may be.
            divisible = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            if isinstance(value, torch.Tensor) or divisible:
                attributes[(launch.kernel.arg_names.index(parameter.name),)] = [["tt.divisibility", 16]]
    source = _source_of(launch.kernel)(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGETS.get(target) or CARDS[target][0], options=launch.options)
