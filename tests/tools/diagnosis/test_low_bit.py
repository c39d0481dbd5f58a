"""Checkpoints that load as something else, or whose layers pass no gradient, are found by their configuration."""

import pytest

from liger_trainer.tools.diagnosis.diagnose import OF_SETTINGS
from liger_trainer.tools.diagnosis.sample import read_case
from tests.tiny_models import TINY_MODELS
from tests.tools.cli.runs import write_recipe

WEIGHTS = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
ACTIVATIONS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
PUBLISHED = {
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, ["'modelopt'", "without their scales"]),
    "w8a8": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {**WEIGHTS, "input_activations": ACTIVATIONS}}},
        ["no gradient", "CompressedTensorsConfig(dequantize=True)"],
    ),
    "w8": ({"quant_method": "compressed-tensors", "config_groups": {"a": WEIGHTS}}, []),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, []),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, []),
    "mxfp4": ({"quant_method": "mxfp4"}, []),  # recipes load it in 16 bits
    "none": (None, []),
}  # fmt: skip
ADAPTERS = {"use_peft": True, "lora_target_parameters": ["experts.gate_up_proj"], "lora_dropout": 0.0}


def traps(folder, quantization, **values):
    config = TINY_MODELS["qwen3_moe"]().config
    if quantization is not None:
        config.quantization_config = quantization
    config.save_pretrained(folder / "model")
    recipe = {"trainer": "sft", "model_name_or_path": str(folder / "model"), "dataset_name": "x", **values}
    case = read_case(write_recipe(folder / "mine.yaml", recipe))
    return [str(trap) for trap in OF_SETTINGS["weights in 8 bits and fewer"](case)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_formats(name, tmp_path):
    quantization, words = PUBLISHED[name]
    found = traps(tmp_path, quantization)
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


@pytest.mark.parametrize(
    ("name", "count"), [("fp8", 1), ("bitsandbytes", 0), ("mxfp4", 0), ("none", 0), ("modelopt", 1), ("w8a8", 2)]
)
def test_adapters_on_experts_of_a_base_that_does_not_stay_packed(name, count, tmp_path):
    found = traps(tmp_path, PUBLISHED[name][0], **ADAPTERS, packed_base=False)
    assert len(found) == count
    if name == "fp8":
        assert "FineGrainedFP8Config(dequantize=True)" in found[0]
        assert traps(tmp_path, PUBLISHED[name][0], use_peft=True, packed_base=False) == []


@pytest.mark.parametrize("name", PUBLISHED)
def test_adapters_on_a_base_that_stays_packed(name, tmp_path):
    assert traps(tmp_path, PUBLISHED[name][0], **ADAPTERS) == []
