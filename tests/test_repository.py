"""The Dockerfile copies what the package is built from, and the forms for issues are as GitHub reads them."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from liger_trainer.tools.cli.parser import make_parser
from tests.release_check import BESIDE, FOLDERS

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def instructions():
    """The instructions of the Dockerfile, each with its words; continued lines are joined, comments left out."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], shlex.split(line)[1:]) for line in lines if line]


def of_kind(kind):
    return [words for name, words in instructions() if name == kind]


def test_dockerfile_copies_what_the_package_is_built_from():
    copied = [word for words in of_kind("COPY") for word in words[:-1]]
    assert sorted(copied) == sorted([*FOLDERS, *BESIDE, "constraints.txt"])
    assert all((ROOT / word).exists() for word in copied)
    for source, target in (words for words in of_kind("COPY") if len(words) == 2):
        assert source == target, "the links in liger_trainer/ lead to ../NAME"
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
    assert sorted(allowed) == sorted(copied)


def test_dockerfile_is_pinned_and_ends_without_root():
    ((base,),) = of_kind("FROM")
    pin = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)[1]
    assert re.fullmatch(rf"pytorch/pytorch:{re.escape(pin)}-cuda\d+\.\d+-cudnn\d+-runtime", base)
    installs = [words for words in of_kind("RUN") if "pip" in words]
    (words,) = installs
    assert words[words.index("--constraint") + 1] == "constraints.txt"
    (extra,) = re.findall(r"^\.\[(.*)\]$", words[-1])
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    kinds = [name for name, _ in instructions()]
    assert kinds.index("USER") > max(index for index, kind in enumerate(kinds) if kind in ("RUN", "COPY"))
    ((user,),) = of_kind("USER")
    (made,) = [words for words in of_kind("RUN") if "useradd" in words]
    assert made[made.index("--uid") + 1] == user != "0"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_form(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() == {"name", "description", "labels", "body"}
    for item in form["body"]:
        assert {"type", "id", "attributes"} <= item.keys() <= {"type", "id", "attributes", "validations"}
        needed = {"textarea": {"label", "description"}, "dropdown": {"label", "description", "options"}}[item["type"]]
        assert needed <= item["attributes"].keys() <= needed | {"render"}
        assert all(isinstance(option, str) for option in item["attributes"].get("options", ()))
        assert item.get("validations", {"required": True}) == {"required": True}
    assert len({item["id"] for item in form["body"]}) == len(form["body"])
    for command in re.findall(r"`liger-trainer ([^`]+)`", path.read_text(encoding="utf-8")):
        make_parser().parse_args(command.split())


def test_a_bug_report_asks_for_the_doctor():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text(encoding="utf-8"))
    (doctor,) = [item for item in form["body"] if "liger-trainer doctor" in item["attributes"]["label"]]
    assert doctor["validations"]["required"]
