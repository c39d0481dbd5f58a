"""Times a kernel at every launch configuration and sets the best beside its table's choice; run on one GPU.

    python benchmarks/sweeps/sweep.py                        # the names of the families
    python benchmarks/sweeps/sweep.py norms rope [--only backward] [--top 4]
    python benchmarks/sweeps/sweep.py grouped_matmul --tokens 32768
    python benchmarks/sweeps/sweep.py lora_gated --rank 16 --dtype bfloat16

Every configuration is checked against the exact result before it is timed, by the clock of the benchmarks. The rate
counts the bytes that the operation has to move, or its FLOPs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.records import Machine
from liger_trainer.benchmarks.registry import load_operations
from liger_trainer.benchmarks.sweeps import passes, single_kernels
from liger_trainer.benchmarks.sweeps.launch import Launches, sweep

FAMILIES: dict[str, Callable[[Device, argparse.Namespace], Launches]] = {
    "cross_entropy": passes.launches(passes.cross_entropy),
    "fp8_casts": single_kernels.fp8_casts,
    "gated": passes.launches(passes.gated),
    "grouped_matmul": single_kernels.grouped_matmul,
    "lora_gated": single_kernels.lora_gated,
    "norms": passes.launches(passes.norms),
    "qk_norm_rope": passes.launches(passes.qk_norm_rope),
    "rope": passes.launches(passes.ropes),
    "weight_gradient": single_kernels.weight_gradient,
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=FAMILIES)
    parser.add_argument("--only", default="", help="only the launches whose name contains this")
    parser.add_argument("--top", type=int, default=4, help="configurations to print for each kernel")
    parser.add_argument("--tokens", type=int, default=8192, help="of grouped_matmul")
    parser.add_argument("--rank", type=int, default=16, help="of the three adapters of lora_gated")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of grouped_matmul and lora_gated",
    )
    arguments = parser.parse_args()
    device = Device(torch.device("cuda"))
    load_operations()
    torch.manual_seed(0)
    print(Machine.measure(device, torch.bfloat16))
    for name in arguments.families:
        for launch in FAMILIES[name](device, arguments):
            if arguments.only in launch.name:
                sweep(launch, device, arguments.top)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
