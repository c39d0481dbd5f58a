"""Hybrids: what their mixers save, and that each kind of layer is counted as often as there is one."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from liger_trainer.benchmarks.models import MODELS, model_config
from liger_trainer.plan.activations import Precision, attention_saved, layer_memory, mlp_saved
from liger_trainer.plan.estimate import keep, layer_results
from liger_trainer.plan.settings import Setting
from tests.plan.cases import counted, moment, run_of

HYBRIDS = ("qwen3.5-9b", "qwen3.5-35b-a3b", "nemotron-3-nano", "granite-4-h-small", "lfm2-2.6b")
HALF = Precision()


@pytest.mark.parametrize("name", HYBRIDS)
def test_parameters_are_those_of_the_model(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(MODELS[name]), dtype=torch.bfloat16)
    counts, _ = counted(name)
    assert counts.total.elements == sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for key, p in model.named_parameters() if ".experts." in key)
    assert counts.groups["experts"].elements == experts, "a convolution of each channel is no expert"
    assert counts.layers == MODELS[name].layers


@pytest.mark.parametrize("name", HYBRIDS)
def test_each_kind_of_layer_has_its_share(name):
    _, shape = counted(name)
    letters = MODELS[name].mixer.layers
    mixed = sum(kind.share for kind in shape.kinds if kind.mixer)
    attended = sum(kind.share for kind in shape.kinds if kind.query)
    assert mixed == pytest.approx(letters.count("M") / len(letters))
    assert attended == pytest.approx(letters.count("*") / len(letters))
    assert sum(kind.share for kind in shape.kinds) == pytest.approx(1)
    alone = letters.count("E")
    assert shape.sparse_share == pytest.approx(alone / len(letters) if alone else 1)


def kind_of(name, **wanted):
    _, shape = counted(name)
    (found,) = (kind for kind in shape.kinds if bool(kind.mixer) is wanted.get("mixer", True))
    return found


def test_what_a_gated_delta_net_saves():
    """Projections; q, k, v; T of each chunk; o; the norm's result; the projections' input; both norms' inputs."""
    kind = kind_of("qwen3.5-9b")
    numbers = (8192 + 4096 + 64) + 8192 + 64 * 32 + 4096 + 4096 + 4096
    assert attention_saved(kind, HALF, 4096, "liger_trainer") == 2 * numbers + 8 * 32 + 2 * 2 * 4096
    frozen = dataclasses.replace(kind, trained=False)
    assert attention_saved(frozen, HALF, 4096, "liger_trainer") == 2 * (numbers - 2 * 4096) + 8 * 32 + 2 * 2 * 4096
    adapted = dataclasses.replace(frozen, adapted_attention=4 * 4096, adapted_output=4096)
    more = attention_saved(adapted, HALF, 4096, "liger_trainer") - attention_saved(frozen, HALF, 4096, "liger_trainer")
    assert more == 2 * (4096 + 4096), "their input once, and what the last projection reads"


def test_what_other_mixers_save():
    mamba = kind_of("granite-4-h-small")
    numbers = (8192 + 8448 + 128) + 8448 + 8192 + 8192 + 4096
    assert attention_saved(mamba, HALF, 4096, "liger_trainer") == 2 * numbers + 8 * 128 + 2 * 2 * 4096
    conv = kind_of("lfm2-2.6b")
    assert attention_saved(conv, HALF, 4096, "liger_trainer") == 2 * (3 * 2048 + 2048 + 2048) + 2 * 2 * 2048


def test_layers_of_nemotron_are_one_part_each():
    _, shape = counted("nemotron-3-nano")
    experts, mixer, attention = shape.kinds
    assert (experts.query, experts.mixer, experts.experts) == (0, None, 128)
    assert (mixer.query, mixer.intermediate, mixer.experts) == (0, 0, 0)
    assert (attention.query, attention.intermediate, attention.mixer) == (4096, 0, None)
    saved = [layer_memory(kind, HALF, 1, 4096, "liger_trainer").saved for kind in shape.kinds]
    assert min(saved) > 0
    assert mlp_saved(mixer, HALF) == mlp_saved(attention, HALF) == 2 * 2688


def test_a_step_counts_every_kind_of_layer():
    """Without checkpoints the mean over the layers is saved; with them the inputs alone."""
    run, setting = run_of("qwen3.5-9b", 4096), Setting("single", 1, 1, 1, checkpointing=False)
    each = [layer_memory(kind, HALF, 4096, 4096) for kind in run.shape.kinds]
    saved = sum(kind.share * memory.saved for kind, memory in zip(run.shape.kinds, each))
    assert moment("loss", run, setting).activations == pytest.approx(32 * saved)
    checkpointed = moment("loss", run, dataclasses.replace(setting, checkpointing=True)).activations
    assert checkpointed == 32 * 4096 * 4096 * 2


def test_checkpointed_layers_keep_what_their_kind_has():
    _, shape = counted("qwen3.5-9b")
    results = {result.name: result for result in layer_results(shape, 2, 4096, "liger_trainer")}
    assert results["attention"].share == results["q, k, v"].share == 0.25
    assert results["recurrence"].share == results["mixer projections"].share == 0.75
    assert results["gate, up"].share == 1
    assert results["recurrence"].bytes == 2 * (4096 + 64 * 32)
    kept = keep(results.values(), 32, 4096, 2**50)
    assert (kept.layers["attention"], kept.layers["recurrence"], kept.layers["gate, up"]) == (8, 24, 32)
    assert kept.saved == pytest.approx(1)


def test_generation_has_states_besides_keys_and_values():
    setting = Setting("single", 1, 1, 1, checkpointing=True)
    run = run_of("qwen3.5-9b", 1024, generated=8)
    found = moment("generation", run, setting).generation
    keys = 8 * 2 * 1024 * 2 * 1024  # of a layer
    states = 24 * 8 * 4 * 32 * 128 * 128
    assert found == pytest.approx(8 * keys + states + keys + 8 * 248320 * 6)
