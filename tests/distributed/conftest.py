"""What the tests on several gloo processes share."""

import json

import pytest

from tests.distributed.two_processes import WORLD, outcomes_of
from tests.once import shared_folder


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each of the file's `CASES` that is to be tested, with an empty string or how it failed on its `RANKS`, or two.

    The cases run once, whichever test process asks for them.
    """
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = [spec.params["case"] for spec in specs if spec is not None and "case" in spec.params]
    module = request.module
    with shared_folder(tmp_path_factory, module.__name__.rpartition(".")[2]) as folder:
        file = folder / "outcomes.json"
        if not file.exists():
            found = outcomes_of(module.__name__, list(dict.fromkeys(names)), getattr(module, "RANKS", WORLD))
            file.write_text(json.dumps(found), encoding="utf-8")
        return json.loads(file.read_text(encoding="utf-8"))
