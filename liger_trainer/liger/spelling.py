"""Our functions and modules with Liger's parameters, which are written as text, as Liger's own source has them.

Liger spells each operation up to four times: as a function, as an `autograd.Function`, as a module and as a function of
that module. Names, order and defaults of the parameters differ; what is computed is the same.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import nn

Result = TypeVar("Result")

NO_EFFECT = {
    *("BLOCK_SIZE", "accum_dtype", "ce_impl", "ce_mode", "chunk_mem_const", "compute_params", "in_place", "jsd_impl"),
    *("jsd_mode", "num_channels", "reduce", "row_mode", "size_average"),
}
"""Parameters that only steer how Liger's kernels work inside, or repeat a shape. They are accepted and dropped."""


@overload
def spelled(signature: str, target: type[nn.Module], /, **ours: str) -> Callable[..., Any]: ...
@overload
def spelled(signature: str, target: Callable[..., Result], /, **ours: str) -> Callable[..., Result]: ...
def spelled(signature: str, target: Callable[..., Any], /, **ours: str) -> Callable[..., Any]:
    """The function `signature` of the calling module, which passes its arguments to `target` by name.

    Args:
        signature: Name and parameters, such as ``"liger_softmax(x)"``. Defaults are literals.
        target: A function, or a class of modules: it is made with the arguments that its constructor takes, and called
            with the others.
        ours: The names in `target` of the parameters that have another name there.

    Raises:
        TypeError: If `target` does not take a parameter that should have an effect.
    """
    module = sys._getframe(1).f_globals["__name__"]  # as for a named tuple, so that the function can be pickled
    name, _, parameters = signature.removesuffix(")").partition("(")
    passed = {each: ours.get(each, each) for each in inspect.signature(eval(f"lambda {parameters}: None")).parameters}
    calls: list[Callable[..., Any]] = [target]
    if isinstance(target, type) and issubclass(target, nn.Module):
        calls.append(target.forward)
    body = "_target"  # Liger has a parameter called `target`
    for call in calls:
        taken = inspect.signature(call).parameters
        body += f"({', '.join(f'{passed.pop(each)}={each}' for each in [*passed] if passed[each] in taken)})"
    if passed.keys() - NO_EFFECT:
        raise TypeError(f"{target.__name__} takes none of {sorted(passed.keys() - NO_EFFECT)} of {signature}.")
    function = eval(f"lambda _target: lambda {parameters}: {body}", {"__name__": module})(target)
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"See [`{target.__name__}`], which describes the arguments and the result."
    return function
