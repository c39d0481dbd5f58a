"""The trainers show the parameters of the trainers that they extend: to `inspect`, and in the API pages."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import pytest

import liger_trainer
from liger_trainer import LigerDPOTrainer
from tests.documents import ROOT

TRAINERS = sorted(name for name in liger_trainer.__all__ if name.endswith("Trainer"))


def shown(trainer: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(trainer).parameters)


def extended(trainer: type) -> type:
    """The class of transformers or TRL that a trainer extends."""
    return next(each for each in trainer.__mro__ if each.__module__.split(".")[0] in ("transformers", "trl"))


@pytest.mark.parametrize("name", TRAINERS)
def test_parameters_are_those_of_the_extended_trainer(name: str) -> None:
    trainer = getattr(liger_trainer, name)
    _, *theirs = inspect.signature(extended(trainer).__init__).parameters.values()  # type: ignore[misc]
    ours = shown(trainer)
    assert len(ours) > 10
    assert [(each.name, each.default) for each in ours.values()] == [(each.name, each.default) for each in theirs]
    assert all(each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for each in ours.values())
    for each in theirs:
        if each.name != "args":
            assert ours[each.name] == each
    own, stock, none = ours["args"].annotation.__args__
    assert own.__name__.startswith("Liger")
    assert issubclass(own, stock)
    assert stock.__name__ in str(inspect.signature(extended(trainer).__init__).parameters["args"])  # type: ignore[misc]
    assert none is type(None)


def test_a_constructor_of_the_user_s_own_is_shown_as_it_is() -> None:
    class Same(LigerDPOTrainer):
        """Adds no constructor."""

    class Other(LigerDPOTrainer):
        def __init__(self, name: str) -> None:
            """Another constructor."""

    assert shown(Same) == shown(LigerDPOTrainer)
    assert list(shown(Other)) == ["name"]


@pytest.mark.parametrize("name", TRAINERS)
def test_api_pages_show_them(name: str) -> None:
    griffe = pytest.importorskip("griffe")
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    trainer = getattr(liger_trainer, name)
    parent = griffe.Module("trainers", parent=griffe.Module("liger_trainer"))
    path = ROOT / (trainer.__module__.replace(".", "/") + ".py")
    module = griffe.visit(
        path.stem,
        filepath=path,
        code=path.read_text(encoding="utf-8"),
        extensions=griffe.load_extensions(hooks.Constructors()),
        parent=parent,
    )
    _, *parameters = module[name]["__init__"].parameters
    assert [each.name for each in parameters] == list(shown(trainer))
    own = shown(trainer)["args"].annotation.__args__[0].__name__
    assert str(module[name]["__init__"].parameters["args"].annotation).startswith(f"{own} | ")
    assert module[name]["__init__"].parameters["callbacks"].default == "None"
