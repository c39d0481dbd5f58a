"""Kernels compiled side by side, before the launches that need them.

Triton compiles each kernel at its first launch, one after the other. For most of that time it does not hold Python's
lock, so threads can compile side by side. [`Compiler`] notes which kernels a computation launches, without launching
them, and compiles them meanwhile. They are then in Triton's cache on disk, where the launches find them.

It uses the hook that Triton calls before a compilation, with all that the compiler is told. All threads share the hook,
and it intervenes only in the thread that notes. Of the processes of a machine, one compiles a kernel, and the others
find it in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import DEVICE_ASSERTIONS
from liger_trainer.kernels.runtime import HAS_TRITON, INTERPRETED, TRITON_DEVICES, triton

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

require(DEVICE_ASSERTIONS)

_OURS = "liger_trainer."
_PARSING = threading.RLock()  # compilers of several threads may wrap one another's
_NEW = {
    *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
    *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided),
}


class _Zeros(TorchFunctionMode):
    """New memory is zero, and device assertions are skipped, since no kernel writes what they check."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch._assert_async:
            return None
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function in _NEW else result


class Compiler:
    """Compiles the kernels of a device in threads; [`compiler_for`] makes it.

    Attributes:
        count: Kernels that it has been given.
    """

    def __init__(self, device: torch.device, pool: ThreadPoolExecutor) -> None:
        self.count = 0
        self._device, self._pool = device, pool
        self._running: list[Future[None]] = []
        self._elsewhere: list[tuple[Any, dict[str, Any]]] = []  # what another process compiles
        self._given: set[tuple[int, str]] = set()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Kernels of ours that are launched in the context are compiled in the background, once each, and do not run.

        Their results are zeros, and assertions on the device about them are skipped.
        """
        runtime, kernels, thread = triton.knobs.runtime, triton.JITFunction, threading.get_ident()
        before, native = runtime.jit_cache_hook, kernels.run

        def is_noted(module: str) -> bool:
            return threading.get_ident() == thread and module.startswith(_OURS)

        def hook(**known: Any) -> bool | None:
            if is_noted(known["fn"].module):
                self._submit(known["fn"].jit_function, known["compile"])
                return True
            return before(**known) if before else None

        # Kernels that are compiled already do not run either: they would read results that others have not written.
        def run(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
            return native(kernel, *args, warmup=warmup or is_noted(kernel.module), **kwargs)

        # A backward launches too, and autograd would run it in a thread of the device.
        with torch.autograd.set_multithreading_enabled(False), _Zeros():
            runtime.jit_cache_hook, kernels.run = hook, run
            try:
                yield
            finally:
                runtime.jit_cache_hook, kernels.run = before, native

    def wait(self) -> None:
        """Returns when all kernels are compiled. One that cannot be compiled fails again at its launch."""
        wait(self._running)
        self._running = [self._pool.submit(self._compile, *each, waits=True) for each in self._elsewhere]
        wait(self._running)
        self._running.clear()
        self._elsewhere.clear()

    def _submit(self, kernel: Any, known: dict[str, Any]) -> None:
        if (id(kernel), known["key"]) not in self._given:
            self._given.add((id(kernel), known["key"]))
            self.count += 1
            self._running.append(self._pool.submit(self._compile, kernel, known, waits=False))

    def _compile(self, kernel: Any, known: dict[str, Any], waits: bool) -> None:
        with _claimed(known["specialization_data"], waits) as is_ours:
            if is_ours:
                with _current(self._device):
                    compile_noted(kernel, known)
            else:
                self._elsewhere.append((kernel, known))  # to be found in the cache when all else is done


def compile_noted(kernel: Any, known: dict[str, Any]) -> None:
    """Compiles `kernel` into Triton's cache on disk, as its launch would have, from what Triton told its hook.

    Args:
        kernel: The kernel, a `triton.JITFunction`.
        known: The argument `compile` of the hook.
    """
    options = json.loads(known["specialization_data"])["options"]
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    source = kernel.ASTSource(kernel, known["signature"], known["constants"], known["configs"][0])
    driver = triton.runtime.driver.active
    compiled = triton.compile(source, target=driver.get_current_target(), options=options)
    # The code that launches a kernel is written in C, and compiled too, up to Triton 3.6: it takes as long again.
    driver.launcher_cls(source, compiled.metadata)


@contextlib.contextmanager
def compiler_for(device: torch.device) -> Iterator[Compiler | None]:
    """Yields a compiler of kernels for `device`; None on the CPU, without Triton and in its interpreter."""
    if not HAS_TRITON or INTERPRETED or device.type not in TRITON_DEVICES:
        yield None
        return
    pool = ThreadPoolExecutor(threads(), "liger_trainer compiles")
    with _parsing_one_at_a_time():
        try:
            yield Compiler(device, pool)
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _parsing_one_at_a_time() -> Iterator[None]:
    """Inside, Triton parses the source of one kernel at a time, in whichever threads.

    Python 3.11 counts the depth of a syntax tree for all threads together. Where the garbage collector lets another
    thread parse before a tree is finished, `ast.parse` raises SystemError: "AST constructor recursion depth mismatch".
    """
    native = triton.JITFunction.parse

    def parse(kernel: Any) -> Any:
        with _PARSING:
            return native(kernel)

    triton.JITFunction.parse = parse
    try:
        yield
    finally:
        triton.JITFunction.parse = native


def threads() -> int:
    """Threads that compile in this process: its share of the cores, which the processes of a machine divide."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(32, cores // _processes()))


@contextlib.contextmanager
def _claimed(specialization: str, waits: bool) -> Iterator[bool]:
    """Yields whether this process compiles a kernel, because no other process that shares the cache does.

    With `waits`, first waits until no other does. A file in Triton's cache is locked in the context. Without other
    processes, and where files cannot be locked, yields True.
    """
    with contextlib.ExitStack() as stack:
        if _processes() > 1 and fcntl is not None:
            name = hashlib.sha256(specialization.encode()).hexdigest()
            try:
                folder = Path(triton.knobs.cache.dir)
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context((folder / f"liger_trainer-{name}.lock").open("a"))
                fcntl.flock(file, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            except OSError:
                pass
        yield True


def _processes() -> int:
    """The processes of this machine, as their launcher says."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes `device` current in this thread: a kernel is compiled for the current one."""
    return contextlib.nullcontext() if device.index is None else torch.get_device_module(device).device(device)
