"""What decided the scales of fp8, and from how many rows it is used; the errors need no GPU.

    python benchmarks/sweeps/fp8_sweep.py

1. The error of each product of a linear layer against float64, for the scales of each mode, for scales of rows that are
   rounded to powers of two as torchao's are, and for one scale with the gradient in e4m3 instead of e5m2. Then the
   largest error of a token's gradient.
2. On a GPU with fp8: milliseconds of the casts and of the products, and the rows on which the products of a layer save
   what the casts of its weights take.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from liger_trainer.benchmarks.device import Device
from liger_trainer.kernels.fp8.linear import scaled_product
from liger_trainer.kernels.fp8.row_cast import cast_columns, cast_rows, cast_transposed, cast_whole

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = 16384
LAYERS = {(4096, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}  # of a Llama-3 8B layer, but for its small keys, values


def rounded(x: torch.Tensor, over: int | None, powers: bool = False, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """`x` in fp8 and back, in float64, with a scale for each row of what remains without the dimension `over`."""
    most = torch.finfo(dtype).max
    factor = most / (x.abs().amax() if over is None else x.abs().amax(over, keepdim=True)).clamp(min=1e-12)
    factor = factor.log2().floor().exp2() if powers else factor
    return (x * factor).float().clamp(-most, most).to(dtype).double() / factor


def products(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, scales: str) -> list[torch.Tensor]:
    """The output and the gradients of input and weight."""
    if scales.startswith("tensorwise"):
        x, weight = rounded(x, None), rounded(weight, None)
        dy = rounded(dy, None, dtype=E4M3 if scales.endswith("e4m3") else E5M2)
        return [x @ weight.t(), dy @ weight, dy.t() @ x]
    powers = scales.endswith("powers of two")

    def each(tensor: torch.Tensor, over: int) -> torch.Tensor:
        return rounded(tensor, over, powers)

    return [each(x, 1) @ each(weight, 1).t(), each(dy, 1) @ each(weight, 0), each(dy, 0).t() @ each(x, 0)]


def operands(kind: str) -> list[torch.Tensor]:
    """Input, weight and gradient of 2048 tokens, 2048 inputs and 512 outputs, in float64 with the values of bf16."""
    torch.manual_seed(0)
    x, weight, dy = (torch.randn(*shape) for shape in ((2048, 2048), (512, 2048), (2048, 512)))
    if kind == "8 input features of 2048 times 50":
        x[:, :8] *= 50
    if kind == "tokens times e^N(0, 2)":
        dy *= (2 * torch.randn(2048, 1)).exp()
    if kind == "Student's t, 3 degrees":
        x, dy = (torch.distributions.StudentT(3.0).sample(each.shape) for each in (x, dy))
    return [each.bfloat16().double() for each in (x, 0.02 * weight, dy)]


def print_errors() -> None:
    """Per cent of the norm of the exact product, and of that of a token's gradient."""
    for kind in (
        "normal numbers",
        "8 input features of 2048 times 50",
        "tokens times e^N(0, 2)",
        "Student's t, 3 degrees",
    ):
        x, weight, dy = operands(kind)
        exact = [x @ weight.t(), dy @ weight, dy.t() @ x]
        print(f"{kind}: output, input's gradient, weight's gradient; a token's gradient at most")
        for scales in ("rowwise", "rowwise, powers of two", "tensorwise", "tensorwise, e4m3"):
            found = products(x, weight, dy, scales)
            errors = [(a - b).norm() / b.norm() for a, b in zip(found, exact)]
            errors += [((found[1] - exact[1]).norm(dim=1) / exact[1].norm(dim=1)).max()]
            print(f"  {scales:24}", "  ".join(f"{100 * error:6.2f}" for error in errors))


def times(device: Device, outputs: int, inputs: int) -> tuple[float, float]:
    """Prints milliseconds of a layer; returns those of its weight's casts, and what a row of it saves."""

    def median(function: Callable[..., object], *arguments: object) -> float:
        return device.median(lambda: function(*arguments), 20)

    x, dy, weight = (
        torch.randn(*shape, device=device.device, dtype=torch.bfloat16)
        for shape in ((ROWS, inputs), (ROWS, outputs), (outputs, inputs))
    )
    casts = {"rows": cast_rows, "whole": cast_whole, "transposed": cast_transposed, "columns": cast_columns}
    of_weight, of_x, of_dy = ({name: median(cast, y) for name, cast in casts.items()} for y in (weight, x, dy))
    operands = cast_rows(x), cast_rows(weight), None
    bf16, fast, slow = median(F.linear, x, weight), *(median(scaled_product, *operands, how) for how in (True, False))
    print(f"{outputs} x {inputs}, {ROWS} rows: bf16 {bf16:.3f} ms, fp8 {fast:.3f} with fast accumulation, {slow:.3f}")
    for what, found in (("weight", of_weight), ("input", of_x), ("gradient", of_dy)):
        print(f"  casts of the {what}:", "  ".join(f"{name} {time:.3f}" for name, time in found.items()))
    saved = 2 * bf16 - fast - slow - of_x["rows"] - of_dy["rows"]
    return of_weight["rows"] + of_weight["transposed"], saved / ROWS


if __name__ == "__main__":
    print_errors()
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
        found = [(count, *times(Device(torch.device("cuda")), *shape)) for shape, count in LAYERS.items()]
        rows = sum(count * spent for count, spent, _ in found) / sum(count * saved for count, _, saved in found)
        print(f"rowwise_gw_hp pays from {rows:,.0f} rows on")
