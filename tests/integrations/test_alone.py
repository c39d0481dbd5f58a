"""A plug-in imports its own framework, and neither another one nor a library that frameworks pin elsewhere."""

import ast
import functools

import pytest

from tests.forked import ROOT
from tests.test_layout import product_modules

FILES = sorted(path.stem for path in (ROOT / "liger_trainer" / "integrations").glob("[a-z]*.py"))
FRAMEWORKS = {"axolotl", "llamafactory", "swift", "verl"}
PINNED = {"accelerate", "datasets", "peft", "trl"}
MODULES = product_modules()


@functools.cache
def at_import(module):
    """What importing one of our modules imports: the statements at its top level, without what is for types alone."""
    imported = []
    for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return imported


@pytest.mark.parametrize("name", FILES)
def test_what_a_plugin_imports(name):
    left, seen = [f"liger_trainer.integrations.{name}"], set()
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left += at_import(module) if module in MODULES else []
    assert len(seen) > 10, "the imports are not found"
    libraries = {module.split(".")[0] for module in seen}
    assert not libraries & (FRAMEWORKS - {name} | PINNED)
    assert not {module for module in seen if module.startswith("liger_trainer.trainers")}
