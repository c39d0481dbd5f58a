"""`activation_memory` with `cuda_graphs`: layers that run from graphs keep all or nothing, and no bit changes."""

import pytest
import torch

from liger_trainer.recompute.activation_memory import ActivationMemory, Keeping
from liger_trainer.trainers import activation_memory
from liger_trainer.trainers.cuda_graphs import CudaGraphsMixin
from tests.graphs.recorded import RecordedCaptures
from tests.trainers.builders import causal
from tests.trainers.parity import build
from tests.trainers.parity import lora as adapters
from tests.trainers.test_activation_memory import FakeMemory, assert_same, assert_same_end, lora
from tests.trainers.test_cuda_graphs import dropping, pairs_of_one_length, recorded  # noqa: F401  (a fixture)
from tests.trainers.tiny import llama, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")

ON = {"gradient_checkpointing": True, "cuda_graphs": "true"}
STEPS = 8  # layers are captured in the sixth


@pytest.fixture(autouse=True)
def logged_in_bytes(monkeypatch):
    monkeypatch.setattr(activation_memory, "_GIB", 1)


def trained(folder, make, budget, steps=STEPS, **options):
    trainer = causal(folder, make(), **{**ON, "activation_memory": budget, "max_steps": steps, **options})
    trainer.train()
    return trainer


def trained_without(folder, make, steps=STEPS, **options):
    trainer = causal(folder, make(), **{**ON, "cuda_graphs": False, "max_steps": steps, **options})
    trainer.train()
    return trainer


def kept(trainer):
    """Bytes that layers kept in each step."""
    return [log["kept_activations_gib"] for log in trainer.state.log_history if "loss" in log]


def kept_by_layers(trainer):
    """Bytes that each layer keeps in its graphs of the last kind."""
    return [found.kept for known in trainer._graphs._of.values() if (found := known.keeping) is not None]


def launches(trainer):
    return sum(map(len, trainer._graphs._captures.operators))


@pytest.mark.parametrize("make", [llama, lora, dropping])
def test_as_many_layers_keep_as_fit(make, tmp_path):
    without = trained_without(tmp_path, make)
    both = trained(tmp_path, make, "1GiB")
    size, other = kept_by_layers(both)
    assert size == other > 0
    trainers = {2: both, 1: trained(tmp_path, make, 2 * size - 1), 0: trained(tmp_path, make, size - 1)}
    for fitting, trainer in trainers.items():
        assert_same(trainer, without)
        assert trainer._graphs.captured == 2, trainer._graphs.reasons
        assert kept_by_layers(trainer) == fitting * [size]
        assert kept(trainer)[:2] == [0, 0]
        assert kept(trainer)[2] > 0  # each layer, result by result, before there are graphs
        assert kept(trainer)[5:] == 3 * [fitting * size]
        assert max(kept(trainer)) <= trainer._kept.budget
        said = f", and {fitting} of these keep" if fitting else "run from graphs."
        assert said in trainer.kernel_report.remarks[-1]
    assert launches(trainers[2]) < launches(trainers[1]) < launches(trainers[0])  # which compute them again


def test_a_second_training_begins_without_the_memory_of_the_first(tmp_path):
    trainer = trained(tmp_path, llama, "1GiB")
    assert trainer._kept._in_graphs.kept > 0
    CudaGraphsMixin._free_graphs(trainer)  # as `train()` does at its end
    assert trainer._kept._in_graphs.kept == 0
    trainer.args.max_steps = 2  # no layer is captured in these
    trainer.train()
    assert trainer._kept._in_graphs.kept == 0
    assert not kept_by_layers(trainer)


def test_nothing_changes_before_it_is_known_what_layers_keep(tmp_path):
    """Not with many micro-batches in a step either, of which the third would be captured."""
    options = {"gradient_accumulation_steps": 4, "kernel_report": False}
    trainer = trained(tmp_path, llama, "1GiB", steps=5, **options)
    assert_same(trainer, trained_without(tmp_path, llama, steps=5, **options))
    assert isinstance(trainer._kept.phase, Keeping)
    assert len(trainer._kept.phase.record.layers) == 2
    assert len(kept_by_layers(trainer)) == 2


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO"])
def test_trainers_of_trl(kind, adapted, tmp_path, folders, monkeypatch):
    """Bit for bit, with packed rows as they are; a reference runs beside the policy."""
    monkeypatch.setattr("liger_trainer.packing.packed_row.filled", lambda layout: layout)
    options = {"gradient_checkpointing": True, "max_steps": STEPS}
    if kind == "DPO":
        options["data"] = pairs_of_one_length
    if adapted:
        options["peft_config"] = adapters()
    trainers = []
    for own in ({"cuda_graphs": "true", "activation_memory": "1GiB"}, {"cuda_graphs": False}):
        trainers.append(build(kind, True, tmp_path, folders["llama"], own=own, **options))
        trainers[-1].train()
    assert_same(*trainers)
    assert trainers[0]._graphs.captured == 2, trainers[0]._graphs.reasons
    assert len(kept_by_layers(trainers[0])) == 2
    assert trainers[0]._kept.may_grow == (kind == "GRPO")


@pytest.mark.parametrize("budget", ["70KiB", "1GiB"])
def test_rows_that_are_computed_again_keep_what_graphs_leave(budget, tmp_path, folders, monkeypatch):
    """The last row of a micro-batch runs from graphs, and the others in its backward, without."""
    monkeypatch.setattr("liger_trainer.packing.packed_row.filled", lambda layout: layout)
    options = {"gradient_checkpointing": True, "max_steps": 12, "data": pairs_of_one_length}
    trainers = []
    for own in ({"cuda_graphs": "true", "activation_memory": budget}, {"cuda_graphs": False}):
        own["tokens_per_micro_batch"] = 40
        trainers.append(build("DPO", True, tmp_path, folders["llama"], own=own, **options))
        trainers[-1].train()
    assert_same(*trainers)
    assert len(kept_by_layers(trainers[0])) == (1 if budget == "70KiB" else 2)
    assert 0 < max(kept(trainers[0])) <= trainers[0]._kept.budget


def test_layers_that_are_not_checkpointed_have_memory_of_their_own(tmp_path):
    """They keep everything in any case, so it is no part of what is allowed."""
    options = {"gradient_checkpointing_kwargs": {"every_n_layers": 2}}

    def make():
        return llama(num_hidden_layers=4)

    without = trained_without(tmp_path, make, **options)
    whole = trained(tmp_path, make, "1GiB", **options)
    size, other = kept_by_layers(whole)
    for budget, fitting in (("1GiB", 2), (size + other - 1, 1)):
        trainer = trained(tmp_path, make, budget, **options)
        assert_same(trainer, without)
        assert trainer._graphs.captured == 4, trainer._graphs.reasons
        assert kept(trainer)[-1] == fitting * size


def hooked():
    """A model whose first layer cannot be captured."""
    model = llama()
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, result: None)
    return model


def test_a_layer_without_graphs_keeps_results_of_what_is_left(tmp_path):
    without = trained_without(tmp_path, hooked)
    whole = trained(tmp_path, hooked, "1GiB")
    (size,) = kept_by_layers(whole)
    first = sum(whole._kept.phase.sizes["model.layers.0"].values())
    assert kept(whole)[5:] == 3 * [size + first]
    assert_same(whole, without)
    for budget in (size + first // 2, size + first // 4, first // 2):
        trainer = trained(tmp_path, hooked, budget)
        assert_same(trainer, without)
        assert kept(trainer)[-1] > 0
        assert max(kept(trainer)) <= budget


def test_lengths_share_what_is_allowed(tmp_path):
    """Of a longer batch fewer layers keep; one without graphs keeps results of what graphs have left."""
    lengths = [10] * 6 + [20] * 4 + [10, 20, 10, 20, 14]
    rows = [
        {key: value[:length] for key, value in row.items()}
        for row, length in zip(token_rows(n=4 * 15, length=20), [each for each in lengths for _ in range(4)])
    ]
    options = {"rows": rows, "train_sampling_strategy": "sequential", "steps": len(lengths)}
    whole = trained(tmp_path, llama, "1GiB", **options)
    both = kept(whole)
    short, long = both[-3:-1]
    assert 0 < short < long
    budget = int(long) - 1  # one layer of the longer batches does not fit
    trainer = trained(tmp_path, llama, budget, **options)
    assert_same(trainer, trained_without(tmp_path, llama, **options))
    assert kept(trainer)[-3:-1] == [short, long / 2]
    assert 0 < kept(trainer)[-1] <= budget - short
    assert max(kept(trainer)) <= budget


def test_a_resumed_run_keeps_as_much(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 8, "steps": 14}
    whole = trained(tmp_path / "a", llama, "150KiB", **options)
    assert len(kept_by_layers(whole)) == 1
    resumed = causal(tmp_path / "b", llama(), **ON, activation_memory="150KiB", max_steps=14)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-8"))
    assert resumed._kept.phase.record == whole._kept.phase.record
    assert kept_by_layers(resumed) == kept_by_layers(whole)
    assert kept(resumed)[-1] == kept(whole)[-1] > 0
    assert_same_end(resumed, whole)
    assert_same_end(resumed, trained_without(tmp_path / "c", llama, steps=14))


def test_what_keeps_the_device_busy_keeps_results(tmp_path):
    """As without graphs."""
    trainer = causal(tmp_path, llama(), **{**ON, "cuda_graphs": "auto"}, activation_memory="1GiB", max_steps=STEPS)
    trainer._graphs._captures.is_busy = True
    trainer.train()
    assert trainer._graphs.captured == 0
    assert kept(trainer)[-1] == kept(trainer)[3] == trainer._kept.plan().bytes > 0
    assert_same(trainer, trained_without(tmp_path, llama))


PEAK = 1_000_000


def trained_with_auto(folder, memory, captures=None, steps=STEPS, **options):
    """A trainer that has trained with this memory, and what graphs kept after each step."""
    callback = options.pop("after", lambda trainer: None)
    trainer = causal(folder, llama(), **ON, activation_memory="1GiB", max_steps=steps, **options)
    trainer._kept = ActivationMemory("auto", torch.device("cpu"), memory)
    trainer._graphs._kept, trainer._graphs._captures = trainer._kept, captures or RecordedCaptures()
    in_graphs, step = [], trainer.training_step

    def training_step(*args, **kwargs):
        loss = step(*args, **kwargs)
        in_graphs.append(trainer._kept._in_graphs.kept)
        callback(trainer)
        return loss

    trainer.training_step = training_step
    trainer.train()
    return trainer, in_graphs


def test_auto_fits_what_graphs_have_under_every_peak(tmp_path):
    """With room for what is computed in a capture, and so for four times of what a layer keeps."""
    trainer, in_graphs = trained_with_auto(tmp_path, FakeMemory(2 * PEAK, peak=PEAK))
    size = in_graphs[-1] // 2
    taken = trainer._graphs._taken()
    assert in_graphs == 5 * [0] + 3 * [2 * size]
    without = trained_without(tmp_path, llama)
    assert_same(trainer, without)
    for limit, highest, fits in (
        (PEAK + taken + 4 * size, 0, True),
        (PEAK + taken + 4 * size - 1, 0, False),
        (PEAK + taken + 4 * size, PEAK + 1, False),  # such as that of the optimizer
    ):
        trainer, in_graphs = trained_with_auto(tmp_path, FakeMemory(limit, peak=PEAK, highest=highest))
        assert in_graphs[-1] == 2 * size * fits
        assert trainer._graphs.captured == 2
        assert_same(trainer, without)


def test_auto_does_not_count_on_what_generations_leave(tmp_path):
    memory = FakeMemory(2 * PEAK, peak=PEAK)
    trainer, in_graphs = trained_with_auto(
        tmp_path, memory, after=lambda trainer: setattr(trainer._kept, "may_grow", True)
    )
    assert in_graphs == STEPS * [0]
    assert trainer._graphs.captured == 2


def test_auto_gives_memory_back_for_a_longer_batch(tmp_path):
    rows = [
        {key: value[:length] for key, value in row.items()}
        for row, length in zip(token_rows(n=40, length=20), [10] * 32 + [20] * 4 + [10] * 4)
    ]
    options = {"rows": rows, "train_sampling_strategy": "sequential", "steps": 10}
    trainer, in_graphs = trained_with_auto(tmp_path, FakeMemory(2 * PEAK, peak=PEAK), **options)
    assert in_graphs[7] > 0
    assert in_graphs[8:] == [0, 0]
    assert trainer._graphs._captures.renewals == 1
    assert_same(trainer, trained_without(tmp_path, llama, **options))


def test_auto_gives_memory_back_where_the_device_ran_out_of_it(tmp_path):
    """Not where only the captures ran out of it, which do not come again."""
    memory = FakeMemory(1_090_000, peak=500_000)

    class RunsOut(RecordedCaptures):
        def __call__(self, run, keeps=False):
            memory.out = True
            return super().__call__(run, keeps)

    def run_out(trainer):
        memory.out = memory.out or trainer.state.global_step == 7

    trainer, in_graphs = trained_with_auto(tmp_path, memory, RunsOut(each=110_000), steps=14, after=run_out)
    assert trainer._graphs._captures.renewals == 1
    assert trainer._kept.phase.limit == 0.92 * 1_090_000
    assert in_graphs[5] == in_graphs[9] == 2 * in_graphs[-1] > 0
    assert in_graphs[10:12] == [0, 0]
    assert_same(trainer, trained_without(tmp_path, llama, steps=14))


def test_auto_gives_memory_back_for_the_first_evaluation(tmp_path):
    """What that takes is known afterwards."""
    memory = FakeMemory(2 * PEAK, peak=PEAK)
    options = {"eval_strategy": "steps", "eval_steps": 7, "steps": 16, "eval_dataset": token_rows(n=4)}
    trainer, in_graphs = trained_with_auto(tmp_path, memory, **options)
    assert trainer._graphs._captures.renewals == 1
    assert in_graphs[6] == in_graphs[-1] > 0
    memory = FakeMemory(2 * PEAK, peak=PEAK)

    def enlarge(trainer):
        memory._peak = 2 * PEAK if trainer.state.global_step + 1 == 7 else PEAK

    trainer, in_graphs = trained_with_auto(tmp_path, memory, after=enlarge, **options)
    assert trainer._kept.phase.record.highest == 2 * PEAK
    assert in_graphs[6] > 0
    assert in_graphs[7:] == 9 * [0]
