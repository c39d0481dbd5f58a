"""Products with a matrix in 4 bits: it is made floating in one buffer, which one product after another uses.

A frozen base model in 4 bits is needed in 16 for as long as a product runs, forward and backward, and no longer. So
there is one buffer for each device, dtype and stream, as large as the largest matrix so far. What is in it is gone with
the next product; nothing outside of the operator here sees it, and autograd never does.

A product is queued behind its dequantisation on one stream. The lock keeps two threads (autograd runs backwards on its
own) from queueing theirs in between.

On CUDA only the default stream has one, as elsewhere memory may be a graph's: CUDA graphs are captured on other
streams, and before it captures, `torch.compile` runs a function there once in the memory of its graphs, in which
nothing may stay. A product on such a stream takes memory for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import torch

from liger_trainer.kernels.lora.nf4 import NF4Weight, dequantize_, nf4_dequantize_reference
from liger_trainer.kernels.runtime import use_triton


@dataclasses.dataclass
class _Buffer:
    memory: torch.Tensor
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_buffers: dict[tuple[torch.device, torch.dtype, torch.Stream | None], _Buffer] = {}


def free_buffers() -> None:
    """Gives the memory of all buffers back to torch; the next product takes a new one."""
    _buffers.clear()


def _has_buffer(device: torch.device) -> bool:
    """Whether products on the current stream share a buffer; otherwise what they take may be a graph's."""
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)


@contextlib.contextmanager
def _dequantized(weight: NF4Weight, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The matrix in `dtype`, for products that are queued inside the context, on the current stream."""
    numel, device = weight.shape[0] * weight.shape[1], weight.device
    if not _has_buffer(device):
        yield _write(weight, torch.empty(numel, dtype=dtype, device=device))
        return
    stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
    key = (device, dtype, stream)
    buffer = _buffers.get(key) or _buffers.setdefault(key, _Buffer(torch.empty(0, dtype=dtype, device=device)))
    with buffer.lock:
        if buffer.memory.numel() < numel:
            buffer.memory = buffer.memory.new_empty(0)  # first gone, then larger
            with torch.inference_mode(False):  # it outlives the mode
                buffer.memory = torch.empty(numel, dtype=dtype, device=device)
        yield _write(weight, buffer.memory[:numel])


def _write(weight: NF4Weight, memory: torch.Tensor) -> torch.Tensor:
    out = memory.view(weight.shape)
    if use_triton(out):
        dequantize_(out, weight.packed, weight.statistics, weight.layout)
    else:
        out.copy_(nf4_dequantize_reference(weight, out.dtype))
    return out


@torch.library.custom_op("liger_trainer::nf4_matmul_", mutates_args=("out",))
def _matmul_(
    out: torch.Tensor,
    rows: torch.Tensor,
    packed: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    layout: Sequence[int],
    bias: torch.Tensor | None,
    transposed: bool,
    add: bool,
) -> None:
    with _dequantized(NF4Weight.of(packed, statistics, layout), rows.dtype) as weight:
        right = weight.T if transposed else weight
        if bias is not None:
            torch.addmm(bias, rows, right, out=out)
        else:
            torch.addmm(out, rows, right, beta=int(add), out=out)


@_matmul_.register_fake
def _(out, rows, packed, statistics, layout, bias, transposed, add):
    return None


def nf4_linear(rows: torch.Tensor, weight: NF4Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows @ weight.T + bias`` in the dtype of `rows`, (tokens, columns), without a gradient."""
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    _matmul_(out, rows, weight.packed, weight.statistics, weight.layout, bias, True, False)
    return out


def nf4_add_product_(out: torch.Tensor, rows: torch.Tensor, weight: NF4Weight, add: bool) -> None:
    """``rows @ weight``, written to `out` or added to it; `rows` is (tokens, rows of the matrix)."""
    _matmul_(out, rows, weight.packed, weight.statistics, weight.layout, None, False, add)
