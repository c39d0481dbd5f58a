"""`make test` sees every planted fault, and runs something of every test function."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ALL
from tests.faults import plant
from tests.faults.faults import FAULTS
from tests.selection import LEFT_OUT, by_function, cases_of, function_of, listed, measured, selected, spread

TESTS = Path(__file__).parent


@pytest.mark.parametrize("kind", dict.fromkeys(fault.kind for fault in FAULTS))
def test_every_fault_and_its_tests_are_there(kind):
    outcomes = [plant.found(fault, plant.ROOT) for fault in FAULTS if fault.kind == kind]
    assert not [outcome for outcome in outcomes if outcome.word != "found"]


def test_every_fault_has_cases_in_the_selection(request):
    """Of the tests that this call has collected, which are all in `make test`."""
    items = request.config.stash[ALL]
    functions, chosen = by_function(items), {*selected(items)}
    for fault in FAULTS:
        for test, cases in cases_of(fault, functions).items():
            if test.partition("::")[2] in functions:
                assert cases, f"{fault.expression!r} of {fault.name!r} leaves nothing of {test}"
                assert chosen.intersection(cases)


def test_every_function_that_is_left_out_is_a_test():
    texts = (path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    names = {name for text in texts for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}
    assert not (listed().keys() | LEFT_OUT.keys()) - names


def test_a_case_of_every_other_function_is_selected(request):
    items = request.config.stash[ALL]
    chosen = {item.nodeid.partition("[")[0] for item in selected(items)}
    missing = {function_of(item) for item in items if item.nodeid.partition("[")[0] not in chosen}
    assert missing <= listed().keys() | LEFT_OUT.keys()


def test_cases_are_spread_evenly():
    assert spread(range(3), 8) == [0, 1, 2]
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread(range(5), 1) == [0]


def test_seconds_are_those_of_the_quickest_case():
    durations = """
        0.50s setup    tests/a/test_x.py::test_one[two words]
        0.25s call     tests/a/test_x.py::test_one[two words]
        0.50s call     tests/a/test_x.py::test_one[other]
        0.75s call     tests/b/test_y.py::test_one
        0.01s teardown tests/b/test_y.py::test_two
    """
    assert measured(map(str.strip, durations.splitlines())) == {"test_one": 0.75, "test_two": 0.01}
