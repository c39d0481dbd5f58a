"""The numerical proof of every patch: the original forward and ours run side by side on dummy modules.

The model's own parameters are never read. A dummy module has the module's class and plain attributes, and small random
tensors instead of its parameters and projections. So modules on the meta device, sharded, quantised or wrapped by an
adapter are probed like any other, and neither their weights nor the global random state change.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import MODULE_CONTENTS
from liger_trainer.kernels.host_random import HostState
from liger_trainer.packed.experts import unpacked_class
from liger_trainer.patching.as_written import EVERY_PRECISION, Precisions
from liger_trainer.patching.binding import OURS, bound_methods
from liger_trainer.patching.inputs import Case
from liger_trainer.patching.side_effects import copies_of_containers
from liger_trainer.patching.trial import Agreement, Computation, Later, Slack, Trial, values_alike

require(MODULE_CONTENTS)

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""The attributes of a module that hold its hooks."""

# Attributes that say nothing of what a module computes.
_OF_EVERY_MODULE = {*nn.Module().__dict__, "forward", "_is_hf_initialized"}
_PLAIN = (bool, int, float, str, type(None))
_THREADS = 4

_Result = TypeVar("_Result")


class Proof(NamedTuple):
    """What the probe of a candidate found."""

    kernel: str | None  # the kernel's name; None if ours differs
    forward: Callable | None  # our forward; None if it differs
    agreement: Agreement  # how the two compare
    # The attributes and children of the module that our forward reads at each call; None for all of them.
    live: tuple[str, ...] | None = ()
    precisions: Precisions = EVERY_PRECISION  # where the agreement holds as well


def refused(reason: str) -> Proof:
    """The proof of a candidate that cannot be probed."""
    return Proof(None, None, Agreement(float("inf"), reason=reason))


def no_formula(failures: Iterable[Agreement], what: str) -> Proof:
    """The proof of a candidate that equals none of our formulas, because it computes `what`."""
    nearest = min(failures, key=lambda each: (not each.case, each.error, each.distance))
    return Proof(None, None, nearest.explained(what))


class Probe:
    """Random tensors from a generator of its own, and the comparison of computations on them; used inside [`isolated`].

    Args:
        device: The model's accelerator, so that the real kernels are proved, or the CPU.
        later: Takes the kernels' runs of all trials but those whose results index memory; see [`Trial`].
    """

    def __init__(self, device: torch.device, later: Later | None = None) -> None:
        self.device, self.later = device, later
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.cache: dict[Any, Any] = {}

    def randn(self, *shape: int) -> torch.Tensor:
        """A float32 tensor of values that are exact in bfloat16, so that both precisions get the same input."""
        values = torch.randn(shape, generator=self._generator, device="cpu", dtype=torch.float32)
        return values.to(torch.bfloat16).to(self.device, torch.float32)

    def trial(
        self,
        original: Computation,
        tensors: Sequence[torch.Tensor],
        inputs: Iterable[Case] = (),
        constants: Sequence[torch.Tensor] = (),
        slack: Slack = Slack(),  # noqa: B008  (frozen)
    ) -> Trial:
        """A [`Trial`] whose kernels run later, with those of the others."""
        return Trial(original, tensors, inputs, constants, slack, self.later)

    def once(self, key: Any, prove: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of ``prove(*arguments)``, which runs once for each `key`."""
        if key not in self.cache:
            self.cache[key] = prove(*arguments)
        return self.cache[key]

    def on_cpu(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the CPU the default device, inside of `isolated`; a context slows every operation down."""
        return contextlib.nullcontext() if self.device.type == "cpu" else torch.device("cpu")

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """The [`neutral`] state on the probe's device, without warnings."""
        with warnings.catch_warnings(), neutral(self.device):
            warnings.simplefilter("ignore")
            yield

    def same(
        self,
        original: Computation,
        ours: Computation,
        tensors: Sequence[torch.Tensor],
        autocast: bool,
        constants: Sequence[torch.Tensor] = (),
    ) -> bool:
        """Whether both give the same dtypes, and the same values within bfloat16 rounding, on these `tensors`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            return values_alike(original, ours, tensors, constants)

    def precisions(self, original: Computation, ours: Computation, tensors: Sequence[torch.Tensor]) -> Precisions:
        """Under autocast and in float16, where the rows of the first of `tensors` grow until they overflow."""
        half = [tensor.to(torch.bfloat16) for tensor in tensors]
        autocast = self.same(original, ours, half, True) and self.same(original, ours, tensors, True)
        return Precisions(autocast, self.in_float16(original, ours, tensors))

    def in_float16(self, original: Computation, ours: Computation, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether both are the same in float16, where the rows of the first of `tensors` grow until they overflow."""
        x = tensors[0]
        sizes = torch.logspace(0.0, 4.8, x[..., 0].numel(), device=x.device).view(*x.shape[:-1], 1)
        growing = [each.to(torch.float16) for each in (x * sizes, *tensors[1:])]
        return values_alike(original, ours, growing, gradients=False)


@contextlib.contextmanager
def few_threads() -> Iterator[None]:
    """In the context, torch's operators on the CPU run in four threads at most.

    The tensors of a proof are small, and the many threads of a large machine would wait for each other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, _THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def drawing_apart(device: torch.device) -> Iterator[None]:
    """What is drawn inside, by torch, Python or numpy, does not change what the caller draws next."""
    of_host = HostState.now()
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        try:
            yield
        finally:
            of_host.restore()


@contextlib.contextmanager
def neutral(device: torch.device) -> Iterator[None]:
    """The state of a fresh process, whatever the caller's: device, dtype, modes, float32 products as such; few threads.

    Nothing that is drawn inside changes what the caller draws next.
    """
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(few_threads())
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(drawing_apart(device))
        for products in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):  # type: ignore[attr-defined]
            if products.fp32_precision not in ("none", "ieee"):  # in TensorFloat-32 or bfloat16
                stack.callback(setattr, products, "fp32_precision", products.fp32_precision)
                products.fp32_precision = "ieee"
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device() != device:  # a context slows every operation down
            stack.enter_context(device)
        yield


def dummy_module(
    module: nn.Module, parameters: Mapping[str, Any], children: Mapping[str, nn.Module], training: bool = True
) -> nn.Module:
    """A module of the same class and plain attributes, without hooks, with these contents."""
    # The class's constructor would allocate the real size and draw from the global generator.
    dummy: nn.Module = object.__new__(class_of(module))
    attributes = {**copies_of_containers(module.__dict__), **{name: type(module.__dict__[name])() for name in HOOKS}}
    attributes.update(_parameters=dict(parameters), _buffers={}, _modules=dict(children), training=training)
    for name in (*OURS, *bound_methods(module)):
        attributes.pop(name, None)
    dummy.__dict__.update(attributes)
    return dummy


def dummy_child(module: nn.Module, training: bool) -> nn.Module:
    """A dummy of a stateless child, so that the probe does not trigger hooks on the real one."""
    children = {name: dummy_child(child, training) for name, child in module._modules.items() if child is not None}
    return dummy_module(module, {}, children, training)


def run_attention(
    forward: Callable, module: nn.Module, children: Mapping[str, nn.Module], hidden: torch.Tensor, head_dim: int
) -> None:
    """Runs the `forward` of an attention on `hidden`, (1, length, size), and a dummy of `module` with `children`."""
    table = torch.ones(1, hidden.shape[1], head_dim)
    dummy = dummy_module(module, {}, children)
    # Where layers share keys, one stores them there.
    shared: dict[str, Any] = (
        {"shared_kv_states": {}} if "shared_kv_states" in inspect.signature(forward).parameters else {}
    )
    forward(dummy, hidden_states=hidden, position_embeddings=(table, table), attention_mask=None, **shared)


class ProjectionToOnes(nn.Module):
    """A projection whose result, of any input, is `size` ones: for runs that only look at which calls are made."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ones of the shape of `x`, but for the last dimension."""
        return x.new_ones(*x.shape[:-1], self.size)


class _Projection(nn.Linear):
    """A linear layer without a matrix product, so that TF32 and reduced precision do not affect the probe."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = (input.unsqueeze(-2) * self.weight).sum(-1)
        return product if self.bias is None else product + self.bias


def projection(
    weight: torch.Tensor, kind: type[nn.Linear] = _Projection, bias: torch.Tensor | None = None
) -> nn.Module:
    """A dummy linear layer; `weight` is ``(out_features, in_features)``."""
    layer: nn.Module = object.__new__(kind)
    nn.Module.__init__(layer)  # not Linear's own, which allocates and draws from the global generator
    layer.__dict__.update(in_features=weight.shape[1], out_features=weight.shape[0])
    layer._parameters.update({"weight": weight, "bias": bias})  # type: ignore[dict-item]
    return layer


def identity(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for modules with the same proof: class, plain attributes, shapes, stateless children."""
    attributes = tuple(
        (name, _plain(value))
        for name, value in sorted(module.__dict__.items())
        if name not in _OF_EVERY_MODULE and (isinstance(value, _PLAIN) or not name.startswith("_"))
    )
    tensors = {**module._parameters, **module._buffers}
    shapes = tuple((name, None if tensor is None else full_shape(tensor)) for name, tensor in tensors.items())
    stateless = tuple(
        (name, identity(child) if is_stateless(child) else None)
        for name, child in module._modules.items()
        if child is not None
    )
    return (class_of(module), attributes, shapes, stateless)


def _plain(value: Any) -> Any:
    """A key for an attribute: itself, with its type, as 1 equals True; the identity of any other object."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, functools.partial):
        return _plain((value.func, value.args, *value.keywords.items()))
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of `module`, or the one that it had before its weights were parametrised or packed."""
    return unpacked_class(parametrize.type_before_parametrizations(module))


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of `parameter`, or the one that it had before ZeRO-3 partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_stateless(module: nn.Module) -> bool:
    """Whether `module` holds neither parameters nor buffers, such as an activation."""
    return not any(
        tensor is not None
        for part in module.modules()
        for tensor in (*part._parameters.values(), *part._buffers.values())
    )


def only_argument(module: nn.Module) -> str | None:
    """The name of the only argument of the class's forward besides `self`; None if it takes more or none."""
    names = arguments_of(module)
    return names[0] if len(names) == 1 else None


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of the class's forward besides `self`; none if one is not of the usual kind."""
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    if any(parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return ()
    return tuple(parameter.name for parameter in parameters)
