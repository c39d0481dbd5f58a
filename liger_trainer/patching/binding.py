"""Binding a forward to one module instance, or an implementation to one module of experts, so that it can be undone.

Only the instance changes. Its class, children and parameters stay as they are, so state-dict keys, wrapping policies,
adapters and output recorders keep working. The bound forward is a method made of a plain function of `self`, so
`copy.deepcopy` binds it to the copy. A shallow copy, a replica of `nn.DataParallel` and a pickle are without it: there
it would compute with the module that it was bound to.

Each call looks whether the module still is what was proved (`as_written.py`).
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import REPLICAS
from liger_trainer.patching.as_written import bound_functions, is_bound_by_us, is_ours, while_proved
from liger_trainer.patching.records import RECORD, record

require(REPLICAS)

IMPLEMENTATION = "liger_trainer"
"""Our name in transformers' registry."""


def bind_forward(
    module: nn.Module, forward: Callable, over: Callable | None = None, live: tuple[str, ...] | None = ()
) -> None:
    """Makes `forward(self, ...)` the forward of this `module` alone, as long as the module stays what it is.

    Args:
        module: The instance.
        forward: A function of the module and its inputs.
        over: A forward that the instance already has and that `forward` replaces; unbinding restores it. Such a
            `forward` serves this module only, and looks itself whether it may run.
        live: Names of the attributes and children that `forward` reads at each call; None for all of them, where it
            runs the code of the class. If another one is changed, the class's own forward runs.
    """
    foreign = overriding_forward(module)
    if foreign is not None and module.__dict__["forward"] is not over:
        raise ValueError(f"{type(module).__name__}'s forward is already overridden by {foreign}; it is left alone.")
    if over is not None:
        forward.replaced = over  # type: ignore[attr-defined]
    else:
        record(module, forward, live)
        forward = while_proved(forward)
    bound_functions.add(forward)
    module.forward = types.MethodType(forward, module)
    _guard_copies(module)


def bind_method(module: nn.Module, name: str, method: Callable) -> None:
    """Makes `method(self, ...)` the method `name` of this `module` alone.

    It runs the code of the class, or looks itself whether it may run: a method is not recorded as a forward is.
    """
    bound_functions.add(method)
    module.__dict__[name] = types.MethodType(method, module)
    _guard_copies(module)


def bound_methods(module: nn.Module) -> list[str]:
    """The names of the methods that [`bind_method`] has bound to `module`, or to what its attributes were copied of."""
    return [
        name
        for name, value in module.__dict__.items()
        if name not in OURS and isinstance(value, types.MethodType) and is_ours(value.__func__)
    ]


def overriding_forward(module: nn.Module) -> str | None:
    """The name of the function that overrides this instance's forward, unless it is ours."""
    bound = module.__dict__.get("forward")
    if bound is None or is_bound_by_us(module):
        return None
    function = getattr(bound, "__func__", bound)
    if function is type(module).forward:  # as Hugging Face's `kernels` library leaves it
        return None
    if isinstance(function, functools.partial):
        function = function.func
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"


def bound_function(module: nn.Module) -> Any:
    """The function of the module that [`bind_forward`] has made its forward."""
    return module.__dict__["forward"].__func__


def unbind_forward(module: nn.Module) -> bool:
    """Restores the forward of the instance, usually its class's, and its methods; False if none of them is ours."""
    methods = bound_methods(module)  # which it may have without a forward
    chosen = unchoose(module)
    if not is_bound_by_us(module):
        if methods:
            _take_out(module, module.__dict__)
        return chosen or bool(methods)
    replaced = getattr(module.forward, "replaced", None)
    _take_out(module, module.__dict__)
    if replaced is not None:
        module.forward = replaced
    return True


def bound_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of `model` with a forward or a method of ours, and the experts whose config names one.

    For the latter see [`ChosenConfig`].
    """
    return (m for m in model.modules() if is_bound_by_us(m) or is_chosen(m) or bound_methods(m))


def call_like(forward: Callable, *arguments: str) -> Callable:
    """`forward(self, x, ...)` with its first arguments renamed to `arguments`, so that callers may use keywords.

    Raises:
        ValueError: If a function inside `forward` uses one of these: the interpreter finds it by its name, and would
            crash.
    """
    code = forward.__code__
    shared = {*code.co_varnames[1 : 1 + len(arguments)]} & {*code.co_cellvars}
    if shared:
        raise ValueError(f"Functions inside {forward.__qualname__} use its {', '.join(shared)}, which gets a new name.")
    # Local variables get an underscore, so that none of them has the name of an argument.
    others = code.co_varnames[1 + len(arguments) :]
    names = (code.co_varnames[0], *arguments, *(f"_{name}" for name in others))
    forward.__code__ = code.replace(co_varnames=names, co_name="forward")
    forward.__name__ = "forward"
    return forward


class ChosenConfig:
    """A view of the model's config, for one module of experts, that names our implementation.

    transformers asks the config which implementation of the experts runs. Pickling the view gives the model's config.
    """

    def __init__(self, config: Any, forward: Callable) -> None:
        self._experts_implementation = IMPLEMENTATION
        self.model_config = config
        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model_config"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChosenConfig:
        return ChosenConfig(copy.deepcopy(self.model_config, memo), self.forward)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.model_config,)


def _itself(config: Any) -> Any:
    return config


def choose(module: Any, forward: Callable, live: tuple[str, ...] = ()) -> None:
    """Makes `forward` the implementation of this `module` only; see [`bind_forward`] for `live`."""
    module.config = ChosenConfig(module.config, forward)
    record(module, forward, live)
    _guard_copies(module)


def is_chosen(module: Any) -> bool:
    """Whether the implementation of `module` is ours."""
    return isinstance(module.__dict__.get("config"), ChosenConfig)


def unchoose(module: Any) -> bool:
    """Gives the module the model's config again; False if it has no other."""
    if not is_chosen(module):
        return False
    module.config = module.config.model_config
    module.__dict__.pop(RECORD, None)
    if not is_bound_by_us(module):
        _take_out(module, module.__dict__)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Copies
# ---------------------------------------------------------------------------------------------------------------------


class _State(dict):
    """What a copy of a patched module starts from: without our forward, which a deep copy gets, bound to itself."""

    ours: dict[str, Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy({**self, **self.ours}, memo)

    def __reduce__(self) -> tuple[Any, ...]:  # pickling
        return dict, (), None, None, iter(self.items())


def _guard_copies(module: nn.Module) -> None:
    for name, method in _METHODS.items():
        module.__dict__[name] = types.MethodType(method, module)


def _take_out(module: nn.Module, attributes: dict[str, Any]) -> dict[str, Any]:
    """Takes what we have put into `module` out of these attributes of it or of a copy, and returns it."""
    names = [*(OURS if is_bound_by_us(module) else OURS[1:]), *bound_methods(module)]
    return {name: attributes.pop(name) for name in names if name in attributes}


def _state(self: nn.Module) -> _State:
    state = _State(type(self).__getstate__(self))
    state.ours = _take_out(self, state)
    return state


def _replica(self: nn.Module) -> nn.Module:
    replica: nn.Module = type(self)._replicate_for_data_parallel(self)  # type: ignore[assignment]
    _take_out(self, replica.__dict__)
    return replica


_METHODS = {"__getstate__": _state, "_replicate_for_data_parallel": _replica}
OURS = ("forward", RECORD, *_METHODS)
"""The attributes of a module that belong to its patch."""
