"""The LM head with its vocabulary split over processes, compared with gathering it; one process per GPU.

    torchrun --nproc_per_node 2 -m liger_trainer.benchmarks.vocab_parallel --model llama3-8b

Every process has all hidden states and its part of the head's rows. Time is that of the slowest process, memory the
largest of all, and the error the largest distance from float64 with the whole head. Providers:

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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from liger_trainer import functional
from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import measure
from liger_trainer.benchmarks.models import MODELS, Model
from liger_trainer.benchmarks.operations.head import head_cases, soft_capped
from liger_trainer.benchmarks.records import Record
from liger_trainer.benchmarks.registry import OPERATIONS, Case, Data, Floor, load_operations, wide
from liger_trainer.benchmarks.report import make_console, make_table, milliseconds, number

Provider = Callable[..., Any]
LOSS, LOG_PROBS = "linear_cross_entropy", "linear_log_probs"


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


class SharedDevice(Device):
    """The clock and the memory counter of all processes: each value is that of the process that needs most."""

    def time(self, *parts: Callable[[Any], Any]) -> list[float]:
        dist.barrier()
        return self.largest(super().time(*parts))

    def peak_gibibytes(self, work: Callable[[], object]) -> float | None:
        own = super().peak_gibibytes(work)
        return None if own is None else self.largest([own])[0]

    def largest(self, values: Iterable[float]) -> list[float]:
        """The largest of each value over all processes."""
        tensor = torch.tensor([*values], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()


def _split(case: Case) -> Case:
    """The case with this process's part of the head."""
    part = case.arguments["weight"].detach().chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    return Case(case.arguments | {"weight": part}, case.shape, Floor(), case.upstream)


def table(records: list[Record], title: str) -> Table:
    """A table of one operation."""
    result = make_table(title, "forward ms", "backward ms", "both ms", "GiB", "error", "gradient error")
    for record in records:
        times = (milliseconds(time) for time in (record.forward, record.backward, record.both))
        errors = (number(error, ".1e") for error in (record.errors.get("output"), record.gradient_error()))
        result.add_row(record.provider, *times, number(record.peak_gibibytes, ".2f"), *errors, record.failure)
    return result


def run(model: Model, tokens: int, dtype: torch.dtype, rounds: int, device: SharedDevice) -> list[Record]:
    """Measures and prints both operations."""
    found: list[Record] = []
    for operation, providers in PROVIDERS.items():
        data = Data(device.device, dtype)
        case = _split(next(iter(head_cases(data, model, tokens, upstream=operation == LOG_PROBS))))
        of_case = (operation, model.name, tokens, case.variant, case.shape, str(dtype).removeprefix("torch."))
        records = {name: Record(*of_case, name) for name in providers}
        exact = _fused(OPERATIONS[operation].exact(), whole_head=True)
        measure(case, providers, records, exact, device, rounds)
        for record in records.values():
            record.errors = dict(zip(record.errors, device.largest(record.errors.values())))
        title = f"{operation} · {model.name} · {case.shape} · {dist.get_world_size()} processes · {device.name()}"
        if dist.get_rank() == 0:
            make_console().print(table([*records.values()], title))
        found += records.values()
    return found


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
    records = run(model, arguments.tokens, getattr(torch, arguments.dtype), arguments.rounds, SharedDevice(place))
    if arguments.output and dist.get_rank() == 0:
        arguments.output.write_text(json.dumps([dataclasses.asdict(record) for record in records], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
