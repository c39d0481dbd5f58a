"""Every private name of another library: present here, and without it a message that says what to do."""

import ast
import contextlib
import functools
import importlib
import logging
import re
import sys
import types
from pathlib import Path

import pytest

from liger_trainer.compat import LIBRARIES, features
from liger_trainer.compat.private import TESTED, Feature, Private, available, installed_version, require
from liger_trainer.tools.cli.doctor import private_names
from tests.compat import versions

ROOT = Path(__file__).parents[2]
EVERY = [(feature, name) for feature in features() for name in feature.names]
CHECKED = [(feature, name) for feature, name in EVERY if name.parameters is not None or name.uses or name.unpacks]


def identifier(value):
    return value.name if isinstance(value, Private) else re.sub(r"\W+", "_", value.text)


def owner_of(name):
    module, _, path = name.path.partition(":")
    *owners, last = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), last


def message_of(feature, caplog):
    """The message for the user: the error of a needed feature, the one warning of another."""
    if feature.needed:
        with pytest.raises(ImportError) as raised:
            require(feature)
        return str(raised.value)
    available.cache_clear()
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        assert not available(feature)
        assert not available(feature)
    available.cache_clear()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "this is off" in record.getMessage()
    return record.getMessage()


def check_message(message, feature, name):
    library = feature.library
    assert message.startswith(f"{library} {installed_version(library)}: `{name.name}` ")
    assert f"liger_trainer needs for {feature.text}." in message
    assert f"`pip install {library}=={TESTED[library]}`" in message
    assert "\n" not in message


def is_tested(library):
    return (installed_version(library) or "").partition("+")[0] == TESTED[library]


@pytest.fixture(autouse=True)
def _installed(request):
    feature = request.node.callspec.params.get("feature") if hasattr(request.node, "callspec") else None
    if feature is None:
        return
    version = installed_version(feature.library)
    if version is None:
        pytest.skip(f"{feature.library} is not installed")
    if not feature.needed and not is_tested(feature.library) and any(name.problem() for name in feature.names):
        pytest.skip(f"off with {feature.library} {version}, and not needed")


@pytest.mark.parametrize(("feature", "name"), EVERY, ids=identifier)
def test_present(feature, name):
    assert name.library == feature.library
    assert name.problem() is None
    if feature.needed:
        assert require(feature)[feature.names.index(name)] == name.find()
    else:
        assert available(feature)


@pytest.mark.parametrize(("feature", "name"), EVERY, ids=identifier)
def test_taken_away(feature, name, monkeypatch, caplog):
    owner, last = owner_of(name)
    if last in vars(owner):  # not inherited
        with contextlib.suppress(TypeError):  # a class that is not Python's
            monkeypatch.delattr(owner, last)
    if name.problem() is None:  # still there, or imported again by a module that imports what it is asked for
        find = Private.find

        def find_others(self):
            if self == name:
                raise AttributeError(last)
            return find(self)

        monkeypatch.setattr(Private, "find", find_others)
    message = message_of(feature, caplog)
    check_message(message, feature, name)
    # Without its own method a class has that of its base, such as an `__init__` or a `train`.
    assert "is missing" in message or hasattr(owner, last)


@pytest.mark.parametrize(("feature", "name"), CHECKED, ids=identifier)
def test_changed(feature, name, monkeypatch, caplog):
    owner, last = owner_of(name)
    if name.parameters is not None:
        monkeypatch.setattr(owner, last, lambda another: None)
        expected = f"takes (another), not ({name.parameters})"
    elif name.uses:
        monkeypatch.setattr(owner, last, lambda *args, **kwargs: None)
        expected = "no longer uses "
    message = message_of(feature, caplog)
    check_message(message, feature, name)
    assert expected in message


def sample(self, args=None, namespace=None):
    first, second = self.parse_known_args(args, namespace)
    return first, second


@pytest.mark.parametrize(
    ("expected", "problem"),
    [
        (Private("m:f", "self, args, namespace"), None),
        (Private("m:f", "self, ..."), None),
        (Private("m:f", "self, args"), "takes (self, args, namespace), not (self, args)"),
        (Private("m:f", uses="parse_known_args"), None),
        (Private("m:f", uses="parse_args, other"), "no longer uses `parse_args`, `other`"),
        (Private("m:f", unpacks="first, second"), None),
        (Private("m:f", unpacks="second, first"), "no longer unpacks (second, first)"),
    ],
)
def test_what_is_compared(expected, problem, monkeypatch):
    monkeypatch.setattr(Private, "find", lambda self: sample)
    assert expected.problem() == problem

    def decorated(function):  # without functools.wraps
        return lambda self, args=None, namespace=None: function(self, args, namespace)

    monkeypatch.setattr(Private, "find", lambda self: decorated(sample))
    assert expected.problem() == problem


def test_a_wrapper_that_passes_everything_on_is_fine(monkeypatch):
    """Such as another library's, around a method of the Trainer."""

    def wrapper(*args, **kwargs):
        return sample(*args, **kwargs)

    monkeypatch.setattr(Private, "find", lambda self: wrapper)
    assert Private("m:f", "self, model").problem() is None


def checks():
    """Where the product checks a feature: the module, whether on import, the function that checks, and the feature."""
    for folder in ("liger_trainer", "kernels", "callbacks", "configs", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            imported = {
                alias.name: (node.module.rpartition(".")[2], alias.name)
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("liger_trainer.compat.")
                for alias in node.names
            }
            at_import = [node for item in tree.body if not hasattr(item, "name") for node in ast.walk(item)]
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("require", "available"):
                    library, name = imported[node.args[0].id]
                    yield path, node in at_import, node.func.id, library, name


CHECKS = list(checks())


def feature_of(library, name):
    return getattr(importlib.import_module(f"liger_trainer.compat.{library}"), name)


def test_every_feature_is_checked_where_it_is_needed():
    found = {(library, name): set() for library in LIBRARIES for name, value in declared(library) if value}
    for _, _, function, library, name in CHECKS:
        found[library, name].add(function)
    for (library, name), functions in found.items():
        assert functions == {"require" if feature_of(library, name).needed else "available"}, (library, name)


def declared(library):
    module = importlib.import_module(f"liger_trainer.compat.{library}")
    return [(name, value) for name, value in vars(module).items() if isinstance(value, Feature)]


@pytest.mark.parametrize(
    ("path", "library", "name"),
    [(path, library, name) for path, early, function, library, name in CHECKS if early and function == "require"],
)
def test_the_part_that_needs_it_cannot_be_imported(path, library, name, monkeypatch):
    feature = feature_of(library, name)
    if not feature.applies:
        pytest.skip(f"{library} has these names since {feature.since}")
    monkeypatch.setattr(Private, "problem", lambda self: "is missing" if self is feature.names[-1] else None)
    copy = types.ModuleType(f"copy_of_{path.stem}")
    monkeypatch.setitem(sys.modules, copy.__name__, copy)  # where a dataclass looks for its module
    with pytest.raises(ImportError, match=re.escape(f"which liger_trainer needs for {feature.text}.")):
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), vars(copy))


def test_tested_versions_are_those_of_the_constraints():
    lines = dict(re.findall(r"^(\w+)(?:>=[\d.]+,<|=)=(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert {library: lines[library] for library in TESTED} == TESTED


def test_every_test_that_runs_with_other_versions_exists():
    assert all((ROOT / place).exists() for place in versions.TESTS)


@pytest.mark.parametrize(("since", "applies"), [(None, True), ("1.9", True), ("1.10", True), ("1.10.1", False)])
def test_names_of_newer_versions_are_not_asked_for(since, applies, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda library: "1.10.0+cpu")
    assert Feature("", Private("library:name"), since=since).applies == applies


def test_doctor_lists_them(monkeypatch):
    expected = {"ok", "note"} if all(map(is_tested, TESTED)) else {"ok", "note", "warning"}
    assert {finding.status for finding in private_names()} <= expected
    for finding in private_names():
        ours = [feature for feature in features() if feature.library == finding.subject.partition(" ")[0]]
        names = {name.name for feature in ours for name in feature.names if name.problem() is None}
        whole = (feature for feature in ours if not any(name.problem() for name in feature.names))
        canaries = {feature.canary for feature in whole if feature.canary}
        recognised = f", {len(canaries)} structures recognised" if canaries else ""
        if finding.status == "ok":
            assert finding.text == f"{len(names)} private names as expected{recognised}"
    from transformers import Trainer

    monkeypatch.delattr(Trainer, "_save_checkpoint")
    monkeypatch.setattr(Trainer, "_clip_grad_norm", lambda self: None)
    monkeypatch.delattr(Trainer, "_get_dataloader")
    wrong = {finding.text.split(":")[0]: finding for finding in private_names() if finding.status != "ok"}
    start = "transformers.trainer.Trainer"
    assert wrong[f"{start}._save_checkpoint"].status == "error"
    assert "missing; needed for checkpoints" in wrong[f"{start}._save_checkpoint"].text
    assert "changed: it takes (self), not (self, model)" in wrong[f"{start}._clip_grad_norm"].text
    assert wrong[f"{start}._get_dataloader"].status == "warning"
