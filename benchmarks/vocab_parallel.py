"""The LM head with its vocabulary split over processes, compared with gathering it; one process per GPU.

    torchrun --nproc_per_node 2 -m liger_trainer.benchmarks.vocab_parallel --model llama3-8b

Every process has all hidden states and its part of the head's rows. Time is that of the slowest process, memory the
largest of all, and the error the largest distance from float64 on one process with the whole head. Providers:

    gathered logits     each process its columns of the logits, all of them gathered, and the loss in fp32: what a
                        trainer does whose tensor-parallel head returns whole logits
    gathered head       the whole weight gathered, and our operator for one process
    liger-kernel        its tensor-parallel operator, for log-probabilities
    liger_trainer       ours: instead of logits, 32 bytes per token and process are gathered
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from liger_trainer import functional
from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import Runner, exact_results, explain, relative_error
from liger_trainer.benchmarks.models import MODELS, Model
from liger_trainer.benchmarks.operations.head import head_cases, soft_capped
from liger_trainer.benchmarks.registry import OPERATIONS, Case, Data, load_operations, wide
from liger_trainer.benchmarks.report import make_table, milliseconds, number

Provider = Callable[..., Any]
LOSS, LOG_PROBS = "linear_cross_entropy", "linear_log_probs"


@dataclasses.dataclass
class Line:
    """The measurement of one provider: milliseconds and GiB of the process that needed most."""

    operation: str
    provider: str
    forward: float | None = None
    backward: float | None = None
    gibibytes: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    failure: str = ""


class _Gather(torch.autograd.Function):
    """Gathers the parts of all processes; each gets the gradient of its own part, as all compute the same loss."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()].contiguous(), None


class _Shared(torch.autograd.Function):
    """A tensor that is the same on all processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


def _gathered_logits(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    part = _Shared.apply(hidden) @ weight.T
    logits = soft_capped(wide(_Gather.apply(part, 1)), softcap)
    return logits.gather(-1, target.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def _mean_of_gathered_logits(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    return -_gathered_logits(hidden, weight, target, softcap).mean()


def _fused(function: Callable[..., Any], whole_head: bool = False) -> Provider:
    """A function of the head's part, or of the gathered whole."""

    def run(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Any:
        return function(hidden, _Gather.apply(weight, 0) if whole_head else weight, target, softcap=softcap)

    return run


def _liger(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_scaled_cross_entropy_tp

    if softcap is not None:
        raise ValueError("has no soft-cap")
    output = liger_fused_linear_scaled_cross_entropy_tp(hidden, weight, target, dist.group.WORLD)
    return -(output[0] if isinstance(output, tuple) else output)


PROVIDERS: dict[str, dict[str, Provider]] = {
    LOSS: {
        "gathered logits": _mean_of_gathered_logits,
        "gathered head": _fused(functional.linear_cross_entropy, whole_head=True),
        "liger_trainer": _fused(functional.vocab_parallel_linear_cross_entropy),
    },
    LOG_PROBS: {
        "gathered logits": _gathered_logits,
        "gathered head": _fused(functional.linear_log_probs, whole_head=True),
        "liger-kernel": _liger,
        "liger_trainer": _fused(functional.vocab_parallel_linear_log_probs),
    },
}


def _own_part(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def _largest(values: list[float], device: Device) -> list[float]:
    """The largest of each value over all processes."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def _sample(runner: Runner, device: Device) -> list[float]:
    runner.step()
    dist.barrier()
    return device.time(runner.forward, runner.backward)


def measure(operation: str, case: Case, device: Device, rounds: int) -> list[Line]:
    """Measures every provider of an operation; all processes call it with the same case of the whole head."""
    truth = exact_results(OPERATIONS[operation].exact(), case)
    truth["dweight"] = _own_part(truth["dweight"]).clone()
    arguments = {**case.arguments, "weight": _own_part(case.arguments["weight"].detach()).clone().requires_grad_()}
    del case.arguments["weight"]
    device.empty_cache()
    lines = []
    for name, provider in PROVIDERS[operation].items():
        line, runner = Line(operation, name), Runner(provider, arguments, case.upstream)
        try:
            errors = {key: relative_error(value, truth[key]) for key, value in runner.results().items()}
        except (ImportError, ValueError) as error:  # the same on every process
            line.failure = explain(error)
        else:
            line.errors = dict(zip(errors, _largest(list(errors.values()), device)))
            peak = device.peak_gibibytes(runner.step)
            line.gibibytes = None if peak is None else _largest([peak], device)[0]
            samples = [_largest(_sample(runner, device), device) for _ in range(rounds)]
            line.forward, line.backward = (statistics.median(times) for times in zip(*samples))
        lines.append(line)
    return lines


def table(lines: list[Line], title: str) -> Table:
    """A table of one operation."""
    result = make_table(title, "forward ms", "backward ms", "both ms", "GiB", "error", "gradient error")
    for line in lines:
        both = None if line.forward is None or line.backward is None else line.forward + line.backward
        gradients = max((error for key, error in line.errors.items() if key.startswith("d")), default=None)
        times = (milliseconds(time) for time in (line.forward, line.backward, both))
        errors = (number(error, ".1e") for error in (line.errors.get("output"), gradients))
        result.add_row(line.provider, *times, number(line.gibibytes, ".2f"), *errors, line.failure)
    return result


def run(model: Model, tokens: int, dtype: torch.dtype, rounds: int, device: Device) -> list[Line]:
    """Measures and prints both operations."""
    console, lines = Console(), []
    for operation in PROVIDERS:
        data = Data(device.device, dtype)
        case = next(iter(head_cases(data, model, tokens, upstream=operation == LOG_PROBS)))
        found = measure(operation, case, device, rounds)
        title = f"{operation} · {model.name} · {case.shape} · {dist.get_world_size()} processes · {device.name()}"
        if dist.get_rank() == 0:
            console.print(table(found, title))
        lines += found
    return lines


def main(argv: list[str] | None = None) -> None:
    """The command; torchrun starts it on every process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama3-8b", help="whose sizes are taken")
    parser.add_argument("--tokens", type=int, default=8192, help="rows of hidden states")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=12, help="samples of each provider")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc_per_node N -m liger_trainer.benchmarks.vocab_parallel")
    on_gpu = torch.cuda.is_available()
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model = MODELS[arguments.model]
    if model.vocab % dist.get_world_size():
        parser.error(f"{model.vocab} rows of the head cannot be split evenly over {dist.get_world_size()} processes")
    load_operations()
    lines = run(model, arguments.tokens, getattr(torch, arguments.dtype), arguments.rounds, Device(place))
    if arguments.output and dist.get_rank() == 0:
        arguments.output.write_text(json.dumps([dataclasses.asdict(line) for line in lines], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
