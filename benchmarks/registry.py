"""What can be benchmarked: operations, their cases, and the providers that run them.

An operation is one module under `operations/`: a generator of its cases, and its providers. A provider is a function of
the case's arguments, registered with a decorator, here or in a file of yours:

    from liger_trainer.benchmarks.registry import provider

    @provider("rms_norm", "mine")
    def mine(x, weight, eps): ...

It imports its library when it is called; a provider whose library is missing is skipped. [`library`] registers a
function of a library that takes the case's arguments as they are.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from liger_trainer.benchmarks.models import MODELS, Model
from liger_trainer.configs.kernel_config import parse_bytes
from liger_trainer.errors import UserError

Function = TypeVar("Function", bound=Callable)


class BenchmarkError(UserError):
    """A mistake in the arguments of a benchmark."""


@dataclasses.dataclass
class Data:
    """Makes the random inputs of a case on one device, in one dtype; the same ones every time."""

    device: torch.device
    dtype: torch.dtype
    seed: int = 0

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    def normal(
        self, *shape: int, scale: float = 1.0, grad: bool = True, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Normal random numbers with standard deviation `scale`: a leaf that requires a gradient by default."""
        tensor = torch.randn(shape, device=self.device, dtype=dtype or self.dtype, generator=self._generator)
        return tensor.mul_(scale).requires_grad_(grad)

    def upstream(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A random gradient for an output of this shape."""
        return self.normal(*shape, grad=False, dtype=dtype)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Random integers from 0 to `high` - 1, such as token ids."""
        return torch.randint(high, shape, device=self.device, generator=self._generator)


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least work of an operation: memory that it must move, and FLOPs or matmuls that it must run."""

    forward: float = 0  # elements of the inputs' dtype that the forward pass reads and writes
    backward: float = 0
    forward_flops: float = 0  # at the rate of a large matmul; the slower of bytes and FLOPs is the floor
    backward_flops: float = 0
    matmuls: Callable[[], object] | None = None  # of both passes; if given, they are timed like a provider


@dataclasses.dataclass
class Case:
    """One operation on given inputs."""

    arguments: dict[str, Any]  # of every provider, by name; tensors that require a gradient get one
    shape: str  # as the tables show it
    floor: Floor
    upstream: tuple[torch.Tensor, ...] = ()  # gradients of the outputs; none for a scalar loss
    variant: str = ""  # distinguishes cases of one operation and model


def case_of_rows(
    data: Data, shape: tuple[int, ...], inputs: tuple[str, ...] = ("x",), variant: str = "", **others: Any
) -> Case:
    """An operation that reads inputs of one shape and writes y of the same; the `others` are small.

    Its backward reads the inputs and dy, and writes the inputs' gradients.
    """
    size, count = math.prod(shape), len(inputs)
    floor = Floor((count + 1) * size, (2 * count + 1) * size)
    arguments = {name: data.normal(*shape) for name in inputs} | others
    return Case(arguments, "×".join(map(str, shape)), floor, (data.upstream(*shape),), variant)


Cases = Callable[[Data, Model, int], Iterator[Case]]


@dataclasses.dataclass
class Operation:
    """One operation; its providers are in the order of the table."""

    name: str
    description: str
    tokens: int
    cases: Cases
    providers: dict[str, Callable] = dataclasses.field(default_factory=dict)
    reference: Callable | None = None

    @property
    def title(self) -> str:
        """What stands before the colon of its description."""
        return self.description.split(":")[0]

    def exact(self) -> Callable:
        """The function that gives the true result in float64: the reference, or torch's own code."""
        return self.reference or self.providers["torch"]


OPERATIONS: dict[str, Operation] = {}


def operation(name: str, description: str, tokens: int = 16384) -> Callable[[Cases], Cases]:
    """Registers a generator of cases as the operation `name`, measured at `tokens` tokens by default.

    The description reads ``"Title: what exactly is computed"``.
    """

    def register(cases: Cases) -> Cases:
        OPERATIONS[name] = Operation(name, description, tokens, cases)
        return cases

    return register


def provider(operation: str, name: str, **settings: Any) -> Callable[[Function], Function]:
    """Registers a function of the operation's arguments as a provider.

    Args:
        operation: Name of the operation.
        name: The library, such as ``"liger_trainer"``. ``"torch"`` gives ``"torch.compile"`` too, and is what runs in
            float64 as the truth unless the operation has a `reference`.
        settings: Keyword arguments bound to the function and added to the name, for one library at several settings.

    Raises:
        BenchmarkError: if there is no such operation.
    """

    def register(function: Function) -> Function:
        known = OPERATIONS[closest(operation, OPERATIONS, "operation")]
        label = " ".join([name, *(f"{key}={value}" for key, value in settings.items())])
        known.providers[label] = functools.partial(function, **settings) if settings else function
        if name == "torch":
            # Recompiled for every case: `torch.compiler.reset` runs between them.
            known.providers["torch.compile"] = torch.compile(known.providers[label], dynamic=False)
        return function

    return register


_USUAL_PLACES = {
    "liger-kernel": "liger_kernel.transformers.functional:liger_{}",
    "liger_trainer": "liger_trainer.functional:{}",
    "quack": "quack:{}",
}


def library(
    operation: str,
    *names: str,
    path: str = "",
    by_name: Iterable[str] = (),
    fixed: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> None:
    """Registers functions of libraries as providers; they get the case's arguments by position, in the case's order.

    Args:
        operation: Name of the operation.
        names: The libraries, as for [`provider`].
        path: ``"module:function"``, imported when the provider is called; by default the operation's name, where the
            library has such functions.
        by_name: The arguments that are passed by name instead.
        fixed: Further keyword arguments of the function.
        settings: Keyword arguments of the function, added to the name of the provider; memory as in ``"2GiB"``.

    Raises:
        BenchmarkError: if there is no such operation.
    """
    options = {key: parse_bytes(value) if key.endswith("_memory") else value for key, value in settings.items()}
    for name in names:
        module, _, function = (path or _USUAL_PLACES[name].format(operation)).partition(":")
        register = provider(operation, name, **settings)
        register(functools.partial(_call, module, function, tuple(by_name), {**fixed, **options}))


def _call(module: str, function: str, by_name: tuple[str, ...], options: dict[str, Any], **arguments: Any) -> Any:
    options = options | {name: arguments[name] for name in by_name}
    inputs = [value for name, value in arguments.items() if name not in options]
    return operator.attrgetter(function)(importlib.import_module(module))(*inputs, **options)


def reference(operation: str) -> Callable[[Function], Function]:
    """Registers the function that is right in float64, where torch's own code would need too much memory."""

    def register(function: Function) -> Function:
        OPERATIONS[operation].reference = function
        return function

    return register


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision as float32, anything wider as it is: how eager code casts, and what makes it exact in float64."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def closest(name: str, known: Iterable[str], kind: str) -> str:
    """`name` itself where it is known.

    Raises:
        BenchmarkError: naming the nearest where it is not.
    """
    names = list(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise BenchmarkError(f"No {kind} {name!r}.{hint} There are {', '.join(names)}.")


def family(provider: str) -> str:
    """The library of a provider, without its settings."""
    return provider.split()[0]


def choose_providers(operation: Operation, wanted: Iterable[str]) -> Mapping[str, Callable]:
    """The providers of an operation that belong to the wanted libraries; all of them where none is named."""
    libraries = set(wanted)
    return {
        name: function for name, function in operation.providers.items() if not libraries or family(name) in libraries
    }


def choose_models(wanted: Iterable[str] | None, on_cpu: bool) -> list[Model]:
    """The models whose names are given; by default one that suits the device.

    Raises:
        BenchmarkError: for an unknown name.
    """
    return [MODELS[closest(name, MODELS, "model")] for name in wanted or ["tiny" if on_cpu else "llama3-8b"]]


def load_operations(provider_file: Path | None = None) -> None:
    """Registers every operation of the package, and the providers of a Python file of the user's.

    Raises:
        BenchmarkError: if there is no such file, or it fails.
    """
    package: Any = importlib.import_module("liger_trainer.benchmarks.operations")
    for name in sorted({file.stem for place in package.__path__ for file in Path(place).glob("*.py")}):
        importlib.import_module(f"liger_trainer.benchmarks.operations.{name}")
    if provider_file is not None:
        load_provider_file(provider_file)


def load_provider_file(path: Path) -> None:
    """Runs a Python file of the user's, whose decorated functions become providers.

    Raises:
        BenchmarkError: if there is no such file, or it fails.
    """
    if not path.is_file():
        raise BenchmarkError(f"No provider file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BenchmarkError(f"{path} is no Python file.")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except BenchmarkError as error:
        raise BenchmarkError(f"{path}: {error}") from None
    except Exception as error:  # whatever the user's file may raise
        raise BenchmarkError(f"{path} fails: {type(error).__name__}: {error}") from error
