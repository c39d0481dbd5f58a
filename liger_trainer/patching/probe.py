"""The numerical proof of every patch: the original forward and ours run side by side on dummy modules.

The model's own parameters are never read. A dummy module has the module's class and plain attributes, and small random
tensors instead of its parameters and projections. So modules on the meta device, sharded, quantised or wrapped by an
adapter are probed like any other, and neither their weights nor the global random state change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import MODULE_CONTENTS

require(MODULE_CONTENTS)

FP32_TOLERANCE = 1e-5
"""Largest relative difference in float32, of values and gradients, at which two forwards count as equal."""

# In bfloat16 the two may round in different places. Ours must be as close to the float32 result as the original, give
# or take a quarter or, of fewer than 256 numbers (GPT-OSS's sinks), four deviations of the ratio of two such means; or
# as close as one rounding of the result allows: on average, or at most, where a tensor has few numbers.
_BF16_SLACK, _DEVIATIONS = 1.25, 4.0
_BF16_FLOOR = 2.0**-9
_BF16_FLOOR_OF_FEW = 2.0**-8
_FEW = 32

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

Computation = Callable[..., Any]
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How two computations compare.

    Args:
        error: Largest relative float32 difference of outputs and gradients; infinite if one is missing.
        distance: Largest relative bfloat16 difference, which distinguishes formulas that only round differently.
        reason: Why they do not agree; empty if they do.
    """

    error: float
    distance: float = 0.0
    reason: str = ""

    @property
    def equal(self) -> bool:
        """Whether ours may replace the original."""
        return not self.reason

    def explained(self, what: str) -> Agreement:
        """This result with the reason that the original computes `what`, if both ran and their values differ."""
        if self.equal or not math.isfinite(self.error) or self.error <= FP32_TOLERANCE:
            return self
        return dataclasses.replace(self, reason=f"it computes {what} (relative difference {self.error:.1e})")


class Proof(NamedTuple):
    """What the probe of a candidate found: the kernel's name and our forward, None for neither, and the agreement."""

    kernel: str | None
    forward: Callable | None
    agreement: Agreement


def refused(reason: str) -> Proof:
    """The proof of a candidate that cannot be probed."""
    return Proof(None, None, Agreement(float("inf"), reason=reason))


def no_formula(failures: Iterable[Agreement], what: str) -> Proof:
    """The proof of a candidate that equals none of our formulas, because it computes `what`."""
    nearest = min(failures, key=lambda agreement: (agreement.error, agreement.distance))
    return Proof(None, None, nearest.explained(what))


class Probe:
    """Random tensors from a generator of its own, and the comparison of two computations on them.

    Use it inside its [`isolated`] context.

    Args:
        device: Where the probe runs: the model's accelerator, so that the real kernels are proved, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.cache: dict[Any, Any] = {}

    def randn(self, *shape: int) -> torch.Tensor:
        """A float32 tensor of values that are exact in bfloat16, so that both precisions get the same input."""
        values = torch.randn(shape, generator=self._generator, device="cpu", dtype=torch.float32)
        return values.to(torch.bfloat16).to(self.device, torch.float32)

    def once(self, key: Any, prove: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of ``prove(*arguments)``, which runs once for each `key`."""
        if key not in self.cache:
            self.cache[key] = prove(*arguments)
        return self.cache[key]

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """Turns off the caller's modes (meta device, no_grad, inference, autocast), and hides warnings."""
        kinds = {"cpu", self.device.type}
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            if torch.get_default_device() != self.device:  # a context slows every operation down
                stack.enter_context(self.device)
            yield

    def compare(self, original: Computation, ours: Computation, tensors: Sequence[torch.Tensor]) -> Agreement:
        """Compares the two on `tensors` in float32 and in bfloat16, outputs and gradients of every tensor."""
        try:
            truth = _run(original, tensors)
            rounded = _run(original, [tensor.to(torch.bfloat16) for tensor in tensors])
        except Exception as error:
            return Agreement(float("inf"), reason=f"the probe could not run its forward: {_first_line(error)}")
        try:
            exact = _run(ours, tensors)
            nearby = _run(ours, [tensor.to(torch.bfloat16) for tensor in tensors])
        except Exception as error:
            return Agreement(float("inf"), reason=f"the kernel did not run: {_first_line(error)}")
        return _judge(truth, rounded, exact, nearby)

    def same(self, original: Computation, ours: Computation, tensors: Sequence[torch.Tensor], autocast: bool) -> bool:
        """Whether both give the same dtypes, and the same values within bfloat16 rounding, on these `tensors`."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
            try:
                expected, got = _run(original, tensors), _run(ours, tensors)
            except Exception:
                return False
            return not _mismatch(expected, got) and all(_rms(a, b) <= 2**-7 for a, b in zip(expected, got))


def _run(computation: Computation, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    result = computation(*leaves)
    outputs = list(result) if isinstance(result, tuple) else [result]
    upstream = []
    for output in outputs:
        # A fixed wave, as a wrong formula could cancel a constant gradient.
        wave = torch.arange(output.numel(), device=output.device, dtype=torch.float32).mul(0.7).cos()
        upstream.append(wave.to(torch.bfloat16).to(output.dtype).view(output.shape))
    gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    return [tensor if tensor is None else tensor.detach() for tensor in (*outputs, *gradients)]


def _mismatch(expected: Sequence[torch.Tensor | None], got: Sequence[torch.Tensor | None]) -> str:
    if len(expected) != len(got):
        return "it returns another number of tensors than the kernel"
    for one, other in zip(expected, got):
        if (one is None) != (other is None):
            return "an input has a gradient in one of the two only"
        if one is not None and other is not None and (one.shape != other.shape or one.dtype != other.dtype):
            return f"it gives {tuple(one.shape)} {one.dtype} where the kernel gives {tuple(other.shape)} {other.dtype}"
    return ""


def _judge(
    truth: list[torch.Tensor | None],
    rounded: list[torch.Tensor | None],
    exact: list[torch.Tensor | None],
    nearby: list[torch.Tensor | None],
) -> Agreement:
    mismatch = _mismatch(truth, exact) or _mismatch(rounded, nearby)
    if mismatch:
        return Agreement(float("inf"), reason=mismatch)
    error = max(_largest(one, other) for one, other in zip(truth, exact))
    if not error <= FP32_TOLERANCE:
        return Agreement(error, reason=f"it computes another formula (relative difference {error:.1e})")
    distance = max(_rms(one, other) for one, other in zip(rounded, nearby))
    for true, theirs, own in zip(truth, rounded, nearby):
        count = 0 if true is None else true.numel()
        slack = max(_BF16_SLACK, 1 + _DEVIATIONS / math.sqrt(max(count, 1)))
        allowed = max(slack * _rms(true, theirs), _BF16_FLOOR_OF_FEW if count < _FEW else _BF16_FLOOR)
        if not _rms(true, own) <= allowed:
            return Agreement(error, distance, f"in bfloat16 it rounds differently (relative difference {distance:.1e})")
    return Agreement(error, distance)


def _largest(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None or not one.numel():
        return 0.0
    scale = one.double().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
    return float((one.double() - other.double()).abs().max() / scale)


def _rms(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None or not one.numel():
        return 0.0
    scale = one.double().norm().clamp_min(torch.finfo(torch.float32).tiny)
    return float((one.double() - other.double()).norm() / scale)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__


def dummy_module(module: nn.Module, parameters: Mapping[str, Any], children: Mapping[str, nn.Module]) -> nn.Module:
    """A module of the same class and plain attributes, in training mode, without hooks, with these contents."""
    # The class's constructor would allocate the real size and draw from the global generator.
    dummy: nn.Module = object.__new__(class_of(module))
    attributes = {**module.__dict__, **{name: type(module.__dict__[name])() for name in _HOOKS}}
    attributes.update(_parameters=dict(parameters), _buffers={}, _modules=dict(children), training=True)
    attributes.pop("forward", None)
    dummy.__dict__.update(attributes)
    return dummy


def run_attention(
    forward: Callable, module: nn.Module, children: Mapping[str, nn.Module], hidden: torch.Tensor, head_dim: int
) -> None:
    """Runs the `forward` of an attention on `hidden`, (1, length, size), and a dummy of `module` with `children`."""
    table = torch.ones(1, hidden.shape[1], head_dim)
    dummy = dummy_module(module, {}, children)
    forward(dummy, hidden_states=hidden, position_embeddings=(table, table), attention_mask=None)


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
        return (input.unsqueeze(-2) * self.weight).sum(-1)


def projection(weight: torch.Tensor, kind: type[nn.Linear] = _Projection) -> nn.Module:
    """A dummy linear layer; `weight` is ``(out_features, in_features)``."""
    layer: nn.Module = object.__new__(kind)
    nn.Module.__init__(layer)  # not Linear's own, which allocates and draws from the global generator
    layer.__dict__.update(in_features=weight.shape[1], out_features=weight.shape[0])
    layer._parameters.update({"weight": weight, "bias": None})  # type: ignore[dict-item]
    return layer


def identity(module: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for modules with the same proof: class, plain attributes, shapes, stateless children."""
    plain = (bool, int, float, str, type(None))
    attributes = tuple(
        (name, value if isinstance(value, plain) else id(value))
        for name, value in sorted(module.__dict__.items())
        if not name.startswith("_") and name not in ("training", "forward")
    )
    shapes = tuple((name, None if p is None else full_shape(p)) for name, p in module._parameters.items())
    stateless = tuple(
        (name, identity(child) if is_stateless(child) else None)
        for name, child in module._modules.items()
        if child is not None
    )
    return (class_of(module), attributes, shapes, stateless)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of `module`, or the one that it had before its weights were parametrised."""
    return parametrize.type_before_parametrizations(module)


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape of `parameter`, or the one that it had before ZeRO-3 partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_stateless(module: nn.Module) -> bool:
    """Whether `module` holds neither parameters nor buffers, such as an activation."""
    return next(module.parameters(), None) is None and next(module.buffers(), None) is None


def only_argument(module: nn.Module) -> str | None:
    """The name of the only argument of the class's forward besides `self`; None if it takes more or none."""
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None
    return parameters[0].name
