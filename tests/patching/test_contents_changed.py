"""What a forward reads in containers, configs and globals is changed after patching; what it never reads is free."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import nn

from liger_trainer import apply_liger_kernel
from liger_trainer.head import warn_once
from liger_trainer.patching.as_written import is_as_proved, is_bound_by_us
from tests.patching import toys
from tests.patching.comparisons import LAYERS

NUMBER, PAIR, NUMBERS = 2.0, (1.0, 2.0), [2.0]
OPTIONS = types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0))
FILE = types.ModuleType("constants")
FILE.NUMBER = 2.0


class Norm(nn.Module):
    """An RMSNorm times half of a 2 that each class reads elsewhere."""

    numbers = (2.0,)

    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.unread = nn.Parameter(torch.ones(8)), 1e-6, 3
        self.options, self.values, self.nested = {"g": 2.0}, [2.0], {"all": [{"g": 2.0}]}
        self.config = types.SimpleNamespace(text=types.SimpleNamespace(scale=2.0, entries={"g": 2.0}))
        self.table = torch.tensor(2.0)

    def half(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * 0.5

    def normed(self, x):
        return self.half(x)


def of_its_file(x):
    return x * NUMBER


class Base(Norm):
    def forward(self, x):
        return self.normed(x) * self.options["g"]


class Sub(Base):
    def forward(self, x):
        return super().forward(x)


def with_global(patch, name, value):
    patch.setitem(globals(), name, value)


CHANGES = {
    "a dictionary": (lambda s, x: s.normed(x) * s.options["g"], lambda m, p: m.options.update(g=4.0)),
    "a list": (lambda s, x: s.normed(x) * s.values[0], lambda m, p: m.values.__setitem__(0, 4.0)),
    "a dictionary in a list": (
        lambda s, x: s.normed(x) * s.nested["all"][0]["g"],
        lambda m, p: m.nested["all"][0].update(g=4.0),
    ),
    "by a string": (lambda s, x: s.normed(x) * getattr(s, "options")["g"], lambda m, p: m.options.update(g=4.0)),  # noqa: B009
    "a config": (lambda s, x: s.normed(x) * s.config.text.scale, lambda m, p: setattr(m.config.text, "scale", 4.0)),
    "a dictionary of a config": (
        lambda s, x: s.normed(x) * s.config.text.entries["g"],
        lambda m, p: m.config.text.entries.update(g=4.0),
    ),
    "a list of the class": (lambda s, x: s.normed(x) * s.numbers[0], lambda m, p: m.numbers.__setitem__(0, 4.0)),
    "a global number": (lambda s, x: s.normed(x) * NUMBER, lambda m, p: with_global(p, "NUMBER", 4.0)),
    "a number of a function": (lambda s, x: of_its_file(s.normed(x)), lambda m, p: with_global(p, "NUMBER", 4.0)),
    "a global tuple": (lambda s, x: s.normed(x) * PAIR[1], lambda m, p: with_global(p, "PAIR", (1.0, 4.0))),
    "a global list": (lambda s, x: s.normed(x) * NUMBERS[0], lambda m, p: NUMBERS.__setitem__(0, 4.0)),
    "a global config": (
        lambda s, x: s.normed(x) * OPTIONS.inner.scale,
        lambda m, p: p.setattr(OPTIONS.inner, "scale", 4.0),
    ),
    "a number of a file": (lambda s, x: s.normed(x) * FILE.NUMBER, lambda m, p: p.setattr(FILE, "NUMBER", 4.0)),
}


@pytest.fixture(autouse=True)
def as_written():
    yield
    NUMBERS[:] = [2.0]


def norm_with(forward, base=Norm):
    return type("OneNorm", (base,), {"forward": forward, "numbers": [2.0]})()


def doubles(model, change, patch, x):
    before = model.it(x)
    change(model.it, patch)
    torch.testing.assert_close(model.it(x), 2 * before)


def assert_a_change_counts(model, change, copied, patch):
    """A patched part, or its copy, runs as written after a change that doubles what it computes."""
    apply_liger_kernel(model, LAYERS)
    model = copy.deepcopy(model) if copied else model
    assert is_bound_by_us(model.it)
    assert is_as_proved(model.it)
    doubles(model, change, patch, torch.linspace(-1, 2, 16).view(2, 8))
    assert not is_as_proved(model.it)


@pytest.mark.parametrize("copied", [False, True], ids=["", "of a copy"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_inside_counts(name, copied, monkeypatch):
    forward, change = CHANGES[name]
    assert_a_change_counts(toys.Toy(it=norm_with(forward)), change, copied, monkeypatch)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, p: m.options.update(g=4.0),
        lambda m, p: p.setattr(Base, "forward", lambda self, x: 2 * self.normed(x) * self.options["g"]),
        lambda m, p: p.setattr(Norm, "half", lambda self, x: 2 * Norm.kept(self, x)),
    ],
    ids=["an option", "the forward", "a method"],
)
def test_what_a_base_class_reads_counts(change, monkeypatch):
    monkeypatch.setattr(Norm, "kept", Norm.half, raising=False)
    model = toys.Toy(it=Sub())
    apply_liger_kernel(model, LAYERS)
    assert is_bound_by_us(model.it)
    doubles(model, change, monkeypatch, torch.linspace(-1, 2, 16).view(2, 8))


def test_compiled_code_sees_a_change_inside():
    torch.compiler.reset()
    model = toys.Toy(it=norm_with(CHANGES["a dictionary"][0]))
    apply_liger_kernel(model, LAYERS)
    compiled, x = torch.compile(model.it, backend="eager", fullgraph=True), torch.linspace(-1, 2, 16).view(2, 8)
    before = compiled(x)
    model.it.options["g"] = 4.0
    torch.testing.assert_close(compiled(x), 2 * before)


TABLE = torch.tensor(2.0)


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.normed(x) * s.table,
        lambda s, x: s.normed(x) * s.nested["table"],
        lambda s, x: s.normed(x) * TABLE,
    ],
    ids=["an attribute", "in a dictionary", "a global"],
)
def test_a_tensor_that_may_change_in_place_is_left_alone(forward):
    model = toys.Toy(it=norm_with(forward))
    model.it.nested["table"] = torch.tensor(2.0)
    (row,) = apply_liger_kernel(model, LAYERS).rows
    assert not row.applied
    assert "may change in place" in row.reason


@pytest.mark.parametrize("name", ["unread", "options", "table", "new"])
def test_what_no_code_reads_is_free(name, caplog, monkeypatch):
    monkeypatch.setattr(warn_once, "_said", set())
    model = toys.Toy(it=norm_with(lambda s, x: s.normed(x) * 2.0), mlp=toys.MLP(act=nn.SiLU()))
    assert all(row.applied for row in apply_liger_kernel(model, LAYERS))
    for module in (model.it, model.mlp):
        setattr(module, name, 5)
        assert is_as_proved(module)
    assert not caplog.records


def handed_on(module, x):
    return module.normed(x) * module.unread


def test_all_counts_where_the_module_is_handed_on():
    model = toys.Toy(it=norm_with(lambda s, x: handed_on(s, x)))
    model.it.unread = 2.0
    apply_liger_kernel(model, LAYERS)
    assert is_bound_by_us(model.it)
    doubles(model, lambda m, p: setattr(m, "unread", 4.0), None, torch.linspace(-1, 2, 16).view(2, 8))
