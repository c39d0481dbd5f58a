"""The plan of what layers keep: its bounds on memory, and its order."""

import json
import math
import random

import pytest

from liger_trainer.recompute.budget import (
    Call,
    Candidate,
    Layer,
    Plan,
    RecordedStep,
    choose,
    left_always,
    merged,
    most,
    proved,
)

MM = Call("aten::mm", 0)
ATTENTION = Call("aten::attention", 0)


def step(layers=4, tokens=100, attention=4.0, start=100, peak=150, growing=10):
    """Layers with a matmul of 8 bytes and 1 s, and an attention of 4 bytes; peaks grow towards the first layer."""
    candidates = Candidate(MM, 8, 1.0), Candidate(ATTENTION, 4, attention)
    frames = [Layer(f"layers.{i}", tokens, candidates, start + 20 + growing * (layers - 1 - i)) for i in range(layers)]
    return RecordedStep(tuple(frames), start, peak)


def kept_bytes(recorded, plan, name, growth=1.0):
    (layer,) = (layer for layer in recorded.layers if layer.name == name)
    calls = plan.calls.get(name, frozenset())
    return growth * sum(candidate.bytes for candidate in layer.candidates if candidate.call in calls)


def test_everything_is_kept_where_it_fits():
    recorded = step()
    plan = choose(recorded, 1.0, math.inf, math.inf)
    assert plan == Plan({f"layers.{i}": frozenset({MM, ATTENTION}) for i in range(4)}, 48, 20.0)
    assert most(recorded) == plan.bytes


def test_nothing_is_kept_without_room():
    assert choose(step(), 1.0, 0, math.inf) == Plan({})
    assert choose(step(), 1.0, math.inf, 150) == Plan({})
    assert choose(step(), 1.0, 3, math.inf) == Plan({})


def test_most_time_per_byte_first_then_the_last_layer():
    assert choose(step(), 1.0, 8, math.inf).calls == {f"layers.{i}": frozenset({ATTENTION}) for i in (2, 3)}
    assert choose(step(), 1.0, 24, math.inf).calls == {
        **{f"layers.{i}": frozenset({ATTENTION}) for i in range(3)},
        "layers.3": frozenset({ATTENTION, MM}),
    }
    cheap = step(attention=0.4)  # 0.1 s a byte, and the matmul 0.125
    assert choose(cheap, 1.0, 20, math.inf).calls == {
        "layers.3": frozenset({MM, ATTENTION}),
        "layers.2": frozenset({MM}),
    }


def test_a_smaller_result_fills_the_rest():
    cheap = step(attention=0.4)
    assert choose(cheap, 1.0, 13, math.inf).calls == {"layers.3": frozenset({MM, ATTENTION})}


def test_noise_does_not_order_the_layers():
    noisy = [Layer(f"layers.{i}", 100, (Candidate(MM, 8, 1.0 + (0.1 if i == 0 else 0)),)) for i in range(4)]
    assert set(choose(RecordedStep(tuple(noisy)), 1.0, 8, math.inf).calls) == {"layers.3"}


def test_the_first_layers_keep_less_as_their_bytes_are_held_until_the_gradients_exist():
    recorded = step(start=100, peak=100)  # the peaks of the layers are 150, 140, 130 and 120
    plan = choose(recorded, 1.0, math.inf, 150)
    assert plan.calls.pop("layers.0") == {ATTENTION}  # in the backward of the second layer there is room for 10 bytes
    assert set(plan.calls.values()) == {frozenset({ATTENTION, MM})}
    assert plan.bytes == 40


@pytest.mark.parametrize("seed", range(40))
def test_memory_never_exceeds_its_limits(seed):
    """The memory of a simulated step with the plan, at every moment."""
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    layers = tuple(
        Layer(
            f"layers.{i}",
            10,
            tuple(Candidate(Call("mm", j), draw.randint(1, 20), draw.random()) for j in range(draw.randint(0, 4))),
            draw.randint(50, 120),
        )
        for i in range(count)
    )
    recorded = RecordedStep(layers, 40, draw.randint(50, 120))
    growth, kept, allocated = draw.choice([0.5, 1.0, 1.5]), draw.randint(0, 200), draw.randint(40, 260)
    plan = choose(recorded, growth, kept, allocated)
    held = [kept_bytes(recorded, plan, layer.name, growth) for layer in layers]
    grown = [40 + (layer.peak - 40) * max(growth, 1) for layer in layers]
    assert sum(held) <= kept
    assert plan.bytes == int(sum(held))
    if plan.calls:
        assert 40 + (recorded.peak - 40) * max(growth, 1) + sum(held) <= allocated
    for place in range(count):
        assert sum(held[:place]) == 0 or grown[place] + sum(held[:place]) <= allocated


def test_a_longer_batch_keeps_less():
    recorded = step()
    sizes = [choose(recorded, growth, math.inf, 190).bytes / growth for growth in (1.0, 1.5, 2.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[1]


def test_the_peaks_of_several_micro_batches_are_the_highest():
    one, other = step(growing=10, peak=150, start=90), step(layers=3, growing=40, peak=130, start=80)
    both = merged([other, one])
    assert (both.start, both.peak, len(both.layers)) == (80, 150, 4)
    assert [layer.peak for layer in both.layers] == [180, 140, 120, 110]


def test_the_longest_micro_batch_gives_the_tokens():
    short, long = step(tokens=100), step(tokens=400)
    assert {layer.tokens for layer in merged([short, long]).layers} == {400}


def test_a_kind_of_result_that_failed_in_one_layer_or_was_never_tried_is_kept_in_none():
    recorded = step()
    tried = {"layers.1": frozenset({MM, ATTENTION}), "layers.2": frozenset({ATTENTION})}
    kinds = [{one.call for one in layer.candidates} for layer in proved(recorded, tried, set()).layers]
    assert kinds == [{MM, ATTENTION}] * 4
    kinds = [
        {one.call for one in layer.candidates} for layer in proved(recorded, tried, {("layers.2", ATTENTION)}).layers
    ]
    assert kinds == [{MM}] * 4
    kinds = [{one.call for one in layer.candidates} for layer in proved(recorded, {"layers.2": {MM}}, set()).layers]
    assert kinds == [{MM}] * 4


def test_a_step_goes_through_json():
    recorded = step()
    assert RecordedStep.from_dict(json.loads(json.dumps(recorded.to_dict()))) == recorded


@pytest.mark.parametrize(("highest", "growth", "left"), [
    (0, 1.0, 100 - 70),  # the backward of a layer
    (80, 1.0, 100 - 80),  # another moment, such as the optimizer's
    (80, 1.5, 100 - (10 + 60 * 1.5)),
    (80, 0.5, 100 - 80),
], ids=str)  # fmt: skip
def test_what_graphs_take_is_free_at_every_moment(highest, growth, left):
    step = RecordedStep((Layer("a", 1, (), 70), Layer("b", 1, (), 50)), start=10, peak=60, highest=highest)
    assert left_always(step, growth, 100) == left


def test_the_highest_peak_is_that_of_all_processes_and_in_checkpoints():
    steps = [RecordedStep((), highest=highest) for highest in (3, 7, 5)]
    assert merged(steps).highest == 7
    assert RecordedStep.from_dict(json.loads(json.dumps(merged(steps).to_dict()))) == merged(steps)
