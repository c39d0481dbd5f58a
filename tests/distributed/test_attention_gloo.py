"""Our attention on two gloo processes: loss and gradients of one process, which runs eager attention with masks.

The CPU has no kernels of ours, so transformers would make its own masks; plans, and our function on them, are forced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.attention.families import BATCHES, Batch, build, documents
from tests.distributed.tensor_parallel import assert_near, assert_same_gradients, gradients, load_split
from tests.distributed.two_processes import WORLD

WINDOW = 3
TOLERANCE = 1e-5
WINDOWED = ("gemma3_text", "gpt_oss", "gemma2", "granite_swa")
KINDS = ("left-padded", "packed")

SPLIT_SINKS = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn": "local_params",
}
"""Splits the heads of GPT-OSS, which transformers' own plan does not."""


def _model(family: str) -> Any:
    return build(family, WINDOW if family in WINDOWED else None).train()


def _rows_of(rank: int, batch: Batch) -> Batch:
    """Two rows of the padded batch on the first rank, and one on the second; one of the packed batch on each."""
    return {name: value[rank::WORLD] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _targets(batch: Batch) -> torch.Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def _loss_and_gradients(model: Any, batches: list[Batch], targets: torch.Tensor) -> tuple[torch.Tensor, Any]:
    losses = []
    for batch in batches:
        losses.append(model(**batch, num_items_in_batch=targets).loss)
        losses[-1].backward()
    return torch.stack(losses).sum().detach(), gradients(model)


def _of_one_process(family: str, batch: Batch) -> tuple[torch.Tensor, Any]:
    """Of all rows; packed documents alone, as GPT-OSS itself lets those of a row see each other."""
    model = _model(family)
    model.set_attn_implementation("eager")
    batches = list(documents(batch)) if "position_ids" in batch else [batch]
    return _loss_and_gradients(model, batches, _targets(batch))


def _of_one_process_in_bf16(family: str, batch: Batch) -> tuple[torch.Tensor, Any]:
    """With our attention, rank after rank, as FSDP2 reduces gradients in fp32."""
    total, whole = torch.zeros(()), {}
    for rank in range(WORLD):
        model = _patched(_model(family))
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        loss, found = _loss_and_gradients(model, [_rows_of(rank, batch)], _targets(batch))
        total += loss
        whole = {name: whole.get(name, 0.0) + gradient.float() for name, gradient in found.items()}
    return total, whole


def _patched(model: Any) -> Any:
    from liger_trainer import apply_liger_kernel
    from liger_trainer.configs.kernel_config import KERNEL_KEYS

    report = apply_liger_kernel(model, {**dict.fromkeys(KERNEL_KEYS, False), "attention": True})
    assert [row.applied for row in report if row.component == "attention"] == [True], str(report)
    return model


@contextlib.contextmanager
def _forced() -> Iterator[mock.Mock]:
    """Counts the calls of our function, which runs as where it has kernels, on its reference."""
    from liger_trainer.attention import interface

    with (
        mock.patch.object(interface, "TRITON_DEVICES", ("cpu",)),
        mock.patch.object(interface, "use_triton", return_value=True),
        mock.patch.object(interface, "attention", wraps=interface.attention) as calls,
    ):
        yield calls


def _check(model: Any, wrapped: Any, rank: int | None, expected_of: Any) -> None:
    """Steps of `wrapped`, on this rank's rows, or on all if `rank` is None; its layers are checkpointed."""
    for kind in KINDS:
        batch = BATCHES[kind]()
        with _forced():
            expected, expected_gradients = expected_of(batch)
        mine, share = (batch, 1) if rank is None else (_rows_of(rank, batch), WORLD)
        model.zero_grad()
        with _forced() as calls:
            loss = wrapped(**mine, num_items_in_batch=_targets(batch)).loss
            (loss * share).backward()  # gradients are means over the ranks
        assert calls.call_count == 2 * model.config.num_hidden_layers, f"{kind}: {calls.call_count} calls"
        total = loss.detach().clone()
        if rank is not None:
            dist.all_reduce(total)
        assert_near(f"{kind}: the loss", total, expected, TOLERANCE)
        assert_same_gradients(gradients(model), expected_gradients, TOLERANCE)


def _checkpointed(family: str) -> Any:
    model = _patched(_model(family))
    model.gradient_checkpointing_enable()
    return model


def _ddp(rank: int, family: str) -> None:
    model = _checkpointed(family)
    _check(model, nn.parallel.DistributedDataParallel(model), rank, partial(_of_one_process, family))


def _fsdp2(rank: int, family: str, mixed: bool) -> None:
    model = _checkpointed(family)
    options: dict[str, Any] = {}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    for module in (*model.model.layers, model):
        fully_shard(module, **options)
    _check(model, model, rank, partial(_of_one_process_in_bf16 if mixed else _of_one_process, family))


def _tensor_parallel(rank: int, family: str, **plan: Any) -> None:
    model = _patched(load_split(_model(family), tp_size=WORLD, **plan))
    model.gradient_checkpointing_enable()
    _check(model, model, None, partial(_of_one_process, family))


FAMILIES = ("llama", "gemma3_text", "gpt_oss")
CASES = {
    **{f"ddp, {family}": partial(_ddp, family=family) for family in FAMILIES},
    **{f"fsdp2, {family}": partial(_fsdp2, family=family, mixed=False) for family in FAMILIES},
    **{f"fsdp2 in bf16, {family}": partial(_fsdp2, family=family, mixed=True) for family in FAMILIES},
    **{f"tp, {family}": partial(_tensor_parallel, family=family) for family in (*FAMILIES, "gemma2", "granite_swa")},
    "tp, gpt_oss, heads and sinks split": partial(_tensor_parallel, family="gpt_oss", tp_plan=SPLIT_SINKS),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_process(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
