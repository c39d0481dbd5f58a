"""`activation_memory`: what the layers keep changes no bit of the training, in every trainer that checkpoints."""

import copy
import ctypes
import functools
import json
import logging
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from liger_trainer.recompute import recording
from liger_trainer.recompute.activation_memory import ActivationMemory, Keeping
from liger_trainer.recompute.budget import Call, Candidate, Layer, RecordedStep
from liger_trainer.recompute.keeping import Replaced
from liger_trainer.trainers.trainer import LigerTrainer
from tests.patching.mixing_models import built
from tests.tiny_models import TINY_MODELS
from tests.trainers.builders import causal, dpo, losses_and_norms, sft
from tests.trainers.parity import KINDS, build
from tests.trainers.parity import lora as adapters
from tests.trainers.tiny import llama, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")

ON = {"gradient_checkpointing": True, "max_steps": 5, "kernel_report": False}


def lora(dropout=0.0, model=llama):
    base = model()
    torch.manual_seed(0)
    adapted = get_peft_model(
        base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=dropout)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return adapted


def trained(builder, folder, make, **options):
    trainer = builder(folder, make(), **{**ON, **options})
    trainer.train()
    return trainer


def assert_same(one, other):
    assert losses_and_norms(one) == losses_and_norms(other)
    for (name, ours), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


MAKERS = {
    "llama": llama,
    "lora": lora,
    "lora with dropout": lambda: lora(0.3),
    "gemma3": TINY_MODELS["gemma3_text"],
    "qwen3_moe": TINY_MODELS["qwen3_moe"],
    "attention with dropout": lambda: llama(attention_dropout=0.3),
}
MIXING = {
    **{name: functools.partial(built, name) for name in ("qwen3_5_text", "nemotron_h", "lfm2")},
    "qwen3_5_text, lora": lambda: lora(model=lambda: built("qwen3_5_text")),
}
MAKERS |= MIXING


@pytest.mark.parametrize("budget", ["40KiB", "1GiB"])
@pytest.mark.parametrize("name", MAKERS)
def test_no_bit_changes(name, budget, tmp_path, monkeypatch):
    if name in MIXING:  # beside a recurrence in plain torch, no other result is worth its bytes
        monkeypatch.setattr(recording, "_LEAST_SHARE", 0)
        monkeypatch.setattr(recording, "_LEAST_COPIES", 0)
    without = trained(causal, tmp_path, MAKERS[name])
    kept = trained(causal, tmp_path, MAKERS[name], activation_memory=budget)
    assert_same(kept, without)
    assert kept._kept.kept > 0
    assert kept._kept.kept <= (40 * 2**10 if budget == "40KiB" else 2**30)
    layers = kept.model.config.num_hidden_layers
    assert len(kept._kept.phase.record.layers) == layers
    # Where layers differ, their times decide which of them a small budget goes to.
    assert len(kept._kept.plan().calls) == layers or (name in MIXING and budget == "40KiB")


@pytest.mark.parametrize("options", [
    {"gradient_accumulation_steps": 3},
    {"liger_kernel_config": {"tiled_mlp": True}},
    {"use_liger_kernel": False},
    {"gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    {"per_device_train_batch_size": 1},
], ids=str)  # fmt: skip
def test_no_bit_changes_with(options, tmp_path):
    assert_same(
        trained(causal, tmp_path, llama, activation_memory="1GiB", **options),
        trained(causal, tmp_path, llama, **options),
    )


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_trainers_of_trl(kind, adapted, tmp_path, folders):
    def train(**options):
        further = {"peft_config": adapters()} if adapted else {}
        trainer = build(kind, True, tmp_path, folders["llama"], **{**ON, **further, **options})
        trainer.train()
        return trainer

    without, kept = train(), train(activation_memory="1GiB")
    assert_same(kept, without)
    assert kept._kept.kept > 0


def test_layers_keep_although_trl_gives_them_their_own_functions_back(tmp_path):
    """An adapter's reference is the model without it, and TRL checkpoints nothing while it answers."""
    trainer = dpo(tmp_path, lora(), **ON, activation_memory="1GiB")
    names = []
    inner = trainer._kept._calls_to_keep
    trainer._kept._calls_to_keep = lambda phase, name, tokens: (names.append(name), inner(phase, name, tokens))[1]
    trainer.train()
    assert len(names) == 2 * 3  # two layers in every step but the first, and the second, which is recorded


def test_batches_of_other_lengths(tmp_path):
    """A longer batch than the recorded one gets a plan within the same budget; a shorter one keeps as much or more."""
    rows = [
        {key: value[:length] for key, value in row.items()}
        for row, length in zip(token_rows(n=24, length=64), [16] * 8 + [64] * 4 + [32] * 4 + [7] * 8, strict=True)
    ]
    options = {"rows": rows, "train_sampling_strategy": "sequential", "max_steps": 6}
    without = trained(causal, tmp_path, llama, **options)
    kept = trained(causal, tmp_path, llama, activation_memory="60KiB", **options)
    assert_same(kept, without)
    sizes = [log["kept_activations_gib"] * 2**30 for log in kept.state.log_history if "loss" in log]
    assert len(kept._kept.phase.plans) > 2
    assert all(plan.bytes <= 60 * 2**10 for plan in kept._kept.phase.plans.values())
    assert len(sizes) == 6


def test_the_plan_is_printed_logged_and_in_the_report(tmp_path, capsys):
    trainer = trained(causal, tmp_path, llama, activation_memory="1GiB", kernel_report=True)
    line = trainer._kept.summary()
    assert capsys.readouterr().out.count(line) == 1
    assert line.startswith("activation_memory: 2 of 2 layers keep ")
    assert trainer.kernel_report.remarks[-1] == line
    assert all("kept_activations_gib" in log for log in trainer.state.log_history if "loss" in log)


def test_a_budget_below_the_smallest_result_says_so(tmp_path, capsys):
    trainer = trained(causal, tmp_path, llama, activation_memory="1B", kernel_report=True)
    assert "nothing is kept; there is room for 0.00 MiB, and the smallest result" in capsys.readouterr().out
    assert trainer._kept.kept == 0


def test_a_resumed_run_keeps_the_plan(tmp_path):
    options = {"activation_memory": "50KiB", "save_strategy": "steps", "save_steps": 4, "max_steps": 6}
    whole = trained(causal, tmp_path / "a", llama, **options)
    checkpoint = tmp_path / "a" / "checkpoint-4"
    resumed = causal(tmp_path / "b", llama(), **{**ON, **options})
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed._kept.phase.record == whole._kept.phase.record
    assert resumed._kept.plan() == whole._kept.plan()
    assert isinstance(resumed._kept.phase, Keeping)
    assert_same_end(resumed, whole)
    saved = json.loads((checkpoint / "activation_memory.json").read_text())
    saved["run"]["per_device_train_batch_size"] = 99  # another run's record is not valid
    (checkpoint / "activation_memory.json").write_text(json.dumps(saved))
    other = causal(tmp_path / "c", llama(), **{**ON, **options})
    other.train(resume_from_checkpoint=str(checkpoint))
    assert other._kept.planned is None  # two steps are too few for a plan of its own
    assert_same_end(other, whole)


def assert_same_end(one, other):
    for (name, ours), theirs in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("value", [None, 0, "0"])
def test_off(value, tmp_path):
    assert causal(tmp_path, **ON, activation_memory=value)._kept is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_checkpointing": False}, "`gradient_checkpointing` is false"),
        ({"torch_compile": True}, "`torch_compile` is true"),
        ({"gradient_checkpointing_kwargs": {"context_fn": print}}, "has a `context_fn`"),
        ({"activation_memory": "auto"}, "training is on the CPU"),
        ({"activation_memory": "20GX"}, "`activation_memory` is '20GX'"),
        ({"activation_memory": -1}, "`activation_memory` is -1"),
    ],
    ids=str,
)
def test_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        causal(tmp_path, **{**ON, "activation_memory": "1GiB", **options})


def test_refused_beside_the_selective_checkpointing_of_trl(tmp_path):
    with pytest.raises(ValueError, match="`selective`"):
        sft(tmp_path, **{**ON, "activation_memory": "1GiB", "gradient_checkpointing_kwargs": {"selective": True}})


def test_reentrant_checkpointing_keeps_nothing_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        trainer = causal(
            tmp_path, **ON, activation_memory="1GiB", gradient_checkpointing_kwargs={"use_reentrant": True}
        )
    assert trainer._kept is None
    assert "reentrant" in caplog.text


class FakeMemory:
    """An allocator that always had the same peak; the limits are those of one call after the other."""

    def __init__(self, *limits, peak=0, highest=0):
        self._limits, self._peak, self.out, self.noted = list(limits), peak, False, 0
        self.highest = max(peak, highest)

    def allocated(self):
        return 0

    def take_peak(self):
        return self._peak

    def note_peak(self):
        self.noted += 1

    def limit(self):
        return self._limits.pop(0) if len(self._limits) > 1 else self._limits[0]

    def ran_out(self):
        out, self.out = self.out, False
        return out


def kept_in_steps(folder, memory, steps, runs_out):
    """A trainer that has trained with `auto` on this memory, which runs out in one step, and what each step kept."""
    trainer = causal(folder, llama(), **{**ON, "max_steps": steps, "activation_memory": "1GiB"})
    trainer._kept = ActivationMemory("auto", torch.device("cpu"), memory)
    kept = []
    step = trainer.training_step

    def training_step(*args, **kwargs):
        loss = step(*args, **kwargs)
        memory.out = memory.out or trainer.state.global_step == runs_out
        kept.append(trainer._kept.kept)
        return loss

    trainer.training_step = training_step
    trainer.train()
    return trainer, kept


def test_auto_fills_what_is_free_and_shrinks_when_memory_runs_out(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "liger_trainer"):
        trainer, kept = kept_in_steps(tmp_path, FakeMemory(10_000 + 45_000, peak=10_000), steps=60, runs_out=20)
    assert kept[:2] == [0, 0]
    assert 0 < kept[2] <= kept[3]  # there is less room while results are compared
    assert 30_000 < kept[3] <= 45_000
    assert kept[-1] < kept[3]
    assert kept[-1] <= 0.92 * 55_000 - 10_000
    assert caplog.text.count("out of memory for a moment") == 1
    assert_same_end(trainer, trained(causal, tmp_path, llama, max_steps=60))


def test_auto_shrinks_in_the_step_after_the_first_one_that_ran_out(tmp_path):
    _, kept = kept_in_steps(tmp_path, FakeMemory(10_000 + 45_000, peak=10_000), steps=6, runs_out=3)
    assert kept[3] > 30_000
    assert max(kept[4:]) <= 0.92 * 55_000 - 10_000


def test_auto_keeps_less_where_keeping_leaves_more_fragments(tmp_path):
    """The limit is measured again after the step that compares; one that grew changes nothing."""
    for limits in ((55_000, 30_000), (30_000, 55_000)):
        trainer, kept = kept_in_steps(tmp_path, FakeMemory(*limits, peak=10_000), steps=5, runs_out=None)
        assert trainer._kept.phase.limit == 30_000
        assert 10_000 < kept[-1] <= 20_000


def test_the_peak_is_noted_before_callbacks_of_a_step_see_the_counter(tmp_path):
    """In the three steps before the last measurement of the limit; a callback may reset the counter after each."""
    memory, seen = FakeMemory(55_000, peak=10_000), []

    class Resets(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append(memory.noted)

    trainer = causal(tmp_path, llama(), **{**ON, "activation_memory": "1GiB"}, callbacks=[Resets()])
    trainer._kept = ActivationMemory("auto", torch.device("cpu"), memory)
    trainer.train()
    assert seen == [1, 2, 3, 3, 3]


def test_a_layer_of_more_tokens_than_were_planned_for_keeps_nothing():
    call = Call("aten::mm", 0)
    layers = tuple(Layer(name, 100, (Candidate(call, 10, 1.0),)) for name in ("text", "images"))
    kept = ActivationMemory(1000, torch.device("cpu"))
    kept.resume(RecordedStep(layers), 1e9)
    assert kept._calls_to_keep(kept.phase, "text", 90) == {call}
    assert kept._calls_to_keep(kept.phase, "images", 100) == frozenset()
    assert kept._calls_to_keep(kept.phase, "images", 90) == {call}
    assert kept._calls_to_keep(kept.phase, "unknown", 90) == frozenset()


class Writes(torch.autograd.Function):
    """Doubles its input in place, and torch does not see it, as with a kernel of Triton's."""

    @staticmethod
    def forward(ctx, x):
        memory = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
        for place in range(x.numel()):
            memory[place] *= 2
        return x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def writing():
    """A model whose MLP writes to the result of a matmul."""
    model = llama()
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(Writes.apply(mlp.up_proj(x)).tanh())
    return model


def test_what_a_hidden_kernel_writes_to_is_not_kept(tmp_path):
    options = {"liger_kernel_config": {"swiglu": False}, "learning_rate": 1e-3}
    without = trained(causal, tmp_path, writing, **options)
    kept = trained(causal, tmp_path, writing, activation_memory="1GiB", **options)
    assert_same(kept, without)
    assert kept._kept.kept > 0


def test_a_second_run_measures_again(tmp_path, monkeypatch):
    # Times differ from run to run; so all results are worth their bytes.
    monkeypatch.setattr(recording, "_LEAST_SHARE", 0)
    monkeypatch.setattr(recording, "_LEAST_COPIES", 0)
    sizes = iter([32, 32, 64])  # the first is for the construction
    trainer = causal(
        tmp_path,
        trainer_class=LigerTrainer,
        model_init=lambda: llama(hidden_size=next(sizes, 64)),
        **{**ON, "activation_memory": "1GiB"},
    )
    trainer.train()
    small = trainer._kept.plan().bytes
    trainer.train()
    assert trainer._kept.plan().bytes > 1.5 * small


def test_layers_that_share_weights_under_autocast(tmp_path):
    """Autocast casts a weight once in the forward, and in the recomputation of each layer."""

    def shared():
        model = llama(num_hidden_layers=3)
        model.model.layers[2].mlp = model.model.layers[0].mlp
        return model

    options = {"bf16": True, "liger_kernel_config": {"swiglu": False}}
    assert_same(
        trained(causal, tmp_path, shared, activation_memory="1GiB", **options),
        trained(causal, tmp_path, shared, **options),
    )


def test_copies_of_a_trained_model_have_the_functions_of_transformers(tmp_path):
    trainer = trained(causal, tmp_path, llama, activation_memory="1GiB")
    trainer._kept._memory = torch  # as that of an accelerator, this cannot be pickled
    layer = trainer.model.model.layers[0]
    assert isinstance(layer._gradient_checkpointing_func, Replaced)
    assert type(pickle.loads(pickle.dumps(layer))._gradient_checkpointing_func) is functools.partial
    assert type(copy.deepcopy(trainer.model).model.layers[0]._gradient_checkpointing_func) is functools.partial
