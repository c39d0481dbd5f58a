"""A small Llama on the bytes of Python's standard library: what `optimizers` and `fp8` train, and their commands."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.device import find_device
from liger_trainer.benchmarks.evidence.results import Evidence
from liger_trainer.benchmarks.records import setting
from liger_trainer.benchmarks.registry import BenchmarkError

_RECORDED = ("hidden", "layers", "rows", "length", "steps", "held_out")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the model and the runs."""

    hidden: int
    layers: int
    rows: int  # of a step
    length: int  # of a row, in tokens
    steps: int  # of a run
    held_out: int  # batches
    seeds: int
    pretraining: int = 0  # steps before the runs


def corpus() -> dict[str, bytes]:
    """The sources of the standard library, in three parts. A file is in the part that a hash of its name says."""
    parts: dict[str, list[bytes]] = {"pretraining": [], "fine-tuning": [], "held-out": []}
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - {"site-packages", "dist-packages", "__pycache__"})
        for name in sorted(files):
            if name.endswith(".py"):
                file = Path(folder, name)
                bucket = zlib.crc32(file.relative_to(root).as_posix().encode()) % 10
                part = "pretraining" if bucket < 6 else "fine-tuning" if bucket < 9 else "held-out"
                parts[part].append(file.read_bytes())
    return {name: b"".join(files) for name, files in parts.items()}


def cut(text: bytes, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Rows from random places of a text, (count, length + 1), on the CPU."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(tokens) - length, (count, 1), generator=generator)
    return tokens[starts + torch.arange(length + 1)]


def build(sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.nn.Module:
    """The model with random weights, without kernels of ours."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 64,
        num_key_value_heads=sizes.hidden // 64,
        max_position_embeddings=sizes.length,
        use_cache=False,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").to(device)


def log_probs(model: torch.nn.Module, rows: Tensor, autocast: bool = True) -> Tensor:
    """Log-probabilities of the tokens that follow, (n, k, length) in fp32, of rows (n, k, length + 1) in uint8.

    A model in fp32 runs under bf16 autocast, if `autocast` is set.
    """
    tokens, weight = rows.flatten(0, 1).long(), next(model.parameters())
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=autocast and weight.dtype == torch.float32):
        logits = model(input_ids=tokens[:, :-1]).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return -losses.view(*rows.shape[:2], -1)


@torch.no_grad()
def log_probs_of_all(model: torch.nn.Module, rows: Tensor, batch: int, autocast: bool) -> Tensor:
    """The same in batches, without gradients."""
    return torch.cat([log_probs(model, part, autocast) for part in rows.split(batch)])


def pretrain(model: torch.nn.Module, rows: Tensor, batch: int, lr: float, parts: int = 1) -> Tensor:
    """Trains from random weights, one cycle of the learning rate with 5 % of warm-up; returns each step's loss.

    Args:
        model: A model in fp32, trained in place under bf16 autocast.
        rows: Tokens of all steps, (N, 1, length + 1) in uint8.
        batch: Rows of a step.
        lr: The highest learning rate of AdamW.
        parts: Into how many micro-batches a step is split.

    Returns:
        (N / batch,), in fp32.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), fused=True)
    warm_up = 0.05 + 1e-9  # OneCycleLR divides by 0 if it is exactly one step
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, len(rows) // batch, pct_start=warm_up)
    steps = []
    for of_step in rows.split(batch):
        losses = []
        for part in of_step.chunk(parts):
            loss = -log_probs(model, part).mean() / parts
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        steps.append(torch.stack(losses).sum())
    return torch.stack(steps)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """The same results in every run on one machine: attention's backward, for example, has no atomics then."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def command(
    name: str,
    description: str | None,
    sizes: tuple[Sizes, Sizes],
    argv: Sequence[str] | None,
    compare: Callable[..., Iterator[Evidence]],
    resume: bool = True,
) -> tuple[Evidence, Path]:
    """Runs a benchmark's command: measures, or reads the file of an earlier run. Ends the process for a mistake.

    Args:
        name: The benchmark's.
        description: Shown as help.
        sizes: The large and the small ones.
        argv: Arguments of the command; None for those of this process.
        compare: Yields the values of all runs so far, from the sizes, the device, the values that there are, and a
            function that tells a line.
        resume: Whether the values of a file that is there are kept, and passed on.

    Returns:
        The values, and their file.
    """
    large, small = sizes
    parser = argparse.ArgumentParser(
        f"python -m liger_trainer.benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"a folder for {name}.csv and {name}.png")
    parser.add_argument("--device", help="by default the accelerator, or the CPU without one")
    parser.add_argument(
        "--steps", type=int, help=f"of each run; by default {large.steps}, or {small.steps} with --small"
    )
    parser.add_argument("--small", action="store_true", help="fewer layers, short rows and few seeds, for the CPU")
    parser.add_argument("--plot", type=Path, metavar="CSV", help="measure nothing; draw and print what such a file has")
    arguments = parser.parse_args(argv)
    if (arguments.output is None) == (arguments.plot is None):
        parser.error("give either --output, a folder for the results, or --plot, the results of an earlier run")
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; it must be 1 or more")
    if arguments.plot:
        return Evidence.read(arguments.plot), arguments.plot
    chosen = small if arguments.small else large
    chosen = dataclasses.replace(chosen, steps=arguments.steps or chosen.steps)
    try:
        device = find_device(arguments.device)
    except BenchmarkError as error:
        parser.error(str(error))
    file = arguments.output / f"{name}.csv"
    known = {size: str(getattr(chosen, size)) for size in _RECORDED} | setting(name, device, argv)
    try:
        begun = Evidence.resume(file, known) if resume else Evidence.begin(known)
        with deterministic():
            for so_far in compare(chosen, device, begun, lambda line: print(line, flush=True)):
                so_far.write(file)  # what is there is not lost with a run that is cut off
    except BenchmarkError as error:
        raise SystemExit(f"error: {error}") from None
    return Evidence.read(file), file
