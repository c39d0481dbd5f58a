"""Modules that hold their weight as it was published, in 8 bits or fewer, and decode it where they multiply by it.

The weight has no gradient. A product decodes it into a buffer that all products share, and so does the backward
(`kernels/lowbit`): nothing of its size is kept between the two. The result is that of the dequantised model: the weight
is rounded once, to the dtype of the input. With `fp8_base`, a weight in fp8 is multiplied as it is, and the input is
rounded to fp8 (`kernels/fp8/stored.py`).

Codes and scales are frozen parameters, since DDP would broadcast buffers at every forward, and FSDP2 splits only
parameters: each process keeps its rows of every tensor, and a layer's tensors are gathered whole before it runs, so a
block may lie on two processes. Floating-point numbers are kept as bytes, so that neither a cast of the model nor
FSDP2's mixed precision changes them. `weight` has a shape but no values: whatever reads or changes values, such as DoRA
or merging adapters, is an error instead of a wrong result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import MODULE_CONTENTS
from liger_trainer.kernels.fp8.blocks import BLOCK, obstacle_to_blocks
from liger_trainer.kernels.fp8.linear import MULTIPLE, has_fp8
from liger_trainer.kernels.fp8.stored import Fp8Weight
from liger_trainer.kernels.lora.lora import LoRALayer, lora_linears_operator
from liger_trainer.kernels.lowbit.decode import decode
from liger_trainer.kernels.lowbit.formats import BlockFp8Weight, Fp4Weight, Int4Weight, PackedWeight
from liger_trainer.kernels.runtime import as_autocast

require(MODULE_CONTENTS)

NO_VALUES = (
    "The values of `weight` are asked for, but this layer holds its weight as codes, which cannot be read or changed "
    "like this. Train adapters that do not read it, such as LoRA without DoRA, PiSSA, OLoRA, CorDA, LoftQ or MiCA, "
    "and merge them with `liger-trainer merge`; or load the model dequantised."
)
"""The error where the values of a packed weight are asked for."""

_INITIALISED = (
    "`{}` would initialise `{}`, but this layer holds its weight as codes, which the checkpoint has filled. Leave "
    "out what initialises weights, such as `init_weights`, or load the model dequantised."
)

_TRAINED = (
    "Codes of a packed weight cannot be trained. Leave its module, and those around it, out of `modules_to_save` and "
    "of what requires a gradient; name modules that the checkpoint has in 16 bits, such as 'lm_head'. Or load the "
    "model dequantised."
)


class _WithoutValues(torch.Tensor):
    """A tensor that has no values: every operation on it is an error."""

    parameter: str
    no_values: str

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):  # `weight.data`
            return args[0]
        name = func.overloadpacket.__name__
        initialises = name in ("normal_", "uniform_", "zero_", "fill_")
        raise RuntimeError(_INITIALISED.format(name, cls.parameter) if initialises else cls.no_values)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"a weight of {tuple(self.shape)}, held as codes"


@functools.cache
def _without_values_of(parameter: str, no_values: str) -> type[_WithoutValues]:
    return type("_WithoutValues", (_WithoutValues,), {"parameter": parameter, "no_values": no_values})


def without_values(
    shape: Sequence[int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    parameter: str = "weight",
    no_values: str = NO_VALUES,
) -> torch.Tensor:
    """Stands for the weight `parameter` of a module that holds codes: a tensor without values, else as given.

    PEFT reads the device and dtype of adapters from it, and the code of some models the dtype in which a linear layer
    takes x; both are widened to fp32. To ask for its values is the error `no_values`.
    """
    kind = _without_values_of(parameter, no_values)
    return torch.empty(1, device=device, dtype=dtype).expand(shape).as_subclass(kind)


_Published = tuple[str, torch.dtype, tuple[int, ...]]
"""The name, the dtype and the shape that a tensor has in the checkpoint."""


_FORMATS = {BlockFp8Weight: "packed FP8", Fp4Weight: "packed FP4", Int4Weight: "packed INT4"}


class PackedLinear(nn.Linear):
    """``nn.Linear`` whose weight stays packed.

    Args:
        linear: The layer that it replaces, of which it takes the sizes and the bias.
        weight: The packed weight, (out_features, in_features).
        published: For each tensor of `weight`, by its name there: its name, dtype and shape in the checkpoint.
        others: Tensors of the checkpoint that a product does not need, such as scales of activations, by their names.

    Attributes:
        in_fp8: Whether products multiply the codes as they are, in fp8; otherwise the weight is decoded.
    """

    in_fp8 = False

    def __init__(
        self,
        linear: nn.Linear,
        weight: PackedWeight,
        published: Mapping[str, _Published],
        others: Mapping[str, torch.Tensor],
    ) -> None:
        nn.Module.__init__(self)  # not Linear's own, which allocates a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_parameter("bias", linear.bias)
        self._kind: Any = type(weight)
        self._dtypes = {name: getattr(weight, name).dtype for name in published}
        self._numbers = {name: value for name, value in weight._asdict().items() if name not in published}
        self._published = {
            **published,
            **{name: (name, each.dtype, tuple(each.shape)) for name, each in others.items()},
        }
        for name in published:
            self.register_parameter(name, frozen(getattr(weight, name)))
        for name, tensor in others.items():
            self.register_parameter(name, frozen(tensor))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy; PEFT copies the modules that it trains whole (`modules_to_save`)."""
        super().__setstate__(state)
        stay_frozen(self.get_parameter(name) for name in self._published)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The sizes and the device of the weight, without its values."""
        return without_values((self.out_features, self.in_features), self.get_parameter("codes").device)

    @property
    def packed(self) -> PackedWeight:
        """The weight as it was published."""
        tensors = {name: as_held(self._parameters[name], dtype) for name, dtype in self._dtypes.items()}
        return self._kind(**tensors, **self._numbers)

    @property
    def operand(self) -> PackedWeight | Fp8Weight:
        """The weight, as our operators take it."""
        packed = self.packed
        if self.in_fp8 and isinstance(packed, BlockFp8Weight):
            return Fp8Weight(packed.codes, packed.typed_scales)
        return packed

    def obstacle_to_fp8(self, device: torch.device) -> str:
        """Why products on `device` cannot multiply the codes as they are (`in_fp8`); empty if they can."""
        weight = self.packed
        if not isinstance(weight, BlockFp8Weight):
            return f"{self.format} is decoded for its products"
        (rows, columns), (height, width) = weight.shape, weight.block
        of_rows = width >= columns and (height == 1 or height >= rows)
        if not of_rows and weight.block != (BLOCK, BLOCK):
            return f"{self.format} with a scale for {height} x {width} is decoded for its products"
        multiple = MULTIPLE if of_rows else BLOCK
        if rows % multiple or columns % multiple:
            return (
                f"its weight is {(rows, columns)}, decoded for its products; the sizes must be multiples of {multiple}"
            )
        if not has_fp8(device):
            return f"{device.type} has no products in fp8, which NVIDIA's Hopper and newer have; it is decoded"
        obstacle = "" if of_rows else obstacle_to_blocks(device)
        return obstacle and f"{obstacle}; it is decoded for its products"

    def published(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Each tensor of the checkpoint: its name here, its name in the checkpoint, and the tensor as published."""
        for own, (name, dtype, shape) in self._published.items():
            yield own, name, self.get_parameter(own).detach().view(dtype).view(shape)

    @property
    def format(self) -> str:
        """The format in a word, for reports."""
        return _FORMATS[self._kind] + (", products in fp8" if self.in_fp8 else "")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features), in the dtype of `input`, or that of autocast."""
        return lora_linears_operator(as_autocast(input), [LoRALayer(self.operand, self.bias)])[0]

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight, (out_features, in_features) in `dtype`, without a gradient."""
        return decode(self.packed, dtype)

    def extra_repr(self) -> str:
        """The sizes and the format, for `print`."""
        return f"{super().extra_repr()}, {self.format}"


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    """`tensor` as a frozen parameter that no cast changes: floating-point numbers as bytes, integers as they are.

    It has at least one dimension, since FSDP2 splits the first.
    """
    held = tensor.detach().reshape(tensor.shape or (1,))
    parameter = nn.Parameter(held.view(torch.uint8) if held.is_floating_point() else held, requires_grad=False)
    stay_frozen([parameter])
    return parameter


def stay_frozen(codes: Iterable[nn.Parameter]) -> None:
    """Makes parameters that are to be trained say why they cannot; a copy of one forgets that.

    torch asks each parameter of a module, so no method of the module would do; and what is not exactly `nn.Parameter`
    is left alone by our operators and graphs.
    """
    for each in codes:
        vars(each)["requires_grad_"] = _refuse_to_train


def _refuse_to_train(requires_grad: bool = True) -> None:
    if requires_grad:
        raise RuntimeError(_TRAINED)


def as_held(parameter: nn.Parameter | None, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of `dtype` from which `frozen` made `parameter`."""
    assert parameter is not None
    return parameter if parameter.dtype == dtype else parameter.view(dtype)
