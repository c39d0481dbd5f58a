"""How close every comparison of the tests comes to its bound, over many seeds, and whether their order matters.

    python -m tests.seeds [--seeds 200] [--order 1] [--record FILE] [arguments of pytest]

runs each test once for every seed and prints the comparisons whose error came to more than a quarter of what is
allowed. A test whose errors stay under a twentieth of their bounds for eight seeds gets no more. All seeds of a test
move: those of its name (tests/seeding.py), and those that it sets itself, but not those in `liger_trainer`. Seed 0
leaves them as `pytest` has them.

Recorded are `torch.isclose` and `torch.allclose`, on which `torch.testing.assert_close` and `gradcheck` rest, the
comparisons `<`, `<=`, `>` and `>=` of floats in an `assert` anywhere in `tests/`, and `pytest.approx`. An exact one has
no bound to come close to. Two errors compared with each other, such as "at most 1.1 times as far from float64 as
torch", and statistics, have quotients that are never small and scatter little: where the median is above a quarter,
the distance from it to the bound is to be four times that to the worst.

What runs in other processes is not recorded. The files of two runs with other `--order`s are equal to the byte if no
test depends on what ran before it.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import itertools
import json
import math
import operator
import os
import random
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.runner import runtestprotocol

TESTS = Path(__file__).parent
QUARTER = 0.25
SCOUTS, FAR = 8, 0.05

_record: Callable[[str, float], None] = lambda *_: None  # noqa: E731 (the plugin of a run puts its own here)


# What is allowed, and how much of it an error is.


def share_of(error: Any, allowed: Any) -> float | None:
    """The largest quotient of `error` and `allowed`, or None for counts and for what is compared exactly."""
    numbers = [torch.as_tensor(each).detach() for each in (error, allowed)]
    if not any(each.is_floating_point() for each in numbers):
        return None
    error, allowed = (each.double().cpu() for each in numbers)
    quotients = torch.where(error <= 0, 0.0, error / allowed.clamp(min=0)).nan_to_num(0.0, posinf=math.inf)
    return quotients.max().item() if quotients.numel() else None


def share_of_close(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> float | None:
    if rtol == 0 == atol or not (actual.is_floating_point() or actual.is_complex()) or not actual.numel():
        return None
    wide = torch.complex128 if actual.is_complex() else torch.float64
    actual, expected = actual.detach().to("cpu", wide), expected.detach().to("cpu", wide)
    return share_of((actual - expected).abs(), atol + rtol * expected.abs())


def shares_of_approx(actual: Any, expected: Any) -> Iterable[float]:
    """Of each `pytest.approx` in `expected`, which may be nested."""
    if hasattr(expected, "tolerance") and isinstance(actual, int | float):
        if expected.tolerance:
            yield abs(actual - expected.expected) / expected.tolerance
    elif type(expected).__name__.startswith("Approx"):
        again = {"rel": expected.rel, "abs": expected.abs}
        values = expected.expected
        if isinstance(values, Mapping) and isinstance(actual, Mapping):
            pairs = [(actual.get(key), value) for key, value in values.items()]
        else:
            pairs = list(zip(np.ravel(actual).tolist(), np.ravel(values).tolist()))
        for each, value in pairs:
            yield from shares_of_approx(each, pytest.approx(value, **again))
    elif isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key, value in expected.items():
            yield from shares_of_approx(actual.get(key), value)
    elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        for each, value in zip(actual, expected):
            yield from shares_of_approx(each, value)


# Where comparisons are seen.


_OPERATORS = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge, "Eq": operator.eq}


def _compared(place: str, operators: str, *values: Any) -> Any:
    """What the comparison of `values` in an assert gives; records how close they are."""
    result: Any = True
    for name, left, right in zip(operators.split(), values, values[1:]):
        error, allowed = (right, left) if name in ("Gt", "GtE") else (left, right)
        if name == "Eq":
            for share in (*shares_of_approx(left, right), *shares_of_approx(right, left)):
                _record(place, share)
        elif all(isinstance(each, int | float | np.ndarray | np.generic | torch.Tensor) for each in (left, right)):
            share = share_of(error, allowed)
            if share is not None:
                _record(place, share)
        result = result and _OPERATORS[name](left, right)
    return result


class _Asserts(ast.NodeTransformer):
    """Sends the comparisons of every assert through `_compared`."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).relative_to(TESTS.parent)
        self.inside = 0

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self.inside += 1
        node.test = self.visit(node.test)
        self.inside -= 1
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        if not self.inside or not all(type(each).__name__ in _OPERATORS for each in node.ops):
            return node
        arguments = [
            ast.Constant(f"{self.path}:{node.lineno}"),
            ast.Constant(" ".join(type(each).__name__ for each in node.ops)),
        ]
        call = ast.parse("__import__('tests.seeds').seeds._compared()", mode="eval").body
        call.args = [*arguments, node.left, *node.comparators]
        return ast.fix_missing_locations(ast.copy_location(call, node))


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        return compile(_Asserts(path).visit(ast.parse(self.get_data(path))), path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the tests, whose asserts report."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if not fullname.startswith("tests."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _watch_close() -> None:
    """Sees each `torch.isclose` and `torch.allclose` for which a test asks, by itself or through torch's own tests."""

    def watching(native: Callable) -> Callable:
        def close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
            frame = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(f"{TESTS}{os.sep}"):
                frame = frame.f_back if frame.f_globals.get("__name__", "").startswith("torch.") else None
            share = share_of_close(actual, expected, rtol, atol) if frame is not None else None
            if share is not None:
                place = Path(frame.f_code.co_filename).relative_to(TESTS.parent)
                _record(f"{place}:{frame.f_lineno}", share)
            return native(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan)

        return close

    torch.isclose, torch.allclose = watching(torch.isclose), watching(torch.allclose)


class Shift:
    """Moves every seed by `base`, which is 0 at first and moves nothing, but for those that the product sets itself."""

    def __init__(self) -> None:
        self.base = 0
        shift = self

        class Generator(torch.Generator):
            def manual_seed(self, seed: int) -> torch.Generator:
                return super().manual_seed(shift.of(seed, sys._getframe(1)))

        def moved(native: Callable) -> Callable:
            return lambda seed=None, *rest: native(shift.of(seed, sys._getframe(1)), *rest)

        torch.Generator = Generator
        torch.manual_seed = torch.random.manual_seed = moved(torch.manual_seed)
        np.random.default_rng = moved(np.random.default_rng)
        np.random.seed = moved(np.random.seed)
        random.seed = moved(random.seed)

    def of(self, seed: Any, caller: types.FrameType) -> Any:
        while caller.f_back and caller.f_globals.get("__name__", "").startswith("torch."):  # wraps its functions itself
            caller = caller.f_back
        ours = caller.f_globals.get("__name__", "").startswith("liger_trainer")
        return (seed + 7_919 * self.base) % 2**32 if self.base and isinstance(seed, int) and not ours else seed


# Runs.


class Seeds:
    """The plugin: runs the tests over the seeds, file by file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.shift = Shift()
        self.shares: dict[str, dict[str, dict[int, float]]] = {}
        self.outcomes: dict[str, dict[int, str]] = {}
        self.item: pytest.Item | None = None
        self.written = time.monotonic()

    def record(self, place: str, share: float) -> None:
        if self.item is not None:
            found = self.shares.setdefault(self.item.nodeid, {}).setdefault(place, {})
            found[self.shift.base] = max(found.get(self.shift.base, 0.0), share)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.options.order is not None:
            random.Random(self.options.order).shuffle(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed or session.config.option.collectonly:
            return None
        global _record
        _record = self.record
        for _, group in itertools.groupby(session.items, key=lambda item: item.path):
            items = list(group)
            for base in range(self.options.seeds):
                self.run(items, base)
                items = [item for item in items if self.goes_on(item.nodeid, base + 1)]
                if not items:
                    break
                if time.monotonic() - self.written > 20:  # what a run that is stopped has measured stays
                    self.write()
        self.write()
        return True

    def run(self, items: list[pytest.Item], base: int) -> None:
        """One seed of a file's tests, with fixtures of its own."""
        self.shift.base = base
        for name, module in [*sys.modules.items()]:
            if name.startswith("tests."):  # what a module keeps was drawn by another seed
                for each in [*vars(module).values()]:
                    if module.__name__ == getattr(each, "__module__", None) and hasattr(each, "cache_clear"):
                        each.cache_clear()
        for item, following in zip(items, [*items[1:], None]):
            self.item = item
            reports = runtestprotocol(item, nextitem=following, log=False)
            self.item = None
            failed = next((str(each.longrepr).strip().splitlines()[-1] for each in reports if each.failed), "")
            skipped = any(each.skipped for each in reports)
            self.outcomes.setdefault(item.nodeid, {})[base] = failed or ("skipped" if skipped else "passed")

    def goes_on(self, nodeid: str, seeds: int) -> bool:
        """Whether a test that has had `seeds` of them is worth another."""
        shares = self.shares_of(nodeid).values()
        return bool(shares) and (seeds < SCOUTS or max(map(max, shares)) > FAR)

    def shares_of(self, nodeid: str) -> dict[str, list[float]]:
        """Those of each comparison: below 1 where the test passed.

        A failed comparison of a test that passed was meant to fail, and its bound is on the other side.
        """
        passed = [base for base, outcome in self.outcomes[nodeid].items() if outcome == "passed"]
        return {
            place: [1 / share if share > 1 and base in passed else share for base, share in found.items()]
            for place, found in self.shares.get(nodeid, {}).items()
        }

    def write(self) -> None:
        self.written = time.monotonic()
        if self.options.record:
            found = {"outcomes": self.outcomes, "shares": self.shares}
            Path(self.options.record).write_text(json.dumps(found, indent=1, sort_keys=True))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        for nodeid, each in sorted(self.outcomes.items()):
            for base, outcome in each.items():
                if outcome not in ("passed", "skipped"):
                    write(f"FAILED {nodeid} with seed {base}: {outcome}")
        close = []
        for nodeid in self.shares:
            for place, shares in self.shares_of(nodeid).items():
                worst, median = max(shares), statistics.median(shares)
                scatters_little = median > QUARTER and 0 < 4 * (worst - median) <= 1 - median
                if worst > QUARTER and not scatters_little:
                    close.append((worst, median, len(shares), place, nodeid))
        for worst, median, count, place, nodeid in sorted(close, reverse=True):
            write(f"{worst:.3f} of what is allowed (median {median:.3f}, {count} seeds) at {place} in {nodeid}")
        comparisons = sum(map(len, self.shares.values()))
        write(f"{len(self.outcomes)} tests, {comparisons} comparisons, {len(close)} above a quarter of their bounds")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seeds", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="at most how many for each test (default: %(default)s)")
    parser.add_argument("--order", type=int, help="shuffle the tests by this seed")
    parser.add_argument("--record", metavar="FILE", help="write every outcome and share as JSON")
    options, arguments = parser.parse_known_args()
    sys.meta_path.insert(0, _Finder())
    _watch_close()
    flags = ["--assert=plain", "-p", "no:cacheprovider", "-p", "no:randomly", "--disable-warnings"]
    return int(pytest.main([*arguments, *flags], plugins=[Seeds(options)]))


if __name__ == "__main__":
    from tests import seeds  # the same module as that of the asserts

    sys.exit(seeds.main())
