"""Traps of layers with a state, and of adapters that leave most of a model out."""

import importlib.util
from pathlib import Path

import pytest
from packaging.version import Version

from liger_trainer.recipe.families import FAMILIES
from liger_trainer.tools.diagnosis import hybrids
from liger_trainer.tools.diagnosis.diagnose import OF_SETTINGS
from liger_trainer.tools.diagnosis.hybrids import leaks, unreached, wrong_package
from liger_trainer.tools.diagnosis.sample import read_case
from tests.tools.cli.runs import write_recipe

pytestmark = pytest.mark.filterwarnings("ignore")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def case(folder, family, *options, **values):
    config = {"model_type": family, "vocab_size": 128, **FAMILIES[family]}
    written = {"trainer": "sft", "model_config": config, "dataset_name": "x", **values}
    return read_case(write_recipe(Path(folder) / "mine.yaml", written), options)


@pytest.mark.parametrize(
    ("family", "targets", "words", "names"),
    [
        ("qwen3_5", ATTENTION, "Qwen3_5GatedDeltaNet: in_proj_a, in_proj_b, in_proj_qkv", ["in_proj_z", "up_proj"]),
        # More than half, but none of the mixer.
        ("qwen3_5", [*ATTENTION, "gate_proj", "up_proj", "down_proj"], "reaches 10 of the decoder's 15", ["out_proj"]),
        ("lfm2", ["q_proj", "k_proj", "v_proj"], "Lfm2ShortConv: in_proj, out_proj", ["w1", "w2", "w3"]),
        ("granitemoehybrid", ATTENTION, "GraniteMoeHybridMLP: input_linear, output_linear", ["in_proj", "out_proj"]),
    ],
)
def test_adapters_that_leave_most_out(family, targets, words, names, tmp_path):
    peft = {"use_peft": True, "lora_target_modules": targets, "lora_dropout": 0.0}
    (trap,) = unreached(case(tmp_path, family, **peft))
    assert words in str(trap)
    fix = trap.fix.split("[")[1].split("]")[0].replace('"', "").split(", ")
    assert set(names) <= set(fix)
    assert unreached(case(tmp_path, family, **{**peft, "lora_target_modules": fix})) == []
    assert unreached(case(tmp_path, family)) == []


def test_a_name_that_peft_refuses_is_not_proposed(tmp_path):
    peft = {"use_peft": True, "lora_target_modules": ["q_proj", "k_proj"], "lora_dropout": 0.0}
    (trap,) = unreached(case(tmp_path, "nemotron_h", **peft))
    assert "NemotronHMamba2Mixer: in_proj, out_proj" in trap.what
    assert "out_proj" not in trap.fix
    fix = trap.fix.split("[")[1].split("]")[0].replace('"', "").split(", ")
    assert unreached(case(tmp_path, "nemotron_h", **{**peft, "lora_target_modules": fix})) == []


def test_few_adapters_are_a_choice_without_mixers(tmp_path):
    values = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"]}
    assert unreached(case(tmp_path, "llama", **values)) == []


def test_a_copy_of_a_whole_layer_counts_as_reached(tmp_path):
    values = {"use_peft": True, "lora_target_modules": [*ATTENTION, "in_proj_qkv"], "lora_modules_to_save": ["mlp"]}
    assert unreached(case(tmp_path, "qwen3_5", **values)) == []


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU with flash-linear-attention and a Triton for which it is wrong."""
    find = importlib.util.find_spec
    monkeypatch.setattr(hybrids, "_triton", lambda: Version("3.6.0"))
    monkeypatch.setattr(hybrids, "_is_hopper", lambda: True)
    installed = {"fla"}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: (name in installed or None) if name in ("fla", "tilelang") else find(name, *rest),
    )
    return installed


def test_flash_linear_attention_where_it_is_wrong(hopper, tmp_path, monkeypatch):
    stock = {"use_liger_kernel": False}
    (trap,) = wrong_package(case(tmp_path, "qwen3_5", **stock))
    assert "computes Qwen3_5GatedDeltaNet, but on a Hopper GPU with Triton 3.6.0 its gradients are wrong" in trap.what
    assert trap.fix == "Triton 3.7.1 or newer, or `use_liger_kernel: true`"
    for family in ("llama", "lfm2", "nemotron_h"):  # which do not ask for it
        assert wrong_package(case(tmp_path, family, **stock)) == []
    for change in (("_triton", lambda: Version("3.7.1")), ("_triton", lambda: None), ("_is_hopper", lambda: False)):
        with monkeypatch.context() as patched:
            patched.setattr(hybrids, *change)
            assert wrong_package(case(tmp_path, "qwen3_5", **stock)) == []
    hopper.add("tilelang")
    assert wrong_package(case(tmp_path, "qwen3_5", **stock)) == []


def test_flash_linear_attention_in_whose_place_ours_runs(hopper, tmp_path, monkeypatch):
    monkeypatch.setattr(hybrids, "_has_our_recurrence", lambda case: case.values["use_liger_kernel"])
    assert wrong_package(case(tmp_path, "qwen3_5")) == []
    assert len(wrong_package(case(tmp_path, "qwen3_5", "--use_liger_kernel", "false"))) == 1


def test_packing_a_hybrid_is_a_trap_without_our_kernels_alone(tmp_path):
    pytest.importorskip("liger_trainer.patching.recurrent", reason="layers with a state are not patched yet")
    for family in ("lfm2", "qwen3_5_text", "granitemoehybrid"):
        config = FAMILIES["qwen3_5"]["text_config"] if family == "qwen3_5_text" else FAMILIES[family]
        values = {"model_config": {"model_type": family, "vocab_size": 128, **config}, "packing": True}
        assert leaks(case(tmp_path, "lfm2", **values)) == []
        (trap,) = leaks(case(tmp_path, "lfm2", **values, use_liger_kernel=False))
        assert "`use_liger_kernel: true`, whose kernels begin anew with each document" in trap.fix


def test_the_checks_are_among_all():
    assert {leaks, unreached, wrong_package} <= set(OF_SETTINGS.values())
