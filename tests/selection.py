"""Which tests `make test` runs: a case of every quick test function, and those that see the planted faults.

`pytest --part selected` runs them, and `pytest --part rest`, of `make test-all`, the others. Tests are named by their
functions, so that files may be split and moved. `tests/slow.txt` lists the functions that are left to `make test-all`
unless a fault names them, with the seconds that a case takes. It is written anew from what pytest measures on a machine
that does nothing else:

    pytest -n 2 -vv --durations=0 tests | python -m tests.selection
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tests.faults.faults import FAULTS, Fault

OF_A_FAULT = 3
"""How many cases run at most of a test that a fault names: the first, the last, and one between them."""
LIMIT = 0.5
"""Seconds that a case of a function may take."""
SLOW_FILE = Path(__file__).with_name("slow.txt")
LEFT_OUT = dict.fromkeys(
    (
        "test_each_process_holds_its_rows_of_codes_that_stay_as_they_are",
        "test_trains_as_one_process",
        "test_what_is_saved_are_adapters_that_load_on_the_dequantised_model",
        "test_what_is_saved_loads_without_us",
        "test_zero_says_that_it_keeps_its_number_of_processes",
    ),
    "shares trainings of two processes that take a minute",
)
"""Functions that are quick by themselves, and left to `make test-all` too, with the reason."""

_KINDS = ("gpu", "kernel", "long", "multigpu")


def listed() -> dict[str, float]:
    """The functions of `tests/slow.txt`, and their seconds."""
    lines = (line.split() for line in SLOW_FILE.read_text(encoding="utf-8").splitlines())
    return {name: float(seconds) for seconds, name in lines}


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
        cases = [item for item in functions.get(function, ()) if part in item.nodeid.partition("::")[0]]
        cases = [item for item in cases if not item.get_closest_marker("long")]  # which `make test` does not run
        if fault.expression:
            expression = Expression.compile(fault.expression)
            cases = [item for item in cases if expression.evaluate(KeywordMatcher.from_item(item))]
        found[test] = cases
    return found


def selected(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of `items` that `make test` runs."""
    left_out, groups = listed().keys() | LEFT_OUT.keys(), {}
    for item in items:
        kinds = (kind for kind in _KINDS if item.get_closest_marker(kind))
        groups.setdefault((item.nodeid.partition("[")[0], *kinds), item)
    chosen = {item.nodeid for item in groups.values() if function_of(item) not in left_out}
    functions = by_function(items)
    for fault in FAULTS:
        for cases in cases_of(fault, functions).values():
            chosen.update(item.nodeid for item in spread(cases, OF_A_FAULT))
    return [item for item in items if item.nodeid in chosen]


def measured(durations: Iterable[str]) -> dict[str, float]:
    """Seconds of the quickest case of each function; of several functions of a name, those of the slowest."""
    cases: dict[str, float] = {}
    for line in durations:
        if found := re.match(r"([\d.]+)s (?:call|setup|teardown) +(tests/.*?)\s*$", line):
            cases[found[2]] = cases.get(found[2], 0.0) + float(found[1])
    functions: dict[str, float] = {}
    for nodeid, seconds in cases.items():
        function = nodeid.partition("[")[0]
        functions[function] = min(seconds, functions.get(function, seconds))
    names: dict[str, float] = {}
    for function, seconds in functions.items():
        name = function.rpartition("::")[2]
        names[name] = max(seconds, names.get(name, 0.0))
    return names


def main() -> None:
    """Rewrites `tests/slow.txt`; what was not measured stays."""
    seconds = {**listed(), **measured(sys.stdin)}
    slow = sorted(name for name in seconds if seconds[name] > LIMIT)
    SLOW_FILE.write_text("".join(f"{seconds[name]:6.2f} {name}\n" for name in slow), encoding="utf-8")


if __name__ == "__main__":
    main()
