"""What `make release-check` sees, and that nothing but the date of a release keeps this tree from passing it."""

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests import release_check
from tests.compat.versions import dependencies, recorded
from tests.release_check import (
    NEWEST_RUN,
    in_the_archives,
    in_the_commands,
    in_the_newest_run,
    in_the_tree,
    in_the_version,
    in_the_words,
    version_of,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture
def release(tmp_path):
    """A repository with the files that name the version, as they are at a release."""
    (tmp_path / "liger_trainer").mkdir()
    (tmp_path / "liger_trainer" / "_version.py").write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0 (2027-01-31)\n\n## 1.1.0 (2026-12-01)\n")
    (tmp_path / "CITATION.cff").write_text("version: 1.2.0\ndate-released: 2027-01-31\n")
    (tmp_path / "constraints.txt").write_text(
        "torch==2.13.0\nPyYAML==6.0.3  # recipes\nmkdocs==1.6.1\ntriton>=3.6,<3.10\n"
    )
    (tmp_path / NEWEST_RUN).parent.mkdir(parents=True)
    versions = dict.fromkeys(dependencies(), "1.0") | {"torch": "2.13.0+cpu", "pyyaml": "6.0.3"}
    (tmp_path / NEWEST_RUN).write_text(recorded(versions))
    for words in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def day(after):
    """So many days after today, where the clock shows UTC."""
    return str(datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=after))


def test_a_release_passes(release):
    assert list(in_the_version(release)) == list(in_the_words(release)) == list(in_the_newest_run(release)) == []


def test_a_run_with_the_newest_dependencies(release):
    path = release / NEWEST_RUN
    run = json.loads(path.read_text())
    assert run["versions"]["torch"] == "2.13.0", "without the local part"
    run["versions"]["pyyaml"] = "6.0.4"
    del run["versions"]["trl"]
    run["date"] = day(-8)
    path.write_text(json.dumps(run))
    assert [line.partition("; ")[0] for line in in_the_newest_run(release)] == [
        f"{NEWEST_RUN}: 8 days old, at most 7 are allowed",
        "constraints.txt: PyYAML is 6.0.3",
        f"{NEWEST_RUN}: says nothing of trl",
    ]
    path.unlink()
    assert list(in_the_newest_run(release)) == [f"{NEWEST_RUN}: missing; `make newest` writes it where all tests pass"]


@pytest.mark.parametrize(
    ("after", "problem"),
    [
        (0, None),
        (-1, None),
        (-7, None),
        (-8, "8 days old, at most 7 are allowed; run `make newest` again"),
        (-400, "400 days old, at most 7 are allowed; run `make newest` again"),
        (1, f"of {day(1)}, which is yet to come; run `make newest` again, by a clock that is right"),
        (9999, f"of {day(9999)}, which is yet to come; run `make newest` again, by a clock that is right"),
    ],
)
def test_the_day_of_the_run(release, after, problem):
    run = json.loads((release / NEWEST_RUN).read_text())
    assert run["date"] == day(0)
    (release / NEWEST_RUN).write_text(json.dumps(run | {"date": day(after)}))
    assert list(in_the_newest_run(release)) == [f"{NEWEST_RUN}: {problem}"] * (problem is not None)


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Etc/GMT+12"])
def test_the_day_of_the_run_is_that_of_no_time_zone(release, zone, monkeypatch):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert json.loads(recorded({}))["date"] == day(0)
        assert list(in_the_newest_run(release)) == []
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "JSONDecodeError: "),
        ("{", "JSONDecodeError: "),
        ("[]", "TypeError: "),
        ("null", "TypeError: "),
        ("{}", "KeyError: 'date'"),
        ('{"date": "31.01.2027", "versions": {}}', "ValueError: Invalid isoformat string: '31.01.2027'"),
        ('{"date": "2027-02-31", "versions": {}}', "ValueError: day is out of range for month"),
        ('{"date": null, "versions": {}}', "TypeError: "),
        ('{"date": "2027-01-31"}', "KeyError: 'versions'"),
        ('{"date": "2027-01-31", "versions": null}', "TypeError: "),
        ('{"date": "2027-01-31", "versions": "2.13.0"}', "ValueError: "),
        ("\udcff", "UnicodeDecodeError: "),
    ],
)
def test_a_record_that_cannot_be_read(release, text, why):
    (release / NEWEST_RUN).write_text(text, errors="surrogateescape")
    (line,) = in_the_newest_run(release)
    assert line.startswith(f"{NEWEST_RUN}: not as `make newest` writes it ({why}")
    assert line.endswith("); run it again")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("CHANGELOG.md", "2027-01-31", "unreleased", "CHANGELOG.md: the first section is '1.2.0 (unreleased)'"),
        ("CHANGELOG.md", "2027-01-31", "2027-02-31", "CHANGELOG.md: the first section is '1.2.0 (2027-02-31)'"),
        ("CHANGELOG.md", "## 1.2.0", "## 1.3.0", "CHANGELOG.md: the first section is '1.3.0 (2027-01-31)'"),
        ("CITATION.cff", "1.2.0", "1.1.0", "CITATION.cff: `version` is '1.1.0'"),
        ("CITATION.cff", "01-31", "01-30", "CITATION.cff: `date-released` is 2027-01-30; CHANGELOG.md has 2027-01-31"),
    ],
)
def test_a_version_or_date_that_differs(release, file, old, new, problem):
    (release / file).write_text((release / file).read_text().replace(old, new, 1))
    (found,) = in_the_version(release)
    assert found.startswith(problem)


def test_what_is_not_committed(release):
    assert {line.split(":")[0] for line in in_the_tree(release)} == {
        "CHANGELOG.md",
        "CITATION.cff",
        "constraints.txt",
        "liger_trainer/_version.py",
        NEWEST_RUN,
    }
    name = ["-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run(["git", *name, "commit", "--quiet", "-m", "release"], cwd=release, check=True)
    assert list(in_the_tree(release)) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see /ho" + "me/ann/notes", "a home folder"),
        ("ask ann" + "@example.org", "an e-mail address"),
        ("pip install --index" + "-url https://mirror", "a package index"),
        ("HF_TOKEN=hf" + "_" + "a" * 34, "an access token"),
        ("-----BEGIN RSA " + "PRIVATE KEY-----", "a private key"),
        ("in {root}/outputs", "the folder of this checkout"),
    ],
)
def test_private_words(release, text, what):
    (release / "notes.md").write_text("# Notes\n\n" + text.format(root=release))
    assert list(in_the_words(release)) == []  # not tracked
    subprocess.run(["git", "add", "."], cwd=release, check=True)
    (found,) = in_the_words(release)
    assert found.startswith("notes.md:3: ")
    assert found.endswith(f" is {what}")


def test_the_archives_of_another_version(tmp_path):
    (tmp_path / "liger_trainer-1.1.0.tar.gz").touch()
    (found,) = in_the_archives(tmp_path, "1.2.0")
    assert "holds liger_trainer-1.1.0.tar.gz; it must hold liger_trainer-1.2.0-py3-none-any.whl and" in found


def test_a_command_that_fails():
    commands = [[sys.executable, "-c", f"raise SystemExit({code})"] for code in (0, 3)]
    (found,) = in_the_commands(commands)
    assert found == f"`{sys.executable} -c 'raise SystemExit(3)'` fails; its output is above"


def test_each_problem_is_a_line_and_nothing_is_built(release, monkeypatch, capsys):
    monkeypatch.setattr(release_check, "ROOT", release)
    monkeypatch.setattr(release_check, "in_the_commands", None)
    assert release_check.main() == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"release-check: {line}" for line in in_the_tree(release)]


def test_this_tree_has_no_private_words():
    assert list(in_the_words(ROOT)) == []


def test_citation():
    """The keys that the citation file format 1.2.0 asks for, and no others than it knows."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version_of(ROOT)
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == "Apache-2.0"
    assert citation["type"] == "software"
    known = {"cff-version", "message", "title", "abstract", "type", "authors", "version", "date-released", "license"}
    assert {"message", "title", "authors"} <= citation.keys() <= known | {"keywords"}
    assert all(author.keys() == {"name"} and author["name"] for author in citation["authors"])
    texts = [*(citation[key] for key in ("message", "title", "abstract", "version")), *citation["keywords"]]
    assert all(isinstance(text, str) and text for text in texts)
