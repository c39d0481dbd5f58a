"""Layers that add to a dict, or read from it what earlier layers have added, have their own bits from graphs too."""

import collections
import contextlib
import copy
import functools
import gc
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_trainer.attention import interface
from liger_trainer.graphs.captured import CapturedLayers
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.patching.labelled_tokens import _is_of_single_tokens
from tests.attention.shared_layers import batch_of, build
from tests.graphs.recorded import RecordedCaptures
from tests.graphs.test_captured import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")
LINEAR = ["q_proj", "k_proj", "v_proj", "down_proj"]


@functools.cache
def gemma(name, lora):
    model = build(name)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=LINEAR, init_lora_weights=False))
    apply_liger_kernel(model)
    return model.train()


def both(model, captured, run):
    """What `run` computes of a model with graphs and of its copy without, and their gradients, which are compared."""
    other = copy.deepcopy(model)
    for number in range(6):
        results = []
        for each, graphs in ((model, captured), (other, None)):
            with graphs.attached(each) if graphs else contextlib.nullcontext():
                results.append(run(each, number))
            results[-1].backward()
        assert torch.equal(*(each.detach() for each in results))
        assert_same(model, other)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["full", "left-padded", "packed"])
@pytest.mark.parametrize("name", ["E2B", "3n"])
def test_gemmas_whose_last_layers_share_keys(name, kind, lora, checkpointed, monkeypatch):
    """With masks, with plans that layers build masks of, and with plans."""
    if kind != "full":
        monkeypatch.setattr(interface, "TRITON_DEVICES", ("cpu",))
        monkeypatch.setattr(interface, "use_triton", lambda query: kind == "packed")
    model = copy.deepcopy(gemma(name, lora))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch_of(kind)

    def run(each, number):
        """Another order of the rows, and other ids but for padding."""
        given = {key: value.roll(number, 0) for key, value in batch.items() if isinstance(value, torch.Tensor)}
        ids = given.pop("input_ids")
        return each(input_ids=(ids + number * (ids > 1)) % 128, use_cache=False, **given).loss

    def run_twice(each, number):
        """Rows of which another order comes before the backward. A router of Gemma 3n is used twice in each layer: of
        two forwards, autograd adds up its gradients one by one, and graphs those of a layer first."""
        return run(each, number) - 0.3 * run(each, number + 1)

    captured = CapturedLayers(RecordedCaptures())
    both(model, captured, run_twice if (name, kind) == ("E2B", "left-padded") else run)
    assert captured.captured == 6, captured.reasons
    assert not captured.reasons


def test_layers_from_graphs_run_on_all_tokens():
    """On those that have labels, a batch would have another shape each time."""
    model = copy.deepcopy(gemma("E2B", False))
    shared = model.model.layers[-1]
    assert _is_of_single_tokens(shared)
    with CapturedLayers(RecordedCaptures()).attached(model):
        assert not _is_of_single_tokens(shared)


class Layer(GradientCheckpointingLayer):
    """A layer that may write to a dict and read from it; the first one of a model writes."""

    def __init__(self, first):
        super().__init__()
        self.first, self.linear = first, torch.nn.Linear(8, 8, bias=False)
        if first:
            self.key, self.value = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

    def forward(self, hidden, states, last=True):
        if self.first:
            self.write(hidden, states)
        else:
            hidden = self.read(hidden, states)
        return hidden + self.linear(hidden).sin()

    def write(self, hidden, states):
        states["keys"] = self.key(hidden).cos(), self.value(hidden) * 2

    def read(self, hidden, states):
        keys, values = states["keys"]
        return hidden + keys * values


def layers(kind=Layer, checkpointed=False, count=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(kind(number == 0) for number in range(count))).train()
    for layer in model:
        layer.gradient_checkpointing = checkpointed
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    return model


def hidden_states(number):
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(number))


def run(model, number, states=None, use=lambda number, states: 0):
    hidden, states = hidden_states(number), {} if states is None else states
    for layer in model:
        hidden = layer(hidden, states)
    return hidden.square().sum() + use(number, states)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("make", [dict, collections.UserDict])
def test_gradients_reach_the_layer_that_wrote(make, checkpointed):
    captured = CapturedLayers(RecordedCaptures())
    both(layers(checkpointed=checkpointed), captured, lambda each, number: run(each, number, make()))
    assert captured.captured == 3, captured.reasons


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_was_written_has_a_gradient_in_some_steps_alone(checkpointed):
    """A graph holds for the gradients that it was captured with; with others, the layer computes its own."""
    for first in (0, 1):

        def use(number, states, first=first):
            return states["keys"][0].sin().sum() if number % 2 == first else 0

        captured = CapturedLayers(RecordedCaptures())
        model = layers(checkpointed=checkpointed, count=1)
        both(model, captured, functools.partial(run, use=use))
        assert captured.captured == 1, captured.reasons


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_gradient_in_another_layout(checkpointed):
    def use(number, states):
        return (states["keys"][0].transpose(0, 1).contiguous() if number % 2 else states["keys"][0]).sin().sum()

    captured = CapturedLayers(RecordedCaptures())
    both(layers(checkpointed=checkpointed, count=1), captured, functools.partial(run, use=use))
    assert captured.captured == 1, captured.reasons


@pytest.mark.parametrize("checkpointed", [False, True])
def test_several_forwards_before_a_backward(checkpointed):
    captured = CapturedLayers(RecordedCaptures())
    both(
        layers(checkpointed=checkpointed),
        captured,
        lambda each, number: run(each, number) - 0.3 * run(each, number + 9),
    )
    assert captured.captured == 3, captured.reasons


def test_without_gradients():
    model, captured = layers(), CapturedLayers(RecordedCaptures())
    for number in range(5):
        found = []
        for graphs in (captured, None):
            states = {"other": None}
            with torch.no_grad(), graphs.attached(model) if graphs else contextlib.nullcontext():
                found.append((run(model, number, states), *states["keys"]))
            assert [*states] == ["other", "keys"]
        assert all(map(torch.equal, *found))
    assert captured.captured == 3


def test_what_a_graph_was_given_is_not_kept():
    """Keys of a step, with all that autograd holds for them, are gone with the step."""
    model, captured, keys = layers(), CapturedLayers(RecordedCaptures()), []
    for number in range(5):
        states = {}
        with captured.attached(model):
            run(model, number, states).backward()
        keys += map(weakref.ref, states["keys"])
        del states
    assert captured.captured == 3
    gc.collect()
    assert not any(each() is not None for each in keys)


def overwrite(self, hidden, states):
    states["keys"] = self.key(hidden).cos(), self.value(hidden) * 2
    states["old"] = hidden * 2


def change(self, hidden, states):
    Layer.write(self, hidden, states)
    states["old"].add_(1)


def remove(self, hidden, states):
    Layer.write(self, hidden, states)
    states.pop("old", None)


def add_its_input(self, hidden, states):
    states["keys"] = hidden, hidden * 2


def add_one_twice(self, hidden, states):
    states["keys"] = (self.key(hidden).cos(),) * 2


def add_a_number(self, hidden, states):
    Layer.write(self, hidden, states)
    states["count"] = 3


def add_an_expanded_tensor(self, hidden, states):
    states["keys"] = self.key(hidden).cos(), self.value(hidden)[:1].expand(2, -1, -1)


IN_DICT = "it changes what is in a dict, or adds something other than new tensors"


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("write", "reason"),
    [
        *((each, IN_DICT) for each in (overwrite, remove, add_its_input, add_one_twice, add_a_number)),
        (add_an_expanded_tensor, IN_DICT),
        (change, "it changes a tensor that it is given"),
    ],
)
def test_what_is_written_in_another_way_is_left_alone(write, reason, checkpointed):
    kind = type("Other", (Layer,), {"write": write})
    captured = CapturedLayers(RecordedCaptures())
    both(layers(kind, checkpointed), captured, lambda each, number: run(each, number, {"old": hidden_states(50)}))
    assert captured.reasons[reason] == 1


def test_a_layer_that_uses_a_key_twice_runs_without():
    """Its gradient is summed up over the uses of all layers, one after the other."""
    kind = type(
        "Other", (Layer,), {"read": lambda self, hidden, states: hidden + states["keys"][0] ** 2 * states["keys"][0]}
    )
    captured = CapturedLayers(RecordedCaptures())
    both(layers(kind), captured, run)
    assert captured.reasons == {"it uses twice a tensor whose gradient is summed over layers": 2}


class Noting(dict):
    """A dict that does more than that."""


class Converting(collections.UserDict):
    def __setitem__(self, name, value):
        super().__setitem__(name, (value[0] * 2, value[1]))


@pytest.mark.parametrize("make", [Noting, Converting, collections.OrderedDict, lambda: collections.UserDict({1.5: 1})])
def test_other_dicts_are_left_alone(make):
    captured = CapturedLayers(RecordedCaptures())
    both(layers(), captured, lambda each, number: run(each, number, make()))
    assert captured.captured == 0
    assert [*captured.reasons] == ["it is given something that no graph can hold, such as a cache"]


def test_a_key_that_is_changed_before_the_backward_is_an_error():
    model, captured = layers(), CapturedLayers(RecordedCaptures())
    for number in range(5):
        states = {}
        with captured.attached(model):
            loss = run(model, number, states)
        if number == 4:
            with torch.no_grad():
                states["keys"][0].add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()
