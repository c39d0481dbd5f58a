"""`make test` sees every planted fault, and runs something of every test function."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ALL
from tests.faults import plant
from tests.faults.faults import FAULTS
from tests.selection import LEFT_OUT, by_function, cases_of, selected, spread

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


def test_functions_that_are_left_out_are_there():
    texts = (path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    assert LEFT_OUT.keys() <= {name for text in texts for name in re.findall(r"^def (\w+)\(", text, re.MULTILINE)}


def test_a_function_is_selected_by_its_first_case(request):
    items = request.config.stash[ALL]
    chosen = {item.nodeid.partition("[")[0] for item in selected(items)}
    missing = [item for item in items if item.nodeid.partition("[")[0] not in chosen]
    assert {getattr(item, "originalname", item.name) for item in missing} <= LEFT_OUT.keys()


def test_cases_are_spread_evenly():
    assert spread(range(3), 8) == [0, 1, 2]
    assert spread(range(100), 4) == [0, 33, 66, 99]
    assert spread(range(5), 1) == [0]
