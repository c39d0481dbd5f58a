"""A self-contained HTML page, and its curves: one file without scripts, readable from disk, on a phone and in the dark.

Whatever the caller passes as text is escaped. Charts and page share the colours of `STYLE`, which follow the reader's
choice of light or dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

GENERATOR = '<meta name="generator" content="liger_trainer">'
"""Near the start of every page."""

COLOURS = 6  # of lines, told apart by readers with a colour vision deficiency; further lines are dashed

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1d2127; --faint: #626a75; --rule: #e1e4e9;
  --c0: #0b64c0; --c1: #c2410c; --c2: #067a57; --c3: #9b3fae; --c4: #8a6a00; --c5: #47525f; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --text: #e4e7eb; --faint: #9aa3af; --rule: #2c323a;
  --c0: #6cb2ff; --c1: #ff9a62; --c2: #46cf9f; --c3: #da92ea; --c4: #e0bd4a; --c5: #b4bfcc; } }
* { box-sizing: border-box; }
body { max-width: 72rem; margin: 0 auto; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.125rem; margin: 2rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--rule); }
section { display: grid; gap: 1rem 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); }
section > * { grid-column: 1 / -1; margin: 0; min-width: 0; }
section > figure { grid-column: auto; }
p { white-space: pre-wrap; }
figcaption { font-size: .8125rem; color: var(--faint); }
figcaption b { display: block; font-size: .9375rem; font-weight: 600; color: var(--text); }
figcaption span { display: inline-block; margin-right: .9em; }
svg { display: block; width: 100%; height: auto; }
figcaption svg { display: inline-block; width: 1.6em; height: .6em; margin-right: .35em; }
svg text { font: 11px system-ui, sans-serif; fill: var(--faint); }
svg path { fill: none; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round; }
svg path.grid { stroke: var(--rule); stroke-width: 1; }
svg path.dots { stroke-width: 5; stroke-dasharray: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule);
  white-space: pre-wrap; overflow-wrap: break-word; min-width: 5rem; max-width: 36rem; }
th:last-child, td:last-child { min-width: 8rem; }
th { color: var(--faint); font-weight: 500; }
td.number { text-align: right; }
@media print { figure, tr { break-inside: avoid; } }
"""

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{generator}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
"""


def page(title: str, sections: Iterable[str]) -> str:
    """The text of an HTML file, to be written as UTF-8. It loads nothing and runs no script.

    The title, in plain text, is shown at the top and in the browser's tab; the `sections` are HTML from [`section`].
    """
    head = _HEAD.format(generator=GENERATOR, title=escaped(title), style=STYLE)
    return f"{head}<body>\n<h1>{escaped(title)}</h1>\n{''.join(sections)}</body>\n</html>\n"


def section(heading: str, *parts: str) -> str:
    """A heading in plain text, and `parts`: HTML from [`paragraph`], [`table`] and [`curves`], which sit in columns."""
    return f"<h2>{escaped(heading)}</h2>\n<section>\n{''.join(parts)}</section>\n"


def paragraph(text: str) -> str:
    """Plain text; its line breaks and spaces are kept."""
    return f"<p>{escaped(text)}</p>\n"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, which scrolls by itself where it is wider than the screen.

    Cells are shown as `str` writes them; numbers are aligned to the right.
    """
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n'


def escaped(text: object) -> str:
    """`text` for HTML, between tags or in quotes. What UTF-8 cannot say becomes a question mark."""
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))


def _cell(value: object) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"<td{' class=number' if is_number else ''}>{escaped(value)}</td>"


Point = tuple[float, float]

# In units of the view box, which a phone shows in about as many pixels, so that letters keep their size.
_WIDTH, _HEIGHT, _TOP, _RIGHT, _BOTTOM = 340, 190, 8, 12, 34

_MOST_POINTS = 600  # of a line; about two for each pixel of a phone
_LARGEST = 1e100  # so that no arithmetic on a value overflows


def curves(title: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """A chart by step, with axes and a legend, which also gives each line's last finite value.

    Values that are not finite (or beyond 1e100) leave a gap. Of a line with thousands of points the lowest and highest
    of each stretch are drawn, so spikes stay. Without any finite value the chart says so.

    Args:
        title: Plain text above the chart.
        lines: The points (step, y) of each line, by its name in the legend, in the order of the steps.
    """
    drawn = {name: [point for point in points if _fits(point[0])] for name, points in lines.items()}
    shown = [point for points in drawn.values() for point in points if _fits(point[1])]
    legend = "".join(_legend(index, name, points) for index, (name, points) in enumerate(drawn.items()))
    caption = f"<figcaption><b>{escaped(title)}</b>{legend}</figcaption>"
    if not shown:
        return f"<figure>{caption}<p>No finite values.</p></figure>\n"
    axes = _Axes([at for at, _ in shown], [value for _, value in shown])
    marks = "".join(_line(axes, index, _thinned(points)) for index, points in enumerate(drawn.values()))
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escaped(title)} by step"'
    return f"<figure>{caption}<svg {box}>{axes.drawn()}{marks}</svg></figure>\n"


def _thinned(points: Sequence[Point]) -> list[Point]:
    """At most about `_MOST_POINTS`: of each stretch the lowest, the highest and one gap; and both ends."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    kept = {0, len(points) - 1}
    length = math.ceil(len(points) / (_MOST_POINTS // 3))
    for start in range(0, len(points), length):
        stretch = range(start, min(start + length, len(points)))
        finite = [index for index in stretch if _fits(points[index][1])]
        if finite:
            kept |= {min(finite, key=lambda index: points[index][1]), max(finite, key=lambda index: points[index][1])}
        kept.update([index for index in stretch if not _fits(points[index][1])][:1])
    return [points[index] for index in sorted(kept)]


def _fits(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= _LARGEST


class _Axes:
    """Where values lie in the picture."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._x, self._y = span(xs), span(ys)
        self._x_ticks = ticks(*self._x, most=5, whole=all(float(value).is_integer() for value in xs))
        self._y_ticks = ticks(*self._y, most=5)
        self._left = 10 + 6.5 * max((len(text) for _, text in self._y_ticks), default=0)

    def place(self, at: float, value: float) -> str:
        return f"{self._across(at):.1f} {self._down(value):.1f}"

    def _across(self, at: float) -> float:
        low, high = self._x
        return self._left + (at - low) / (high - low) * (_WIDTH - _RIGHT - self._left)

    def _down(self, value: float) -> float:
        low, high = self._y
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _BOTTOM - _TOP)

    def drawn(self) -> str:
        """Grid, numbers, and the name of the horizontal axis."""
        floor = _HEIGHT - _BOTTOM
        grid = f"M{self._left:.1f} {floor}H{_WIDTH - _RIGHT}"
        texts = _text((self._left + _WIDTH - _RIGHT) / 2, _HEIGHT - 4, "step", "middle")
        for value, text in self._y_ticks:
            grid += f"M{self._left:.1f} {self._down(value):.1f}H{_WIDTH - _RIGHT}"
            texts += _text(self._left - 6, self._down(value) + 4, text, "end")
        for value, text in self._x_ticks:
            grid += f"M{self._across(value):.1f} {floor}v4"
            texts += _text(self._across(value), floor + 15, text, "middle")
        return f'<path class="grid" d="{grid}"/>{texts}'


def _text(across: float, down: float, text: str, anchor: str) -> str:
    return f'<text x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}">{escaped(text)}</text>'


def _stroke(index: int) -> str:
    dashes = ' stroke-dasharray="5 4"' if index >= COLOURS else ""
    return f'style="stroke: var(--c{index % COLOURS})"{dashes}'


def _legend(index: int, name: str, points: Sequence[Point]) -> str:
    last = next((value for _, value in reversed(points) if _fits(value)), None)
    text = name if last is None else f"{name} {label(last, abs(last) / 1000)}"
    mark = f'<path d="M1 3H15" {_stroke(index)}/>'
    return f'<span><svg viewBox="0 0 16 6" aria-hidden="true">{mark}</svg>{escaped(text)}</span>'


def _line(axes: _Axes, index: int, points: Sequence[Point]) -> str:
    dots = line = ""
    for piece in _pieces(points):
        if len(piece) == 1:  # a line of no length, which round ends make a dot
            dots += f"M{axes.place(*piece[0])}h0"
        else:
            line += "M" + "L".join(axes.place(*point) for point in piece)
    return f'<path {_stroke(index)} d="{line}"/><path class="dots" {_stroke(index)} d="{dots}"/>'


def _pieces(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Runs of finite points."""
    piece: list[Point] = []
    for point in points:
        if _fits(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def span(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest of `values`, kept apart where they are (nearly) the same."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low <= 1e-6 * size or not size:
        room = 0.05 * size or 1.0
        return low - room, high + room
    return low, high


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[tuple[float, str]]:
    """About `most` multiples of 1, 2 or 5 times a power of ten in [low, high], each with its label.

    If they are `whole`, only integers make sense.
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    step = max(step, 1.0) if whole else step
    slack = 1e-9  # for an end that is a multiple, but for rounding
    first, last = math.ceil(low / step - slack), math.floor(high / step + slack)
    values = [index * step for index in range(first, last + 1)]
    return [(value, label(value, step)) for value in values]


def label(value: float, step: float) -> str:
    """`value` with as many digits as tell it from `value + step`."""
    size = abs(value)
    if size < 0.5 * step or not size:
        return "0"
    last = math.floor(math.log10(step) + 1e-9)
    if 1e-3 <= size < 1e6:
        return f"{value:,.{max(0, -last)}f}"
    mantissa, exponent = f"{value:.{max(0, math.floor(math.log10(size)) - last)}e}".split("e")
    return f"{mantissa}e{int(exponent)}"
