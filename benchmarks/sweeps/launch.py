"""A kernel's launch configurations, each checked against the exact result and then timed by the benchmarks' clock."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import relative_error

Tensors = Sequence[torch.Tensor]
randn = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)


@dataclasses.dataclass
class Launch:
    """A kernel whose configurations are compared.

    Attributes:
        name: The kernel, with its shape.
        chosen: The configuration of the kernel's own table, or of another library beside it.
        configs: The others.
        run: Launches with a configuration and returns what was written.
        exact: The true values of the first outputs.
        work: Bytes moved, or FLOPs with `flops`.
        flops: Whether `work` counts FLOPs.
        tolerance: The largest relative error of an output.
    """

    name: str
    chosen: Any
    configs: Sequence[Any]
    run: Callable[[Any], Tensors]
    exact: Tensors = ()
    work: float = 0.0
    flops: bool = False
    tolerance: float = 4e-3


Launches = Iterator[Launch]


def patched(holder: object, attribute: str, launch: Callable[[], Tensors]) -> Callable[[Any], Tensors]:
    """Runs `launch` while the function `attribute` of `holder` returns the configuration."""

    def run(config: Any) -> Tensors:
        with mock.patch.object(holder, attribute, return_value=config):
            return launch()

    return run


def chosen_by(holder: object, attribute: str, launch: Callable[[], object]) -> Any:
    """The configuration that the function `attribute` of `holder` returns in a launch."""
    function, found = getattr(holder, attribute), []

    def recorded(*arguments: Any) -> Any:
        found.append(function(*arguments))
        return found[-1]

    with mock.patch.object(holder, attribute, recorded):
        launch()
    return found[0]


def sweep(launch: Launch, device: Device, top: int) -> None:
    """Checks and times every configuration, and prints the best ones and the current one."""
    times: dict[Any, float] = {}
    print(f"\n{launch.name}", flush=True)
    for config in dict.fromkeys([launch.chosen, *launch.configs]):
        try:
            outputs = launch.run(config)
            errors = [relative_error(*pair) for pair in zip(outputs, launch.exact)]
            if not all(error < launch.tolerance for error in errors):
                print(f"  {config} is WRONG: relative errors {errors}")
                continue
            for output in outputs:
                output.detach().fill_(float("nan"))  # so that the next configuration cannot pass by not writing
            times[config] = device.median(lambda config=config: launch.run(config))  # type: ignore[misc]
        except Exception as error:  # too much shared memory or too many registers for this device
            print(f"  {config} cannot run: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
    ranked = sorted(times, key=times.__getitem__)
    for config in dict.fromkeys([*ranked[:top], *(each for each in ranked if each == launch.chosen)]):
        mark = "  <- current" if config == launch.chosen else ""
        rate = launch.work / times[config] / 1e6
        print(
            f"  {times[config]:.4f} ms  {rate / 1e3 if launch.flops else rate:5.0f} "
            f"{'TFLOP/s' if launch.flops else 'GB/s'}  {config}{mark}",
            flush=True,
        )


def show(name: str, device: Device, works: Mapping[str, Callable[[], object]]) -> None:
    """A line of milliseconds."""
    times = (f"{label} {device.median(work):.4f}" for label, work in works.items())
    print(f"{name}, ms: " + ", ".join(times), flush=True)
