"""Every operator keeps torch's rules: what it mutates, its fake and its derivative, in each way that it is called."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from liger_trainer.kernels.operator import Operator
from tests.operators import OPERATORS, VARIANTS, of_schema, transposed

# opcheck compares all results, and the padding of 70 columns of logits is not initialised. The last has no operator.
LEFT_OUT = ("linear_log_probs", "grpo_loss_from_log_probs")
ROWS = {name: row for name, row in OPERATORS.items() if not name.startswith(LEFT_OUT)} | VARIANTS
# Rows whose operators run without Triton, and are checked so.
WITHOUT_TRITON = ("linear_", "lora_linear", "moe_experts", "fp8_", "sort_by_expert", "tile_table")
RULES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

kept: set[str] = set()
"""Calls that kept the rules, and that other rows repeat with other numbers."""


def as_leaf(x: torch.Tensor) -> torch.Tensor:
    """A tensor with the values and strides of `x`, which the operator may overwrite."""
    return copy.deepcopy(x.detach()).requires_grad_(x.requires_grad and torch.is_grad_enabled())


def kind(x: Any) -> Any:
    """What of an argument the rules can depend on."""
    if isinstance(x, torch.Tensor):
        return x.is_contiguous() or x.stride(), x.dtype, x.requires_grad, x.numel() > 0
    return type(x) if isinstance(x, float | str) else x


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name.startswith(WITHOUT_TRITON) else pytest.mark.kernel) for name in ROWS],
)
def test_opcheck(name, device, monkeypatch):
    calls, call, rules = [], Operator.__call__, RULES

    def record(self, *arguments):
        arguments_before = tree_map_only(torch.Tensor, as_leaf, arguments)
        result = call(self, *arguments)
        # Tracing asks for gradients of empty results too, which stand for results that were not asked for.
        traceable = all(x.numel() or not x.requires_grad for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        calls.append((self, of_schema(self, arguments_before), rules if traceable else RULES[:-1]))
        return result

    monkeypatch.setattr(Operator, "__call__", record)
    tensors = ROWS[name].tensors(device)
    outputs = ROWS[name].function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    rules = RULES[:-1]  # what a backward calls is traced with what it is the backward of
    upstream = [torch.full_like(output, 0.5) for output in outputs]
    needed = [tensor for tensor in tensors if tensor.requires_grad]
    torch.autograd.grad(outputs, needed, upstream, retain_graph=True)  # the next one may overwrite what was saved
    torch.autograd.grad(outputs, needed, [transposed(gradient) for gradient in upstream])
    monkeypatch.undo()
    assert calls
    for operator, arguments, asked in calls:
        what = f"{operator.name} {asked} {tree_map(kind, arguments)}"
        if what not in kept:
            torch.library.opcheck(operator.custom, arguments, test_utils=asked)
            kept.add(what)
