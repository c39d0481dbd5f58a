"""README is short and true; `tests/test_docs.py` runs its code and follows its links."""

import re

from liger_trainer.recipe.file import shipped_recipes
from tests.documents import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_is_short():
    assert len(README.splitlines()) <= 200


def test_recipes_are_those_of_the_table():
    lines = re.findall(r"^\| (?:`(\w+_)`|newer models) \|(.*)\|$", README, flags=re.MULTILINE)
    methods = ("sft", "dpo", "kto", "orpo", "simpo", "grpo")
    named = set(re.findall(r"`(quickstart\w*)`", README))
    for prefix, cells in lines:
        *ticks, more = cells.split("|")
        named |= {prefix + method for method, tick in zip(methods, ticks, strict=True) if "✓" in tick}
        named |= {prefix + method for method in re.findall(r"`(\w+)`", more)}
    assert named == set(shipped_recipes())


def test_every_trainer_has_a_row_with_an_example():
    import liger_trainer

    trainers = {name for name in liger_trainer.__all__ if name.endswith("Trainer")}
    rows = dict(re.findall(r"^\| `(\w+Trainer)` \|.*\| (.+) \|$", README, flags=re.MULTILINE))
    assert set(rows) == trainers
    for example in rows.values():
        first, *more = re.findall(r"`(\w+)`", example) or [None]
        if first is None:
            assert example.startswith("[guide](")
            continue
        assert first in shipped_recipes()
        family = re.sub(r"_(sft|dpo|kto|orpo|simpo|grpo)$", "", first)
        assert {family + name for name in more if name.startswith("_")} <= set(shipped_recipes())


def test_ends_in_a_tree_of_the_folders_core_first():
    """Each folder of the repository, and each package of `liger_trainer/` in the order of docs/architecture.md."""
    (tree,) = re.findall(r"```text\n(.*?)```\n$", README, flags=re.DOTALL)
    rows = re.findall(r"^( *)([\w/]+)/ +(outer: )?\S", tree, flags=re.MULTILINE)
    assert len(rows) == len(tree.splitlines())
    assert all((ROOT / name).is_dir() for indent, name, _ in rows if not indent)
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    core, outer = page.split("## The packages")[1].split("**outside the core**")
    packages = re.findall(r"^\| `(\w+)/` ", core, flags=re.MULTILINE)
    others = re.findall(r"^\| `(\w+)/` ", outer, flags=re.MULTILINE)
    assert {name for _, name, outer in rows if outer} == set(others)
    inside = [name for indent, name, _ in rows if indent]
    assert set(inside) == {name for name in (*packages, *others) if not (ROOT / name).is_dir()}
    assert inside == sorted(inside, key=[*packages, *others].index)


def test_changelog_names_the_version():
    from liger_trainer._version import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
