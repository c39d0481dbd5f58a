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
from liger_trainer.benchmarks.sweeps import products, rows
from liger_trainer.benchmarks.sweeps.launch import Launches, sweep

FAMILIES: dict[str, Callable[[Device, argparse.Namespace], Launches]] = {
    "cross_entropy": products.cross_entropy,
    "fp8_casts": rows.fp8_casts,
    "gated": rows.gated,
    "grouped_matmul": products.grouped_matmul,
    "lora_gated": rows.lora_gated,
    "norms": rows.norms,
    "qk_norm_rope": rows.qk_norm_rope,
    "rope": rows.ropes,
    "weight_gradient": products.weight_gradient,
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
    torch.manual_seed(0)
    print(Machine.measure(device, torch.bfloat16))
    for name in arguments.families:
        for launch in FAMILIES[name](device, arguments):
            if arguments.only in launch.name:
                sweep(launch, device, arguments.top)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
