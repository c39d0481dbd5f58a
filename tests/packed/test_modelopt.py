"""Checkpoints whose quantisation settings are in ModelOpt's own file, and not in their configuration."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedConfig

from liger_trainer import load_packed
from liger_trainer.packed.loading import is_packed, method_of, packed_loading, quantization_of
from liger_trainer.packed.modelopt import FILE, settings_of_file
from liger_trainer.recipe.model import read_config
from tests.packed_checkpoints import write_dense

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.arange(3, 35).view(2, 16)


def write_beside(folder, name, **changes):
    """A dense checkpoint of ModelOpt with its settings in their own file; the same without, and what both mean."""
    meant = write_dense(folder, name)
    settings = json.loads((folder / "config.json").read_text())
    own = settings.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(settings))
    own = {"quant_algo": own["quant_algo"], "kv_cache_quant_algo": "FP8", "exclude_modules": own["ignore"], **changes}
    (folder / FILE).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    return meant


@pytest.mark.parametrize("name", ["modelopt fp8", "modelopt nvfp4"])
def test_it_is_as_in_the_configuration(name, tmp_path):
    meant = write_beside(tmp_path / "beside", name)
    write_dense(tmp_path / "inside", name)
    native = PreTrainedConfig.__dict__["get_config_dict"]
    models = [load_packed(str(tmp_path / each), dtype=torch.float32) for each in ("inside", "beside")]
    assert PreTrainedConfig.__dict__["get_config_dict"] is native
    with torch.no_grad():
        assert torch.equal(models[1](IDS).logits, models[0](IDS).logits)
    layer = models[1].model.layers[1].mlp.up_proj
    torch.testing.assert_close(
        layer.decoded(torch.float32), meant["model.layers.1.mlp.up_proj.weight"], rtol=1e-6, atol=0
    )
    with packed_loading():  # as trl asks the class that the configuration names
        assert is_packed(LlamaForCausalLM.from_pretrained(tmp_path / "beside"))
    models[1].save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert (saved["quant_method"], saved["quant_algo"]) == ("modelopt", name.split()[1].upper())
    assert is_packed(load_packed(str(tmp_path / "saved")))


def test_what_reads_a_configuration_finds_it(tmp_path):
    write_beside(tmp_path, "modelopt fp8")
    assert method_of(AutoConfig.from_pretrained(tmp_path)) == "modelopt"
    settings = quantization_of(read_config(str(tmp_path), "`model_name_or_path`"))
    assert settings["quant_method"] == "modelopt"
    assert settings["exclude_modules"] == ["lm_head"]
    native = AutoConfig.from_pretrained(tmp_path)
    assert quantization_of(native) is None, "what transformers reads elsewhere is as it was"


def test_of_the_hub_what_is_in_the_cache_is_read(tmp_path):
    repository = tmp_path / "models--me--mine"
    place = repository / "snapshots" / "0123456789012345678901234567890123456789"
    place.parent.mkdir(parents=True)
    write_beside(place, "modelopt fp8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(place.name)
    model = load_packed("me/mine", cache_dir=str(tmp_path), local_files_only=True)
    assert is_packed(model)
    (place / FILE).unlink()
    assert settings_of_file("me/mine", cache_dir=str(tmp_path)) is None


def test_the_configuration_counts_and_weights_in_16_bits_have_no_settings(tmp_path):
    write_beside(tmp_path / "16 bits", "modelopt fp8", quant_algo=None)
    assert settings_of_file(str(tmp_path / "16 bits")) is None
    assert settings_of_file(str(tmp_path)) is None
    assert settings_of_file(str(tmp_path / "of no file.json")) is None
    write_dense(tmp_path / "blocks", "fp8 blocks")
    (tmp_path / "blocks" / FILE).write_text("{}")
    assert method_of(AutoConfig.from_pretrained(tmp_path / "blocks")) == "fp8"
    assert is_packed(load_packed(str(tmp_path / "blocks")))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"quantization": 8}'])
def test_a_file_that_cannot_be_read_is_named(text, tmp_path):
    write_beside(tmp_path, "modelopt fp8")
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{FILE}' must be the JSON that ModelOpt writes, with `quantization`"):
        load_packed(str(tmp_path))
