"""``liger-trainer bench training`` and ``bench longest``: whole training steps."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import math
import sys

import torch

from liger_trainer.benchmarks.device import Device, find_device
from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.benchmarks.packed_base import check_packed_base
from liger_trainer.benchmarks.records import (
    ACTIVATION_MEMORY,
    DEFAULT_OPTIM,
    FP8_BASE,
    FP8_FORMATS,
    OPTIM,
    PACKED_BASES,
    PADDED,
    UNSHARED,
    Machine,
    Run,
)
from liger_trainer.benchmarks.registry import BenchmarkError, choose_models, closest, family
from liger_trainer.benchmarks.report import line, longest_table, make_console, sweep_table, training_table
from liger_trainer.benchmarks.training import (
    ALIGNMENT,
    GROUP_SIZE,
    GROUPS,
    OUT_OF_MEMORY,
    WHOLE_ROWS,
    Task,
    find_longest,
    parse_lengths,
    run_lengths,
)
from liger_trainer.benchmarks.training_providers import (
    IN_FP8,
    TRAINING_PROVIDERS,
    find_training_provider,
    optimizers_of,
)
from liger_trainer.kernels.fp8.linear import has_fp8
from liger_trainer.recipe.experts import can_split_experts, count_experts
from liger_trainer.recipe.file import RecipeError, accelerate_config, runs_alone, split_by

_IN_16_BITS, _NF4 = "bf16", "nf4"  # of `--quantize`, beside `PACKED_BASES`
_STOCK = ("hf", "torch.compile", "liger-kernel")  # libraries that load no packed base
_STEPS_SECONDS, _LONGEST_SECONDS = 600.0, 540.0


def measure_training(arguments: argparse.Namespace, command: str) -> int:
    """Measures training steps, or looks for the longest sequence; each provider in its own processes.

    Returns 1 if nothing was measured; that there is too little memory is a result.

    The command line as it was typed is recorded with the results.
    """
    if arguments.operations == ["longest"]:
        _check_longest(arguments)
    providers = _training_providers(arguments)
    device = Device(find_device(arguments.device))
    run = Run.begin(command, Machine(device.name()))
    measure = _measure_longest if arguments.operations == ["longest"] else _measure_steps
    tasks = [_task(arguments, model.name, device) for model in choose_models(arguments.model, device.module is None)]
    tasks = [dataclasses.replace(task, quantize=base) for task in tasks for base in _bases(arguments, task)]
    for task, names in [(task, _that_train(providers, task)) for task in tasks]:
        measure(arguments, task, names, run)
    if arguments.output is not None and arguments.activation_memory:
        from liger_trainer.benchmarks.plots import draw_pareto

        draw_pareto(run.training, device.name(), arguments.output / "pareto.png")
    if arguments.output is not None and arguments.lengths:
        from liger_trainer.benchmarks.plots import draw_alignment

        draw_alignment(run.training, device.name(), arguments.output / "alignment.png")
    return 0 if run.longest or any(record.failure in ("", OUT_OF_MEMORY) for record in run.training) else 1


def _check_longest(arguments: argparse.Namespace) -> None:
    steps = ("lengths", "prompt", "group", "documents", "padding", "quantize", "optim", "activation_memory")
    option = next((name for name in steps if getattr(arguments, name)), "labelled" if arguments.labelled < 1 else None)
    shared = (name for name in ("expert_parallel", "context_parallel") if getattr(arguments, name) > 1)
    option = next(shared, option)
    if option is not None:
        raise BenchmarkError(f"`--{option}` is for `bench training`; leave it out.")
    if len(arguments.length or []) > 1:
        raise BenchmarkError("`longest` starts at one length; give `--length` one number.")
    if arguments.accelerate_config or max(arguments.gpus or [1]) > 1:
        raise BenchmarkError("`longest` runs on one GPU; leave `--gpus` and `--accelerate_config` out.")


def _measure_longest(arguments: argparse.Namespace, task: Task, providers: list[str], run: Run) -> None:
    before = len(run.longest)
    for provider in providers:
        seconds = arguments.seconds or _LONGEST_SECONDS
        run.longest.append(find_longest(task, provider, arguments.provider_file, seconds))
        if arguments.output is not None:
            run.write(arguments.output)
    make_console().print(longest_table(run.longest[before:]))


def _measure_steps(arguments: argparse.Namespace, task: Task, providers: list[str], run: Run) -> None:
    lengths = sorted(arguments.length or [task.length])
    before = len(run.training)
    for gpus, provider in itertools.product(arguments.gpus or [1], providers):
        here = dataclasses.replace(task, gpus=gpus)
        for record in run_lengths(
            here, lengths, provider, arguments.provider_file, arguments.seconds or _STEPS_SECONDS
        ):
            run.training.append(record)
            print(line(record), file=sys.stderr, flush=True)  # the tables follow when all have run
            if arguments.output is not None:  # after every length, so that a later failure loses nothing
                run.write(arguments.output)
    found = sorted(run.training[before:], key=lambda record: (record.gpus, record.length))
    for _, records in itertools.groupby(found, key=lambda record: record.group):
        make_console().print(training_table(list(records)))
    if len({record.group for record in found}) > 1:
        make_console().print(sweep_table(run.training[before:]))


def _task(arguments: argparse.Namespace, model: str, device: Device) -> Task:
    searching = arguments.operations == ["longest"]
    batch, length, steps = (1, 16384, 2) if searching else (4, 4096, 6)
    trainer = _trainer(arguments)
    _check_lengths(arguments, trainer)
    prompt = arguments.prompt or 0
    group_size = (arguments.group or GROUP_SIZE) if arguments.lengths and trainer in GROUPS else 0
    if arguments.lengths:
        length = prompt + parse_lengths(arguments.lengths)[1]
    batch = arguments.batch or (2 * group_size or batch)
    if group_size and batch % group_size:
        raise BenchmarkError(
            f"`--batch` is {batch}, but a prompt has {group_size} completions; give a multiple of {group_size}."
        )
    if arguments.dtype == "float16" or (searching and arguments.dtype != "bfloat16"):
        allowed = "bfloat16" if searching else "bfloat16 or float32"
        raise BenchmarkError(f"`--dtype` is {arguments.dtype!r}; `{arguments.operations[0]}` takes {allowed}.")
    task = Task(
        model,
        arguments.layers,
        trainer,
        batch,
        (arguments.length or [length])[0],
        not arguments.no_checkpointing,
        steps=arguments.steps or steps,
        device=str(device.device),
        lora=arguments.lora,
        warmup=arguments.warmup,
        accelerate_config=_accelerate_config(arguments, device),
        documents=arguments.documents,
        padding=arguments.padding,
        labelled=arguments.labelled,
        dtype=arguments.dtype,
        lengths=arguments.lengths or "",
        prompt=prompt,
        group_size=group_size,
        expert_parallel=arguments.expert_parallel,
        context_parallel=arguments.context_parallel,
    )
    _check_expert_parallel(arguments, task)
    _check_context_parallel(arguments, task)
    for tokens in arguments.length or [length]:
        _check_rows(dataclasses.replace(task, length=tokens))
    return task


def _check_expert_parallel(arguments: argparse.Namespace, task: Task) -> None:
    size = task.expert_parallel
    if size == 1:
        return
    given, config = f"`--expert_parallel` is {size}", model_config(MODELS[task.model], task.layers)
    experts = count_experts(config) if can_split_experts(config) else 0
    if not experts or experts % size:
        reason = f"has {experts} experts a layer" if experts else "has no experts that transformers can split"
        raise BenchmarkError(f"{given}, but {task.model} {reason}; give a divisor of their number, or leave it out.")
    if any(gpus % size for gpus in arguments.gpus or [1]):
        raise BenchmarkError(f"{given}; give a multiple of it for each of `--gpus`.")
    if (way := split_by(task.accelerate_config)) is not None or arguments.quantize:
        reason = f"`--accelerate_config` splits the model with {way}" if way else "`--quantize` is for whole models"
        raise BenchmarkError(f"{given}, which splits the model as it is loaded, but {reason}; leave that out.")
    if task.lora:
        raise BenchmarkError(
            f"{given}, and `--lora` is {task.lora}: adapters on experts cannot be split; leave one out."
        )


def _check_context_parallel(arguments: argparse.Namespace, task: Task) -> None:
    size = task.context_parallel
    if size == 1:
        return
    given = f"`--context_parallel` is {size}"
    if any(gpus % size for gpus in arguments.gpus or [1]):
        raise BenchmarkError(f"{given}; give a multiple of it for each of `--gpus`.")
    if _split_by(task) != "FSDP2":
        raise BenchmarkError(f"{given}, which needs `--accelerate_config fsdp2`, on GPUs; leave one of them out.")


def _trainer(arguments: argparse.Namespace) -> str:
    return arguments.trainer or ("dpo" if arguments.operations == ["longest"] else "causal_lm")


def _check_lengths(arguments: argparse.Namespace, trainer: str) -> None:
    given = {"--lengths": arguments.lengths, "--prompt": arguments.prompt, "--group": arguments.group}
    option = next((name for name, value in given.items() if value), None)
    if option is None:
        return
    if trainer not in ALIGNMENT:
        raise BenchmarkError(f"`{option}` goes with `--trainer` {', '.join(ALIGNMENT)}, not with {trainer!r}.")
    if not arguments.lengths:
        raise BenchmarkError(f"`{option}` goes with `--lengths`; give it too, such as `--lengths 64:1024`.")
    if arguments.length:
        raise BenchmarkError("`--lengths` says how many tokens there are; leave `--length` out.")
    if arguments.group and trainer not in GROUPS:
        raise BenchmarkError(f"`--group` goes with `--trainer` grpo or rloo, not with {trainer!r}; leave it out.")
    if not arguments.prompt and trainer not in WHOLE_ROWS:
        raise BenchmarkError(
            f"`--lengths` are of completions with {trainer!r}; give `--prompt` too, a prompt's tokens."
        )
    if not arguments.prompt and parse_lengths(arguments.lengths)[0] < 2:
        raise BenchmarkError(f"`--lengths` is {arguments.lengths}; a row without `--prompt` has 2 tokens or more.")


def _check_rows(task: Task) -> None:
    given = {"--documents": task.documents, "--padding": task.padding, "--labelled": task.labelled < 1}
    option = next((name for name, value in given.items() if value), None)
    if option is None:
        return
    if task.trainer not in ("causal_lm", "sft"):
        raise BenchmarkError(f"`{option}` goes with `--trainer causal_lm` or `sft`, not with {task.trainer!r}.")
    if task.documents and task.padding:
        raise BenchmarkError("`--documents` fills the sequences, so none is padded; leave `--padding` out.")
    if task.padding:
        _check_padding(task)
    elif task.documents and not 1 < task.documents < task.length:  # no labels, or what there is without the option
        raise BenchmarkError(
            f"`--documents` is {task.documents}; in sequences of {task.length} tokens, give 2 to {task.length - 1}."
        )


def _check_padding(task: Task) -> None:
    if task.batch == 1:
        raise BenchmarkError("`--padding` fills shorter sequences up to the longest; give `--batch` 2 or more.")
    tokens, least = task.batch * task.length, task.length + 2 * (task.batch - 1)
    most = math.floor(1000 * (1 - least / tokens)) / 1000
    if task.padding > most:
        raise BenchmarkError(
            f"`--padding` is {task.padding:g}; one of {task.batch} sequences has none, so give {most:g} or less."
        )
    if round(tokens * (1 - task.padding)) == tokens:
        raise BenchmarkError(f"`--padding` is {task.padding:g}, less than one of {tokens} tokens; give more.")


def _bases(arguments: argparse.Namespace, task: Task) -> list[str]:
    """The values of `Task.quantize` that `--quantize` asks for, checked."""
    known = [_IN_16_BITS, _NF4, *PACKED_BASES]
    asked = [closest(name, known, "format") for name in arguments.quantize or [_IN_16_BITS]]
    if asked == [_IN_16_BITS]:
        return [""]
    if not arguments.lora:
        raise BenchmarkError("`--quantize` freezes the base, so there is nothing to train; give `--lora` a rank too.")
    if _NF4 in asked and importlib.util.find_spec("bitsandbytes") is None:
        raise BenchmarkError(
            "`--quantize nf4` needs bitsandbytes, which is not installed: pip install 'liger-trainer[qlora]'"
        )
    for base in asked:
        if base in PACKED_BASES:
            check_packed_base(task.model, base, task.layers)
            if (way := _split_by(task)) not in (None, "FSDP2"):
                raise BenchmarkError(
                    f"`--accelerate_config` is {arguments.accelerate_config!r}: {way} splits the model, which takes no "
                    f"base in {base!r}. Give ddp or fsdp2, or `--quantize bf16`."
                )
    return ["" if base == _IN_16_BITS else base for base in asked]


def _that_train(providers: list[str], task: Task) -> list[str]:
    """The providers that can train a task; of the others it is said why they are left out."""
    found: dict[str | None, list[str]] = {None: []}
    for name in providers:
        found.setdefault(_obstacle(name, task), []).append(name)
    left = found.pop(None)
    reasons = ". ".join(f"{', '.join(names)} {obstacle}" for obstacle, names in found.items())
    if not left:
        raise BenchmarkError(f"{reasons}. Add another to `--providers`, such as liger_trainer.")
    if reasons:
        print(f"{reasons}. Left out.", file=sys.stderr, flush=True)
    return left


def _obstacle(provider: str, task: Task) -> str | None:
    """Why a provider cannot train a task, as far as the arguments say; None if it can."""
    if task.quantize in PACKED_BASES and family(provider) in _STOCK:
        return f"cannot train adapters on a base in {task.quantize!r}; liger_trainer keeps it packed"
    if not provider.startswith(FP8_BASE):
        return None
    if task.quantize not in ("", *FP8_FORMATS):
        fitting = ",".join((_IN_16_BITS, *FP8_FORMATS))
        return f"cannot multiply in fp8 with a base in {task.quantize!r} (`--quantize {fitting}`)"
    if (way := _split_by(task)) is not None:
        return f"cannot store a base in fp8 that {way} splits, only a whole one (`--accelerate_config ddp`)"
    if not has_fp8(torch.device(task.device)):
        return "cannot multiply in fp8 here, which needs a GPU of NVIDIA's Hopper generation or newer"
    return None


def _split_by(task: Task) -> str | None:
    return split_by(task.accelerate_config) if task.accelerate_config else None


def _accelerate_config(arguments: argparse.Namespace, device: Device) -> str:
    """The accelerate configuration file, given or needed for several GPUs; empty for one process."""
    gpus, default = max(arguments.gpus or [1]), "fsdp2"
    if device.module is None or arguments.expert_parallel > 1:
        default = "ddp"
    name = arguments.accelerate_config or (default if gpus > 1 else "")
    if not name:
        return ""
    there = gpus if device.module is None else device.module.device_count()
    if gpus > there:
        raise BenchmarkError(f"`--gpus` is {gpus}, but this machine has {there}.")
    try:
        config = str(accelerate_config(name))
    except RecipeError as error:
        raise BenchmarkError(str(error)) from None
    if gpus > 1 and runs_alone(config):
        raise BenchmarkError(
            f"`--accelerate_config` is {name!r}, which is for one process, and `--gpus` is {gpus}; give ddp or fsdp2."
        )
    return config


def _training_providers(arguments: argparse.Namespace) -> list[str]:
    """The requested ones; by default every library, for `longest` at several settings, else at its defaults."""
    if arguments.providers:
        asked = arguments.providers
    elif arguments.operations == ["longest"]:
        left_out = ("torch.compile", PADDED, UNSHARED, *IN_FP8)
        asked = [name for name in TRAINING_PROVIDERS if name not in left_out]
        asked = [name for name in asked if arguments.lora or not name.startswith(FP8_BASE)]
    else:
        asked = [name for name in TRAINING_PROVIDERS if " " not in name]
    providers = _with_budgets(arguments, _with_optimizers(arguments, asked))
    for name in providers:
        find_training_provider(name)  # a mistake is an error before anything is measured
        if name.startswith(FP8_BASE) and not arguments.lora:
            raise BenchmarkError(f"Provider {name!r} trains adapters; give `--lora` a rank too.")
        # KTO has no two sequences with a prompt in common.
        trainers = [each for each in ALIGNMENT if each != "kto"] if name.startswith(UNSHARED) else ALIGNMENT
        if name.startswith((PADDED, UNSHARED)) and _trainer(arguments) not in trainers:
            given = f"{', '.join(trainers)}, not with {_trainer(arguments)!r}"
            raise BenchmarkError(f"Provider {name!r} goes with `--trainer` {given}; leave it out.")
    return providers


def _with_optimizers(arguments: argparse.Namespace, providers: list[str]) -> list[str]:
    """The providers, each once for every `--optim` that it has; for the default one, under its own name."""
    if not arguments.optim:
        return providers
    optimizers = [closest(name, optimizers_of("liger_trainer"), "optimizer") for name in arguments.optim]
    found = [
        name + ("" if optim == DEFAULT_OPTIM else OPTIM + optim)
        for name in providers
        for optim in optimizers
        if optim in optimizers_of(name)
    ]
    if not found:
        raise BenchmarkError(f"`--optim {','.join(optimizers)}` is of liger_trainer; add it to `--providers`.")
    return found


def _with_budgets(arguments: argparse.Namespace, providers: list[str]) -> list[str]:
    """The providers, with each of ours once for every `--activation_memory`; for 0, under its own name."""
    sizes = arguments.activation_memory
    if not sizes:
        return providers
    if arguments.no_checkpointing:
        raise BenchmarkError("`--activation_memory` needs checkpointing; leave `--no_checkpointing` out.")
    if arguments.warmup < 2 or (arguments.steps or arguments.warmup + 3) < arguments.warmup + 3:
        raise BenchmarkError(
            "Layers keep results from the fourth step on: with `--activation_memory`, give `--warmup` 2 or more, and "
            "`--steps` 3 or more beyond that; the median is then of steps that keep."
        )
    ours = [name for name in providers if family(name) == "liger_trainer"]
    if not ours:
        raise BenchmarkError("`--activation_memory` is an argument of liger_trainer; add it to `--providers`.")
    suffixes = ["" if size == "0" else f"{ACTIVATION_MEMORY}{size}" for size in sizes]
    return [name + suffix for name in providers for suffix in (suffixes if name in ours else [""])]
