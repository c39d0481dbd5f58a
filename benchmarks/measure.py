"""Time and peak memory of one forward and backward, measured the same way for every provider."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping

import torch

Step = Callable[[], object]


@dataclasses.dataclass
class Result:
    """What one provider did on one workload: median milliseconds, peak GiB above the inputs, or why it failed."""

    milliseconds: float = float("nan")
    gibibytes: float = float("nan")
    failure: str = ""


def peak_gibibytes(step: Step) -> float:
    """Peak device memory of one warm `step` above what was allocated before it."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _one_time(step: Step, flush: torch.Tensor) -> float:
    flush.zero_()  # evicts the workload's data from L2
    torch.cuda._sleep(10_000_000)  # some 5 ms in which the host queues the step, so that its own time does not count
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(steps: Mapping[str, Step], rounds: int = 12) -> dict[str, Result]:
    """Measures all providers of one workload in turns, so that clocks and power treat them alike."""
    results = {name: Result() for name in steps}
    for name, step in steps.items():
        try:
            step()
            results[name].gibibytes = peak_gibibytes(step)
        except Exception as error:  # a peer that cannot run the workload is a result, not a crash
            results[name].failure = f"{type(error).__name__}: {error}".splitlines()[0][:90]
            torch.cuda.empty_cache()
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name, result in results.items() if not result.failure}
    for _ in range(rounds):
        for name in times:
            times[name].append(_one_time(steps[name], flush))
    for name, samples in times.items():
        results[name].milliseconds = statistics.median(samples)
    return results
