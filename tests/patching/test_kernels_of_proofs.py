"""The kernels that are compiled for the proofs of a model, and what happens where one of them is wrong."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from liger_trainer import apply_liger_kernel
from liger_trainer.kernels import runtime
from liger_trainer.patching import apply, norm_forwards, trial
from liger_trainer.patching.inputs import AS_DRAWN
from liger_trainer.patching.recurrent import delta
from liger_trainer.patching.trial import KernelRuns, Trial
from liger_trainer.recipe.families import FAMILIES
from tests.aot import NotedKernels, compiled_for

NO_HEAD = {"linear_cross_entropy": False, "cross_entropy": False}


def _model(family: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]), dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------------------
# How many are compiled
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def proofs_on_an_h100(stub: NotedKernels, folder) -> Iterator[list[str]]:
    """Proofs run on the CPU, and ask `stub` for the kernels that they would put off on a GPU.

    Trials that put nothing off ask for none: those on the CPU of a machine with a GPU, and a router's, which would
    compile two. The result has the names of kernels that are launched all the same.
    """

    def noted(self, ours, agreement):
        tensors = [tensor.to(torch.bfloat16) for tensor in self._tensors]
        if self._later is not None:
            with stub.noting():
                trial._run(ours, tensors, self._constants, AS_DRAWN)
        return agreement

    def on_cpu(self):
        return Trial(self._original, self._tensors, self._inputs, self._constants, self._slack)

    apply_liger_kernel(_model("llama"))  # tries what is recognised by its shape, on the CPU
    with contextlib.ExitStack() as stack:
        late = stack.enter_context(compiled_for("sm_90", folder))
        stack.enter_context(mock.patch.object(Trial, "_in_kernels", noted))
        stack.enter_context(mock.patch.object(Trial, "on_cpu", on_cpu))
        stack.enter_context(mock.patch.object(delta, "few", lambda heads, most, probe: heads))
        yield late


def kernels_of_proofs(model: torch.nn.Module, folder) -> Counter[str]:
    """The names of the kernels that the proofs of `model` would compile on an H100, and how many of each.

    Of the experts' trials, two kernels that sort rows are launched here, and count.
    """
    stub = NotedKernels()
    with proofs_on_an_h100(stub, folder) as late:
        apply_liger_kernel(model, NO_HEAD)
    return stub.names() + Counter(late)


@pytest.mark.skipif(runtime.INTERPRETED, reason="Triton's interpreter compiles nothing")
@pytest.mark.parametrize(("family", "count"), [("llama", 11), ("qwen3", 14), ("qwen3_moe", 20), ("qwen3_5", 36)])
def test_proofs_compile_so_many_kernels_and_no_more(family, count, tmp_path):
    """docs/performance.md has the numbers."""
    found = kernels_of_proofs(_model(family), tmp_path)
    assert found.total() == count, found


# ---------------------------------------------------------------------------------------------------------------------
# Where one is wrong
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_kernels(monkeypatch):
    """Proofs run "kernels" on the CPU: operators out of `plain_torch`."""
    monkeypatch.setattr(trial, "TRITON_DEVICES", ("cpu",))


def _in_kernels() -> bool:
    return runtime._plain_thread is None


@pytest.mark.usefixtures("with_kernels")
def test_kernels_run_after_the_formula_is_proved_in_bfloat16_alone():
    ran = []

    def ours(x):
        ran.append((_in_kernels(), x.dtype))
        return x.sin()

    put_off = []
    later = Trial(torch.sin, [torch.randn(4, 16)], later=lambda *run: put_off.append(run))
    assert later.prove(ours).equal
    assert ran == [(False, torch.float32), (False, torch.bfloat16)]
    ((run, is_right),) = put_off
    assert is_right(run())
    assert ran[2:] == [(True, torch.bfloat16)]
    assert not is_right([each * 1.1 for each in run()])
    assert Trial(torch.sin, [torch.randn(4, 16)]).prove(ours).equal
    assert ran[4:] == [(False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)]


@pytest.mark.usefixtures("with_kernels")
def test_a_kernel_that_is_wrong_or_does_not_run_is_refused():
    def wrong(x):
        return x.sin() * (1.1 if _in_kernels() else 1.0)

    def failing(x):
        if _in_kernels():
            raise RuntimeError("out of resource: shared memory")
        return x.sin()

    x = [torch.randn(4, 16)]
    assert "rounds differently" in Trial(torch.sin, x).prove(wrong).reason
    assert "the kernel did not run: RuntimeError: out of resource" in Trial(torch.sin, x).prove(failing).reason
    for ours in (wrong, failing):
        runs = KernelRuns(None)
        assert Trial(torch.sin, x, later=runs.later).prove(ours).equal
        assert not runs.are_right()


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("fails", [False, True])
def test_one_wrong_kernel_leaves_its_modules_alone_and_no_others(fails, monkeypatch):
    rms_norm = norm_forwards.rms_norm

    def broken(*args, **kwargs):
        if _in_kernels() and fails:
            raise RuntimeError("an illegal instruction was encountered")
        return rms_norm(*args, **kwargs) * (1.1 if _in_kernels() else 1.0)

    monkeypatch.setattr(norm_forwards, "rms_norm", broken)
    rows = {row.component: row for row in apply_liger_kernel(_model("llama"), NO_HEAD).rows}
    assert not rows["rms_norm"].applied
    assert "rounds differently" in str(rows["rms_norm"].reason)  # of the nearest formula
    assert rows["swiglu"].applied
    assert rows["rope"].applied
    assert rows["attention"].applied


@pytest.mark.usefixtures("with_kernels")
def test_where_all_kernels_are_right_the_model_is_searched_once(monkeypatch):
    searches = []
    native = apply._find_everything
    monkeypatch.setattr(apply, "_find_everything", lambda *args: searches.append(1) or native(*args))
    assert apply_liger_kernel(_model("llama"), NO_HEAD).rows[0].applied
    assert searches == [1]
