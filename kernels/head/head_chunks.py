"""Chunks of tokens for the operators over an LM head: how many tokens a chunk holds, and gradients summed over chunks.

Gradients that were computed in the forward are multiplied by upstream / expected, both on the device, which reads
nothing where the two are equal.

An operator that computes its gradients in the forward assumes an upstream gradient (`expected`, usually 1). In the
backward the true one is known, but only on the device. A persistent grid loads both scalars and returns if they are
equal: that costs a few microseconds and no synchronisation, instead of a pass over the weight gradient (4 bytes an
element in bf16).

Shapes: N tokens, H hidden size, V vocabulary; a chunk is n of the N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.autograd import refuse_double_backward
from liger_trainer.kernels.head import weight_gradient as weight_gradients
from liger_trainer.kernels.head.weight_gradient import (
    MAX_HALF_CHUNKS,
    Launch,
    empty_exponents,
    sums_in_block_floating_point,
)
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import cdiv, graph_is_kept, matmul_into, num_sms, on_device, tl, triton, use_triton

COLUMN_MULTIPLE = 64  # the buffer's rows are padded to it: matmuls lose their fast path on odd strides
ROW_MULTIPLE = 128  # tokens of a matmul tile; a chunk holds whole tiles
MANY_ROWS = 896  # from here on a chunk fills whole waves of tiles, not only whole tiles
_FP16_MAX_EXPECTED_GRAD = 4096.0
_WAVE = 2**22  # elements of a matmul's result that occupy every multiprocessor, as tiles of 128 by 256


class Needs(NamedTuple):
    """Which gradients are computed."""

    hidden_gradient: bool
    weight_gradient: bool
    bias_gradient: bool

    @classmethod
    def of(cls, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Needs:
        """Which of the three tensors require a gradient; none where gradients are disabled."""
        if not torch.is_grad_enabled():
            return cls(False, False, False)
        return cls(hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)


def chunk_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    logits_memory: int,
    weight_gradient: bool,
    unit: int = 1,
    class_bytes: int | None = None,
) -> int:
    """Tokens of a chunk: as many as `logits_memory` bytes hold, spread evenly over the chunks.

    One class of one token takes `class_bytes`, by default one logit of the dtype of `hidden`. A chunk holds whole units
    of `unit` tokens; the result is 0 if not even one unit fits.

    A budget of many tokens may be exceeded by a sixth if that makes their number a multiple of 512, and is otherwise
    rounded down to a multiple of 256: then every wave of matmul tiles is full.

    It is exceeded further in one case. A half-precision dW of more than `MAX_HALF_CHUNKS` chunks needs an fp32
    accumulator of V*H elements; as long as a larger buffer costs less memory, the buffer grows instead. A dW that is
    summed as block floating point needs no such accumulator.
    """
    tokens, hidden_size = hidden.shape
    class_bytes = class_bytes or hidden.element_size()
    width = weight.shape[0] + -weight.shape[0] % COLUMN_MULTIPLE
    rows = max(1, logits_memory // (width * class_bytes))
    if rows >= MANY_ROWS and unit <= ROW_MULTIPLE:
        more = rows + -rows % 512
        rows = more if 6 * more <= 7 * rows else rows // 256 * 256
    elif rows >= ROW_MULTIPLE and unit <= ROW_MULTIPLE and 2 * (rows % ROW_MULTIPLE) < ROW_MULTIPLE:
        rows -= rows % ROW_MULTIPLE  # the last tile would be mostly empty
    if weight_gradient and hidden.element_size() == 2 and not sums_in_block_floating_point(weight):
        few = -(-tokens // MAX_HALF_CHUNKS)
        few += -few % ROW_MULTIPLE if few >= ROW_MULTIPLE else 0
        if rows < few and class_bytes * (few - rows) <= 2 * hidden_size:
            rows = few
    units, most = tokens // unit, rows // unit
    if most == 0:
        return 0
    chunks = max(1, -(-units // most))
    even = -(-units // chunks)
    whole_tiles = even + -even % max(1, ROW_MULTIPLE // unit)
    return max(1, whole_tiles if whole_tiles <= most else even) * unit


def saturating_chunk_rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, weight_gradient: bool) -> int:
    """As `chunk_rows`, but without a dW to sum no more tokens than fill the device once: more would gain nothing."""
    rows = chunk_rows(hidden, weight, logits_memory, weight_gradient)
    if weight_gradient:
        return rows
    full = _WAVE // weight.shape[1]
    return min(rows, max(1024, full + -full % ROW_MULTIPLE))


def retained_rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, retain_memory: int | None) -> int:
    """How many of the last tokens retain their logits for the backward: one chunk, or what `retain_memory` holds."""
    if retain_memory is None:
        rows = chunk_rows(hidden, weight, logits_memory, weight_gradient=True)
    else:
        width = weight.shape[0] + -weight.shape[0] % COLUMN_MULTIPLE
        rows = retain_memory // (width * hidden.element_size())
        rows -= rows % ROW_MULTIPLE if rows >= ROW_MULTIPLE else 0
    return min(hidden.shape[0], rows)


def logits_buffer(hidden: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Uninitialised memory for the logits of `rows` tokens, each row padded."""
    return hidden.new_empty(rows, weight.shape[0] + -weight.shape[0] % COLUMN_MULTIPLE)


class WeightGradientSum:
    """``dW = sum of dZ.T @ X`` over `chunks` calls of `add`, the last of which leaves it in `weight_gradient`.

    The representation of the sum between chunks depends on the device:

    - one chunk, or fp32 and float64: in dW itself;
    - fp16 and bf16 on NVIDIA GPUs from Hopper on: in dW's memory as block floating point, rounded once at the end;
    - fp16 and bf16 elsewhere: in dW itself up to 8 chunks (each rounds), beyond in an fp32 tensor of its own.

    Args:
        weight_gradient: dW, (V, H), uninitialised. If it is not contiguous, as that of a transposed weight is not, it
            is summed as on the other devices.
        chunks: How many chunks there will be.
    """

    def __init__(self, weight_gradient: torch.Tensor, chunks: int) -> None:
        self.weight_gradient = weight_gradient
        self.chunks = chunks
        self.added = 0
        self.launch: Launch | None = None
        self.exponents: torch.Tensor | None = None
        self.total = weight_gradient
        if chunks > 1 and sums_in_block_floating_point(weight_gradient):
            self.launch = weight_gradients.launch_for(weight_gradient.device)
        elif chunks > MAX_HALF_CHUNKS and weight_gradient.element_size() == 2:
            self.total = torch.empty_like(weight_gradient, dtype=torch.float32)

    def add(self, logits_gradient: torch.Tensor, hidden: torch.Tensor, vocab_start: int = 0) -> None:
        """Adds ``logits_gradient.T @ hidden``: (n, V) with rows at multiples of 16 bytes, and (n, H) contiguous.

        The logits' gradient may come as panels of columns, in their order, each with the `vocab_start` of its first
        column; the panel with the last column ends the chunk. A panel writes only its own rows of dW.
        """
        stop = vocab_start + logits_gradient.shape[1]
        add = self.added > 0
        if self.launch is not None:
            if self.exponents is None:
                self.exponents = empty_exponents(self.weight_gradient)
            if hidden.data_ptr() % 16:  # a view that starts where the copy engine cannot read
                hidden = hidden.clone()
            keep = self.added + 1 < self.chunks
            rows, exponents = self.weight_gradient[vocab_start:stop], self.exponents[:, vocab_start:stop]
            self.launch(rows, exponents, logits_gradient, hidden, add, keep)
        else:
            matmul_into(self.total[vocab_start:stop], logits_gradient.t(), hidden, add=add)
        self.added += stop == self.weight_gradient.shape[0]
        if self.added == self.chunks and self.total is not self.weight_gradient:
            self.weight_gradient.copy_(self.total)


class HeadGradients:
    """dX, dW and dbias of a head, from the gradients of the logits of one chunk of tokens after the other.

    Args:
        hidden: X, (N, H).
        weight: W, (V, H).
        bias: (V,), or None.
        needs: Which of the three are computed.
        chunks: How many chunks there will be.
        vocab_size: Columns of the logits, the first of V; by default all.

    Attributes:
        results: dX, dW and dbias, strided like their inputs so that autograd adopts them, and empty if not needed; what
            is in them counts from `finish` on.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: Needs,
        chunks: int,
        vocab_size: int | None = None,
    ) -> None:
        d_hidden = torch.empty_like(hidden) if needs.hidden_gradient else hidden.new_empty(0)
        d_weight = torch.empty_like(weight) if needs.weight_gradient else weight.new_empty(0)
        d_bias = torch.empty_like(bias) if needs.bias_gradient and bias is not None else weight.new_empty(0)
        self.results = d_hidden, d_weight, d_bias
        self.partial = vocab_size is not None and vocab_size < weight.shape[0]
        if self.partial:
            weight, d_weight, d_bias = weight[:vocab_size], d_weight[:vocab_size], d_bias[:vocab_size]
        self.hidden, self.weight, self.chunks = hidden, weight, chunks
        self.d_hidden = d_hidden if needs.hidden_gradient else None
        self.weight_sum = WeightGradientSum(d_weight, chunks) if needs.weight_gradient else None
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.bias_sum = d_bias.new_zeros(d_bias.shape, dtype=dtype) if needs.bias_gradient else None

    def add(self, start: int, stop: int, gradient: torch.Tensor) -> None:
        """Adds a chunk: the `gradient` of the logits of tokens `start` to `stop`, (stop - start, V)."""
        if self.d_hidden is not None:
            matmul_into(self.d_hidden[start:stop], gradient, self.weight)
        if self.weight_sum is not None:
            self.weight_sum.add(gradient, self.hidden[start:stop])
        if self.bias_sum is not None:
            self.bias_sum += gradient.sum(0, dtype=self.bias_sum.dtype)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dX, dW and dbias, rounded once and empty if not needed; 0 without a chunk, and for classes without logits."""
        d_hidden, d_weight, d_bias = self.results
        if self.weight_sum is not None:
            assert self.weight_sum.added == self.chunks, "every chunk adds once"
        if self.bias_sum is not None:
            d_bias[: len(self.bias_sum)].copy_(self.bias_sum)
        if self.partial or not self.chunks:
            d_weight[self.weight.shape[0] if self.chunks else 0 :].zero_()
            d_bias[self.weight.shape[0] :].zero_()
        return d_hidden, d_weight, d_bias


@torch.no_grad()
def expected_gradient(
    expected_grad: float | torch.Tensor | None, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`expected_grad` (1 for None) as a 0-d tensor on the device of `scale`; 1 if the backward could not divide by it.

    fp16 gradients of a mean lie below fp16's range, and so do those of a sum that is divided later. They are multiplied
    by a power of two until the backward, as a gradient scaler does, but never beyond those of the sum, which need no
    factor and might overflow with it.
    """
    expected = torch.ones_like(scale) * (1.0 if expected_grad is None else expected_grad)
    if dtype == torch.float16:
        raised = torch.exp2(torch.floor(-torch.log2((scale * expected).abs())))
        expected = expected * raised.clamp(1.0, _FP16_MAX_EXPECTED_GRAD)
    return torch.where(torch.isfinite(expected) & (expected != 0), expected, 1.0)


@triton.jit
def _rescale_kernel(tensor_ptr, upstream_ptr, expected_ptr, numel, BLOCK: tl.constexpr):
    """Multiplies `numel` elements by upstream / expected, in a grid that strides over them."""
    upstream = tl.load(upstream_ptr).to(tl.float32)
    expected = tl.load(expected_ptr).to(tl.float32)
    if upstream == expected:
        return
    ratio = upstream / expected
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, numel, step):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < numel
        value = tl.load(tensor_ptr + offsets, mask=mask).to(tl.float32)
        tl.store(tensor_ptr + offsets, (value * ratio).to(tensor_ptr.dtype.element_ty), mask=mask)


@operator("liger_trainer::rescale_", mutates=("tensor",))
def rescale_(tensor: torch.Tensor, upstream: torch.Tensor, expected: torch.Tensor) -> None:
    """Multiplies `tensor` in place by `upstream / expected`; does not touch it if the two are equal.

    Args:
        tensor: Any shape, dense in memory; the product is taken in fp32 and rounded once.
        upstream: 0-d, on the device of `tensor`. 0, inf and NaN act as in any multiplication.
        expected: 0-d, not 0, on the device of `tensor`.
    """
    numel = tensor.numel()
    if numel == 0:
        return
    if use_triton(tensor):
        block = 4096
        grid = (min(cdiv(numel, block), 4 * num_sms(tensor.device)),)
        with on_device(tensor):
            _rescale_kernel[grid](tensor, upstream, expected, numel, BLOCK=block, num_warps=8)
    elif tensor.device.type == "cpu":
        # Reading a CPU scalar waits for nothing, and a Python number is not rounded to the tensor's dtype.
        if upstream.item() != expected.item():
            tensor.mul_(upstream.item() / expected.item())
    else:
        tensor.copy_(tensor * (upstream.to(torch.float32) / expected).expand(1))


def rescaled_gradients(
    gradients: list[torch.Tensor | None],
    upstream: torch.Tensor,
    expected: torch.Tensor,
    function: str = "this operator",
) -> list[torch.Tensor | None]:
    """Rescales `gradients`, computed in the forward for `expected`, to `upstream`; for use inside a backward.

    In the last backward of a graph the saved tensors themselves are scaled in place and returned, so ``.grad`` adopts
    them and no second tensor is allocated. A backward that keeps its graph (``retain_graph=True``) scales copies and
    leaves the saved tensors alone: so every later backward is right for any upstream gradient, 0 and inf included, and
    no caller holds memory that a later backward writes to. The copy replaces the one that autograd would make for
    ``.grad``. Traced graphs (``torch.compile``) must not write to what their forward returned, so they scale copies
    too.

    Raises:
        RuntimeError: If the backward is itself differentiated (``create_graph=True``).
    """
    refuse_double_backward(function)
    keep = graph_is_kept() or type(upstream) is not torch.Tensor  # tracing sees fake or functional tensors
    results: list[torch.Tensor | None] = []
    for gradient in gradients:
        if gradient is not None:
            gradient = gradient.clone() if keep else gradient.detach()
            rescale_(gradient, upstream, expected)
        results.append(gradient)
    return results
