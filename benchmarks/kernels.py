"""Kernels against their peers on one GPU: `python -m benchmarks.kernels [workload ...]`.

Providers that are not installed are left out. Every row is one forward and backward on random bf16 data; `ms` is the
median of 12 runs taken in turns with the other providers, `GiB` the peak above the inputs. "floor" is the fewest bytes
moved at the copy bandwidth, or the fewest FLOPs at the matmul rate, both measured in this run. Gradient errors are
measured by `benchmarks.gradient_error`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Result, Step, measure
from benchmarks.workloads import WORKLOADS, Workload


def machine_rates() -> tuple[float, float]:
    """Copy bandwidth in bytes/s (read plus write) and bf16 matmul rate in FLOP/s of this GPU, now."""
    source = torch.randn(2**30, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(source)
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    copy: Step = lambda: target.copy_(source)  # noqa: E731
    matmul: Step = lambda: left @ right  # noqa: E731
    times = measure({"copy": copy, "matmul": matmul}, rounds=10)
    return (
        2 * source.numel() * source.element_size() / times["copy"].milliseconds * 1e3,
        2 * 8192**3 / times["matmul"].milliseconds * 1e3,
    )


def run(workload: Workload, rates: tuple[float, float]) -> dict[str, Result]:
    """Measures one workload with every provider that is installed."""
    steps: dict[str, Step] = {}
    failures: dict[str, str] = {}
    providers: dict[str, Callable[[], Step]] = workload.providers()
    for name, build in providers.items():
        try:
            steps[name] = build()
        except ImportError as error:
            failures[name] = str(error)
    results = measure(steps)
    floor = max(workload.bytes / rates[0], workload.flops / rates[1]) * 1e3
    return {"floor": Result(milliseconds=floor), **results}


def main() -> None:
    """Runs the named workloads (all by default) and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="*", choices=[[], *WORKLOADS], help="default: all")
    parser.add_argument("--json", type=pathlib.Path, help="also write the numbers here")
    args = parser.parse_args()
    rates = machine_rates()
    console = Console(width=150)
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {rates[0] / 1e12:.2f} TB/s, "
        f"bf16 matmul {rates[1] / 1e12:.0f} TFLOP/s"
    )
    table = Table("workload", "provider", "ms", "x floor", "GiB", "remark")
    numbers: dict[str, dict[str, dict]] = {}
    for name in args.workload or WORKLOADS:
        results = run(WORKLOADS[name], rates)
        numbers[name] = {provider: vars(result) for provider, result in results.items()}
        floor = results["floor"].milliseconds
        for provider, result in results.items():
            table.add_row(
                name,
                provider,
                f"{result.milliseconds:.3f}",
                f"{result.milliseconds / floor:.2f}",
                "" if provider == "floor" else f"{result.gibibytes:.2f}",
                result.failure,
            )
        table.add_section()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"rates": rates, "workloads": numbers}, indent=1))


if __name__ == "__main__":
    main()
