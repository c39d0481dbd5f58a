"""Multiplies a gradient by upstream / expected, both on the device, and reads nothing where the two are equal.

An operator that computes its gradients in the forward assumes an upstream gradient (`expected`, usually 1). In the
backward the true one is known, but only on the device. A persistent grid loads both scalars and returns if they are
equal: that costs a few microseconds and no synchronisation, instead of a pass over the weight gradient (4 bytes an
element in bf16).

Shapes: any; the kernel sees one flat array.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import refuse_double_backward
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import cdiv, graph_is_kept, num_sms, on_device, tl, triton, use_triton


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
