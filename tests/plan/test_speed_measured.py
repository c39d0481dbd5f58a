"""The time of a step against every run of `docs/performance.md` on several GPUs; no constant was chosen by these."""

import dataclasses
import re
from pathlib import Path

import pytest

from liger_trainer.plan.estimate import largest_activation_memory
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.speed import LARGEST_ERROR, step_time
from tests.plan.cases import GIB, cluster, run_of

ADAMW = {"optim": "liger_adamw", "mixed": False}


def split(gpus, batch, **more):
    return Setting("fsdp2", gpus, batch, **more)


@dataclasses.dataclass(frozen=True)
class Case:
    """A measured run of Llama-3 8B: tokens/s a GPU; `kept` are the GiB that were kept, or `peak` those of the peak."""

    card: str
    length: int
    setting: Setting
    measured: float
    more: dict = dataclasses.field(default_factory=dict)
    layers: int = 0
    kept: float = 0.0
    peak: float = 0.0


CASES = {
    "16 layers, one H200, 8 × 4,096": Case("H200", 4096, split(1, 8), 18_251, layers=16),
    "16 layers, two H200, 8 × 4,096": Case("H200", 4096, split(2, 8), 18_158, layers=16),
    "two H200, 8 × 4,096": Case("H200", 4096, split(2, 8), 9_545),
    "two H200, 8 × 8,192": Case("H200", 8192, split(2, 8), 9_193),
    "two H200, 8 × 16,384": Case("H200", 16384, split(2, 8), 7_904),
    "two H200, 8 × 32,768, `tiled_mlp`, half offloaded": Case(
        "H200", 32768, split(2, 8, tiled_mlp=True, offloading=0.5), 6_153
    ),
    "four H200, 8 × 4,096": Case("H200", 4096, split(4, 8), 9_617),
    "four H200, 8 × 4,096, `auto`": Case("H200", 4096, split(4, 8), 11_589, kept=87.126),
    "four H200, 8 × 4,096, `auto`, `liger_adamw`": Case("H200", 4096, split(4, 8), 11_707, ADAMW, kept=103.254),
    "four H200, 2 × 16,384, `auto`": Case("H200", 16384, split(4, 2), 9_278, kept=87.377),
    "four H200, 1 × 65,536, `auto`, `tiled_mlp`": Case("H200", 65536, split(4, 1, tiled_mlp=True), 4_900, kept=67.755),
    "two H100, 4 × 8,192": Case("H100", 8192, split(2, 4), 8_766),
    "two H100, 8 × 4,096, `liger_adamw`": Case("H100", 4096, split(2, 8), 9_742, ADAMW),
    "two H100, 8 × 4,096, `auto`, `liger_adamw`": Case("H100", 4096, split(2, 8), 10_428, ADAMW, peak=64.5),
    "two H100, 2 × 16,384, `liger_adamw`": Case("H100", 16384, split(2, 2), 7_710, ADAMW),
    "two H100, 2 × 16,384, `auto`, `liger_adamw`": Case("H100", 16384, split(2, 2), 8_589, ADAMW, peak=64.5),
    "two H100, 1 × 65,536, `tiled_mlp`, `liger_adamw`": Case("H100", 65536, split(2, 1, tiled_mlp=True), 4_228, ADAMW),
    "two H100, 1 × 65,536, `auto`, `tiled_mlp`, `liger_adamw`": Case(
        "H100", 65536, split(2, 1, tiled_mlp=True), 4_743, ADAMW, peak=61.7
    ),
}


def predicted(case):
    """Tokens/s a GPU by the formulas."""
    run = run_of("llama3-8b", case.length, layers=case.layers, recompute_mlp=True)
    run, setting = dataclasses.replace(run, implementation="liger_trainer", **case.more), case.setting
    budget = int(case.kept * GIB)
    if case.peak:
        budget = largest_activation_memory(run, setting, case.peak * GIB)
    setting = dataclasses.replace(setting, activation_memory=budget)
    return 1 / step_time(run, setting, cluster(setting.gpus, card=case.card)).token


@pytest.mark.parametrize("name", CASES)
def test_tokens_a_second(name):
    assert predicted(CASES[name]) == pytest.approx(CASES[name].measured, rel=LARGEST_ERROR)


def test_the_largest_error_is_the_one_that_is_printed():
    errors = [abs(predicted(case) / case.measured - 1) for case in CASES.values()]
    assert LARGEST_ERROR - 0.01 < max(errors) <= LARGEST_ERROR <= 0.08


def test_the_documentation_has_every_row():
    page = Path("docs/guides/planning.md").read_text(encoding="utf-8")
    for name, case in CASES.items():
        rate = predicted(case)
        assert f"| {name} | {case.measured:,} | {rate:,.0f} | {100 * (rate / case.measured - 1):+.1f} % |" in page


def test_every_measured_row_is_here():
    """Of our own runs in bf16 in the two tables of the page about performance."""
    page = Path("docs/performance.md").read_text(encoding="utf-8")
    tables = page.partition("Under FSDP2, tokens/s a GPU")[2].partition("`optim: liger_adamw` takes")[0]
    rows = page.partition("<!-- table: several-gpus -->")[2].partition("<!-- end of table -->")[0].split("\n")
    text = "\n".join([tables, *(row for row in rows if row.startswith("| liger_trainer"))])
    speeds = {int(speed.replace(",", "")) for speed in re.findall(r"(\d+,\d{3}) / \d", text)}
    assert len(speeds) == 16 + 1  # one is in both tables, and one run of 8 x 8,192 is of the page about fp8
    assert speeds <= {case.measured for case in CASES.values()}
