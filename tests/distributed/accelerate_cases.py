"""What the real trainers train under `accelerate launch`: models, rows, arguments, and the ways to spread them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

STEPS = 3
BATCH = 4
"""Rows of a micro-batch over all processes, whose number divides it."""
VOCAB = 128  # of the tokenizer that the texts of DPO and GRPO need
IGNORE = -100


@dataclasses.dataclass(frozen=True)
class Wrapping:
    """A way to spread a model.

    Args:
        config: The file of `configs/accelerate`.
        flags: Further flags of `accelerate launch`.
        processes: How many.
    """

    config: str
    flags: tuple[str, ...] = ()
    processes: int = 2


_HSDP = ("--use_parallelism_config", "--use_fsdp", "--fsdp_version", "2")
_HSDP += ("--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2")
WRAPPINGS: dict[str, Wrapping] = {
    "single": Wrapping("single_gpu", processes=1),
    "ddp": Wrapping("ddp"),
    "fsdp1": Wrapping("fsdp1"),
    "fsdp2": Wrapping("fsdp2"),
    "fsdp2 kept": Wrapping("fsdp2", ("--fsdp_reshard_after_forward", "false")),
    "hsdp": Wrapping("fsdp2", _HSDP, processes=4),
    "zero2": Wrapping("zero2"),
    "zero3": Wrapping("zero3"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training.

    Args:
        trainer: `trainer` (of transformers), `sft`, `dpo` or `grpo`.
        parameters: A name of `matrix_models.PARAMETERS`.
        rows: A name of `ROWS`; DPO and GRPO have data of their own.
        options: Further training arguments.
        device: Whether it takes an accelerator.
        evaluated: Whether the trained model is evaluated, with metrics of its logits.
        sampled: Whether the model answers prompts while it trains.
        switched: Whether the stock trainer trains with our kernels, by `use_kernels=True`, in place of our trainer.
    """

    trainer: str
    parameters: str = "full"
    rows: str = "unequal"
    options: tuple[tuple[str, Any], ...] = ()
    device: bool = False
    evaluated: bool = False
    sampled: bool = False
    switched: bool = False

    @property
    def of_wrapping(self) -> bool:
        """Whether the result depends on how many processes there are: samples of a generator, means of each rank."""
        return self.trainer == "grpo" or "average_tokens_across_devices" in dict(self.options)


def _with(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


_EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
_CHECKPOINTED = {"gradient_checkpointing": True}
_REENTRANT = {
    **_CHECKPOINTED,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "ddp_find_unused_parameters": False,
}
CASES: dict[str, Case] = {
    **{f"trainer, {name}": Case("trainer", name) for name in ("full", "lora", "lora with head", "tied head")},
    **{f"sft, {name}": Case("sft", name) for name in ("full", "lora", "lora with head", "tied head")},
    **{f"sft, {name}": Case("sft", name) for name in ("dora with head", "modules to save", "token rows")},
    **{f"trainer, {name}": Case("trainer", name) for name in ("frozen head", "tied token rows")},
    "dpo, full": Case("dpo"),
    "dpo, lora": Case("dpo", "lora"),
    "dpo, lora with head": Case("dpo", "lora with head"),
    "grpo, full": Case("grpo"),
    "grpo, lora": Case("grpo", "lora"),
    "accumulated": Case("trainer", rows="accumulated", options=_with(gradient_accumulation_steps=2)),
    "accumulated, sft": Case("sft", "lora with head", rows="accumulated", options=_with(gradient_accumulation_steps=2)),
    "means of ranks": Case("trainer", options=_with(average_tokens_across_devices=False)),
    "a rank without labels": Case("trainer", rows="without labels"),
    "a rank without labels, sft": Case("sft", "lora with head", rows="without labels"),
    "short last": Case("trainer", rows="short last"),
    "clipped": Case("trainer", options=_with(max_grad_norm=0.5)),
    "checkpointed": Case("sft", options=_with(**_CHECKPOINTED)),
    "checkpointed, reentrant": Case("trainer", "lora with head", options=_with(**_REENTRANT)),
    "kept": Case("trainer", options=_with(activation_memory="1GiB", max_steps=5, **_CHECKPOINTED)),
    "kept, sft": Case("sft", "lora", options=_with(activation_memory="1GiB", max_steps=5, **_CHECKPOINTED)),
    "evaluated": Case("trainer", evaluated=True),
    "evaluated between": Case("trainer", evaluated=True, options=_with(**_EVALUATED)),
    "evaluated between, dpo": Case("dpo", options=_with(**_EVALUATED)),
    "sampled": Case("trainer", sampled=True),
    "sampled, lora": Case("sft", "lora", options=_with(**_CHECKPOINTED), sampled=True),
    "use_kernels": Case("trainer", switched=True),
    "use_kernels, lora": Case("trainer", "lora", options=_with(**_CHECKPOINTED), switched=True),
    "use_kernels, dpo": Case("dpo", switched=True),
    "bf16": Case("sft", options=_with(bf16=True), device=True),
    "fp16": Case("sft", options=_with(fp16=True), device=True),
    "offloaded": Case("sft", options=_with(activation_offloading=True, **_CHECKPOINTED), device=True),
    "compiled": Case("trainer", options=_with(torch_compile=True), device=True),
}


def _rows(count: int, step: int, labelled: Any = lambda index: True) -> list[dict[str, torch.Tensor]]:
    """`count` rows of other lengths, whose number of labels differs even more; none where not `labelled`."""
    generator = torch.Generator().manual_seed(step)
    rows = []
    for index in range(count):
        ids = torch.randint(3, VOCAB, (12 - 2 * (index % 4),), generator=generator)
        labels = ids.clone()
        labels[: 1 + index % 4] = IGNORE
        rows.append({"input_ids": ids, "labels": labels if labelled(index) else torch.full_like(labels, IGNORE)})
    return rows


def _steps(count: int, *labelled: Any) -> list[dict[str, torch.Tensor]]:
    """The rows of all steps, `count` each."""
    return [row for step in range(STEPS) for row in _rows(count, step, *(each(step) for each in labelled))]


ROWS: dict[str, Any] = {
    "unequal": lambda: _steps(BATCH),
    "accumulated": lambda: _steps(2 * BATCH),
    # The first or the second half of a batch, which is that of a rank.
    "without labels": lambda: _steps(BATCH, lambda step: lambda index: (index < BATCH // 2) == bool(step % 2)),
    "short last": lambda: _steps(BATCH)[:-1],
}


def rows_of(case: Case, alone: bool) -> list[dict[str, torch.Tensor]]:
    """The rows in their order; to one process alone, what accelerate fills up the last batch of the ranks with."""
    rows = ROWS[case.rows]()
    return rows + rows[: -len(rows) % BATCH] if alone else rows


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """`rows`, padded on the right."""
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.as_tensor(row["input_ids"]) for row in rows]
    labels = [torch.as_tensor(row["labels"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE),
    }
