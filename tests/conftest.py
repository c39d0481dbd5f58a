"""Everything runs offline; a test marked `gpu` or `multigpu` is skipped, with the reason, where there is none."""

import gc
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["COLUMNS"] = "200"  # pytest-xdist says 80, at which tables wrap; tests of the width set their own

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

import tests.speedups
import tests.uninitialised  # noqa: F401
from tests.seeding import seed
from tests.selection import selected

# Compiled code is for one kind of CPU, and torch's cache of it does not ask which.
_KIND = f"inductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), _KIND))

# The same examples in every run, so that an unchanged tree passes or fails as it did; `random` draws new ones. None has
# a limit of time: machines differ, and other programs run beside the tests.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# One thread a test process: the tensors are tiny, and xdist already uses the cores.
torch.set_num_threads(1)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.interpreted import mend_interpreter

    mend_interpreter()


ALL = pytest.StashKey[list[pytest.Item]]()
"""Every test that was collected, also those that another call or machine runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests that take minutes too")
    parser.addoption(
        "--part", choices=("selected", "rest"), help="run what `make test` runs (tests/selection.py), or all else"
    )


@pytest.hookimpl(tryfirst=True)  # before the order is changed
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[ALL] = [*items]
    left_out: set[pytest.Item] = set()
    if part := config.getoption("--part"):
        chosen = {*selected(items)}
        left_out |= {*items} - chosen if part == "selected" else chosen
    if not INTERPRETED and not torch.cuda.is_available():
        # `make interpreter` runs these: Triton interprets in a whole process or not at all.
        left_out |= {item for item in items if item.get_closest_marker("kernel")}
    if not config.getoption("--long"):
        left_out |= {item for item in items if item.get_closest_marker("long")}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    for item in items:
        if item.get_closest_marker("multigpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 GPUs, found {devices}; run on a multi-GPU machine"))
        elif item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a GPU; run on a GPU machine"))


def _settle_garbage() -> None:
    """Keeps the collector off what is there now, which every training would make it look through, for 0.3 s."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _settle_garbage()


@pytest.fixture(scope="module", autouse=True)
def _settled_garbage() -> None:
    """What the last file imported, compiled and cached is frozen as well."""
    _settle_garbage()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Before every other fixture of the test: what they draw is the test's own as well."""
    seed(request.node.nodeid)


@pytest.fixture(autouse=True)
def _collected(request: pytest.FixtureRequest) -> None:
    """A test on a GPU may measure memory, in the middle of which the garbage of an earlier one would be freed."""
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        gc.collect()


@pytest.fixture(autouse=True)
def _same_precision() -> Iterator[None]:
    """accelerate and `TrainingArguments(tf32=True)` switch TF32 on for all that the process runs after them."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield
    if matmul.fp32_precision != before:
        matmul.fp32_precision = before


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """What a file draws when it is imported is its own too."""
    if isinstance(collector, pytest.Module):
        seed(collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    """What several tests share is drawn alike whichever of them asks first; `_seeded` runs after it."""
    if fixturedef.scope != "function":
        seed(request.node.nodeid, fixturedef.argname, request.param_index)


@pytest.fixture
def device() -> str:
    """The accelerator's type where there is one, else "cpu"."""
    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled is left of other tests, nor counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
