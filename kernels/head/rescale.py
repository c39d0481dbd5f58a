"""Multiplies a gradient by upstream / expected, both on the device, and reads nothing where the two are equal.

An operator that computes its gradients in the forward assumes an upstream gradient (`expected`, usually 1). In the
backward the true one is known, but only on the device. A persistent grid loads both scalars and returns where they are
equal: a few microseconds and no synchronisation, instead of a pass over the weight gradient (4 bytes an element in
bf16).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import refuse_double_backward
from liger_trainer.kernels.runtime import cdiv, graph_is_kept, num_sms, on_device, tl, triton, use_triton

_FP16_MAX_EXPECTED_GRAD = 4096.0


@triton.jit
def _rescale_kernel(tensor_ptr, upstream_ptr, expected_ptr, numel, BLOCK: tl.constexpr):
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


@torch.library.custom_op(
    "liger_trainer::rescale_",
    mutates_args={"tensor"},
    schema="(Tensor(a!) tensor, Tensor upstream, Tensor expected) -> ()",
)
def rescale_(tensor: torch.Tensor, upstream: torch.Tensor, expected: torch.Tensor) -> None:
    """Multiplies `tensor` in place by `upstream / expected`; leaves it bit for bit where the two are equal.

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
        # Reading a CPU scalar waits for nothing, and as a Python number it is not rounded to the tensor's dtype.
        if upstream.item() != expected.item():
            tensor.mul_(upstream.item() / expected.item())
    else:
        tensor.copy_(tensor * (upstream.to(torch.float32) / expected).expand(1))


@rescale_.register_fake
def _(tensor: torch.Tensor, upstream: torch.Tensor, expected: torch.Tensor) -> None:
    return None


def rescaled_gradients(
    gradients: list[torch.Tensor | None],
    upstream: torch.Tensor,
    expected: torch.Tensor,
    function: str = "this operator",
) -> list[torch.Tensor | None]:
    """`gradients`, computed in the forward for `expected`, made those of `upstream`; for use inside a backward.

    In the last backward of a graph the saved tensors themselves are scaled in place and handed on, so that ``.grad``
    takes them over and no second one is allocated. In a backward that keeps its graph (``retain_graph=True``) copies
    are scaled and the saved ones stay as they are, so every later backward is right whatever its upstream gradient, 0
    and inf included, and no caller holds memory that a later backward writes. A kept graph costs no more than
    autograd's own copy into ``.grad``, which it replaces. Traced graphs (``torch.compile``), which may not write what
    their forward returned, scale copies too.

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


@torch.no_grad()
def expected_gradient(
    expected_grad: float | torch.Tensor | None, scale: torch.Tensor, dtype: torch.dtype, normalised: bool
) -> torch.Tensor:
    """`expected_grad` as a 0-d tensor beside `scale`, with 1 where it could not be divided out again.

    fp16 gradients of a mean lie below fp16's range; unless told otherwise they are kept times a power of two, as a
    gradient scaler would have them, but never made larger than those of the sum. A sum needs no such help and might
    overflow with it.
    """
    if expected_grad is None:
        expected_grad = 1.0
        if dtype == torch.float16 and normalised:
            expected_grad = torch.exp2(torch.floor(torch.log2(1.0 / scale))).clamp(1.0, _FP16_MAX_EXPECTED_GRAD)
    expected = torch.ones_like(scale) * expected_grad
    return torch.where(torch.isfinite(expected) & (expected != 0), expected, 1.0)
