"""Reads a page as a browser would, strictly."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = ("meta", "br")


class Page(HTMLParser):
    """What a page holds; feeding it one whose tags are not closed in order is an error.

    Attributes:
        title: The title of the tab.
        headings: The headings of the sections.
        charts: For each chart, by its title, the lines of its legend.
        strokes: For each chart, by its title, the paths of its lines without those of the legend.
        rows: The cells of each row of a table.
        text: All text that is shown.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._open: list[str] = []
        self.title, self.headings = "", []
        self.charts: dict[str, list[str]] = {}
        self.strokes: dict[str, list[str]] = {}
        self.rows: list[list[str]] = []
        self.text = ""
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        values = dict(attributes)
        for name, value in attributes:
            assert not name.startswith("on"), name
            assert name not in ("src", "href", "srcset"), value
        if tag in _VOID:
            return
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "path" and "figcaption" not in self._open and "--c" in values.get("style", ""):
            self.strokes.setdefault(self._chart, []).append(values["d"])

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self._open, tag
        assert self._open.pop() == tag, tag

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.text += data
        inside = self._open[-1] if self._open else ""
        if inside == "title":
            self.title += data
        elif inside == "h2":
            self.headings.append(data)
        elif inside == "b" and "figcaption" in self._open:
            self._chart = data
            assert data not in self.charts
            self.charts[data] = []
        elif inside == "span":
            self.charts[self._chart].append(data)
        elif inside in ("td", "th"):
            self.rows[-1][-1] += data


def places(path: str) -> list[list[tuple[float, float]]]:
    """The pieces of a line: the points of each, in units of the picture."""
    pieces = [piece for piece in path.replace("h0", "").split("M") if piece]
    return [[tuple(map(float, re.split("[ ,]", point))) for point in piece.split("L")] for piece in pieces]
