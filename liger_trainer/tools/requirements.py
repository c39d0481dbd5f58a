"""The supported versions of other libraries, as pyproject.toml declares them for training."""

from __future__ import annotations

import functools
import importlib.metadata
import tomllib
from pathlib import Path


@functools.cache
def requirements() -> dict[str, str]:
    """The supported version range of each library that the trainers need here, such as ``{"trl": "<2,>=1.16"}``.

    The ranges come from the installed distribution or, in a plain checkout, from pyproject.toml.
    """
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("liger-trainer") or []
    except importlib.metadata.PackageNotFoundError:
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
        lines = project["dependencies"] + project["optional-dependencies"]["train"]
    needed = [Requirement(line) for line in lines]
    needed = [item for item in needed if item.marker is None or item.marker.evaluate({"extra": "train"})]
    return {item.name: str(item.specifier) for item in needed}
