"""The table of what is served of each family: of a few, and, among the long tests, of all."""

from __future__ import annotations

import pytest
import transformers

from liger_trainer.benchmarks.served import COLUMNS, PAGE, all_served, families, served, table, written

SAMPLE = ("llama", "qwen3_moe", "deepseek_v3", "gemma4_text", "deepseek_v32")


def row_of(family):
    return next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{family}` |"))


@pytest.mark.parametrize("family", SAMPLE)
def test_the_page_says_what_is_served(family):
    row = served(family)
    assert not row.crashed, row.reason
    assert table([row]).splitlines()[-1] == row_of(family)


def test_what_the_rows_say():
    attention = list(COLUMNS).index("attention")
    cells = {family: served(family).cells[attention] for family in SAMPLE}
    assert cells == {
        "llama": "yes",
        "qwen3_moe": "yes",
        "deepseek_v3": "yes",
        "gemma4_text": "yes",
        "deepseek_v32": "yes",
    }


def test_a_page_is_written():
    row = served("llama")
    page = written(PAGE.read_text(encoding="utf-8"), [row])
    assert f"transformers {transformers.__version__}, 1 types." in page
    assert page.count("| `") == 1
    assert written(page, [row]) == page


@pytest.mark.long
def test_no_family_crashes():
    rows = all_served(families())
    assert not [(row.family, row.reason) for row in rows if row.crashed]
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}," in page:
        assert written(page, rows) == page
