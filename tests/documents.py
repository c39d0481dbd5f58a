"""README, CONTRIBUTING and the other pages, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUTSIDE_DOCS = ("README.md", "CONTRIBUTING.md", "examples/README.md", ".github/pull_request_template.md")
PAGES = [*(ROOT / page for page in OUTSIDE_DOCS), *sorted((ROOT / "docs").rglob("*.md"))]
TWO_PROCESSES = "<!-- runs on 2 processes -->\n"


def name(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of some languages."""
    return [code for _, code in _fenced(page, languages)]


def python_blocks(two_processes: bool) -> list[tuple[str, str]]:
    """Page and source of all Python, of one kind: that runs on two processes, or on one."""
    found = [(page, *block) for page in PAGES for block in _fenced(page, ("python",))]
    return [(name(page), code) for page, marker, code in found if (marker == TWO_PROCESSES) is two_processes]


def commands() -> list[str]:
    """Every command line in a block of shell, without comments, its continued lines joined."""
    found = set()
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                found.add(re.sub(r"(^|\s)#.*", "", line).strip())
    return sorted(found - {""})


def prose(page: Path) -> str:
    """A page without its blocks and without its measured tables."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"<sub>.*?</sub>", "", text)


def anchors(page: Path) -> set[str]:
    """The anchors that mkdocs and GitHub give the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def _fenced(page: Path, languages: tuple[str, ...]) -> list[tuple[str, str]]:
    pattern = rf"({re.escape(TWO_PROCESSES)})?```(?:{'|'.join(languages)})\n(.*?)```"
    return re.findall(pattern, page.read_text(encoding="utf-8"), flags=re.DOTALL)
