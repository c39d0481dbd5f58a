"""No file of the product leans on a private name of another library that `liger_trainer/compat/` does not check."""

import ast
import functools
import re

import pytest

from liger_trainer.compat import features
from liger_trainer.compat.private import TESTED
from tests.compat.test_private import CHECKS, feature_of
from tests.test_layout import imports, product_modules

BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
PYTHONS_OWN = {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
"""Documented names of Python: of named tuples, `os` and `sys`."""

CHECKED_BY = {
    "liger_trainer.attention.interface": "liger_trainer.patching.attention",
    "liger_trainer.patching.binding": "liger_trainer.patching.moe.experts",
    "liger_trainer.patching.moe.experts_formula": "liger_trainer.patching.moe.experts",
    "liger_trainer.patching.use_kernels": "liger_trainer.stock_trainer",
    "liger_trainer.plan.running": "liger_trainer.trainers.trl_mixin",
    "liger_trainer.trainers.checks.out_of_memory": "liger_trainer.trainers.trl_mixin",
    "liger_trainer.trainers.deferred_metrics": "liger_trainer.trainers.sft_trainer",
    "liger_trainer.trainers.generation_trainers": "liger_trainer.trainers.generation_trainers",
    "liger_trainer.trainers.grouping": "liger_trainer.trainers.generation_trainers",
}
"""Parts that are checked by the module that they are a part of, or that gives them what they read from."""

MODULES = product_modules()
# The sweeps are scripts for one device and one version, which the wheel leaves out.
OUTSIDE = [name for name in MODULES if not name.startswith(("liger_trainer.compat", "liger_trainer.benchmarks.sweeps"))]


def is_private(name):
    return bool(re.match("_(?!_)", name))


def private_part(path):
    """A dotted path from its first private name on: what is inside of something private is private too."""
    words = re.split(r"[.:]", path)
    return words[next((place for place, word in enumerate(words) if is_private(word)), len(words)) :]


def names_in(declared):
    """The private names that a declaration checks."""
    return {*private_part(declared.path), *filter(is_private, declared.uses.split(", "))}


def read_in(tree):
    """The private attributes that a file reads, and the private names or modules that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            of_library = re.fullmatch(r"(\w+)(\.\w+)+", path) and path.split(".")[0] in TESTED
            yield from private_part(path if of_library else node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
            yield from private_part(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ()
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in TESTED:
            yield from (word for alias in node.names for word in private_part(f"{node.module}.{alias.name}"))
        elif isinstance(node, ast.Import):
            yield from (word for alias in node.names for word in private_part(alias.name))


def own_attributes(tree):
    """The private attributes that the classes of a file define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", item)]
                yield from (getattr(target, "name", getattr(target, "id", "")) for target in targets)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


IMPORTED = {name: set(imports(path, MODULES)) for name, path in MODULES.items()}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
OURS = {attribute for tree in TREES.values() for attribute in own_attributes(tree)}
DECLARED = {name for feature in features() for declared in feature.names for name in names_in(declared)}
CHECKED = {}  # by file: the names that it checks itself
for path, _, _, library, constant in CHECKS:
    checked = {name for declared in feature_of(library, constant).names for name in names_in(declared)}
    CHECKED.setdefault(path, set()).update(checked)


@functools.cache
def reached_from(name):
    """A module and everything that it imports."""
    seen, pending = set(), [name]
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            pending += IMPORTED[module]
    return seen


@pytest.mark.parametrize("name", [name for name in OUTSIDE if any(read_in(TREES[name]))])
def test_private_names_are_declared_and_checked(name):
    foreign = {each for each in read_in(TREES[name]) if each in DECLARED or each not in OURS} - PYTHONS_OWN
    reached = reached_from(name) | reached_from(CHECKED_BY.get(name, name))
    checked = set().union(*(CHECKED.get(MODULES[module], set()) for module in reached))
    assert foreign <= checked, f"{name} uses names that it does not check: {sorted(foreign - checked)}"


def test_what_is_found():
    source = "import torch._a\nfrom torch.b import _c\nx._d.y\nhasattr(x, '_e')\nx.f\nx.__g__\ntorch._h.i(j)\n"
    assert set(read_in(ast.parse(source))) == {"_a", "_c", "_d", "_e", "_h", "i"}
    source = "class A:\n    _a: int = 1\n    _b = 2\n    def _c(self):\n        self._d = x._e\n        x._f = 3\n"
    assert set(own_attributes(ast.parse(source))) == {"_a", "_b", "_c", "_d"}
