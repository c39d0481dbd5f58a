"""Hooks of mkdocs: what griffe needs to read the package, constructors of trainers, and the command line's help.

griffe, which reads the docstrings of the API pages without importing anything, skips folders without an `__init__.py`;
`kernels/`, `configs/` and `callbacks/` must not have one (docs/architecture.md). It reads a copy in which they have.
"""

import importlib
import inspect
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Copies the package and has the API pages read the copy."""
    folder = Path(tempfile.mkdtemp(prefix="liger_trainer_docs-"))
    shutil.copytree(ROOT / "liger_trainer", folder / "liger_trainer", ignore=shutil.ignore_patterns("__pycache__"))
    for package in (path for path in folder.rglob("*") if path.is_dir()):
        (package / "__init__.py").touch()
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(folder)]
    config.extra["copied_package"] = str(folder)
    return config


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Puts the help of a command in the place of `<!-- help: COMMAND -->`, and beside a picture its dark version."""
    markdown = re.sub(r"<!-- help(?:: (\w+))? -->", _help, markdown)
    return re.sub(r"!\[([^]]*)\]\(([^)]*images/[\w-]+)\.png\)", _in_both_schemes, markdown)


def _in_both_schemes(found: re.Match[str]) -> str:
    """The two versions of a picture, of which the theme shows one; a version that is missing stops a strict build."""
    text, path = found.groups()
    return f"![{text}]({path}.png#only-light)![{text}]({path}-dark.png#only-dark)"


def _help(found: re.Match[str]) -> str:
    from liger_trainer.tools.cli.parser import make_parser

    os.environ["COLUMNS"] = "80"
    parser = make_parser()
    if found[1]:
        (commands,) = (action for action in parser._actions if isinstance(action.choices, dict))
        parser = commands.choices[found[1]]
    return f"```text\n{parser.format_help()}```"


class Constructors(griffe.Extension):
    """Shows the parameters of constructors that `parameters_of` decorates: those of a trainer of another library."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Replaces the `*args` and `**kwargs` of the source by what the class itself takes."""
        init = cls.members.get("__init__")
        decorators = init.decorators if isinstance(init, griffe.Function) else []
        if not any(str(each.value).startswith("parameters_of(") for each in decorators):
            return
        real = getattr(importlib.import_module(cls.module.path), cls.name)
        init.parameters = griffe.Parameters(griffe.Parameter("self"), *map(_shown, _parameters(real)))


def _parameters(cls: type) -> list[inspect.Parameter]:
    return list(inspect.signature(cls).parameters.values())


def _shown(parameter: inspect.Parameter) -> griffe.Parameter:
    """A parameter with its annotation as text, in which names have no modules."""
    given = parameter.annotation
    text = given if isinstance(given, str) else inspect.formatannotation(given)
    return griffe.Parameter(
        parameter.name,
        annotation=re.sub(r"\b(?:\w+\.)+(?=\w)", "", text),
        kind=griffe.ParameterKind.positional_or_keyword,
        default=None if parameter.default is inspect.Parameter.empty else repr(parameter.default),
    )


def on_page_content(html: str, **_: object) -> str:
    """Shows Hugging Face's references in docstrings, [`~trl.SFTTrainer`], as plain names."""
    return re.sub(r"\[(<code>)(?:~[\w.]*\.)?([\w.]+</code>)\](?!\()", r"\1\2", html)


def on_post_build(config: MkDocsConfig) -> None:
    """Removes the copy."""
    shutil.rmtree(config.extra["copied_package"])
