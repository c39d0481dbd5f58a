"""What a measurement does with providers that fail, cheat or overwrite."""

import time

import pytest
import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import DeviceLost, explain, measure, relative_error, summary
from liger_trainer.benchmarks.records import Record
from liger_trainer.benchmarks.registry import Case, Data, Floor

CPU = Device(torch.device("cpu"))


@pytest.fixture
def case():
    data = Data(torch.device("cpu"), torch.float32)
    return Case({"x": data.normal(4, 8), "factor": 3.0}, "4×8", Floor(1, 1), (data.upstream(4, 8),))


def right(x, factor):
    return x * factor


def measured(case, exact=right, deadline=float("inf"), rounds=2, **providers):
    records = {name: Record("multiply", "tiny", 4, "", case.shape, "float32", name) for name in providers}
    measure(case, providers, records, exact, CPU, rounds, deadline)
    return records


def test_errors_are_distances_from_float64(case):
    results = measured(case, right=right, wrong=lambda x, factor: x * factor * 1.25)
    assert results["right"].errors == {"output": pytest.approx(0, abs=1e-7), "dx": pytest.approx(0, abs=1e-7)}
    assert results["wrong"].errors == {"output": pytest.approx(0.25), "dx": pytest.approx(0.25)}


def test_a_failure_is_told_and_the_rest_goes_on(case):
    def fails(x, factor):
        raise ValueError("takes no such shape\nand says more")

    def absent(x, factor):
        from no_such_package_at_all.kernels import function

        return function(x)

    def partly(x, factor):
        from liger_trainer.functional import no_such_function

        return no_such_function(x)

    results = measured(case, fails=fails, absent=absent, partly=partly, right=right)
    assert results["fails"].failure == "ValueError: takes no such shape"
    assert results["absent"].failure == "skipped: no_such_package_at_all is not installed"
    assert results["partly"].failure == "skipped: liger_trainer.functional has no no_such_function"
    assert results["right"].failure == ""
    assert results["right"].both > 0
    assert results["fails"].both is None


def test_an_overwritten_input_is_told_and_restored(case):
    def clobbers(x, factor):
        result = x * factor
        x.detach().zero_()
        return result

    before = case.arguments["x"].detach().clone()
    results = measured(case, clobbers=clobbers, right=right)
    assert results["clobbers"].remark == "writes over its inputs"
    assert results["right"].remark == ""
    assert results["right"].errors["output"] < 1e-6
    assert torch.equal(case.arguments["x"].detach(), before)


def test_an_overwritten_gradient_is_told(case):
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul_(3)

    results = measured(case, greedy=lambda x, factor: Greedy.apply(x), right=right)
    assert results["greedy"].remark == "writes over the gradient it is given"
    assert results["right"].errors["dx"] < 1e-6


def test_a_gradient_left_behind_is_taken_and_a_missing_one_is_a_failure(case):
    class Leaves(torch.autograd.Function):
        """Its backward accumulates into a weight that autograd does not see, as that of a tiled MLP may."""

        @staticmethod
        def forward(ctx, x, held):
            ctx.held = held
            ctx.save_for_backward(x)
            return x * held[0].detach()

        @staticmethod
        def backward(ctx, gradient):
            (x,), (weight,) = ctx.saved_tensors, ctx.held
            weight.grad = (gradient * x).sum(0)
            return gradient * weight.detach(), None

    weight = torch.randn(8, requires_grad=True)
    case.arguments = {"x": case.arguments["x"], "weight": weight}
    results = measured(
        case,
        exact=lambda x, weight: x * weight,
        leaves=lambda x, weight: Leaves.apply(x, [weight]),
        lacks=lambda x, weight: x * weight.detach(),
    )
    assert max(results["leaves"].errors.values()) < 1e-6
    assert weight.grad is None
    assert results["lacks"].failure == "ValueError: gave no gradient of weight"


def test_the_wrong_number_of_outputs(case):
    results = measured(case, two=lambda x, factor: (x, x))
    assert results["two"].failure == "ValueError: returned 2 outputs where 1 are expected"


def test_the_wrong_shape(case):
    case.upstream = ()
    results = measured(case, exact=lambda x, factor: x.sum(), odd=lambda x, factor: x.sum(0, keepdim=True).sum(1))
    assert results["odd"].failure == "ValueError: a result is shaped (1,), not ()"


def test_time_runs_out(case):
    def slow(x, factor):
        time.sleep(0.05)
        return x * factor

    began = time.monotonic()
    results = measured(case, deadline=began + 0.3, rounds=1000, liger_trainer=slow, **{"torch.compile": slow})
    assert time.monotonic() - began < 5
    assert results["liger_trainer"].both >= 50
    late = measured(case, deadline=time.monotonic() - 1, right=right)
    assert late["right"].failure == "skipped: no time left"


def test_a_lost_device_ends_it(case, monkeypatch):
    def breaks(x, factor):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert measured(case, breaks=breaks)["breaks"].failure.startswith("RuntimeError: CUDA error")
    monkeypatch.setattr(Device, "works", lambda self: False)
    with pytest.raises(DeviceLost, match="breaks: RuntimeError: CUDA error"):
        measured(case, breaks=breaks)


def test_out_of_memory_in_words():
    assert explain(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")) == "out of memory"


def test_matmuls_are_timed_as_the_floor(case):
    calls = []
    case.floor = Floor(matmuls=lambda: calls.append(1))
    assert measure(case, {}, {}, right, CPU, rounds=3) > 0
    assert len(calls) == 6  # each round once untimed


def test_summary_is_median_and_middle_half():
    assert summary([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0)
    assert summary([7.0]) == (7.0, 0.0)


def test_relative_error_in_slices(monkeypatch):
    truth = torch.randn(100, 7, dtype=torch.float64)
    assert relative_error(truth * 1.5, truth) == pytest.approx(0.5)
    assert relative_error(torch.tensor(3.0), torch.tensor(2.0, dtype=torch.float64)) == pytest.approx(0.5)
    assert relative_error(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.float64)) == 0


class FakeAccelerator:
    """Notes what a device is asked to do, in order; every event lies 2 ms after the one before."""

    def __init__(self):
        self.log, self.clock, self.allocated, self.peak = [], 0, 100 * 2**20, 0
        accelerator = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                accelerator.log.append("record")
                accelerator.clock += 2
                self.at = accelerator.clock

            def elapsed_time(self, other):
                return other.at - self.at

        self.Event = Event

    def _sleep(self, cycles):
        self.log.append("sleep")

    def synchronize(self):
        self.log.append("synchronize")

    def memory_allocated(self):
        return self.allocated

    def reset_peak_memory_stats(self):
        self.peak = self.allocated

    def max_memory_allocated(self):
        return self.peak


def test_events_surround_each_part():
    device = Device(torch.device("cpu"))
    device.module = fake = FakeAccelerator()
    seen = []
    times = device.time(lambda given: seen.append(given) or "outputs", lambda given: seen.append(given))
    assert times == [2, 2]
    assert seen == [None, "outputs"]
    assert fake.log == ["sleep", "record", "record", "record", "synchronize"]


def test_peak_memory_is_above_what_was_there():
    device = Device(torch.device("cpu"))
    device.module = fake = FakeAccelerator()

    def work():
        fake.peak = fake.allocated + 2**29

    assert device.peak_gibibytes(work) == 0.5
    assert CPU.peak_gibibytes(work) is None
