"""What the tests on several gloo processes share."""

import pytest

from tests.distributed.two_processes import WORLD, outcomes_of


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Each of the file's `CASES` that is to be tested, with an empty string or how it failed on its `RANKS`, or two."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = [spec.params["case"] for spec in specs if spec is not None and "case" in spec.params]
    module = request.module
    return outcomes_of(module.__name__, list(dict.fromkeys(names)), getattr(module, "RANKS", WORLD))
