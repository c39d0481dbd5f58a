"""AdamW's step alone, on all weights of a model with fewer layers; one optimizer after the other, on one device.

    python -m liger_trainer.benchmarks.optimizer_step --model llama3-8b --layers 8 --output results

The floor is the time of moving what a step must: weights and states, read and written, and gradients, read.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from liger_trainer.benchmarks.device import Device, find_device
from liger_trainer.benchmarks.measure import explain, summary
from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.optimizers import bitsandbytes_8bit, torchao_8bit
from liger_trainer.benchmarks.records import OPTIMIZER_STEP, Machine, Record, Run, command_line
from liger_trainer.benchmarks.report import make_console, make_table, milliseconds, number, percentage
from liger_trainer.optim import LigerAdamW

_FUSED = partial(torch.optim.AdamW, fused=True)
PROVIDERS: dict[str, tuple[torch.dtype, Callable[[Any], torch.optim.Optimizer]]] = {
    "torch": (torch.bfloat16, _FUSED),
    "torch dtype=float32": (torch.float32, _FUSED),
    "bitsandbytes": (torch.bfloat16, partial(bitsandbytes_8bit, lr=1e-3)),
    "torchao, stochastic": (torch.bfloat16, partial(torchao_8bit, lr=1e-3)),
    "liger_trainer": (torch.bfloat16, LigerAdamW),
    "liger_trainer states=bf16": (torch.bfloat16, partial(LigerAdamW, states="bf16")),
    "liger_trainer states=fp32": (torch.bfloat16, partial(LigerAdamW, states="fp32")),
    "liger_trainer master=stochastic": (torch.bfloat16, partial(LigerAdamW, master="stochastic")),
}
"""The dtype of the weights and gradients of each, and its optimizer."""


def measure(record: Record, shapes: Iterable[torch.Size], device: Device, copy_rate: float, rounds: int) -> None:
    """Fills the record of a provider: milliseconds, the floor, GiB above weights and gradients, and bytes a weight."""
    dtype, make = PROVIDERS[record.provider]
    random = torch.Generator(device.device).manual_seed(0)

    def normal(shape: torch.Size, scale: float) -> torch.Tensor:
        return torch.randn(shape, device=device.device, dtype=dtype, generator=random).mul_(scale)

    weights = [normal(shape, 0.02).requires_grad_() for shape in shapes]
    for weight in weights:
        weight.grad = normal(weight.shape, 1e-3)
    try:
        optimizer = make(weights)
        record.peak_gibibytes = device.peak_gibibytes(optimizer.step)
    except (ImportError, RuntimeError) as error:
        record.failure = explain(error)
        return
    optimizer.step()
    samples = [device.time(lambda _: optimizer.step())[0] for _ in range(rounds)]
    record.both, record.both_spread = summary(samples)
    states = [_bytes(value) for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    own = sum(map(_bytes, weights))
    record.floor = (2 * (own + sum(states)) + own) / copy_rate * 1e3
    record.remark = f"{(2 * own + sum(states)) / sum(weight.numel() for weight in weights):.2f} bytes a weight"


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that are stored, for torchao's tensors too, which are made of others."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama3-8b", help="whose sizes are taken")
    parser.add_argument("--layers", type=int, default=8, help="how many of its layers, besides embedding and head")
    parser.add_argument("--rounds", type=int, default=12, help="samples of each optimizer")
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write results.json and results.csv here")
    arguments = parser.parse_args(argv)
    device = Device(find_device(arguments.device))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(MODELS[arguments.model], arguments.layers))
    shapes = [parameter.shape for parameter in model.parameters()]
    title = f"{sum(shape.numel() for shape in shapes) / 1e9:.2f}B weights"
    run = Run.begin(command_line("optimizer_step", argv), Machine.measure(device, torch.bfloat16))
    table = make_table(f"{OPTIMIZER_STEP} · {arguments.model}, {title} · {run.machine}", "ms", "of the floor", "GiB")
    for name, (dtype, _) in PROVIDERS.items():
        kind = str(dtype).removeprefix("torch.")
        record = Record(OPTIMIZER_STEP, arguments.model, 0, f"{arguments.layers} layers", title, kind, name)
        measure(record, shapes, device, run.machine.copy_rate, arguments.rounds)
        device.collect()
        run.records.append(record)
        cells = milliseconds(record.both), percentage(record.fraction_of_floor()), number(record.peak_gibibytes, ".2f")
        table.add_row(name, *cells, record.failure or record.remark)
        if arguments.output is not None:
            run.write(arguments.output)
    make_console().print(table)


if __name__ == "__main__":
    main()
