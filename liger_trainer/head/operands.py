"""The operands of the kernels that compute a loss of deferred logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from liger_trainer.head.chunked_module import ModuleCall
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.kernels.autograd import saved_as_is


@contextlib.contextmanager
def operands(logits: DeferredLogits) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Hidden states `(..., H)`, weight `(V, H)` and bias `(V,)` of deferred `logits` of a linear head.

    They are in the dtype of the head's call, without a graph where the logits have none. Of a head that tensor
    parallelism splits, weight and bias are the rows of this process. Inside, autocast is off, and what an operator
    saves for its backward is not offloaded.

    Raises:
        RuntimeError: where hidden states or parameters have changed since the call.
    """
    recorded = logits.recorded
    call = recorded.call
    assert not isinstance(call, ModuleCall)
    recorded.check()
    weight, bias = call.gathered()
    hidden = recorded.hidden
    if not logits.has_graph:
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    bias = None if bias is None else bias.to(call.dtype)
    with torch.autocast(hidden.device.type, enabled=False), saved_as_is():
        yield hidden.to(call.dtype), weight.to(call.dtype), bias
