"""Chooses the row kernel's launch and the rule of dW's accumulation; run on one GPU, about a minute.

    python benchmarks/sweeps/cross_entropy_sweep.py

1. Every configuration of the row kernel is checked against float64, then timed: both passes in place (the fused head's
   step), statistics alone and gradient alone (`cross_entropy`'s forward and backward). GB/s count 3, 1 and 2 passes.
2. The error of dW against float64 by the number of chunks, summed in bf16 and in fp32, beside eager bf16's own.

`liger-trainer bench cross_entropy linear_cross_entropy` times the operators that result.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.measure import relative_error
from liger_trainer.kernels.head import cross_entropy_kernel
from liger_trainer.kernels.head import linear_cross_entropy as operator
from liger_trainer.kernels.head.cross_entropy_kernel import row_gradient_, row_statistics_
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.loss_options import LossOptions
from liger_trainer.kernels.head.token_statistics import RowStats
from liger_trainer.kernels.matmul import matmul_into

DEVICE = Device(torch.device("cuda"))
CONFIGURATIONS = [
    (4096, 8, 1),
    (4096, 16, 1),
    (8192, 8, 1),
    (8192, 16, 1),
    (8192, 16, 2),
    (8192, 16, 3),
    (8192, 32, 1),
    (16384, 16, 1),
    (16384, 32, 1),
    (16384, 32, 2),
    (16384, 32, 3),
    (32768, 32, 1),
]


class PlainSum:
    """Replaces `WeightGradientSum`: dW summed over the chunks in `dtype`."""

    def __init__(self, dtype: torch.dtype, weight_gradient: torch.Tensor, chunks: int) -> None:
        self.weight_gradient = weight_gradient
        self.total = torch.zeros_like(weight_gradient, dtype=dtype)

    def add(self, logits_gradient: torch.Tensor, hidden: torch.Tensor) -> None:
        matmul_into(self.total, logits_gradient.t(), hidden, add=True)

    def finish(self) -> None:
        self.weight_gradient.copy_(self.total)


def sweep_rows(tokens: int, vocab: int, softcap: float | None) -> None:
    print(f"\nrows {tokens} x {vocab} bf16, softcap {softcap}")
    source = 2 * torch.randn(tokens, vocab, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, vocab, (tokens,), device="cuda")
    options = LossOptions(-100, 0.0, 0.0, softcap, 1.0, 1.0)
    one = torch.ones((), device="cuda")
    stats = RowStats.allocate(source, tokens, False, False)
    few = slice(0, 64)
    double = source[few].double().requires_grad_()
    z = double if softcap is None else softcap * torch.tanh(double / softcap)
    exact_rows = F.cross_entropy(z, target[few], reduction="none")
    (exact,) = torch.autograd.grad(exact_rows.sum(), double)
    buffer, out = source.clone(), torch.empty_like(source)
    size = tokens * vocab * 2 / 1e6
    for configuration in CONFIGURATIONS:
        with mock.patch.object(cross_entropy_kernel, "row_config", return_value=configuration):
            try:
                buffer.copy_(source)
                row_statistics_(buffer, target, stats, options, coefficient=one)
                loss_error = float((stats.loss[few].double() - exact_rows).abs().max())
                errors = [relative_error(buffer[few], exact)]
                row_gradient_(source, target, stats, options, one, out=out)
                errors.append(relative_error(out[few], exact))
                if loss_error > 1e-4 or max(errors) > 3e-3:
                    print(f"{configuration!s:>16}  WRONG: loss {loss_error:.1e}, gradients {errors}")
                    continue
                both = DEVICE.median(lambda: row_statistics_(buffer, target, stats, options, coefficient=one))
                first = DEVICE.median(lambda: row_statistics_(source, target, stats, options))
                second = DEVICE.median(lambda: row_gradient_(source, target, stats, options, one, out=out))
            except Exception as error:  # a configuration the device cannot run must not end the sweep
                print(f"{configuration!s:>16}  {type(error).__name__}: {str(error).splitlines()[0][:80]}")
                continue
        print(
            f"{configuration!s:>16}  both {both:.3f} ms {3 * size / both:6.0f} GB/s   statistics {first:.3f} ms "
            f"{size / first:6.0f}   gradient {second:.3f} ms {2 * size / second:6.0f}   error {max(errors):.1e}"
        )


def sweep_accumulation(tokens: int = 8192, hidden_size: int = 2048, vocab: int = 32768) -> None:
    for scale in (1.0, 3.0):
        hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(vocab, hidden_size, device="cuda", dtype=torch.bfloat16) * (scale / hidden_size**0.5)
        weight.requires_grad_()
        target = torch.randint(0, vocab, (tokens,), device="cuda")
        exact = torch.zeros(vocab, hidden_size, device="cuda", dtype=torch.float64)
        double = weight.detach().double()
        for part, labels in zip(hidden.split(1024), target.split(1024)):
            gradient = torch.softmax(part.double() @ double.t(), -1)
            gradient[torch.arange(len(labels), device="cuda"), labels] -= 1.0
            exact += gradient.t() @ part.double() / tokens
        (eager,) = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), target), weight)
        base = relative_error(eager, exact)
        print(f"\ndW of {tokens} x {hidden_size} x {vocab}, logits of deviation {scale}: eager bf16 error {base:.2e}")
        for count in (1, 2, 4, 8, 16, 32):
            cells = []
            for dtype in (torch.bfloat16, torch.float32):
                with (
                    mock.patch.object(operator, "chunk_rows", return_value=tokens // count),
                    mock.patch.object(operator, "plan_panels", return_value=None),
                    mock.patch.object(operator, "WeightGradientSum", partial(PlainSum, dtype)),
                ):
                    loss = linear_cross_entropy(hidden, weight, target)
                    assert isinstance(loss, torch.Tensor)  # no outputs were asked for
                    (ours,) = torch.autograd.grad(loss, weight)
                error = relative_error(ours, exact)
                cells.append(f"{str(dtype)[6:]} {error:.2e} = {error / base:.3f} x eager")
            print(f"{count:3} chunks: " + "   ".join(cells))


if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for tokens in (2048, 4096):
        for vocab, softcap in ((128256, None), (262208, None), (262208, 30.0)):
            if not (tokens == 4096 and softcap):
                sweep_rows(tokens, vocab, softcap)
    sweep_accumulation()
