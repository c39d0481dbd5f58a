"""What objects and functions hold that a forward uses: a change after patching counts, and no gradient is lost."""

from __future__ import annotations

import copy
import functools
import types

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from liger_trainer import apply_liger_kernel
from liger_trainer.patching.as_written import is_as_proved
from tests.patching import toys
from tests.patching.comparisons import LAYERS
from tests.patching.test_contents_changed import Norm, assert_a_change_counts, norm_with


class Factor:
    """A callable object, whose methods and class read what it holds."""

    shared = 2.0

    def __init__(self, value=2.0):
        self.value, self.inner = value, {"others": [types.SimpleNamespace(number=value)]}

    def __call__(self, x):
        return x * self.value

    def apply(self, x):
        return x * self.value

    def deep(self, x):
        return x * self.inner["others"][0].number

    def of_class(self, x):
        return x * self.shared

    @property
    def number(self):
        return self.value


class Doubled(Factor):
    """Twice as much."""

    @property
    def number(self):
        return 2 * self.value


class Slotted:
    """As `Factor`, without a `__dict__`."""

    __slots__ = ("value",)

    def __init__(self):
        self.value = 2.0

    def apply(self, x):
        return x * self.value


class Config(PretrainedConfig):
    """A config with properties that raise."""

    factor, fails = 2.0, False

    @property
    def eps(self):
        raise NotImplementedError("each layer has its own")

    @property
    def checked(self):
        if self.fails:
            raise ValueError("not now")
        return 2.0


class Times(nn.Module):
    """A module that a tuple keeps from `nn.Module`."""

    factor = 2.0

    def __init__(self, **tensors):
        super().__init__()
        for name, value in tensors.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, x):
        return x * self.factor


class Four(Times):
    """Another number."""

    def forward(self, x):
        return x * 4.0


class Asked(Norm):
    """Makes up an attribute."""

    def __getattr__(self, name):
        return self.__dict__.get("_made_up", 2.0) if name == "made_up" else super().__getattr__(name)


GLOBAL, MODULE, number = Factor(), Times(), 2.0


def with_default(x, factor=2.0):
    return x * factor


def with_keyword(x, *, factor=2.0):
    return x * factor


def with_attribute(x):
    return x * with_attribute.factor


with_attribute.factor = 2.0


def as_code(x):
    return x * 2.0


def of_config(x, config):
    return x * config.factor


def scaled(function):
    """A decorator with its own global object."""

    @functools.wraps(function)
    def wrapped(self, x):
        return GLOBAL.apply(function(self, x))

    return wrapped


def nonlocal_factor():
    factor = 2.0

    def function(x):
        return x * factor

    def change():
        nonlocal factor
        factor = 4.0

    return {"function": function, "change": change}


def of_wrapped(owner):
    return {"bound": owner.apply, "partial": functools.partial(Factor.apply, owner)}


def attributes():
    """What each norm has besides what `Norm` has."""
    return {
        "factor": Factor(),
        "slotted": Slotted(),
        "hidden": (Times(),),
        "space": types.SimpleNamespace(function=lambda x: x * 2.0),
        "own_config": Config(),
        "number": 1.0,
        **of_wrapped(Factor()),
        **nonlocal_factor(),
    }


CHANGES = {
    # Objects.
    "a callable": (lambda s, x: s.factor(s.normed(x)), lambda m, p: setattr(m.factor, "value", 4.0)),
    "a method": (lambda s, x: s.factor.apply(s.normed(x)), lambda m, p: setattr(m.factor, "value", 4.0)),
    "an attribute of a callable": (
        lambda s, x: s.normed(x) * s.factor.value,
        lambda m, p: setattr(m.factor, "value", 4.0),
    ),
    "a property": (lambda s, x: s.normed(x) * s.factor.number, lambda m, p: setattr(m.factor, "value", 4.0)),
    "what a method reads inside": (
        lambda s, x: s.factor.deep(s.normed(x)),
        lambda m, p: setattr(m.factor.inner["others"][0], "number", 4.0),
    ),
    "an attribute over one of the class": (
        lambda s, x: s.factor.of_class(s.normed(x)),
        lambda m, p: setattr(m.factor, "shared", 4.0),
    ),
    "an attribute of the class": (
        lambda s, x: s.factor.of_class(s.normed(x)),
        lambda m, p: p.setattr(Factor, "shared", 4.0),
    ),
    "a method of the class": (
        lambda s, x: s.factor.apply(s.normed(x)),
        lambda m, p: p.setattr(Factor, "apply", lambda self, x: x * 4.0),
    ),
    "the call of the class": (
        lambda s, x: s.factor(s.normed(x)),
        lambda m, p: p.setattr(Factor, "__call__", lambda self, x: x * 4.0),
    ),
    "another class": (
        lambda s, x: s.normed(x) * s.factor.number,
        lambda m, p: setattr(m.factor, "__class__", Doubled),
    ),
    "slots": (lambda s, x: s.slotted.apply(s.normed(x)), lambda m, p: setattr(m.slotted, "value", 4.0)),
    "a module in a tuple": (lambda s, x: s.hidden[0](s.normed(x)), lambda m, p: setattr(m.hidden[0], "factor", 4.0)),
    "a hook on a module in a tuple": (
        lambda s, x: s.hidden[0](s.normed(x)),
        lambda m, p: m.hidden[0].register_forward_hook(lambda module, args, output: 2 * output),
    ),
    "another class of a module in a tuple": (
        lambda s, x: s.hidden[0](s.normed(x)),
        lambda m, p: setattr(m.hidden[0], "__class__", Four),
    ),
    "a global module": (lambda s, x: MODULE(s.normed(x)), lambda m, p: p.setattr(MODULE, "factor", 4.0)),
    "a global": (lambda s, x: GLOBAL(s.normed(x)), lambda m, p: p.setattr(GLOBAL, "value", 4.0)),
    "a method of a global": (lambda s, x: GLOBAL.apply(s.normed(x)), lambda m, p: p.setattr(GLOBAL, "value", 4.0)),
    # Functions.
    "what is bound": (lambda s, x: s.bound(s.normed(x)), lambda m, p: setattr(m.bound.__self__, "value", 4.0)),
    "what is partial": (lambda s, x: s.partial(s.normed(x)), lambda m, p: setattr(m.partial.args[0], "value", 4.0)),
    "a variable around a function": (lambda s, x: s.function(s.normed(x)), lambda m, p: m.change()),
    "defaults": (
        lambda s, x: with_default(s.normed(x)),
        lambda m, p: p.setattr(with_default, "__defaults__", (4.0,)),
    ),
    "defaults by name": (
        lambda s, x: with_keyword(s.normed(x)),
        lambda m, p: p.setitem(with_keyword.__kwdefaults__, "factor", 4.0),
    ),
    "code": (
        lambda s, x: as_code(s.normed(x)),
        lambda m, p: p.setattr(as_code, "__code__", (lambda x: x * 4.0).__code__),
    ),
    "an attribute of a function": (
        lambda s, x: with_attribute(s.normed(x)),
        lambda m, p: p.setattr(with_attribute, "factor", 4.0),
    ),
    "a function in a namespace": (
        lambda s, x: s.space.function(s.normed(x)),
        lambda m, p: setattr(m.space, "function", lambda x: x * 4.0),
    ),
    "a config that a function reads": (
        lambda s, x: of_config(s.normed(x), s.own_config),
        lambda m, p: setattr(m.own_config, "factor", 4.0),
    ),
    "a decorator's": (
        scaled(lambda s, x: s.normed(x)),
        lambda m, p: p.setattr(GLOBAL, "value", 4.0),
    ),
    # Names.
    "a global with the name of an attribute": (
        lambda s, x: s.normed(x) * s.number * number,
        lambda m, p: p.setitem(globals(), "number", 4.0),
    ),
    "a global in a function inside": (
        lambda s, x: s.normed(x) * (lambda: number)(),
        lambda m, p: p.setitem(globals(), "number", 4.0),
    ),
    "an attribute that is made up": (lambda s, x: s.normed(x) * s.made_up, lambda m, p: setattr(m, "_made_up", 4.0)),
    "__dict__": (
        lambda s, x: s.normed(x) * s.__dict__.get("set_later", 2.0),
        lambda m, p: setattr(m, "set_later", 4.0),
    ),
    "vars": (lambda s, x: s.normed(x) * vars(s).get("set_later", 2.0), lambda m, p: setattr(m, "set_later", 4.0)),
    "a property that raises": (
        lambda s, x: s.normed(x) * (4.0 if s.own_config.fails else s.own_config.checked),
        lambda m, p: setattr(m.own_config, "fails", True),
    ),
}


def toy(forward, **more):
    model = toys.Toy(it=norm_with(forward, Asked))
    for name, value in {**attributes(), **more}.items():
        setattr(model.it, name, value)
    return model


@pytest.mark.parametrize("copied", [False, True], ids=["", "of a copy"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_inside_counts(name, copied, monkeypatch):
    forward, change = CHANGES[name]
    assert_a_change_counts(toy(forward), change, copied, monkeypatch)


class Act:
    """An activation that is no module."""

    def __init__(self, beta):
        self.beta = beta

    def __call__(self, x):
        return x * torch.sigmoid(self.beta * x)


def test_an_activation_that_is_an_object():
    model = toys.Toy(it=toys.MLP(act=Act(1.0)))
    assert apply_liger_kernel(model, LAYERS).applied
    x = torch.linspace(-1, 2, 16).view(2, 8)
    model.it.act_fn.beta = 3.0
    torch.testing.assert_close(model.it(x), toys.MLP.forward(model.it, x))


def test_what_is_called_in_the_message(caplog, monkeypatch):
    monkeypatch.setattr("liger_trainer.head.warn_once._said", set())
    model = toy(CHANGES["a callable"][0])
    apply_liger_kernel(model, LAYERS)
    model.it.factor.value = 4.0
    model.it(torch.ones(2, 8))
    assert "`value` has been changed since liger_trainer patched" in caplog.text


def tensor():
    return torch.ones((), requires_grad=True)


def closure_over(beta):
    return lambda x: x * torch.sigmoid(beta * x)


def default_of(beta):
    return lambda x, beta=beta: x * torch.sigmoid(beta * x)


TRAINED = {
    "a callable": lambda beta: Act(beta),
    "a bound method": lambda beta: Act(beta).__call__,
    "a partial function": lambda beta: functools.partial(Act.__call__, Act(beta)),
    "a closure": closure_over,
    "a default": default_of,
}


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_trained_out_of_sight_is_left_alone(name):
    beta = tensor()
    model = toys.Toy(it=toys.MLP(act=TRAINED[name](beta)))
    (row,) = apply_liger_kernel(model, LAYERS).rows
    assert not row.applied
    assert "may change in place" in row.reason
    model(torch.ones(2, 8)).sum().backward()
    assert beta.grad is not None


HIDDEN = {
    "a method": (lambda s, x: s.normed(x) * s.more.apply(2.0), lambda: Factor(torch.ones(()))),
    "an array": (lambda s, x: s.normed(x) * float(s.more.value), lambda: Factor(np.ones(1))),
    "a module in a tuple": (lambda s, x: s.normed(x) * s.more[0].scale * 2.0, lambda: (Times(scale=torch.ones(())),)),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_numbers_that_may_change_in_place_are_left_alone(name):
    forward, build = HIDDEN[name]
    (row,) = apply_liger_kernel(toy(forward, more=build()), LAYERS).rows
    assert not row.applied
    assert "may change in place" in row.reason


def test_what_reads_too_much_is_left_alone():
    model = toy(lambda s, x: s.normed(x) * 2.0 * len(s.more) / 1000, more=[[] for _ in range(1000)])
    (row,) = apply_liger_kernel(model, LAYERS).rows
    assert not row.applied
    assert "reads more than 1000 objects" in row.reason


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.normed(x) * s.own_config.factor,
        lambda s, x: s.normed(x) * s.own_config.factor * s.__dict__["number"],
    ],
    ids=["", "where a dictionary is read"],
)
def test_what_is_unread_in_a_config_of_transformers_is_free(forward):
    model = toy(forward)
    apply_liger_kernel(model, LAYERS)
    model.it.own_config.use_cache = model.it.own_config.other = 5
    assert is_as_proved(model.it)


def test_what_holds_itself_is_patched():
    factor = Factor()
    factor.itself, factor.inner["all"] = factor, factor.inner
    one, other = Times(), Times()
    one.others, other.others = (other,), (one,)
    model = toy(lambda s, x: s.factor(s.normed(x)) * s.hidden[0].others[0].factor / 2, factor=factor, hidden=(one,))
    assert apply_liger_kernel(model, LAYERS).applied
    assert is_as_proved(copy.deepcopy(model).it)
