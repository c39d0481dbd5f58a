"""The Dockerfile, the forms for issues as GitHub reads them, and the words with which docstrings describe arguments."""

import ast
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


def vague_lines(source):
    """Lines of the docstrings' sections that describe an argument, attribute or result by a pronoun or an "of"."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        sections = re.findall(r"^(Args|Attributes|Returns|Yields):\n((?: .*\n?)+)", ast.get_docstring(node) or "", re.M)
        for section, lines in sections:
            name = r"" if section in ("Returns", "Yields") else r"[*]*\w+(?: \(.*?\))?: "
            yield from re.findall(rf"^ {{4}}{name}(?:Of|That|Those|What|In)\b.*", lines, re.M)


def test_vague_lines_are_found():
    arguments = "Args:\n        x: Of rows.\n        *y (`int`): Those.\n        z: One.\n"
    function = f'def f(x, *y, z):\n    """Sums.\n\n    {arguments}\n    Returns:\n        That.\n    """'
    assert list(vague_lines(function)) == ["    x: Of rows.", "    *y (`int`): Those.", "    That."]


def test_docstrings_name_what_an_argument_is():
    files = [path for folder in (*FOLDERS, "tests") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): list(vague_lines(path.read_text(encoding="utf-8"))) for path in files}
    assert len(found) > 300
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize("folder", ["kernels", "liger_trainer/liger/operators"])
def test_a_file_with_kernels_or_operators_has_a_legend_of_its_shapes(folder):
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        helpers = "" if path.parent.name == "kernels" else r"|@(triton|gluon)\.jit"  # those for all are elementwise
        if re.search(rf"^(@operator\(|def _?\w+_kernel\({helpers})", text, re.MULTILINE):
            assert "Shapes: " in (ast.get_docstring(ast.parse(text)) or ""), path.relative_to(ROOT)
