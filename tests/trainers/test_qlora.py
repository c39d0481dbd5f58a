"""QLoRA in TRL's trainers: a model that transformers loads in 4 bits trains as with TRL alone."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.lora import lora as operators
from tests.quantised import library, loading_in_4_bits
from tests.trainers.parity import build, lora
from tests.trainers.tiny import llama, logged, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    library()
    folder = str(tmp_path_factory.mktemp("model"))
    llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)  # rows of whole blocks
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO"])
def test_losses_are_those_of_trl(kind, folder, tmp_path, monkeypatch):
    """TRL keeps adapters of a quantised model in bf16, so equal is equal but for their rounding."""
    calls, native = [], operators._lora_linears
    monkeypatch.setattr(operators, "_lora_linears", lambda *args: calls.append(1) or native(*args))
    case = {"model_init_kwargs": loading_in_4_bits(), "bf16": True, "max_steps": 8, "learning_rate": 1e-3}
    case |= {"gradient_checkpointing": True, "own": {"activation_memory": "1GiB"}}
    curves = []
    for ours in (False, True):
        trainer = build(kind, ours, tmp_path / str(ours), folder, peft_config=lora(*TARGETS), **case)
        trainable = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        assert {parameter.dtype for parameter in trainable} == {torch.bfloat16}
        calls.clear()
        trainer.train()
        assert bool(calls) == ours
        assert not ours or trainer._kept.kept > 0
        curves.append([log["loss"] for log in logged(trainer) if "loss" in log])
    assert len(curves[0]) == 8
    assert curves[0][-1] < curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=2e-2, abs=2e-3)
