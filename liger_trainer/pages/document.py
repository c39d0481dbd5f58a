"""A page, its sections, and what they hold besides charts. Whatever the caller passes as text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from liger_trainer.pages.style import STYLE

GENERATOR = '<meta name="generator" content="liger_trainer">'
"""Near the start of every page."""

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

    Args:
        title: Plain text, shown at the top and in the browser's tab.
        sections: HTML, from [`section`], in the order of reading.
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

    Args:
        header: The names of the columns.
        rows: A row holds a cell for each column, shown as `str` writes it; numbers are aligned to the right.
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
