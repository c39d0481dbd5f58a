"""Training steps: providers agree, configurations have the published shapes, a failing process is a line."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.records import Run
from liger_trainer.benchmarks.training import _reason
from liger_trainer.benchmarks.training_step import Task, model_config, run
from liger_trainer.cli import main

MINE = """
from liger_trainer.benchmarks.training_step import training_provider

@training_provider("slow")
def slow(setup):
    raise RuntimeError("no such trainer\\nat all")
"""


@pytest.mark.parametrize("trainer", ["causal_lm", "sft"])
def test_losses_agree(trainer):
    task = Task("tiny", layers=1, trainer=trainer, batch=2, length=16, steps=3, device="cpu")
    results = {provider: run(task, provider) for provider in ("hf", "liger_trainer")}
    for result in results.values():
        assert len(result["losses"]) == 3
        assert result["tokens_per_second"] > 0
        assert result["peak_gibibytes"] is None
    assert results["hf"]["losses"] == pytest.approx(results["liger_trainer"]["losses"], abs=0.02)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_configurations(name):
    shape = MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(shape, layers=1))
    assert model.lm_head.weight.shape == (shape.vocab, shape.hidden)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (shape.heads * shape.head_dim, shape.hidden)
    assert attention.k_proj.weight.shape == (shape.kv_heads * shape.head_dim, shape.hidden)
    assert hasattr(attention, "q_norm") is (shape.qk_norm and name != "tiny")
    assert model_config(shape).num_hidden_layers == shape.layers


def test_a_process_that_fails_is_a_line(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    sizes = ["--layers", "1", "--batch", "1", "--length", "8", "--steps", "1", "--device", "cpu"]
    mine = ["--providers", "slow", "--provider_file", str(tmp_path / "mine.py"), "--output", str(tmp_path)]
    assert main(["bench", "training", *sizes, *mine]) == 0
    assert "RuntimeError: no such trainer" in capsys.readouterr().out
    (record,) = Run.read(tmp_path / "results.json").training
    assert record.failure == "RuntimeError: no such trainer"
    assert record.group == ("tiny", 1, "causal_lm", 1, 8, True)


def test_reasons():
    trace = "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n"
    assert _reason(trace, 1) == "out of memory"
    assert _reason("", -9) == "exit code -9"
    assert _reason("a.b.SomeError: first\nsecond\n", 1) == "a.b.SomeError: first"
