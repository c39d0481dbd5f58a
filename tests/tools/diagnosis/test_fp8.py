"""Recipes whose `fp8` cannot run or saves no time; the same with the fix has no trap."""

import pytest
import torch

from liger_trainer.tools.diagnosis import settings as diagnosis
from liger_trainer.tools.diagnosis.diagnose import OF_SETTINGS
from liger_trainer.tools.diagnosis.sample import read_case
from tests.tools.cli.runs import write_recipe

SIZES = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "vocab_size": 64}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 8}
CASES = {
    "kernels": ({"use_liger_kernel": False}, {"use_liger_kernel": True}, "leaves every layer in bf16"),
    "fp16": ({"bf16": False, "fp16": True}, {"fp16": False, "bf16": True}, "in fp16"),
    "fp32": ({"bf16": False, "dtype": "float32"}, {"bf16": True}, "multiply in float32"),
    "small": ({"model": {"hidden_size": 512}}, {"fp8": None}, "fewer than 1024 features"),
    "ends": (
        {"model": {"num_hidden_layers": 2}},
        {"liger_kernel_config": {"fp8_all_layers": True}},
        "the first and the last layer stay",
    ),
    "adapters": ({"use_peft": True, "lora_target_modules": ["all-linear"]}, {"fp8_base": True}, "it has adapters"),
    "experts": ({"model": EXPERTS}, {"fp8": None}, "experts stay in bf16"),
    "tokens": ({"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 2}, "at most 1,024 tokens"),
    "pairs": ({"trainer": "dpo", "max_length": 511}, {"max_length": 512}, "at most 2,044 tokens"),
    "packed": (
        {"trainer": "dpo", "tokens_per_micro_batch": 512},
        {"tokens_per_micro_batch": 4096},
        "at most 512 tokens",
    ),
}


def traps(folder, model=None, **values):
    config = {"model_type": "llama", **SIZES, "num_hidden_layers": 3, **(model or {})}
    base = {"trainer": "sft", "model_config": config, "dataset_name": "x", "fp8": "rowwise", "max_length": 1024}
    path = write_recipe(folder / "mine.yaml", {**base, "per_device_train_batch_size": 2, "bf16": True, **values})
    return [str(trap) for trap in OF_SETTINGS["fp8"](read_case(path))]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("case", CASES)
def test_found_and_gone_with_the_fix(case, tmp_path):
    values, fix, words = CASES[case]
    (trap,) = traps(tmp_path, **values)
    assert words in trap
    assert traps(tmp_path, **{**values, **fix}) == []


def test_an_older_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(diagnosis, "has_fp8", lambda device: False)
    (trap,) = traps(tmp_path)
    assert "NVIDIA A100 is no NVIDIA Hopper or newer" in trap
    monkeypatch.setattr(diagnosis, "has_fp8", lambda device: True)
    assert traps(tmp_path) == []
