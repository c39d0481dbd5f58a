"""Which tests `make test` runs: a case of every test function, and those that see the planted faults.

`pytest --part selected` runs them, and `pytest --part rest`, of `make test-all`, the others. Tests are named by their
functions, so that files may be split and moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tests.faults.faults import FAULTS, Fault

OF_A_FAULT = 3
"""How many cases run at most of a test that a fault names, spread evenly over those that its expression leaves."""
LEFT_OUT: dict[str, str] = {}
"""Test functions of which nothing is selected unless a fault names them, and why."""

_KINDS = ("gpu", "kernel", "long", "multigpu")


def function_of(item: pytest.Item) -> str:
    """The name of the function that `item` is a case of."""
    return getattr(item, "originalname", item.name)


def spread(cases: Sequence[pytest.Item], count: int) -> list[pytest.Item]:
    """`count` of the cases: the first, the last, and evenly between them."""
    if len(cases) <= count:
        return list(cases)
    return [cases[number * (len(cases) - 1) // max(1, count - 1)] for number in range(count)]


def by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of all test functions of a name."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(function_of(item), []).append(item)
    return functions


def cases_of(fault: Fault, functions: Mapping[str, Sequence[pytest.Item]]) -> dict[str, list[pytest.Item]]:
    """The cases that `fault` names, for each of its tests."""
    found = {}
    for test in fault.tests.split():
        part, _, function = test.partition("::")
        cases = [item for item in functions.get(function, ()) if part in item.nodeid.partition("tests/")[2]]
        if fault.expression:
            expression = Expression.compile(fault.expression)
            cases = [item for item in cases if expression.evaluate(KeywordMatcher.from_item(item))]
        found[test] = cases
    return found


def selected(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of `items` that `make test` runs."""
    chosen: set[str] = set()
    groups: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in items:
        kinds = (kind for kind in _KINDS if item.get_closest_marker(kind))
        groups.setdefault((item.nodeid.partition("[")[0], *kinds), []).append(item)
    for cases in groups.values():
        if function_of(cases[0]) not in LEFT_OUT:
            chosen.add(cases[0].nodeid)
    functions = by_function(items)
    for fault in FAULTS:
        for cases in cases_of(fault, functions).values():
            chosen.update(item.nodeid for item in spread(cases, OF_A_FAULT))
    return [item for item in items if item.nodeid in chosen]
