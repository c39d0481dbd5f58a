"""`liger-trainer merge`: where it looks, where it writes, what it refuses, and llama.cpp's converter."""

from __future__ import annotations

import shutil
import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_trainer.tools.cli import main
from tests.tools.cli.runs import checkpoints, message_of

ADAPTERS = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "lora_r": 4, "learning_rate": 0.01}
CONVERTER = """\
import pathlib, sys
folder, _, kind, _, file = sys.argv[1:]
assert (pathlib.Path(folder) / "model.safetensors").is_file()
if kind == "tq1_0":
    sys.exit("this architecture is unknown")
pathlib.Path(file).write_text(kind)
"""


@pytest.fixture
def run(recipe, tmp_path, capsys):
    """A run with adapters on a new model, and a checkpoint after each of its two steps."""
    assert main(["train", recipe(**ADAPTERS, save_strategy="steps", save_steps=1)]) == 0
    capsys.readouterr()
    return tmp_path / "run"


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=torch.arange(3, 15)[None]).logits


def test_a_run_and_its_checkpoints(run, capsys):
    """The output folder, then a checkpoint, then the output folder of a run that was killed."""
    base = AutoModelForCausalLM.from_pretrained(run / "initial_model")
    adapted = logits(PeftModel.from_pretrained(base, run))
    assert main(["merge", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"Merging the LORA adapters in {run} into " in shown
    assert "Proved on random tokens: " in shown
    assert f"The merged model is in {run / 'merged'}." in shown
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(run / "merged")), adapted)
    assert AutoTokenizer.from_pretrained(run / "merged").get_vocab() == AutoTokenizer.from_pretrained(run).get_vocab()

    assert main(["merge", str(run / "checkpoint-1"), "--dtype", "bfloat16"]) == 0
    assert checkpoints(run) == ["checkpoint-1", "checkpoint-2"]
    first = AutoModelForCausalLM.from_pretrained(run / "merged-checkpoint-1")
    assert first.dtype == torch.bfloat16
    assert (logits(first.float()) - adapted).abs().max() > 1e-4

    (run / "adapter_config.json").unlink()
    assert main(["merge", str(run), "--output_dir", str(run / "again")]) == 0
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(run / "again")), adapted)


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main(["merge", *map(str, arguments)]) == 2
    return message_of(capsys.readouterr().err)


def test_what_is_refused(run, tmp_path, capsys):
    (run / "merged").mkdir()
    (run / "merged" / "mine.txt").write_text("mine")
    message = refused(capsys, run)
    assert f"`--output_dir` {str(run / 'merged')!r} exists and is not an empty folder; give another one." in message
    assert [path.name for path in (run / "merged").iterdir()] == ["mine.txt"]
    assert "there is no folder 'nowhere'" in refused(capsys, "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds neither adapters (adapter_config.json) nor a model" in refused(capsys, tmp_path / "empty")
    whole = run / "initial_model"
    assert "holds a whole model, and nothing that could be added" in refused(capsys, whole)
    assert "holds a whole model; leave it out" in refused(capsys, whole, "--base_model", "x")
    shutil.move(run / "initial_model", tmp_path / "moved")
    assert "is no longer in 'run/initial_model'; give its folder" in refused(capsys, run, "--output_dir", "new")
    assert main(["merge", str(run), "--output_dir", "new", "--base_model", str(tmp_path / "moved")]) == 0


def test_the_converter_of_llama_cpp(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "`--llama_cpp` is given without `--gguf`" in refused(capsys, run, "--llama_cpp", "x")
    assert "which is not on the PATH" in refused(capsys, run, "--gguf", "q8_0")
    assert "holds no convert_hf_to_gguf.py" in refused(capsys, run, "--gguf", "q8_0", "--llama_cpp", tmp_path)
    assert not (run / "merged").exists()
    script = tmp_path / "bin" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.write_text(CONVERTER)
    options = ["--llama_cpp", str(script.parent), "--gguf"]
    assert main(["merge", str(run), *options, "q8_0"]) == 0
    assert (run / "merged" / "merged-q8_0.gguf").read_text() == "q8_0"
    message = refused(capsys, run, *options, "tq1_0", "--output_dir", tmp_path / "other")
    assert "is complete, but convert_hf_to_gguf.py failed (exit code 1): this architecture is unknown" in message
    assert (tmp_path / "other" / "model.safetensors").is_file()
    script.write_text(f"#!{sys.executable}\n{CONVERTER}")
    script.chmod(0o755)
    assert main(["merge", str(run), "--gguf", "f16", "--output_dir", str(tmp_path / "third")]) == 0
    assert (tmp_path / "third" / "third-f16.gguf").read_text() == "f16"
