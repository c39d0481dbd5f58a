"""Generation under tensor parallelism: the processes of a group have to train on the same completions.

TRL seeds every process apart and gives each other prompts. The processes of a tensor-parallel group compute one model
together, so they must get the same prompts, and draw the same tokens for them.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import set_seed


def draw_alike(trainer: Any) -> None:
    """Seeds the processes of a tensor-parallel group of a GRPO or RLOO `trainer` alike; nothing without one.

    Raises:
        ValueError: for what TRL cannot do alike on all processes of a group: vLLM, a streamed dataset, and groups of
            completions that are spread over processes.
    """
    size, args = trainer.get_tp_size(), trainer.args
    if size == 1:
        return
    if args.use_vllm:
        raise ValueError(
            f"`use_vllm` is true and the model is split by tensor parallelism (`tp_size` is {size}). vLLM answers "
            "every process with completions of its own, and these must be the same: set `use_vllm=False`, or load the "
            "model without `tp_size` and spread it with FSDP2."
        )
    if not hasattr(trainer.train_dataset, "__len__"):
        raise ValueError(
            "`train_dataset` is streamed and the model is split by tensor parallelism, whose processes would get other "
            "prompts. Give a dataset with a length."
        )
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if rows % args.num_generations:
        raise ValueError(
            f"`num_generations` is {args.num_generations}, and a process generates {rows} completions at a time "
            "(`per_device_train_batch_size * steps_per_generation`). Under tensor parallelism the second must be a "
            "multiple of the first, so that every process has whole groups."
        )
    set_seed(args.seed + args.process_index // size)


def alike(sampler: Any, tp_size: int) -> Any:
    """TRL's `sampler`, which takes prompts for all processes at a time, for as many as there are groups."""
    sampler.batch_size //= tp_size
    return sampler
