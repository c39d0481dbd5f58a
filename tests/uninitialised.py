"""New memory holds NaN, or the largest integer, in every process of the tests: what is read before it is written shows.

torch has a mode of this, a part of `torch.use_deterministic_algorithms`, which would change what is computed as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def _filling(native: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(native)
    def empty(*arguments: object, **options: object) -> torch.Tensor:
        made = native(*arguments, **options)
        # A tracer would make the filling a part of its graph.
        traced = torch.compiler.is_compiling() or type(made) is not torch.Tensor
        if traced or made.is_meta or torch._C._len_torch_dispatch_stack() > 0 or _makes_zeros():
            return made
        if made.is_floating_point() or made.is_complex():
            made.detach().fill_(float("nan"))
        else:
            made.detach().fill_(made.dtype == torch.bool or torch.iinfo(made.dtype).max)
        return made

    return empty


def _makes_zeros() -> bool:
    """Whether new memory is zero, where kernels are compiled and do not run."""
    modes = (torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack()))
    return any(type(mode).__module__ == "liger_trainer.kernels.compile_together" for mode in modes)


with torch.device("meta"):
    torch.empty(0)  # torch lists the constructors that follow a default device now, before they are replaced

_NAMES = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    torch.Tensor: ("new_empty", "new_empty_strided"),
}
for owner, names in _NAMES.items():
    for name in names:
        setattr(owner, name, _filling(getattr(owner, name)))
