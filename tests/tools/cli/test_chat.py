"""`liger-trainer chat`: answers through a pipe and in a terminal, with and without a chat template."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from liger_trainer.tools.cli import main
from tests.tiny_models import TINY_MODELS
from tests.tools.cli.runs import message_of
from tests.trainers.tiny import tokenizer

TEMPLATE = (
    "{% for turn in messages %}<{{ turn['role'] }}>{{ turn['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = ["--temperature", "0", "--max_new_tokens", "8"]


def saved(folder, template=TEMPLATE, **sizes):
    TINY_MODELS["llama"](**sizes).save_pretrained(folder)
    words = tokenizer()
    words.chat_template = template
    words.save_pretrained(folder)
    return str(folder)


def piped(monkeypatch, capsys, run, text, *options):
    """The lines that the command answers, and what it says beside."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["chat", run, *GREEDY, *options]) == 0
    shown = capsys.readouterr()
    return shown.out.splitlines(), shown.err


def greedy(run, text, new=8):
    model, words = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    inputs = words(text, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=new)[0, inputs["input_ids"].shape[1] :]
    return words.decode(ids, skip_special_tokens=True)


def shown(answer):
    return answer.strip().replace("\n", "\\n")


def test_a_line_is_a_message_and_a_line_its_answer(tmp_path, monkeypatch, capsys):
    run = saved(tmp_path / "model")
    text = "the cat\n\nbirds\n/reset\nthe cat\n/exit\nnever\n"
    answers, said = piped(monkeypatch, capsys, run, text)
    first = greedy(run, "<user>the cat<assistant>")
    second = greedy(run, f"<user>the cat<assistant>{first}<user>birds<assistant>")
    assert answers == [shown(first), shown(second), shown(first)]
    assert first != second
    assert "template" not in said


def test_the_system_message_stays(tmp_path, monkeypatch, capsys):
    run = saved(tmp_path / "model")
    answers, _ = piped(monkeypatch, capsys, run, "the cat\n/reset\nthe cat\n", "--system", "we read books")
    assert answers == [shown(greedy(run, "<system>we read books<user>the cat<assistant>"))] * 2


def test_without_a_template_the_text_goes_on(tmp_path, monkeypatch, capsys):
    run = saved(tmp_path / "model", None)
    answers, said = piped(monkeypatch, capsys, run, "the cat\nbirds\n")
    first = greedy(run, "the cat")
    assert answers == [shown(first), shown(greedy(run, f"the cat{first}birds"))]
    assert said.count("has no chat template: the model continues plain text") == 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    assert main(["chat", run, "--system", "be kind"]) == 2
    assert "`--system` is given, but the tokenizer has no chat template" in message_of(capsys.readouterr().err)


def test_adapters(tmp_path, monkeypatch, capsys):
    run = saved(tmp_path / "model")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(run), LoraConfig(r=4, target_modules=["v_proj"]))
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    adapted.save_pretrained(tmp_path / "run")
    answers, _ = piped(monkeypatch, capsys, str(tmp_path / "run"), "the cat\n")
    base, _ = piped(monkeypatch, capsys, run, "the cat\n")
    assert main(["merge", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    merged, _ = piped(monkeypatch, capsys, str(tmp_path / "run" / "merged"), "the cat\n")
    assert answers == merged != base


def test_a_terminal(tmp_path, monkeypatch, capsys):
    run = saved(tmp_path / "model", max_position_embeddings=64)
    lines = iter(["the cat", "birds " * 100, "/reset", "the cat"])

    def typed(prompt=""):
        line = next(lines, None)
        if line is None:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert main(["chat", run, *GREEDY]) == 0
    out = capsys.readouterr().out
    assert out.count(greedy(run, "<user>the cat<assistant>")) == 2
    assert "`/reset` forgets it, or write" in out


def test_too_long_for_the_model(tmp_path, monkeypatch, capsys):
    """An answer ends at the model's last position; a message beyond it ends a pipe."""
    run = saved(tmp_path / "model", max_position_embeddings=64)
    answers, _ = piped(monkeypatch, capsys, run, "the cat\n", "--max_new_tokens", "500")
    words = AutoTokenizer.from_pretrained(run)
    prompt = "<user>the cat<assistant>"
    assert answers == [shown(greedy(run, prompt, 64 - len(words(prompt)["input_ids"])))]
    monkeypatch.setattr(sys, "stdin", io.StringIO("birds " * 100))
    assert main(["chat", run]) == 2
    assert "and the model 64 positions" in message_of(capsys.readouterr().err)


def test_a_template_that_refuses(tmp_path, monkeypatch, capsys):
    run = saved(tmp_path / "model", "{{ raise_exception('System role not supported') }}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    assert main(["chat", run]) == 2
    assert "The chat template cannot be applied: System role not supported" in message_of(capsys.readouterr().err)


def test_an_error_in_the_model_is_not_swallowed(tmp_path, monkeypatch):
    run = saved(tmp_path / "model", vocab_size=16)  # fewer rows than the tokenizer has tokens
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    with pytest.raises(IndexError):
        main(["chat", run])


def test_a_model_that_scores(tmp_path, monkeypatch, capsys):
    run = saved(tmp_path / "model")
    AutoModelForSequenceClassification.from_pretrained(run, num_labels=1).save_pretrained(run)
    assert main(["chat", run]) == 2
    assert "generates no text, so there is nobody to talk to" in message_of(capsys.readouterr().err)


@pytest.mark.parametrize("value", ["-1", "hot", "nan"])
def test_temperatures(value, capsys):
    with pytest.raises(SystemExit):
        main(["chat", "run", "--temperature", value])
    assert f"{value!r} is not a number of 0 or more" in capsys.readouterr().err
