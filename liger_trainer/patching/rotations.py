"""The proof of a rotary function: which rotation it computes, and our function with its signature.

A rotation is proved for each layout, the shapes and arguments of a call. Calls with any other layout run the model's
own function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.head.recorded import build
from liger_trainer.kernels.rope.layouts import rope_complex
from liger_trainer.kernels.rope.qk_norm_rope import qk_norm_rope
from liger_trainer.kernels.rope.rope import rope
from liger_trainer.patching.as_written import runs_ours
from liger_trainer.patching.inputs import ROTATION, Case
from liger_trainer.patching.last_columns import rotate_last_columns
from liger_trainer.patching.norm_forwards import PendingNorm
from liger_trainer.patching.probe import Probe, Proof, no_formula, refused
from liger_trainer.patching.trial import Agreement

_BATCH, _HEADS, _KV_HEADS, _LENGTH, _HEAD_DIM = 2, 4, 2, 5, 16
_TIMES = 8  # as many heads of as many times the size are compared once
_OTHER_SIZES = "it computes another rotation of larger or more heads"

_ONE_TENSOR = ["x", "cos", "sin"]
_DIM = "unsqueeze_dim"

# The layout of a call: (dimensions of q, unsqueeze_dim, tables as wide as a head, tables as long as the batch).
Layout = tuple[int, int, bool, bool]


@dataclasses.dataclass(frozen=True)
class Rotation:
    """One of the ways to pair the dimensions of a head and to keep the tables of the pairs.

    Args:
        name: The rotation's name in the report.
        interleaved: Pairs are neighbours.
        split_output: Results have the first members of all pairs before the second ones.
        table: Which part of a table is read: ``"all"``, an entry for each dimension; ``"output"``, the same in the
            order of the result, for neighbours to halves; ``"first half"`` of it, an entry for each pair; or
            ``"narrow"``, all of a table that is half as wide as a head.
    """

    name: str
    interleaved: bool = False
    split_output: bool = False
    table: str = "all"

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        dim: int,
        keep_dtype: bool,
        first: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotates q and k of 4 dimensions, or of 3, one sequence: (tokens, heads, head_dim); from column `first` on."""
        if q.dim() == 3:
            q, k = self(q.unsqueeze(0), k.unsqueeze(0), cos.unsqueeze(0), sin.unsqueeze(0), 2, keep_dtype)
            return q.squeeze(0), k.squeeze(0)
        rotary_dim = q.shape[-1] - first if self.table == "narrow" else cos.shape[-1]
        if self.table == "first half":
            cos, sin = cos[..., : rotary_dim // 2], sin[..., : rotary_dim // 2]
        elif self.table == "output":
            cos, sin = (torch.stack(each.chunk(2, -1), -1).flatten(-2) for each in (cos, sin))
        return rope(
            q,
            k,
            cos,
            sin,
            unsqueeze_dim=dim,
            rotary_dim=rotary_dim,
            interleaved=self.interleaved,
            split_output=self.split_output,
            keep_dtype=keep_dtype,
            first=first,
        )

    def last(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int, keep_dtype: bool
    ) -> tuple[Any, torch.Tensor]:
        """As a call, for q that may be the last columns of whole queries; see [`rotate_last_columns`]."""

        def rotate(q: torch.Tensor, k: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
            return self(q, k, cos, sin, dim, keep_dtype, first)

        return rotate_last_columns(rotate, q, k, dim, q.dtype if keep_dtype else cos.dtype)


ROTATIONS = (
    Rotation("rope"),
    Rotation("rope (half-width tables)", table="narrow"),
    Rotation("rope (neighbours)", interleaved=True),
    Rotation("rope (neighbours)", interleaved=True, table="first half"),
    Rotation("rope (neighbours to halves)", interleaved=True, split_output=True, table="first half"),
    Rotation("rope (neighbours to halves)", interleaved=True, split_output=True, table="output"),
)


def arguments_of(function: Callable) -> list[str]:
    """The names of a function's arguments; empty if it has no signature."""
    try:
        return list(inspect.signature(_call(function)).parameters)
    except (TypeError, ValueError):
        return []


def takes_one_tensor(arguments: Sequence[str]) -> bool:
    """Whether these are of a rotary function that is called for queries and for keys, as in LitGPT and Gemma 4."""
    return list(arguments) in (_ONE_TENSOR, [*_ONE_TENSOR, _DIM])


def _call(function: Callable) -> Callable:
    # Hugging Face's kernels library turns such a function into a module; its forward has the signature.
    return function.forward if isinstance(function, nn.Module) else function


def _signed_as(original: Callable) -> Callable[[Callable], Callable]:
    """Gives a function that takes any arguments the name and the signature of `original`."""
    return functools.wraps(_call(original), updated=())


def _by_name(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a function whose parameters are called `names`.

    Empty for a call that such a function would refuse: with too many arguments, or one of them twice.
    """
    given = {**dict(zip(names, args)), **kwargs}
    return given if len(given) == len(args) + len(kwargs) else {}


def prove_rotation(function: Callable, probe: Probe) -> Proof:
    """The proof for a rotary function of q, k, cos and sin; of one of q and k; or of q, k and complex factors."""
    arguments = arguments_of(function)
    if takes_one_tensor(arguments):
        pair = _of_pair(function)
        kernel, ours, agreement, *_ = _prove_tables(pair, inspect.signature(pair).parameters, probe)
        return Proof(kernel, None if ours is None else _of_one(function, ours), agreement)
    if len(arguments) == 3 and not any(name in ("cos", "sin") for name in arguments):
        return _prove_complex(function, probe)
    if arguments[:4] != ["q", "k", "cos", "sin"]:
        return refused(f"it takes ({', '.join(arguments)}), not (q, k, cos, sin)")
    parameters = inspect.signature(_call(function)).parameters
    needed = [p.name for p in list(parameters.values())[4:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if needed:
        return refused(f"it also takes {', '.join(needed)}")
    return _prove_tables(function, parameters, probe)


# ---------------------------------------------------------------------------------------------------------------------
# Cosines and sines
# ---------------------------------------------------------------------------------------------------------------------


def _prove_tables(function: Callable, parameters: Any, probe: Probe) -> Proof:
    has_dim = "unsqueeze_dim" in parameters
    default = parameters["unsqueeze_dim"].default if has_dim else None
    failures: list[Agreement] = []
    for rotation, precise in itertools.product(ROTATIONS, (False, True)):
        attempt = _Attempt(function, has_dim, rotation, precise, probe)
        usual = [layout for layout in _layouts() if _is_usual(layout, rotation, default)]
        agreements = {layout: attempt.prove(layout, ROTATION) for layout in usual}
        if not any(agreement.equal for agreement in agreements.values()):
            failures += agreements.values()
            continue
        agreements |= {layout: attempt.prove(layout, ()) for layout in _layouts() if layout not in agreements}
        proven = {layout: agreement for layout, agreement in agreements.items() if agreement.equal}
        used = next(layout for layout in usual if layout in proven)
        if not attempt.is_same_of_more(used):
            return refused(_OTHER_SIZES)
        dim = used[1] if default is None else default
        ours = rotary_function(function, rotation, dim, frozenset(proven), attempt.mixed_result(used), precise)
        return Proof(rotation.name, ours, Agreement(max(agreement.error for agreement in proven.values())))
    return no_formula(failures, "another rotation than those of q and k by pairs")


def _is_usual(layout: Layout, rotation: Rotation, default: int | None) -> bool:
    """Whether models use this layout: tables with a row for each sequence, as wide as the rotation needs."""
    _, dim, full_width, full_batch = layout
    return full_batch and full_width == (rotation.table != "narrow") and default in (None, dim)


def _layouts() -> Iterator[Layout]:
    for full_width in (True, False):
        for full_batch in (True, False):
            yield 4, 1, full_width, full_batch
            yield 4, 2, full_width, full_batch
        # Without a batch the dimension has no meaning; a function without that argument is called with its default.
        yield 3, 1, full_width, True
        yield 3, 2, full_width, True


def _tensors(layout: Layout, probe: Probe, times: int = 1) -> list[torch.Tensor]:
    dimensions, unsqueeze_dim, full_width, full_batch = layout
    length, head_dim = _LENGTH, times * _HEAD_DIM
    width = head_dim if full_width else head_dim // 2
    batch = _BATCH if full_batch else 1
    # The two halves of the tables differ on purpose: nothing in the function's contract makes them equal.
    tables = [probe.randn(batch, length, width) for _ in range(2)]
    rows = [probe.randn(_BATCH, times * heads, length, head_dim) for heads in (_HEADS, _KV_HEADS)]
    if unsqueeze_dim == 2 or dimensions == 3:
        rows = [row.transpose(1, 2) for row in rows]
    if dimensions == 3:  # no batch dimension: (tokens, heads, head_dim)
        return [tensor[0] for tensor in (*rows, *tables)]
    return [*rows, *tables]


def _fixed_tables(function: Callable, cos: torch.Tensor, sin: torch.Tensor) -> Callable:
    """`function` of q and k only; the tables have q's dtype and no gradient."""
    return lambda q, k: function(q, k, cos.to(q.dtype), sin.to(q.dtype))


@dataclasses.dataclass(frozen=True)
class _Attempt:
    """A rotary function of q, k, cos and sin, and one of our rotations that it may compute.

    Args:
        function: The function.
        has_dim: Whether it takes `unsqueeze_dim`.
        rotation: The rotation.
        precise: Whether ours computes in float32 and rounds once.
        probe: Draws tensors, and compares.
    """

    function: Callable
    has_dim: bool
    rotation: Rotation
    precise: bool
    probe: Probe

    def prove(self, layout: Layout, inputs: Sequence[Case]) -> Agreement:
        """Compares the two in this layout, and on these further inputs."""
        q, k, cos, sin = _tensors(layout, self.probe)
        trial = self.probe.trial(_fixed_tables(self._original(layout), cos, sin), [q, k], inputs)
        return trial.prove(_fixed_tables(self._ours(layout, self.precise), cos, sin))

    def is_same_of_more(self, layout: Layout) -> bool:
        """Whether the two agree on more and larger heads."""
        q, k, cos, sin = _tensors(layout, self.probe, _TIMES)
        original = _fixed_tables(self._original(layout), cos, sin)
        return self.probe.same(original, _fixed_tables(self._ours(layout, self.precise), cos, sin), [q, k], False)

    def mixed_result(self, layout: Layout) -> str | None:
        """With float32 tables and bfloat16 heads: ``"promoted"``, ``"rounded"`` to the heads' dtype, or None."""
        q, k, cos, sin = _tensors(layout, self.probe)
        half = [q.to(torch.bfloat16), k.to(torch.bfloat16)]
        original = functools.partial(self._original(layout), cos=cos, sin=sin)
        for mixed in ("promoted", "rounded"):
            ours = functools.partial(self._ours(layout, self.precise or mixed == "rounded"), cos=cos, sin=sin)
            if all(self.probe.same(original, ours, half, autocast) for autocast in (False, True)):
                return mixed
        return None

    def _original(self, layout: Layout) -> Callable:
        return functools.partial(self.function, unsqueeze_dim=layout[1]) if self.has_dim else self.function

    def _ours(self, layout: Layout, keep_dtype: bool) -> Callable:
        return functools.partial(self.rotation, dim=layout[1], keep_dtype=keep_dtype)


@functools.cache
def _of_pair(function: Callable) -> Callable:
    """A rotary function of one tensor as one of q and k."""
    dim = inspect.signature(_call(function)).parameters.get(_DIM)
    if dim is None:
        return lambda q, k, cos, sin: (function(q, cos, sin), function(k, cos, sin))

    def pair(q, k, cos, sin, unsqueeze_dim=dim.default):
        return function(q, cos, sin, unsqueeze_dim), function(k, cos, sin, unsqueeze_dim)

    return pair


@functools.cache
def _of_one(original: Callable, function: Callable) -> Callable:
    """Our rotary `function` of q and k as one of q alone, with the signature of `original`."""
    names = arguments_of(original)

    def alone(args: tuple, kwargs: dict, is_right: Callable[[Any], bool]) -> tuple[Any, Any, dict[str, Any]] | None:
        """The tensor, its tables and the dimension of its heads, if it is given; None if it is not of the kind."""
        given = _by_name(names, args, kwargs)
        x, *tables = (given.pop(name, None) for name in _ONE_TENSOR)
        known = is_right(x) and tables[0] is not None and tables[1] is not None
        return (x, tables, given) if known and given.get(_DIM, 1) in (1, 2) and given.keys() <= {*names} else None

    def no_heads(x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        dim = given.get(_DIM, getattr(function, _DIM)) if x.dim() == 4 else 1
        return x.new_empty(*x.shape[:dim], 0, *x.shape[dim + 1 :])

    @_signed_as(original)
    def rotary(*args, **kwargs):
        found = alone(args, kwargs, lambda x: isinstance(x, torch.Tensor) and x.dim() > 2)
        if found is None:
            return original(*args, **kwargs)
        x, tables, given = found
        return function(x, no_heads(x, given), *tables, **given)[0]

    @_signed_as(original)
    def of_pending(*args, **kwargs):
        """As `rotary`, for a norm that has not been computed yet."""
        found = alone(args, kwargs, lambda x: isinstance(x, PendingNorm) and x.is_pending)
        if found is None:
            return rotary(*map(build, args), **{name: build(value) for name, value in kwargs.items()})
        x, tables, given = found
        nothing = PendingNorm(no_heads(x.x, given), x.weight.detach(), x.options)
        return function.of_pending(x, nothing, *tables, **given)[0]  # type: ignore[attr-defined]

    if hasattr(function, "of_pending"):
        rotary.of_pending = of_pending  # type: ignore[attr-defined]
    return rotary


@functools.cache
def rotary_function(
    original: Callable,
    rotation: Callable,
    default_dim: int,
    proven: frozenset[Layout],
    mixed: str | None,
    precise: bool,
) -> Callable:
    """Our rotary function with the signature of `original`, which still runs what is not proved equal.

    Args:
        original: The model's function.
        rotation: The rotation that it computes, a [`Rotation`] or its `last`.
        default_dim: Its default for `unsqueeze_dim`.
        proven: The layouts on which the two agree.
        mixed: The result if the tables have another dtype than q: ``"promoted"`` as in torch, ``"rounded"`` to q's
            dtype, or None to run the original.
        precise: Compute in float32 and round once, as the original does. On an accelerator the kernel does so anyway,
            and this is tried only if the plain call does not agree.
    """
    names = arguments_of(original)

    @_signed_as(original)
    def rotary(*args, **kwargs):
        given: dict[str, Any] = {}
        dim: Any = default_dim
        if len(args) == 4 and not kwargs:
            q, k, cos, sin = args
        else:
            given = _by_name(names, args, kwargs)
            q, k, cos, sin = (given.pop(name, None) for name in ("q", "k", "cos", "sin"))
            dim = given.pop("unsqueeze_dim", default_dim)
        if given or q is None or k is None or cos is None or sin is None or not runs_ours(q):
            return original(*args, **kwargs)
        layout = (q.dim(), dim, cos.shape[-1] == q.shape[-1], cos.shape[0] == q.shape[0])
        as_probed = layout in proven and cos.dim() == q.dim() - 1 and k.dtype == q.dtype
        if not as_probed or (mixed is None and cos.dtype != q.dtype):
            return original(*args, **kwargs)
        return rotation(q, k, cos, sin, dim, precise or (mixed == "rounded" and cos.dtype != q.dtype))

    @_signed_as(original)
    def of_pending(*args, **kwargs):
        """As `rotary`, for norms that have not been computed yet: norms and rotation in one pass in the usual case."""
        usual: Any = args if len(args) == 4 and kwargs.keys() <= {_DIM} else (None,) * 4
        q, k, cos, sin = usual
        pending = isinstance(q, PendingNorm) and isinstance(k, PendingNorm)
        if pending and q.is_pending and k.is_pending and q.options == k.options:
            dim = kwargs.get(_DIM, default_dim)
            layout = (q.x.dim(), dim, cos.shape[-1] == q.x.shape[-1], cos.shape[0] == q.x.shape[0])
            one_dtype = q.x.dtype == k.x.dtype == q.weight.dtype == k.weight.dtype == cos.dtype
            if layout in proven and cos.dim() == 3 and q.x.dim() == 4 and (one_dtype or mixed == "promoted"):
                eps, offset, casting = q.options
                return qk_norm_rope(q.x, k.x, q.weight, k.weight, cos, sin, eps, offset, casting, dim)
        return rotary(*map(build, args), **{name: build(value) for name, value in kwargs.items()})

    if rotation == ROTATIONS[0] and not precise:
        rotary.of_pending = of_pending  # type: ignore[attr-defined]
    rotary.unsqueeze_dim = default_dim  # type: ignore[attr-defined]
    if isinstance(rotation, Rotation):
        made = functools.partial(rotary_function, original, rotation.last, default_dim, proven, mixed, precise)
        rotary.of_last_columns = made  # type: ignore[attr-defined]
    return rotary


# ---------------------------------------------------------------------------------------------------------------------
# Complex factors
# ---------------------------------------------------------------------------------------------------------------------

# Shapes of the factors: of every sequence, of all sequences, and as Llama 4's vision tower keeps them.
_FACTORS = {"batch": (_BATCH, _LENGTH), "shared": (1, _LENGTH), "plain": (_LENGTH,), "column": (_LENGTH, 1)}


def _prove_complex(function: Callable, probe: Probe) -> Proof:
    failures: list[Agreement] = []
    found: dict[int, dict[str, Agreement]] = {}
    for dim in (2, 1):
        rows = [probe.randn(_BATCH, _LENGTH, heads, _HEAD_DIM) for heads in (_HEADS, _KV_HEADS)]
        rows = [row.transpose(1, 2) for row in rows] if dim == 1 else rows
        agreements = {}
        for form, shape in _FACTORS.items():
            factors = torch.complex(probe.randn(*shape, _HEAD_DIM // 2), probe.randn(*shape, _HEAD_DIM // 2))
            trial = probe.trial(_with(factors, function), rows, ROTATION)
            agreements[form] = trial.prove(_with(factors, rope_complex, dim))
        found[dim] = {form: agreement for form, agreement in agreements.items() if agreement.equal}
        failures += agreements.values()
        if "batch" in found[dim]:  # else heads may be in the other dimension: one table alone fits in both
            break
    dim, proven = max(found.items(), key=lambda each: len(each[1]))
    if not proven:
        return no_formula(failures, "another rotation than complex factors of neighbours")
    form, times = next(iter(proven)), _TIMES
    heads = [probe.randn(_BATCH, times * each, _LENGTH, times * _HEAD_DIM) for each in (_HEADS, _KV_HEADS)]
    heads = heads if dim == 1 else [each.transpose(1, 2) for each in heads]
    parts = [probe.randn(*_FACTORS[form], times * _HEAD_DIM // 2) for _ in range(2)]
    factors = torch.complex(*parts)
    if not probe.same(_with(factors, function), _with(factors, rope_complex, dim), heads, False):
        return refused(_OTHER_SIZES)
    ours = complex_rotary_function(function, dim, frozenset(proven))
    return Proof("rope (complex)", ours, Agreement(max(agreement.error for agreement in proven.values())))


def _with(factors: torch.Tensor, function: Callable, *args: int) -> Callable:
    return lambda q, k: function(q, k, factors, *args)


def _last_columns_complex(q: torch.Tensor, k: torch.Tensor, factors: torch.Tensor, dim: int) -> tuple[Any, Any]:
    """As `rope_complex`, for q that may be the last columns of whole queries; see [`rotate_last_columns`]."""

    def rotate(q: torch.Tensor, k: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_complex(q, k, factors, dim, first)

    return rotate_last_columns(rotate, q, k, dim, q.dtype)


@functools.cache
def complex_rotary_function(
    original: Callable, dim: int, proven: frozenset[str], of_last_columns: bool = False
) -> Callable:
    """As [`rotary_function`], for an original of q, k and complex factors, with heads in dimension `dim`.

    A real table, as a complex buffer becomes when the model is cast, runs the original. With `of_last_columns`, q may
    be the last columns of whole queries.
    """
    names = arguments_of(original)

    @_signed_as(original)
    def rotary(*args, **kwargs):
        given = _by_name(names, args, kwargs)
        q, k, factors = (given.get(name) for name in names)
        if q is None or k is None or factors is None or not runs_ours(q):
            return original(*args, **kwargs)
        if not _is_proven(factors, q, k, dim, proven):
            return original(*args, **kwargs)
        return (_last_columns_complex if of_last_columns else rope_complex)(q, k, factors, dim)

    if not of_last_columns:
        made = functools.partial(complex_rotary_function, original, dim, proven, True)
        rotary.of_last_columns = made  # type: ignore[attr-defined]
    return rotary


def _is_proven(factors: Any, q: torch.Tensor, k: torch.Tensor, dim: int, proven: frozenset[str]) -> bool:
    if factors.dtype != torch.complex64 or q.dim() != 4 or q.dtype != k.dtype:
        return False
    batch, length = q.shape[0], q.shape[3 - dim]
    shapes = {"batch": (batch, length), "shared": (1, length), "plain": (length,), "column": (length, 1)}
    return any(tuple(factors.shape[:-1]) == shapes[form] for form in proven)
