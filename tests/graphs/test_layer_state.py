"""What a layer does beside its launches, and what is changed in it: seen, put back, or left without graphs."""

import copy
import functools
import random
import types

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_trainer.graphs.captured import CapturedLayers
from liger_trainer.graphs.known_calls import KnownCalls
from tests.graphs.recorded import RecordedCaptures
from tests.graphs.test_captured import assert_same, assert_same_steps, ids, tiny


class Layer(GradientCheckpointingLayer):
    """A layer with a weight, and with `state`, which a subclass uses."""

    def __init__(self, checkpointed):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.gradient_checkpointing = checkpointed
        self._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

    def forward(self, hidden):
        return self.used(self.body(hidden))

    def used(self, hidden):
        return hidden


def model_of(kind, checkpointed, layers=2):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(kind(checkpointed) for _ in range(layers))).train()


def compared(model, other, captured, numbers, after=lambda model: 0.0):
    """Steps of a model with graphs and of one without; `after` adds to the loss."""
    for number in numbers:
        hidden = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(number))
        with captured.attached(model):
            loss = model(hidden.clone().requires_grad_()).square().sum() + after(model)
        loss.backward()
        plain = other(hidden.clone().requires_grad_()).square().sum() + after(other)
        plain.backward()
        assert torch.equal(loss, plain), number
        assert_same(model, other)
        assert all(map(torch.equal, model.buffers(), other.buffers()))


class CheckpointedCall(Layer):
    """As up to transformers 5.22, which checkpoint the call of a layer and not its forward."""

    def __call__(self, *args, **kwargs):
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)
        return super().__call__(*args, **kwargs)


CheckpointedCall.forward = getattr(Layer.forward, "__wrapped__", Layer.forward)  # which newer ones wrap


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_checkpoint_of_a_call(checkpointed):
    model = model_of(CheckpointedCall, checkpointed)
    captured = CapturedLayers(RecordedCaptures())
    compared(model, copy.deepcopy(model), captured, range(6))
    assert captured.captured == 2
    with captured.attached(model), torch.no_grad():
        outputs = [model(torch.ones(1, 3, 8)) for _ in range(5)]
    assert torch.equal(outputs[0], outputs[-1])


class Listed(Layer):
    scales = ([1.0],)

    def __init__(self, checkpointed):
        super().__init__(checkpointed)
        self.of = {"list": [1.0], "inner": {"scale": 1.0}}
        self.config = types.SimpleNamespace(scale=1.0)
        self.tensors = [torch.ones(8)]

    def used(self, hidden):
        return hidden * (self.of["list"][0] * self.of["inner"]["scale"] * self.config.scale) * self.tensors[0]


def in_list(layer):
    layer.of["list"][0] = 3.0


def in_dict_of_dict(layer):
    layer.of["inner"]["scale"] = 3.0


def in_config(layer):
    layer.config.scale = 3.0


def tensor_in_list(layer):
    layer.tensors = [torch.full((8,), 3.0)]


def same_list_again(layer):
    layer.of = {"list": [1.0], "inner": {"scale": 1.0}}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("change", [in_list, in_dict_of_dict, in_config, tensor_in_list, same_list_again])
def test_what_is_in_containers_and_objects_is_seen(change, checkpointed):
    model = model_of(Listed, checkpointed)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    compared(model, other, captured, range(5))
    for each in (model, other):
        change(each[1])
    compared(model, other, captured, range(5, 12))
    assert captured.captured == 2


class Counts(Layer):
    def used(self, hidden):
        self.count.add_(1)
        return hidden * self.count


class Remembers(Layer):
    last = None

    def used(self, hidden):
        self.last = hidden
        return hidden


class Collects(Layer):
    def __init__(self, checkpointed):
        super().__init__(checkpointed)
        self.seen = []

    def used(self, hidden):
        self.seen.append(hidden.mean())
        return hidden


class Draws(Layer):
    """Refused for another reason, after it has drawn."""

    def used(self, hidden):
        hidden = torch.nn.functional.dropout(hidden, 0.5)
        return hidden * hidden.detach().abs().sum().clamp(max=1.0).item()


class Averages(Layer):
    """Whose running mean is changed in place without being counted as changed."""

    def __init__(self, checkpointed):
        super().__init__(checkpointed)
        self.norm = torch.nn.BatchNorm1d(8)

    def used(self, hidden):
        return self.norm(hidden.mT).mT


class Skips(Layer):
    """By chance, of Python's generator."""

    def used(self, hidden):
        return hidden * 2 if random.random() > 0.5 else hidden


class SkipsByNumpy(Layer):
    """By chance, of numpy's generator."""

    def used(self, hidden):
        return hidden * 2 if np.random.random() > 0.5 else hidden


REASONS = {Averages: "it changes its buffers", **dict.fromkeys([Skips, SkipsByNumpy], "it draws random numbers on the")}
REASONS |= dict.fromkeys([Remembers, Collects], "it changes its attributes")
REASONS |= {Counts: "it changes its buffers", Draws: "its launches cannot be captured"}
AUXILIARY = {Remembers: lambda model: sum(each.last.mean() for each in model)}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", [Counts, Averages, Remembers, Collects, Draws, Skips, SkipsByNumpy])
def test_what_a_layer_does_beside_its_result_stays(kind, checkpointed):
    model = model_of(kind, checkpointed)
    other = copy.deepcopy(model)
    captured = CapturedLayers(RecordedCaptures())
    for number in range(6):
        drawn = []
        for each, graphs in ((model, captured), (other, None)):
            torch.manual_seed(number)
            random.seed(number)
            np.random.seed(number)
            hidden = torch.ones(1, 3, 8, requires_grad=True)
            if graphs is None:
                result = each(hidden)
            else:
                with graphs.attached(each):
                    result = each(hidden)
            loss = result.square().sum() + AUXILIARY.get(kind, lambda model: 0.0)(each)
            loss.backward()
            drawn.append((float(loss), float(torch.rand(())), random.random(), np.random.random()))
        assert drawn[0] == drawn[1]
        assert_same(model, other)
        assert all(map(torch.equal, model.buffers(), other.buffers()))
        assert [len(getattr(each, "seen", ())) for each in model] == [len(getattr(each, "seen", ())) for each in other]
    assert captured.captured == 0
    (reason,) = captured.reasons
    assert reason.startswith(REASONS[kind])


class Borrows(Layer):
    """A layer with a weight that is no parameter of it."""

    def used(self, hidden):
        return hidden + self.borrowed[0](hidden)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_weights_of_others_get_their_gradients(checkpointed):
    model = model_of(Borrows, checkpointed)
    model.shared = torch.nn.Linear(8, 8)
    del model._modules["shared"]
    shared = torch.nn.Linear(8, 8)
    for layer in model:
        layer.borrowed = [shared]
    captured = CapturedLayers(RecordedCaptures())
    for _ in range(5):
        shared.zero_grad()
        with captured.attached(model):
            model(torch.ones(1, 3, 8, requires_grad=True)).sum().backward()
        assert shared.weight.grad is not None
    assert [*captured.reasons] == ["it uses a weight that is not one of its parameters"]


def test_a_hook_of_all_modules_is_called():
    model = model_of(Layer, True)
    other, captured = copy.deepcopy(model), CapturedLayers(RecordedCaptures())
    compared(model, other, captured, range(4))
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: output * 2 if isinstance(module, torch.nn.Linear) else None
    )
    try:
        compared(model, other, captured, range(4, 7))
    finally:
        handle.remove()
    compared(model, other, captured, range(7, 9))
    assert captured.captured == 2


def test_a_weight_that_changes_between_forward_and_backward_is_an_error():
    model, captured = tiny(), CapturedLayers(RecordedCaptures())
    for number in range(5):
        with captured.attached(model):
            loss = model(input_ids=ids(number), labels=ids(number), use_cache=False).loss
        if number == 4:
            with torch.no_grad():
                model.model.layers[1].mlp.down_proj.weight.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


class Steps(Layer):
    """Another attribute in each step, from outside."""

    rate = 1.0

    def used(self, hidden):
        return hidden * self.rate


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_layer_whose_attributes_change_leaves_the_others_their_graphs(checkpointed):
    model = model_of(Steps, checkpointed, layers=4)
    other, captures = copy.deepcopy(model), RecordedCaptures()
    captured = CapturedLayers(captures)
    for number in range(60):
        for each in (model, other):
            each[1].rate = 1.0 + number // 4
        compared(model, other, captured, [number])
    assert captured.captured == 3
    assert [*captured.reasons] == ["its attributes or the memory of its weights keep changing"]
    assert captures.count <= 2 * 4 * 6


def test_frozen_layers_before_all_trained_ones_are_looked_at_seldom(monkeypatch):
    from liger_trainer.graphs import captured as of_captured

    looked, native = [], of_captured.LayerState
    monkeypatch.setattr(of_captured, "LayerState", lambda layer: looked.append(layer) or native(layer))
    model = model_of(Layer, False, layers=3)
    model[0].requires_grad_(False)
    captured = CapturedLayers(RecordedCaptures())
    for _ in range(20):
        with captured.attached(model):
            model(torch.ones(1, 3, 8)).sum().backward()
    assert captured.captured == 2
    assert len(looked) == 3


def test_a_new_kind_of_call_waits_until_another_has_not_come_for_long(monkeypatch):
    from liger_trainer.graphs import known_calls

    monkeypatch.setattr(known_calls, "_MOST", 2)
    monkeypatch.setattr(known_calls, "_IDLE", 10)
    model = tiny()
    other, captures = copy.deepcopy(model), RecordedCaptures()
    captured = CapturedLayers(captures)
    assert_same_steps(model, other, captured, (ids(number, length=3 + number % 4) for number in range(40)))
    assert captures.count == 2 * 2 * 3  # two lengths of four, in turn
    assert_same_steps(model, other, captured, (ids(number, length=6) for number in range(16)))
    assert captures.count == 3 * 2 * 3
    assert isinstance(captured._of["model.layers.0"], KnownCalls)
