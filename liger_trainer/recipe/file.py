"""Finds and reads recipe files, and finds the accelerate configurations that they name."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

import yaml

from liger_trainer.errors import UserError

LAUNCH_LINE = 'if __import__("liger_trainer.cli").cli.run_yaml(globals()): pass'
"""The line that makes a recipe runnable as Python; to YAML it is a key, which `read_recipe` drops."""


class RecipeError(UserError):
    """A mistake in a recipe or its data, which every ``check_...`` of this package raises; its text says what to do."""


class TrainingError(RecipeError):
    """A mistake that training found on this process; the other processes may not know of it."""


def first_line(error: BaseException) -> str:
    """The first line of a library's error as a sentence; if it ends in a colon, up to the end of that sentence."""
    lines = [line.strip() for line in (str(error).strip() or type(error).__name__).splitlines()]
    text = lines[0]
    for line in lines[1:6] if text.endswith(":") else []:
        text = f"{text} {line}"
        if line.endswith("."):
            break
    return text if text.endswith((".", "!", "?")) else f"{text}."


def shipped_recipes() -> dict[str, Path]:
    """The recipes in the package: name to file."""
    return packaged_files("liger_trainer.recipes", "*.yaml")


def packaged_files(package: str, pattern: str) -> dict[str, Path]:
    """The files that match `pattern` in a folder of the package, by name, in a source tree or an installed wheel."""
    module: Any = importlib.import_module(package)
    return {file.stem: file for file in sorted(file for place in module.__path__ for file in Path(place).glob(pattern))}


def find_recipe(name: str | Path) -> Path:
    """The file of a recipe, given by its path or by the name of a shipped recipe."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    if path.parent == Path() and path.name.removesuffix(".yaml") in shipped:
        return shipped[path.name.removesuffix(".yaml")]
    near = difflib.get_close_matches(path.stem, shipped, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    others = f"`liger-trainer recipes` lists the {len(shipped)} shipped ones."
    raise RecipeError(f"No recipe file {str(name)!r}.{hint} {others}")


def accelerate_config(name: str) -> Path:
    """The file of an accelerate configuration, given by its path or by the name of a shipped one."""
    if Path(name).is_file():
        return Path(name)
    shipped = shipped_configs()
    if name in shipped:
        return shipped[name]
    raise RecipeError(f"`accelerate_config` is {name!r}, which is not a file; shipped are {', '.join(shipped)}.")


def split_by(config: str | Path) -> str | None:
    """What splits a model over processes by an accelerate configuration file, such as ``"FSDP2"`` or ``"DeepSpeed"``.

    None if each process has it whole.
    """
    values = yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {}
    version = (values.get("fsdp_config") or {}).get("fsdp_version", 1)
    return {"FSDP": f"FSDP{version}", "DEEPSPEED": "DeepSpeed"}.get(str(values.get("distributed_type")))


def runs_alone(config: str | Path) -> bool:
    """Whether an accelerate configuration file is for one process, however many it is launched with."""
    values = yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {}
    return str(values.get("distributed_type")).upper() in ("NO", "FALSE")


def shipped_configs() -> dict[str, Path]:
    """The accelerate configurations in the package: name to file."""
    return packaged_files("liger_trainer.configs", "accelerate/*.yaml")


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, but a duplicate key is an error; YAML would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                continue
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key `{key.value}` appears twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_recipe(path: Path) -> dict[str, Any]:
    """The keys and values of a recipe file, in which a duplicate key is an error."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " Indent with spaces." if "'\\t'" in what else ""
        raise RecipeError(f"{path} is not valid YAML:{place} {what}.{hint}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not valid YAML: {first_line(error)}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no `key: value` lines; a recipe is a YAML mapping.")
    return {str(key): value for key, value in values.items() if not str(key).startswith("if __import__(")}
