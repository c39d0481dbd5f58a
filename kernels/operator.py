"""Our operators: custom operators of torch, without their dispatch in eager mode.

`torch.library` gives an operator to the compiler, to dispatch modes such as that of selective checkpointing, and to
tensor subclasses. Its way to the function takes the host longer than an autograd function's, in every call, and with
a small model the GPU waits for the host. So the function is called at once when none of these has to see it.

Autograd functions do not look into lists. An operator's is therefore given its arguments as one tuple and the values
of the schema as one list, and each tensor among them, those inside of lists too, as an argument of its own, for which
it returns the gradient.

Arguments that travel together are one argument of the function, a named tuple. torch knows its fields as so many
arguments: function, fake and `setup_context` get the tuple, a backward returns the gradients of the fields.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import DISPATCH_MODES, FUNCTION_TRANSFORMS, RESULTS_TO_WRITE_TO
from liger_trainer.kernels.autograd import input_gradients

require(DISPATCH_MODES)
require(RESULTS_TO_WRITE_TO)
require(FUNCTION_TRANSFORMS)

R = TypeVar("R")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Operator(Generic[R]):
    """A function that torch knows as an operator; `operator` makes it.

    Attributes:
        custom: The `torch.library.custom_op`, which dispatches.
        derivative: The autograd function that calls and differentiates `function`; None if it has no derivative.
        records: Which arguments of the function are named tuples, and their classes.
        tensors: Which arguments of torch's are tensors, or None in place of one.
        lists: Which of them are lists of tensors.
    """

    def __init__(self, name: str, function: Callable[..., R], mutates: Sequence[str]) -> None:
        signature = inspect.signature(function, eval_str=True)
        kinds = enumerate(parameter.annotation for parameter in signature.parameters.values())
        self.records = {place: kind for place, kind in kinds if hasattr(kind, "_fields")}
        flat = self._flat_function(function)
        self.custom = torch.library.custom_op(name, flat, mutates_args=mutates)
        self.custom.register_fake((lambda *values: None) if signature.return_annotation is None else flat)
        self.name = name
        self.function = function
        self.derivative: type[torch.autograd.Function] | None = None
        self.defaults = tuple(parameter.default for parameter in signature.parameters.values())
        parameters = inspect.signature(flat).parameters
        self.mutated = [place for place, name in enumerate(parameters) if name in mutates]
        schema = torch.library.infer_schema(flat, mutates_args=mutates)
        found = [re.search(rf"Tensor(\S*) {name}\b", schema) for name in parameters]
        self.tensors = [place for place, kind in enumerate(found) if kind and "[]" not in kind[1]]
        self.lists = [place for place, kind in enumerate(found) if kind and "[]" in kind[1]]
        self.returns_list = schema.endswith("-> Tensor[]")

    def _flat_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with the fields of named tuples as arguments."""
        if not self.records:
            return function

        def flat(*values: Any) -> Any:
            return function(*self._grouped(values))

        signature = inspect.signature(function, eval_str=True)
        parameters = []
        for place, parameter in enumerate(signature.parameters.values()):
            if place in self.records:
                fields = get_type_hints(self.records[place]).items()
                parameters += [parameter.replace(name=name, annotation=hint) for name, hint in fields]
            else:
                parameters.append(parameter)
        flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return flat

    def _grouped(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the function out of those of the schema."""
        arguments = list(values)
        for place, kind in self.records.items():
            stop = place + len(kind._fields)
            arguments[place:stop] = [kind(*arguments[place:stop])]
        return tuple(arguments)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Gives the operator its function for tensors without memory, as `torch.library.register_fake`.

        Without one, the operator's own function runs: it allocates its results, and launches its kernel only where
        `has_elements` says so.
        """
        return self.custom.register_fake(lambda *values: fake(*self._grouped(values)))

    def register_autograd(
        self,
        backward: Callable[..., Any],
        *,
        setup_context: Callable[[Any, Any, Any], None] | None = None,
        materialize_grads: bool = False,
    ) -> None:
        """Gives the operator its derivative, as `torch.library.register_autograd`.

        Args:
            backward: Takes the context and the gradients of the results, and returns those of the inputs.
            setup_context: Takes the context, the inputs and the output, and saves what `backward` needs.
            materialize_grads: Whether a gradient that does not exist is zeros. A `backward` with a collective needs it,
                as every process has to call that. By default the gradient is None, and `backward` is not called where
                none exists.
        """

        def setup(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            ctx.set_materialize_grads(materialize_grads)
            if setup_context is not None:
                setup_context(ctx, inputs, output)

        def setup_of_schema(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            setup(ctx, self._grouped(inputs), output)

        def guarded(ctx: Any, *gradients: Any) -> Any:
            given = gradients[0] if self.returns_list else gradients
            return input_gradients(ctx) if all(each is None for each in given) else backward(ctx, *gradients)

        self.custom.register_autograd(guarded, setup_context=setup_of_schema)

        def forward(ctx: Any, arguments: tuple[Any, ...], values: list[Any], *tensors: torch.Tensor | None) -> Any:
            output: Any = self.function(*arguments)
            # Autograd lets nobody write to a view that was made in here. Results may be written to, as they share no
            # memory with each other or with the arguments.
            one = isinstance(output, torch.Tensor)
            owned = [each.data if each._is_view() else each for each in ([output] if one else output)]
            output = owned[0] if one else type(output)(owned)
            ctx.needs_input_grad = self._in_places(ctx.needs_input_grad[2:], values)
            setup(ctx, arguments, output)
            return tuple(output) if self.returns_list else output

        def flat_backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
            results = guarded(ctx, list(gradients)) if self.returns_list else guarded(ctx, *gradients)
            results = results if isinstance(results, tuple) else (results,)
            lists = (results[place] for place in self.lists)
            return None, None, *(results[place] for place in self.tensors), *itertools.chain.from_iterable(lists)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(flat_backward)}
        self.derivative = type(self.name, (torch.autograd.Function,), methods)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """The function's result, recorded for autograd if an input needs a gradient."""
        values = list(args)  # which become those of the schema
        for place in reversed(self.records):
            values[place : place + 1] = args[place]
        if kwargs or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return self.custom(*values, **kwargs)
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"`{self.name}` was called inside a transform of torch.func, such as grad or vmap, which it does not "
                "support. For a patched model call liger_trainer.revert_liger_kernel(model) first; a function of "
                "liger_trainer.functional has a `_reference`."
            )
        values += self.defaults[len(args) :]  # of which none is a named tuple
        tensors: list[torch.Tensor | None] = []
        for place in self.tensors:
            tensors.append(values[place])
        for place in self.lists:
            tensors += values[place]
        recorded = False
        for tensor in tensors:
            if tensor is None:
                continue
            if type(tensor) not in _PLAIN or tensor.is_meta:
                return self.custom(*values)
            recorded = recorded or tensor.requires_grad
        arguments = args + self.defaults[len(args) :]
        if recorded and torch.is_grad_enabled():
            if self.derivative is None:
                return self.custom(*values)  # whose backward is an error
            output: Any = self.derivative.apply(arguments, values, *tensors)
            if self.returns_list:
                output = list(output)
            return output
        result = self.function(*arguments)
        for place in self.mutated:
            _note_change(values[place])
        return result

    def _in_places(self, flags: Iterable[bool], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Flags of the tensors, then of those in lists, in the places of `arguments`; False for what is no tensor."""
        rest = iter(flags)
        values: list[Any] = [False] * len(arguments)
        for place in self.tensors:
            values[place] = next(rest)
        for place in self.lists:
            values[place] = list(itertools.islice(rest, len(arguments[place])))
        return tuple(values)


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., R]], Operator[R]]:
    """Makes a function an operator.

    Args:
        name: ``"liger_trainer::..."``.
        mutates: The arguments that it writes to. Such an operator has no derivative.

    Returns:
        A decorator. All arguments of its function are annotated, as for `torch.library`, or as named tuples.
    """
    return lambda function: Operator(name, function, mutates)


def _note_change(tensor: torch.Tensor | None) -> None:
    """Lets autograd find that a saved tensor was overwritten, as torch's dispatch does."""
    if tensor is not None and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
