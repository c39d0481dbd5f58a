"""Kernels that are compiled in threads before they are launched, for a card that this machine does not have."""

import fcntl
import hashlib
import threading
import time

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

from liger_trainer import functional as ops
from liger_trainer.kernels import compile_together, runtime
from liger_trainer.kernels.compile_together import Compiler, compiler_for, threads
from liger_trainer.kernels.runtime import plain_torch, use_triton
from tests.aot import compiled_for

pytestmark = pytest.mark.skipif(runtime.INTERPRETED, reason="Triton's interpreter compiles nothing")


@triton.jit
def _foreign_kernel(x_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x_ptr + place, tl.load(x_ptr + place) + 1.0)


def _norm(dtype=torch.bfloat16):
    x, weight = torch.ones(4, 64, dtype=dtype, requires_grad=True), torch.ones(64, dtype=dtype, requires_grad=True)
    ops.rms_norm(x, weight, 1e-6).sum().backward()


@pytest.fixture
def late(tmp_path):
    with compiled_for("sm_90", tmp_path) as names:
        yield names


def _compiled(compute) -> Compiler:
    with compiler_for(torch.device("cpu")) as compiler:
        assert compiler is not None
        with compiler.noting():
            compute()
        compiler.wait()
    return compiler


def test_what_was_noted_is_compiled_and_then_found(late, tmp_path):
    compiler = _compiled(_norm)
    assert compiler.count == 3
    assert late == []
    assert len([*tmp_path.glob("*/*.cubin")]) == 3  # and is there for the next process
    _norm()
    assert late == []  # in this process nothing is compiled again
    _norm(torch.float32)
    assert late == ["_rms_norm_forward_kernel", "_rms_norm_backward_kernel", "_column_sum_kernel"]


def test_what_launches_a_kernel_is_made_with_it(late):
    _compiled(_norm)
    made = driver.active.launched
    assert sorted(made) == ["_column_sum_kernel", "_rms_norm_backward_kernel", "_rms_norm_forward_kernel"]


def test_what_no_kernel_has_written_is_zero_and_is_not_asserted(monkeypatch):
    native = {each.__name__: each.__wrapped__ for each in compile_together._NEW}  # as the tests replace them
    monkeypatch.setattr(compile_together, "_NEW", {*compile_together._NEW, *native.values()})
    monkeypatch.setattr(compile_together, "TRITON_DEVICES", ("cpu",))
    x = torch.ones(4)
    arguments = {"empty": [4], "empty_strided": [(4,), (1,)], "empty_permuted": [(4,), (0,)], "empty_like": [x]}
    arguments |= {"new_empty": [x, 4], "new_empty_strided": [x, (4,), (1,)]}
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert all(native[name](*arguments[name]).isnan().all() for name in native)
        with compiler_for(torch.device("cpu")) as compiler, compiler.noting():
            made = [native[name](*arguments[name]) for name in native]
            torch._assert_async(made[0].any())
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(made) == 6
    assert not any(each.any() for each in made)


def test_sources_are_parsed_one_at_a_time(late, monkeypatch):
    parsing, most = [], []

    def parse(kernel, native=triton.JITFunction.parse):
        parsing.append(kernel)
        most.append(len(parsing))
        time.sleep(0.05)  # other threads run
        parsing.pop()
        return native(kernel)

    monkeypatch.setattr(triton.JITFunction, "parse", parse)
    monkeypatch.setattr(compile_together, "threads", lambda: 4)
    _compiled(_norm)
    assert {*most} == {1}
    assert triton.JITFunction.parse is parse


def test_one_that_is_launched_twice_is_compiled_once(late):
    def twice():
        _norm()
        _norm()

    assert _compiled(twice).count == 3


def test_none_runs_that_was_compiled_before(late, foreign, monkeypatch):
    launched, native = [], triton.JITFunction.run

    def run(kernel, *args, warmup, **kwargs):
        launched.append((kernel.__name__, warmup))
        return native(kernel, *args, warmup=warmup, **kwargs)

    _norm()
    monkeypatch.setattr(triton.JITFunction, "run", run)
    with compiler_for(torch.device("cpu")) as compiler, compiler.noting():
        _norm()
        foreign()
    names = ["_rms_norm_forward_kernel", "_rms_norm_backward_kernel", "_column_sum_kernel"]
    assert launched == [*((name, True) for name in names), ("_foreign_kernel", False)]
    launched.clear()
    _norm()
    assert launched == [(name, False) for name in names]


def test_what_another_thread_launches_meanwhile_is_compiled_there(late):
    with compiler_for(torch.device("cpu")) as compiler, compiler.noting():
        other = threading.Thread(target=_norm)
        other.start()
        other.join()
        assert (compiler.count, len(late)) == (0, 3)
    _norm()
    assert len(late) == 3


@pytest.fixture
def foreign(late, monkeypatch):
    """A kernel of another package, which this process has not compiled."""
    caches = type(_foreign_kernel.device_caches)(_foreign_kernel.create_binder)
    monkeypatch.setattr(_foreign_kernel, "device_caches", caches)
    return lambda: _foreign_kernel[(1,)](torch.ones(16), BLOCK=16)


def test_kernels_of_others_are_compiled_where_they_are_launched(foreign, late):
    with compiler_for(torch.device("cpu")) as compiler, compiler.noting():
        assert foreign() is not None
        assert compiler.count == 0
    assert late == ["_foreign_kernel"]


def test_one_that_does_not_compile_fails_where_it_is_launched(late, monkeypatch):
    def fail(kernel, known):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(compile_together, "compile_noted", fail)
    assert _compiled(_norm).count == 3
    _norm()
    assert len(late) == 3


def test_another_hook_goes_on_and_is_restored(foreign, monkeypatch):
    asked = []
    hook = lambda **known: asked.append(known["fn"].jit_function)  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    with pytest.raises(KeyError), compiler_for(torch.device("cpu")) as compiler, compiler.noting():
        raise KeyError
    assert triton.knobs.runtime.jit_cache_hook is hook
    with compiler_for(torch.device("cpu")) as compiler, compiler.noting():
        foreign()
    assert asked == [_foreign_kernel]


def test_without_triton_or_on_another_device_there_is_no_compiler(monkeypatch):
    with compiler_for(torch.device("cpu")) as compiler:
        assert compiler is None
    monkeypatch.setattr(compile_together, "HAS_TRITON", False)
    with compiler_for(torch.device("cuda", 0)) as compiler:
        assert compiler is None


def test_the_processes_of_a_machine_divide_its_cores(monkeypatch):
    monkeypatch.setattr(compile_together.os, "sched_getaffinity", lambda pid: range(24))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert threads() == 24
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert threads() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert threads() == 1


def test_a_kernel_that_another_process_compiles_is_awaited_after_all_others(late, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    compiled: list[str] = []
    held = (tmp_path / f"liger_trainer-{hashlib.sha256(b'second').hexdigest()}.lock").open("a")
    fcntl.flock(held, fcntl.LOCK_EX)

    def compile_noted(kernel, known):
        compiled.append(known["key"])
        if known["key"] == "third":
            held.close()  # as the other process does when it has compiled its own

    monkeypatch.setattr(compile_together, "compile_noted", compile_noted)
    monkeypatch.setattr(compile_together, "threads", lambda: 1)
    with compiler_for(torch.device("cpu")) as compiler:
        for name in ("first", "second", "third", "first"):
            compiler._submit(_foreign_kernel, {"key": name, "specialization_data": name})
        compiler.wait()
    assert compiled == ["first", "third", "second"]


def test_operators_run_in_plain_torch_inside_backward_included(late):
    x = torch.ones(4, 64, requires_grad=True)
    answers = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            answers.append(use_triton(x))
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            answers.append(use_triton(dy))
            return dy

    with plain_torch():
        with plain_torch():
            Asks.apply(x).sum().backward()
        _norm()
        other = threading.Thread(target=lambda: answers.append(use_triton(x)))
        other.start()
        other.join()
    assert answers == [False, False, True]
    assert use_triton(x)
    assert late == []
