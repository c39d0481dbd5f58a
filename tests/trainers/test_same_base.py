"""Adapters go on with the base that they were trained on: another is refused, and one that may have moved is said."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from liger_trainer.recipe.build import _model_and_adapters
from liger_trainer.recipe.load import load_recipe
from liger_trainer.trainers.checkpoints import same_base
from liger_trainer.trainers.checkpoints.resuming import CheckpointError
from liger_trainer.trainers.checkpoints.saved_weights import FILE, BaseQuantization
from tests.tools.cli.runs import write_recipe
from tests.trainers.builders import causal
from tests.trainers.tiny import llama

pytestmark = pytest.mark.filterwarnings("ignore")
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def trainer_of(base, folder, max_steps=3, revision=None):
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", revision=revision)
    return causal(folder, get_peft_model(model, config), save_strategy="steps", save_steps=2, max_steps=max_steps)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two bases, of the same sizes, and a run of two steps on the first."""
    folder = tmp_path_factory.mktemp("trained")
    for seed, name in enumerate(("base", "other")):
        torch.manual_seed(seed)
        llama().save_pretrained(folder / name)
    trainer_of(folder / "base", folder / "run", max_steps=2).train()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path / "run"


def resume(base, run, **options):
    trainer = trainer_of(base, run, **options)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    return trainer


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_another_base_is_refused(trained, run):
    with pytest.raises(CheckpointError) as raised:
        resume(trained / "other", run)
    message = str(raised.value)
    assert f"were trained on '{trained / 'base'}', and the base of this run is '{trained / 'other'}'. Resume" in message
    assert "\n" not in message


def test_the_same_base_goes_on_without_a_word(trained, run, caplog, monkeypatch):
    monkeypatch.chdir(trained)
    assert resume("base", run).state.global_step == 3
    assert "for the same one" not in caplog.text


@pytest.mark.parametrize("moved", ["elsewhere/base", "renamed"])
def test_one_that_may_have_moved_goes_on_with_a_line(moved, trained, run, tmp_path, caplog):
    shutil.copytree(trained / "base", tmp_path / moved)
    before = str(trained / "base") if moved != "renamed" else str(tmp_path / "gone")
    change(run / "checkpoint-2" / "adapter_config.json", base_model_name_or_path=before)
    assert resume(tmp_path / moved, run).state.global_step == 3
    assert f"names the base '{before}'; this run takes '{tmp_path / moved}' for the same one" in caplog.text


def test_one_on_the_hub_is_another_than_its_namesake(trained, run, monkeypatch):
    assert not same_base._may_have_moved("one/model", "another/model")
    assert same_base._may_have_moved("one/base", str(trained / "base"))
    assert not same_base._may_have_moved("one/model", str(trained / "base"))


def test_another_revision_is_refused(trained, run):
    checkpoint = run / "checkpoint-2"
    model = trainer_of(trained / "base", run, revision="v2").model
    model.peft_config["default"].base_model_name_or_path = "one/model"
    change(checkpoint / "adapter_config.json", base_model_name_or_path="one/model")
    assert same_base.differing_base(checkpoint, model) is None  # what was not noted is not compared
    change(checkpoint / "adapter_config.json", revision="main")
    found = same_base.differing_base(checkpoint, model)
    assert found == "were trained on 'one/model' (main), and the base of this run is 'one/model' (v2)"
    change(checkpoint / "adapter_config.json", base_model_name_or_path=str(trained / "base"))
    resume(trained / "base", run, revision="v2")  # a folder has none


def test_a_base_in_another_format_is_refused(trained, run, monkeypatch):
    checkpoint, base = run / "checkpoint-2", trained / "base"
    (checkpoint / FILE).write_text(json.dumps({"config": NF4, "dtype": "bfloat16"}))
    with pytest.raises(CheckpointError, match=r"base' \(nf4\), and .*base' \(16 or 32 bits\)"):
        resume(base, run)
    (checkpoint / FILE).write_text(json.dumps({"config": {"quant_method": "fp8"}, "dtype": "bfloat16"}))
    resume(base, run)  # dequantised, it is the same
    (checkpoint / FILE).unlink()
    monkeypatch.setattr(same_base, "base_quantization", lambda model: BaseQuantization(NF4, "bfloat16"))
    with pytest.raises(CheckpointError, match=r"base' \(16 or 32 bits\), and .*base' \(nf4\)"):
        resume(base, run)
    states = torch.load(checkpoint / "rng_state.pth", weights_only=False)
    states.pop("liger_trainer")
    torch.save(states, checkpoint / "rng_state.pth")
    resume(base, run)  # a stock trainer's says nothing of its base


def test_a_format_in_a_word():
    experts = {"quant_type": "nf4", "double_quant": True}
    assert same_base._form(None) == "16 or 32 bits"
    assert same_base._form(BaseQuantization(NF4, "bfloat16", experts)) == "nf4"
    assert same_base._form(BaseQuantization(None, "bfloat16", experts)) == "nf4"
    assert same_base._form(BaseQuantization({"quant_method": "mxfp4"}, "bfloat16")) == "mxfp4"
    assert same_base._form(BaseQuantization({"quant_method": "fp8"}, "bfloat16", decoded=True)) == "16 or 32 bits"
    int4 = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    assert same_base._form(BaseQuantization(int4, "bfloat16")) == "compressed-tensors pack-quantized"
    nested = {"quant_method": "compressed-tensors", "quantization_config": {"format": "pack-quantized"}}
    assert same_base._form(BaseQuantization(nested, "bfloat16")) == "compressed-tensors pack-quantized"
    assert same_base._form(BaseQuantization({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "bfloat16")).endswith(
        "NVFP4"
    )


def test_formats_of_one_method_are_others(trained, run, tmp_path):
    rows, ints = (
        {"quant_method": "compressed-tensors", "format": form} for form in ("float-quantized", "pack-quantized")
    )
    checkpoint = run / "checkpoint-2"
    (checkpoint / FILE).write_text(json.dumps({"config": ints, "dtype": "bfloat16"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same_base, "base_quantization", lambda model: BaseQuantization(rows, "bfloat16"))
        with pytest.raises(CheckpointError, match=r"pack-quantized\), and .*float-quantized\)"):
            resume(trained / "base", run)
    shutil.copytree(trained / "base", tmp_path / "base")
    resume(tmp_path / "base", run)  # moved, and dequantised


def test_what_is_gone_has_a_folder_in_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    assert same_base._may_have_moved(str(tmp_path / "old"), "new")
    assert not same_base._may_have_moved(str(tmp_path / "old"), "one/model")


def test_a_recipe_notes_the_revision_of_its_base(tmp_path):
    """In the adapters' configuration, where merging looks too."""
    values = {"model_name_or_path": "one/model", "model_revision": "v2", "use_peft": True, "data_files": "a.jsonl"}
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml", {"trainer": "sft", **values}), ["--use_cpu"])
    assert _model_and_adapters(recipe, None, False)[1].revision == "v2"
