"""Hybrid models in the trainers, on uneven lengths, with what the tests of packed rows do not have, against TRL's."""

from __future__ import annotations

import pytest

from tests.packing.training import assert_close_gradients, save_models, trained
from tests.trainers.builders import sft
from tests.trainers.parity import OF_DIFFERENCES, assert_close_logs, assert_close_weights, lora
from tests.trainers.tiny import logged

pytestmark = pytest.mark.filterwarnings("ignore")

QWEN, NEMOTRON, LFM = "qwen3_5_text", "nemotron_h", "lfm2"
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "down_proj")
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
CHECKPOINTED = {"gradient_checkpointing": True}
REENTRANT = {**CHECKPOINTED, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
PADDED = {"own": {"padding_free": False}}
CASES = {
    "SFT qwen3_5": ("SFT", QWEN, ACCUMULATED),
    "SFT qwen3_5, lora": ("SFT", QWEN, {"peft_config": lora(*PROJECTIONS), **REENTRANT}),
    "SFT nemotron_h": ("SFT", NEMOTRON, CHECKPOINTED),
    "SFT lfm2, MLPs in tiles": ("SFT", LFM, {"own": {"liger_kernel_config": {"tiled_mlp": True}}}),
    "SFT qwen3_5, stock layers": ("SFT", QWEN, {"own": {"use_liger_kernel": False}}),
    "DPO qwen3_5, padded": ("DPO", QWEN, {**PADDED, **CHECKPOINTED}),
    "DPO qwen3_5, stock layers": ("DPO", QWEN, {"own": {"use_liger_kernel": False}}),
    "DPO lfm2, not shared": ("DPO", LFM, {"own": {"share_prompt": False}}),
    "DPO nemotron_h, stock mixers": ("DPO", NEMOTRON, {"own": {"liger_kernel_config": {"recurrence": False}}}),
    "KTO qwen3_5, padded": ("KTO", QWEN, {**PADDED, **ACCUMULATED}),
    "Reward qwen3_5, padded": ("Reward", QWEN, {**PADDED, "center_rewards_coefficient": 0.1}),
    "GRPO qwen3_5, padded": ("GRPO", QWEN, {"beta": 0.1, **PADDED, **ACCUMULATED}),
    "GRPO nemotron_h, not shared": ("GRPO", NEMOTRON, {"beta": 0.1, "own": {"share_prompt": False}}),
    "GRPO lfm2, stock layers": ("GRPO", LFM, {"beta": 0.1, "own": {"use_liger_kernel": False}}),
}
OF_NOISE = {"DPO": ["rewards/accuracies"], "Reward": ["accuracy"]}  # the order of equal completions


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("hybrids"))


@pytest.mark.parametrize("name", CASES)
def test_logs_gradients_and_weights_are_those_of_trl(name, tmp_path, models):
    kind, model, case = CASES[name]
    case = dict(case)
    own = case.pop("own", {})
    stock, expected = trained(kind, False, tmp_path / "stock", models[model], **case)
    ours, found = trained(kind, True, tmp_path / "ours", models[model], own={**own, "kernel_report": True}, **case)
    left = {row.component: row.reason for row in ours.kernel_report or () if not row.applied}
    applied = {row.component for row in ours.kernel_report.applied} if ours.kernel_report else set()
    stocks = "stock" in name
    assert bool(applied & {"recurrence", "short_conv"}) != stocks
    if kind != "SFT":
        assert ("padding_free" in applied) == (not stocks and "padded" not in name), left
        assert ("share_prompt" in applied) == (kind != "KTO" and "padding_free" in applied and "not shared" not in name)
    assert len(logged(stock)) == 3
    assert_close_logs(logged(ours), logged(stock), OF_NOISE.get(kind, ()), OF_DIFFERENCES)
    assert_close_gradients(found, expected)
    assert_close_weights(ours, stock, tolerance=1e-4)


TEXTS = ["the cat sat on the mat a dog ran far away", "birds fly south", "we read books", "a dog"]


@pytest.mark.parametrize(
    ("model", "compiled"), [(QWEN, False), (NEMOTRON, False), (LFM, False), (QWEN, True), (LFM, True)]
)
def test_packed_rows_train_as_documents_alone(model, compiled, tmp_path, models, request):
    """All documents of a step in one row, and each in a row of its own."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    if compiled:
        request.getfixturevalue("fresh_compiler")
    data = Dataset.from_list([{"text": text} for text in TEXTS])
    options = {"max_steps": 1, "adam_epsilon": 1e-2, "kernel_report": False, "max_length": 128}
    packed = {"packing": True, "packing_strategy": "bfd", "per_device_train_batch_size": 1}
    compiler = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    logs = []
    for more in ({"per_device_train_batch_size": len(TEXTS)}, {**packed, **compiler}):
        trainer = sft(tmp_path, AutoModelForCausalLM.from_pretrained(models[model]), data=data, **options, **more)
        trainer.train()
        logs.append([{key: log[key] for key in ("loss", "grad_norm")} for log in logged(trainer) if "loss" in log])
    assert len(logs[0]) == 1
    assert_close_logs(logs[1], logs[0], relative=1e-4)
