"""Parts that keep something in one of many ways, such as a loss: they run as they are, and a proof leaves nothing."""

from __future__ import annotations

import collections
import functools
import types

import pytest
import torch
from torch.nn import functional as F

from liger_trainer import apply_liger_kernel
from liger_trainer.patching.side_effects import SideEffectError, run_part
from tests.patching import auxiliary_losses, toys, twins
from tests.patching.auxiliary_losses import TRACKER, OfClass, Slotted, Tracker, save
from tests.patching.test_routers import ONLY

KEPT: list[object] = []
LATEST: object = None


def keep_in_global(value):
    KEPT.append(value)


def keep_as_global(value):
    global LATEST
    LATEST = value


def import_and_keep(value):
    from tests.patching.auxiliary_losses import save as kept_there

    kept_there(value)


def keeping(function):
    """A decorator that keeps what `function` is called with in its own closure."""
    values = []

    @functools.wraps(function)
    def wrapped(value):
        values.append(value)
        return function(value)

    wrapped.items = values
    return wrapped


@keeping
def kept_by_decorator(value):
    return value


def latest():
    return [] if LATEST is None else [LATEST]


def of_sink(box):
    return {"box": box, "sink": box.append}


ATTRIBUTES = {
    "tracker": lambda: {"tracker": Tracker()},
    "slotted": lambda: {"slotted": Slotted()},
    "config": lambda: {"config": types.SimpleNamespace(aux=[])},
    "nested": lambda: {"nested": {"layer": ([], collections.deque(maxlen=3))}},
    "sink": lambda: of_sink([]),
    "partial": lambda: {"kept": (tracker := Tracker()), "partial": functools.partial(Tracker.add, tracker)},
}
"""What the parts hold, for all of the ways."""


WAYS = {
    "a helper": (lambda part, value: keep_in_global(value), lambda part: KEPT),
    "a global": (lambda part, value: keep_as_global(value), lambda part: latest()),
    "a helper of another file": (lambda part, value: save(value), lambda part: auxiliary_losses.SAVED),
    "a file": (lambda part, value: auxiliary_losses.save(value), lambda part: auxiliary_losses.SAVED),
    "an import": (lambda part, value: import_and_keep(value), lambda part: auxiliary_losses.SAVED),
    "a global object": (lambda part, value: TRACKER.add(value), lambda part: TRACKER.items),
    "an object of a file": (lambda part, value: auxiliary_losses.TRACKER.add(value), lambda part: TRACKER.items),
    "a class of another file": (lambda part, value: OfClass.add(value), lambda part: OfClass.items),
    "a decorator": (lambda part, value: kept_by_decorator(value), lambda part: kept_by_decorator.items),
    "an object": (lambda part, value: part.tracker.add(value), lambda part: part.tracker.items),
    "an object with slots": (
        lambda part, value: part.slotted.add(value),
        lambda part: [part.slotted.last] if hasattr(part.slotted, "last") else [],
    ),
    "a config": (lambda part, value: part.config.aux.append(value), lambda part: part.config.aux),
    "a list in a dict": (
        lambda part, value: part.nested["layer"][0].append(value),
        lambda part: part.nested["layer"][0],
    ),
    "a deque": (lambda part, value: part.nested["layer"][1].append(value), lambda part: part.nested["layer"][1]),
    "a bound method": (lambda part, value: part.sink(value), lambda part: part.box),
    "a partial function": (lambda part, value: part.partial(value), lambda part: part.kept.items),
    "an attribute of the weight": (
        lambda part, value: setattr(next(part.parameters()), "aux", value),
        lambda part: [value for each in part.parameters() for value in each.__dict__.values()],
    ),
}
"""How a part keeps a value, and what it has kept."""


def router(way):
    return twins.router(changed=lambda self, logits: twins.keep(way(self, logits.logsumexp(-1).mean()), logits))()


def norm(way):
    return twins.norm(lambda self, x: twins.keep(way(self, x.mean()), self.weight * self.normed(x)))()


def mlp(way):
    return twins.mlp(product=lambda self, gate, up: twins.keep(way(self, gate.mean()), F.silu(gate) * up))()


PARTS = {"router": (router, (3, 8)), "norm": (norm, (3, 64)), "mlp": (mlp, (3, 8))}
SOME = ("a helper of another file", "an object", "an attribute of the weight")
CASES = [(kind, way) for kind in PARTS for way in (WAYS if kind == "router" else SOME)]


@pytest.fixture(autouse=True)
def nothing_kept():
    for values in (KEPT, auxiliary_losses.SAVED, TRACKER.items, OfClass.items, kept_by_decorator.items):
        values.clear()
    keep_as_global(None)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_what_keeps_something_still_does_and_the_proof_leaves_nothing(kind, name):
    way, kept = WAYS[name]
    build, shape = PARTS[kind]
    part = build(way)
    for make in ATTRIBUTES.values():
        part.__dict__.update(make())
    (row,) = (row for row in apply_liger_kernel(toys.Toy(it=part), ONLY) if "also sets" in row.reason)
    assert not row.applied
    assert "forward" not in part.__dict__
    assert list(kept(part)) == []
    part(torch.ones(shape))
    assert len(kept(part)) == 1


def test_what_is_kept_before_an_error_comes_back_too():
    def forward(self, x):
        keep_in_global(x)
        raise ValueError("too small")

    KEPT.append("before")
    with pytest.raises(ValueError, match="too small"):
        run_part(forward, toys.Norm(), torch.ones(2))
    assert KEPT == ["before"]


def test_attributes_of_a_result_are_kept_too():
    def forward(self, x):
        result = x * 2
        result.aux = x.mean()
        return result

    with pytest.raises(SideEffectError, match="also sets aux of its result"):
        run_part(forward, toys.Norm(), torch.ones(2))


def hook(values):
    values.register_hook(keep_in_global)


@pytest.mark.parametrize("hooked", [hook, lambda x: x.register_hook(keep_in_global)], ids=["a helper", "itself"])
def test_what_hooks_a_gradient_is_left_alone(hooked):
    part = twins.norm(lambda self, x: self.weight * twins.keep(hooked(x), self.normed(x)))()
    (row,) = (row for row in apply_liger_kernel(toys.Toy(it=part), ONLY) if "hooks a gradient" in row.reason)
    assert not row.applied
    part(torch.ones(3, 64, requires_grad=True)).sum().backward()
    assert len(KEPT) == 1


def test_what_reaches_too_much_is_left_alone():
    part = toys.Norm()
    part.held = [[] for _ in range(10_001)]
    with pytest.raises(SideEffectError, match="reaches more than 10000 objects"):
        run_part(type(part).forward, part, torch.ones(2, 8))


def test_what_a_forward_only_reads_may_be_anything():
    part = toys.Norm()
    part.tracker = Tracker()
    part.held = {"layer": ([Tracker()], {1, 2}, frozenset({(3,)})), "itself": part}
    part.tracker.add(part.tracker)
    x = torch.ones(2, part.weight.numel())
    torch.testing.assert_close(run_part(type(part).forward, part, x), type(part).forward(part, x))
