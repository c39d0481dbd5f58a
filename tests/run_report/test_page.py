"""Pages: whatever is put in is shown as text, and every number as a line that can be read."""

import json
import math
import re
import shutil
import subprocess

import pytest

from liger_trainer.run_report.page import curves, page, paragraph, section, span, table, ticks
from tests.run_report.reading import Page, places

NASTY = "</style><script>alert(1)</script>\"'&amp;<b>é\ud800\n  x"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def chart(points):
    """The pieces and the dots of the only line."""
    read = Page(page("t", [section("s", curves("c", {"line": points}))]))
    line, dots = read.strokes["c"]
    return places(line), places(dots)


def test_all_text_is_escaped():
    parts = [
        paragraph(NASTY),
        table([NASTY], [[NASTY], [3], [0.5], [None]]),
        curves(NASTY, {NASTY: [(1, 2.0)]}),
    ]
    text = page(NASTY, [section(NASTY, *parts)])
    text.encode("utf-8")
    read = Page(text)
    shown = NASTY.replace("\ud800", "?")
    assert "script" not in read.tags
    assert read.title == shown
    assert read.headings == [shown]
    assert read.rows == [[shown], [shown], ["3"], ["0.5"], ["None"]]
    assert list(read.charts) == [shown]
    assert [line.startswith(shown) for line in read.charts[shown]] == [True]
    assert read.text.count(shown) == 8  # tab, title, heading, paragraph, 2 cells; the chart's title and key


def test_nothing_is_fetched_and_nothing_runs():
    text = page("t", [section("s", curves("c", {"l": [(1, 1.0)]}))])
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert "url(" not in text
    assert "script" not in Page(text).tags


def test_points_lie_where_their_values_are():
    (piece,), dots = chart([(0, 0.0), (5, 1.0), (10, 4.0)])
    assert not dots
    (x0, y0), (x1, y1), (x2, y2) = piece
    assert x0 < x1 < x2
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)  # a tenth of a pixel
    assert (y0 - y1) * 4 == pytest.approx(y0 - y2, abs=0.4)  # upwards, in proportion


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_what_is_not_finite_is_a_gap(bad):
    pieces, dots = chart([(0, 0.0), (1, 1.0), (2, bad), (3, 1.0), (4, bad), (5, 0.0), (6, 1.0), (math.nan, 1.0)])
    assert [len(piece) for piece in pieces] == [2, 2]
    assert [len(piece) for piece in dots] == [1]
    assert pieces[0][1][1] == dots[0][0][1] == pieces[1][1][1]  # the scale is that of the finite ones


def test_one_point_is_a_dot():
    pieces, ((dot,),) = chart([(7, 2.5)])
    assert not pieces
    assert 30 < dot[0] < 340
    assert 8 <= dot[1] <= 156


@pytest.mark.parametrize("points", [[], [(1, math.nan)], [(math.inf, 1.0)]])
def test_without_a_value_the_chart_says_so(points):
    read = Page(page("t", [section("s", curves("c", {"line": points}))]))
    assert "No finite values." in read.text
    assert read.charts == {"c": ["line"]}


def test_thousands_of_points_keep_their_spikes_gaps_and_ends():
    points = [(step, math.sin(step / 5)) for step in range(30_000)]  # neither end is the lowest or highest near it
    points[12_345], points[20_001], points[25_000] = (12_345, 50.0), (20_001, -50.0), (25_000, math.nan)
    text = curves("c", {"line": points})
    assert len(text) < 20_000
    pieces, _ = chart(points)
    assert len(pieces) == 2
    drawn = [point for piece in pieces for point in piece]
    heights = sorted(y for _, y in drawn)
    assert (heights[0], heights[-1]) == (8.0, 156.0)  # the two spikes span the picture
    left = float(re.search(r'class="grid" d="M([\d.]+)', text).group(1))
    assert drawn[0][0] == left
    assert drawn[-1][0] == 328
    assert [x for x, _ in drawn] == sorted(x for x, _ in drawn)


def test_the_legend_has_every_line_and_its_last_value():
    lines = {"a": [(1, 0.5), (2, 0.25), (3, math.nan)], "b": [(1, 12345.0)], "c": [(1, 2e-5)], "d": [(1, 0.0)]}
    read = Page(page("t", [section("s", curves("c", lines))]))
    assert read.charts["c"] == ["a 0.2500", "b 12,345", "c 2.000e-5", "d 0"]
    assert len(read.strokes["c"]) == 8  # a line and its dots each


def test_more_lines_than_colours_are_told_apart():
    text = curves("c", {f"run {index}": [(1, 1.0), (2, 2.0)] for index in range(12)})
    caption = text[: text.index("</figcaption>")]
    styles = re.findall(r'd="M1 3H15" ([^/]*)/', caption)
    assert len(set(styles)) == 12


@pytest.mark.parametrize(
    ("values", "most", "whole", "labels"),
    [
        ((0, 10), 5, False, ["0", "2", "4", "6", "8", "10"]),
        ((1, 3), 5, True, ["1", "2", "3"]),
        ((0, 2e-5), 4, False, ["0", "5e-6", "1.0e-5", "1.5e-5", "2.0e-5"]),
        ((1.00001, 1.00005), 4, False, ["1.00001", "1.00002", "1.00003", "1.00004", "1.00005"]),
        ((-0.15, 0.05), 4, False, ["-0.15", "-0.10", "-0.05", "0", "0.05"]),
        ((52_000, 55_000), 3, False, ["52,000", "53,000", "54,000", "55,000"]),
        ((0, 4e9), 4, False, ["0", "1e9", "2e9", "3e9", "4e9"]),
    ],
)
def test_ticks_are_round(values, most, whole, labels):
    assert [text for _, text in ticks(*map(float, values), most, whole)] == labels


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-3e-9], [1e99, -1e99], [1e-300, 2e-300], [1.0, 1.0 + 1e-15]])
def test_any_scale_has_few_ticks(values):
    low, high = span(values)
    assert low < high
    labels = [text for _, text in ticks(low, high, 5)]
    assert 1 <= len(set(labels)) == len(labels) <= 7
    assert high - low > 1e-7 * max(abs(low), abs(high))  # else rounding decides where a point lies
    chart(list(enumerate(values)))


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_it(width, tmp_path):
    """At the width of a phone nothing is wider than the screen, and letters can be read."""
    points = [(step, math.sin(step / 50)) for step in range(2000)]
    parts = [curves(f"chart {index}", {"a line": points}) for index in range(3)]
    long = "averylongword" * 40
    text = page("t", [section("s", *parts, paragraph(long), table([*"abcdefgh"], [["some words " * 9] * 7 + [long]]))])
    measure = """<iframe id="f"></iframe><pre id="found"></pre><script>
        const frame = document.getElementById("f"); frame.style.width = "WIDTHpx"; frame.srcdoc = PAGE;
        frame.onload = () => { const page = frame.contentDocument, box = e => e.getBoundingClientRect();
          document.getElementById("found").textContent = JSON.stringify({
            wide: page.documentElement.scrollWidth, mode: page.compatMode,
            letters: Math.min(...[...page.querySelectorAll("text")].map(e => box(e).height)),
            charts: [...page.querySelectorAll("figure > svg")].map(e => [box(e).left, box(e).width]),
            line: box(page.querySelector("figure > svg > path[style]")).height }); };
        </script>"""
    host = measure.replace("WIDTH", str(width)).replace("PAGE", json.dumps(text).replace("</", "<\\/"))
    (tmp_path / "host.html").write_text(host, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *options, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "host.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL).group(1))
    assert found["mode"] == "CSS1Compat"
    assert found["wide"] <= width
    assert found["letters"] >= 11  # the box of a letter of about 10 pixels
    assert found["line"] > 80
    columns = {left for left, _ in found["charts"]}
    assert len(columns) == (1 if width == 360 else 3)
