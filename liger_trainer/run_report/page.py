"""A self-contained HTML page: one file without scripts, readable from disk, on a phone and in the dark.

Whatever the caller passes as text is escaped. Charts and page share the colours of `STYLE`, which follow the reader's
choice of light or dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

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
