"""What must hold before a release: `make release-check` prints a line for each thing that does not, and fails."""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml

from tests.compat.versions import dependencies

ROOT = Path(__file__).parents[1]
FOLDERS = {"liger_trainer": "liger_trainer"} | {
    name: f"liger_trainer/{name}" for name in ("kernels", "callbacks", "configs", "recipes", "benchmarks")
}
"""Where the files of a top-level folder are in the package."""
BESIDE = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
"""What the build reads beside the folders."""
STARTUP_FILE = "liger_trainer_as_liger.pth"
"""Lies in the wheel beside the package, where Python reads it at its start, too."""

NEWEST_RUN = "tests/compat/newest.json"
NEWEST_DAYS = 7
"""How old the run may be: a release of a library that breaks something should not be live for longer, unseen."""

PRIVATE = {
    "a home folder": re.compile(r"(?<![\w./])/(?:home|Users|root)/\w[\w/.-]*"),
    "an e-mail address": re.compile(r"[\w-]@[\w-]+\.[a-z]{2,}"),
    "a package index": re.compile(r"index[-_]url[ =]+\S+"),
    "an access token": re.compile(r"\b(?:hf_[A-Za-z]{34}|gh[a-z]_\w{36}|github_pat_\w{22}|AKIA[A-Z0-9]{16})"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
}


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def in_the_tree(root: Path) -> Iterator[str]:
    """Changes that no commit holds."""
    for line in git(root, "status", "--porcelain").splitlines():
        yield f"{line[3:]}: not committed; a release is what a commit holds"


def in_the_version(root: Path) -> Iterator[str]:
    """A version or a date that differs between the three files that have it."""
    version = version_of(root)
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    if citation.get("version") != version:
        yield f"CITATION.cff: `version` is {citation.get('version')!r}; liger_trainer/_version.py has {version!r}"
    first = re.search(r"^## (.*)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    heading = first[1] if first else "missing"
    found = re.fullmatch(rf"{re.escape(version)} \((\d{{4}}-\d\d-\d\d)\)", heading)
    if not found or not _is_a_day(found[1]):
        yield f"CHANGELOG.md: the first section is {heading!r}; it must be '{version} (YYYY-MM-DD)'"
    elif str(citation.get("date-released")) != found[1]:
        yield f"CITATION.cff: `date-released` is {citation.get('date-released')}; CHANGELOG.md has {found[1]}"


def _is_a_day(text: str) -> bool:
    try:
        return bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


def version_of(root: Path) -> str:
    """The version, read without importing the package."""
    return re.findall(r'^__version__ = "(.+)"$', (root / "liger_trainer/_version.py").read_text(), re.MULTILINE)[0]


def in_the_newest_run(root: Path) -> Iterator[str]:
    """No run of all tests with the newest dependencies, an old one, or other versions than are pinned.

    A day is one of UTC, so that it is the same on the machine of the run and here.
    """
    if not (root / NEWEST_RUN).is_file():
        yield f"{NEWEST_RUN}: missing; `make newest` writes it where all tests pass"
        return
    try:
        run = json.loads((root / NEWEST_RUN).read_text(encoding="utf-8"))
        day, versions = datetime.date.fromisoformat(run["date"]), dict(run["versions"])
    except (ValueError, TypeError, KeyError) as error:
        yield f"{NEWEST_RUN}: not as `make newest` writes it ({type(error).__name__}: {error}); run it again"
        return
    age = (datetime.datetime.now(datetime.UTC).date() - day).days
    if age > NEWEST_DAYS:
        yield f"{NEWEST_RUN}: {age} days old, at most {NEWEST_DAYS} are allowed; run `make newest` again"
    elif age < 0:
        yield f"{NEWEST_RUN}: of {day}, which is yet to come; run `make newest` again, by a clock that is right"
    lines = (root / "constraints.txt").read_text(encoding="utf-8")
    for name, pinned in re.findall(r"^([\w.-]+)==(\S+)", lines, re.MULTILINE):
        ran = versions.get(name.lower())
        if ran is not None and ran != pinned:
            yield f"constraints.txt: {name} is {pinned}; all tests passed with {ran} on {day} ({NEWEST_RUN})"
    for name in dependencies():
        if name.lower() not in versions:
            yield f"{NEWEST_RUN}: says nothing of {name}; run `make newest` again"


def in_the_words(root: Path) -> Iterator[str]:
    """What tells of a machine or a person, in any tracked file of text."""
    patterns = dict(PRIVATE)
    here = root.resolve()
    if len(here.parts) > 2:  # a checkout in /data is no secret
        patterns["the folder of this checkout"] = re.compile(rf"(?<![\w./]){re.escape(str(here))}\b")
    for name in git(root, "ls-files", "-z").split("\0")[:-1]:
        path = root / name
        if path.is_symlink() or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        for what, pattern in patterns.items():
            for found in pattern.finditer(text):
                yield f"{name}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]!r} is {what}"


def packaged() -> set[str]:
    """Every file that the wheel must hold, as it is named there."""
    names = {STARTUP_FILE}
    for folder, place in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):  # which does not follow the links in liger_trainer/
            # The sweeps choose launch configurations: tools for this repository alone.
            shipped = path.suffix in (".py", ".yaml", ".typed", ".pth") or path.name == "metadata.json"
            if shipped and path.is_file() and "sweeps" not in path.parts:
                names.add(f"{place}/{path.relative_to(ROOT / folder)}")
    return names


def in_the_archives(dist: Path, version: str) -> Iterator[str]:
    """A wheel or an sdist of `dist` that lacks a file, has one too many, or is of another version."""
    wheel, sdist = f"liger_trainer-{version}-py3-none-any.whl", f"liger_trainer-{version}.tar.gz"
    found = {path.name for path in dist.glob("*")}
    if found != {wheel, sdist}:
        yield f"{dist.name}/ holds {', '.join(sorted(found)) or 'nothing'}; it must hold {wheel} and {sdist}"
        return
    with zipfile.ZipFile(dist / wheel) as archive:
        metadata = f"liger_trainer-{version}.dist-info"
        held = {name for name in archive.namelist() if not name.startswith(f"{metadata}/")}
        yield from _differences(wheel, held, packaged())
        if f"{metadata}/licenses/LICENSE" not in archive.namelist():
            yield f"{wheel}: {metadata}/licenses/LICENSE is missing"
    with tarfile.open(dist / sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    names = {name for name in names if not name.startswith("liger_trainer.egg-info/")}
    beside = {*BESIDE, "MANIFEST.in", "PKG-INFO", "setup.cfg"}
    yield from _differences(sdist, names, packaged() - {STARTUP_FILE} | beside)


def _differences(archive: str, held: set[str], expected: set[str]) -> Iterator[str]:
    yield from (f"{archive}: {name} is missing" for name in sorted(expected - held))
    yield from (f"{archive}: {name} does not belong there" for name in sorted(held - expected))


def in_the_commands(commands: Iterable[list[str]]) -> Iterator[str]:
    """Commands that fail; what they print is shown."""
    for command in commands:
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            yield f"`{shlex.join(command)}` fails; its output is above"


def main() -> int:
    """Prints what is wrong, and returns 1 where anything is; builds nothing before the rest is right."""
    problems = [*in_the_tree(ROOT), *in_the_version(ROOT), *in_the_newest_run(ROOT), *in_the_words(ROOT)]
    if not problems:
        snippets = [sys.executable, "-m", "pytest", "tests/test_readme.py", "tests/test_docs.py", "-k", "README"]
        problems = [*in_the_commands([snippets, [os.environ.get("MAKE", "make"), "dist"]])]
        problems += in_the_archives(ROOT / "dist", version_of(ROOT))
    for problem in problems:
        print(f"release-check: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
