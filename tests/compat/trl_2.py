"""TRL as its version 2.0 will be: the installed one without what its warnings say will be removed then.

[`install`] changes the source of TRL's modules as they are imported, so it comes before the first import of TRL.

- The block around such a warning goes: the code for a deprecated option, value or argument. Where there is no block
  around it, the function goes, or the class whose method it is in, which is an old import path.
- An option that such a warning names goes from the configurations, and an argument from the function that warns. Where
  the rest of TRL reads one, it finds None.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ANNOUNCED = re.compile(r"removed in (TRL |version )?v?2\.0")
_NAMED = re.compile(r"""^["'](?:The )?`(\w+)(?:=True)?`""")
_STAYS = "return_outputs"
"""An argument that transformers' Trainer passes; what TRL does for it goes."""
_MADE_OF = {"label_smoothing_factor": "label_smoother"}
"""Attributes that the Trainer makes of options."""
_READ_FROM = ("self", "args", "self.args")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """The modules of the installed TRL: the path and the tree of each, without importing one."""
    (folder,) = importlib.util.find_spec("trl").submodule_search_locations  # type: ignore[misc, union-attr]
    for path in sorted(Path(folder).rglob("*.py")):
        yield str(path.relative_to(folder)), ast.parse(path.read_text(encoding="utf-8"))


def announcement(node: ast.AST) -> str | None:
    """The text of a statement that warns of a removal in 2.0; None for any other."""
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "warnings.warn":
        text = ast.unparse(call.args[0])
        return text if _ANNOUNCED.search(text) else None
    return None


def _named_in(tree: ast.AST) -> set[str]:
    """The options and arguments that the warnings of a module or a function name; not those of which a value goes."""
    texts = [text for node in ast.walk(tree) if (text := announcement(node))]
    return {found[1] for text in texts if (found := _NAMED.match(text))}


def options() -> set[str]:
    """The fields of TRL's configurations that its warnings name."""
    trees = [tree for _, tree in sources()]
    configs = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bodies = [line for node in configs if node.name.endswith("Config") for line in node.body]
    fields = {
        line.target.id for line in bodies if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }
    return fields & set().union(*map(_named_in, trees))


class _Removed(ast.NodeTransformer):
    def __init__(self, tree: ast.Module, fields: set[str]) -> None:
        names = fields | _named_in(tree) - {_STAYS}
        self.fields, self.attributes = fields, names | {_MADE_OF[name] for name in names & _MADE_OF.keys()}
        self.taken: set[str] = set()

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if any(map(announcement, node.body)):
            self.taken.add(f"if {ast.unparse(node.test)}")
            return None
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST | None:
        if any(announcement(line) for each in node.body for line in getattr(each, "body", ())):
            self.taken.add(f"class {node.name}")
            return None
        if node.name.endswith("Config"):
            fields = {line for line in node.body if getattr(getattr(line, "target", None), "id", "") in self.fields}
            self.taken |= {f"option {line.target.id}" for line in fields}  # type: ignore[attr-defined]
            node.body = [line for line in node.body if line not in fields]
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        if any(map(announcement, node.body)):
            self.taken.add(f"function {node.name}")
            return None
        positional = node.args.args
        gone = {each.arg for each in positional} & _named_in(node) - {_STAYS}
        first = len(positional) - len(node.args.defaults)
        node.args.defaults = [
            node.args.defaults[at - first] for at, each in enumerate(positional) if at >= first and each.arg not in gone
        ]
        node.args.args = [each for each in positional if each.arg not in gone]
        self.taken |= {f"argument {name} of {node.name}" for name in gone}
        self.generic_visit(node)
        return _Nothing(gone).visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        read = isinstance(node.ctx, ast.Load) and ast.unparse(node.value) in _READ_FROM
        return ast.Constant(None) if read and node.attr in self.attributes else self.generic_visit(node)


class _Nothing(ast.NodeTransformer):
    """An argument that is gone: None where it is read, and passed to nobody."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        node.keywords = [each for each in node.keywords if each.arg not in self.names]
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(None) if node.id in self.names and isinstance(node.ctx, ast.Load) else node


def removed(tree: ast.Module, fields: set[str]) -> tuple[ast.Module, set[str]]:
    """A module without what is removed, and what that was."""
    transformer = _Removed(tree, fields)
    return ast.fix_missing_locations(transformer.visit(tree)), transformer.taken


class _Loader(importlib.machinery.SourceFileLoader):
    fields: set[str]

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        return compile(removed(tree, self.fields)[0], path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.fields = options()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "trl":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.fields = self.fields
        return spec


def install() -> None:
    """Makes this process import TRL 2.0."""
    assert "trl" not in sys.modules, "TRL is imported already"
    sys.meta_path.insert(0, _Finder())
