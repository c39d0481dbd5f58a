"""Memory in which packed weights lie decoded while their products run.

A frozen base in few bits is needed in 16 only while a product runs, forward and backward. So all products share one
buffer for each device, dtype, stream and slot, as large as the largest weight so far. Its content is gone with the next
weight; nothing outside of an operator sees it, and autograd never does. A product is queued after its decoding on one
stream. The lock keeps two threads (autograd runs backwards on threads of its own) from queueing theirs in between.

Inside one backward, a buffer is not written again with what it holds: a checkpointed block decodes its weights once for
recomputation and gradients together, where they lie in different slots. A buffer remembers the tensors that it was
decoded from by their versions and their storages. It holds the storages, so that no other has their memory, and forgets
the backward they were decoded in; a write past torch's versions (``weight.data.copy_()``), which belongs between steps,
is never missed. FSDP2 frees the memory of a storage that is held, and gathers the next layer's weights there, with the
same shapes and versions: the storage tells them apart.

On CUDA only the default stream has a buffer, because memory allocated on another stream may belong to a CUDA graph:
graphs are captured on other streams, and before capturing, `torch.compile` runs a function once in the memory pool of
its graphs, in which nothing may stay allocated. A product on such a stream allocates memory of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from liger_trainer.compat.private import available, require
from liger_trainer.compat.torch import CHANGED_IN_PLACE, GRAPH_TASK

require(CHANGED_IN_PLACE)

LARGEST = 2**30
"""Bytes of decoded experts at a time; a larger stack is decoded in parts."""


@dataclasses.dataclass
class _Buffer:
    memory: torch.Tensor
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    content: tuple[Any, ...] | None = None  # what lies in it; see `_tag`


_buffers: dict[tuple[torch.device, torch.dtype, torch.Stream | None, int], _Buffer] = {}


def free_buffers() -> None:
    """Gives the memory of all buffers back to torch; the next product allocates a new one."""
    _buffers.clear()


def _has_buffer(device: torch.device) -> bool:
    """Whether products on the current stream share a buffer; on others, memory may belong to a CUDA graph."""
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


@contextlib.contextmanager
def filled(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    write: Callable[[torch.Tensor], Any],
    sources: Sequence[torch.Tensor],
    slot: int = 0,
) -> Iterator[torch.Tensor]:
    """A buffer of this shape with what `write` writes, for products queued inside the context, on the current stream.

    Args:
        shape: Shape of the decoded weight.
        dtype: Its dtype.
        device: Its device.
        write: Fills the tensor that it is given.
        sources: The tensors that `write` reads.
        slot: A buffer of its own for each number.
    """
    numel = torch.Size(shape).numel()
    if not _has_buffer(device):
        own = torch.empty(shape, dtype=dtype, device=device)
        write(own)
        yield own
        return
    stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
    key = (device, dtype, stream, slot)
    buffer = _buffers.get(key) or _buffers.setdefault(key, _Buffer(torch.empty(0, dtype=dtype, device=device)))
    with buffer.lock:
        if buffer.memory.numel() < numel:
            buffer.content = None
            buffer.memory = buffer.memory.new_empty(0)  # freed before the larger one is allocated
            with torch.inference_mode(False):  # the buffer outlives the mode
                buffer.memory = torch.empty(numel, dtype=dtype, device=device)
        dense, tag = buffer.memory[:numel].view(shape), _tag(shape, sources)
        if tag is None or tag != buffer.content:
            buffer.content = None  # also if `write` fails
            write(dense)
            buffer.content = tag
        yield dense


def _tag(shape: Sequence[int], sources: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
    """The running backward, and what identifies the bits of the sources, whose storages it holds; None outside of one.

    A reentrant backward, which checkpoints of the older kind run in a backward, is one of its own. A source without
    elements, which stands for a statistic that a format lacks, has no bits.
    """
    backward = torch._C._current_graph_task_id() if available(GRAPH_TASK) else -1
    if backward < 0 or any(source.is_inference() for source in sources):
        return None
    parts = (
        (source.untyped_storage(), source.data_ptr(), source._version, source.dtype, source.shape)
        for source in sources
        if source.numel()
    )
    return backward, tuple(shape), *parts
