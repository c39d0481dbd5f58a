"""A head whose rows tensor parallelism splits over processes: its loss without gathering the weight or the logits.

transformers keeps such a weight as a DTensor and gives the module a forward that multiplies the hidden states, which
are the same on every process, by the rows of this process and gathers the logits. Deferred logits are not gathered: the
kernels exchange 32 bytes a token, and sum the gradient of the hidden states in the backward.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import SPLIT_HEAD
from liger_trainer.head.lm_head import HeadCall, linear, product_dtype
from liger_trainer.kernels.head.cross_entropy import CrossEntropyOutput
from liger_trainer.kernels.runtime import is_dtensor, saved_as_is
from liger_trainer.parallel.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)


def gathering_forward(head: nn.Module) -> Callable | None:
    """The forward that transformers' tensor parallelism has given a linear `head`, if it gathers the logits.

    That is the style `colwise_gather_output` of a tensor-parallel plan. None for any other forward.
    """
    function = head.__dict__.get("forward")
    function = getattr(function, "replaced", function)  # ours over it
    styles = sys.modules.get("transformers.distributed.tensor_parallel")
    if not inspect.isfunction(function) or styles is None or function.__globals__ is not vars(styles):
        return None
    return function if available(SPLIT_HEAD) and gathers_logits(function, head) else None


def gathers_logits(function: Any, head: nn.Module) -> bool:
    """Whether `function`, which tensor parallelism has given `head`, runs a linear layer and gathers its results."""
    held = inspect.getclosurevars(function).nonlocals
    style: Any = held.get("self")
    inner = held.get("original_forward")
    if not hasattr(style, "output_layouts") or held.get("module") is not head:
        return False
    gathers = style.input_layouts.is_replicate() and style.output_layouts.is_replicate() and style.use_local_output
    return gathers and getattr(inner, "__func__", None) is nn.Linear.forward


@dataclasses.dataclass(eq=False)
class VocabParallelCall(HeadCall):
    """One call of a split head; `weight` and `bias` are DTensors over one dimension of a mesh, sharded by rows."""

    @property
    def _mesh(self) -> Any:
        weight: Any = self.weight  # a DTensor
        return weight.device_mesh

    @property
    def group_options(self) -> dict[str, Any]:
        """The group and the range of this process's rows, as the vocabulary-parallel operators take them."""
        mesh = self._mesh
        start = mesh.get_local_rank() * _rows_per_process(self.weight)
        return {"group": mesh.get_group(), "vocab_start": start, "vocab_size": self.vocab_size}

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This process's rows of the current weight and bias, connected to the parameters' gradients."""
        now = self.head if self.sharded else self  # a `torch.func.functional_call` has parameters of its own
        return _local_rows(now.weight, self.weight), None if self.bias is None else _local_rows(now.bias, self.bias)

    def local_product(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits `(..., V)` of `hidden` `(..., H)`, as a function of `parameters`."""
        return self._gathered(hidden, _own_rows(self.weight), None if self.bias is None else _own_rows(self.bias))

    def gathered_product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """As `local_product`, with the current parameters; it gathers the logits and not the weight."""
        weight, bias = self.gathered()
        return lambda hidden: self._gathered(hidden, weight, bias)

    def split_logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The columns of this process, `(..., V_local)`; the gradient of `hidden` is summed over the processes."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        everywhere = DTensor.from_local(hidden, self._mesh, [Replicate()], run_check=False)
        return linear(everywhere.to_local(grad_placements=[Partial()]), weight, bias, self.dtype)

    def _gathered(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        columns = self.split_logits(hidden, weight, bias)
        whole = torch.empty(*hidden.shape[:-1], self.vocab_size, device="meta")
        parts = DTensor.from_local(
            columns, self._mesh, [Shard(columns.dim() - 1)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return parts.redistribute(placements=[Replicate()]).to_local()


def vocab_parallel_call(head: Any, hidden: torch.Tensor, fused: bool, logits_memory: int) -> VocabParallelCall | None:
    """The call of a split `head` on `hidden`; None where its own forward has to run."""
    weight, bias = head.weight, head.bias
    if not all(_is_split_by_rows(parameter) for parameter in (weight, bias) if parameter is not None):
        return None
    if type(hidden) not in (torch.Tensor, nn.Parameter):
        return None
    dtype = product_dtype(hidden, weight, bias, in_fp32=False)
    return None if dtype is None else VocabParallelCall(head, weight, bias, dtype, fused, logits_memory)


def vocab_parallel_loss(
    call: VocabParallelCall,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    logits_memory: int,
    **options: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy over a split head, fused with it or on the logits of this process.

    `weight` `(V_local, H)` and `bias` `(V_local,)` are the rows of this process; `logits_memory` is in bytes; `options`
    are those of `cross_entropy`, soft-cap and scale included.
    """
    options |= call.group_options
    with saved_as_is():
        if not call.fused:
            return vocab_parallel_cross_entropy(call.split_logits(hidden, weight, bias), target, **options)
        return vocab_parallel_linear_cross_entropy(
            hidden, weight, target, bias_shard=bias, logits_memory=logits_memory, **options
        )


def _is_split_by_rows(parameter: Any) -> bool:
    """Whether `parameter` is a DTensor split by rows over a one-dimensional mesh, with rows for every process."""
    if not is_dtensor(parameter) or parameter.device_mesh.ndim != 1:
        return False
    (placement,) = parameter.placements
    last = _rows_per_process(parameter) * (parameter.device_mesh.size() - 1)
    return placement.is_shard(0) and last < parameter.shape[0]


def _rows_per_process(parameter: Any) -> int:
    """Rows of every process but the last, which has the rest."""
    return -(-parameter.shape[0] // parameter.device_mesh.size())


def _own_rows(parameter: Any) -> torch.Tensor:
    return parameter.to_local()


def _local_rows(parameter: Any, in_forward: Any) -> torch.Tensor:
    """This process's rows of `parameter`, gathered if FSDP2 has sharded them again.

    Args:
        parameter: The parameter that the module has now.
        in_forward: The one that it had in its forward, split by tensor parallelism only.
    """
    if parameter.device_mesh.ndim == in_forward.device_mesh.ndim:
        return _own_rows(parameter)
    from torch.distributed.tensor import Partial, Replicate

    # As `whole_parameter`: every rank's gradient is that of its own batch, so the shards get the mean.
    data = parameter.device_mesh.ndim - in_forward.device_mesh.ndim
    rows = parameter.redistribute(placements=[*[Replicate()] * data, *in_forward.placements])
    return rows.to_local(grad_placements=[*[Partial("avg")] * data, *in_forward.placements])
