"""The operands of the kernels that compute a loss of deferred logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from liger_trainer.head.chunked_module import ModuleCall
from liger_trainer.head.deferred_logits import DeferredLogits


@contextlib.contextmanager
def operands(logits: DeferredLogits) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Hidden states `(..., H)`, weight `(V, H)` and bias `(V,)` of deferred `logits` of a linear head.

    For a fused head they are in the dtype of its call. They have no graph if the logits have none. If tensor parallel
    processes share the head, weight and bias are the rows of this process. Autocast is off inside.

    Raises:
        RuntimeError: if hidden states or parameters have been changed in place since the call.
    """
    recorded = logits.recorded
    call = recorded.call
    assert not isinstance(call, ModuleCall)
    recorded.check()
    weight, bias = call.gathered()
    hidden = recorded.hidden
    if not logits.has_graph:
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    if call.fused:
        hidden, weight = hidden.to(call.dtype), weight.to(call.dtype)
        bias = None if bias is None else bias.to(call.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        yield hidden, weight, bias
