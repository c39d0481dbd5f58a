"""`doctor MODEL_OR_RECIPE` prints a line for each trap; its exit code says whether there are any."""

import pytest

from liger_trainer.tools.cli import main
from tests.tools.cli.runs import message_of
from tests.tools.diagnosis.recipes import model_folder, recipe
from tests.trainers.tiny import CHAT_TEMPLATE

pytestmark = pytest.mark.filterwarnings("ignore")


def told(capsys, *arguments):
    """The exit code and the printed lines."""
    code = main(["doctor", *map(str, arguments)])
    return code, capsys.readouterr().out.splitlines()


def test_traps_are_lines_and_the_exit_code(tmp_path, capsys):
    path = recipe(tmp_path, eos_token=None, packing=True, packing_strategy="wrapped")
    code, lines = told(capsys, path)
    assert code == 1
    traps = [line for line in lines if line.startswith("trap: ")]
    assert len(traps) == 2
    assert all(" Fix: `" in trap for trap in traps)
    code, lines = told(capsys, path, "--eos_token", "<|im_end|>", "--packing_strategy", "bfd")
    assert code == 0
    assert lines[0] == "nothing found"
    assert lines[1].startswith("checked: dtype and learning rate; ")
    assert len(lines) == 2


def test_nothing_is_written(tmp_path, capsys, monkeypatch):
    path = recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert told(capsys, path)[0] == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_and_keys(tmp_path, capsys):
    folder = model_folder(tmp_path / "model", tie_word_embeddings=True)
    (tmp_path / "ends.jinja").write_text(CHAT_TEMPLATE.replace("'<|im_end|>'", "'</s>'"))
    code, lines = told(capsys, folder)
    assert code == 1  # its chat template ends an answer with a token that is not its end-of-sequence token
    assert any(line.startswith("note: With `use_peft: True`, `lora_modules_to_save: ") for line in lines)
    assert any(line.startswith("not checked: labels: no data is named") for line in lines)
    assert told(capsys, folder, "--eos_token", "<|im_end|>")[0] == 0
    assert told(capsys, folder, "--chat_template_path", tmp_path / "ends.jinja")[0] == 0


@pytest.mark.parametrize("name", ["gemma3_4b_sft", "qwen3_30b_a3b_sft_ep", "llama3_8b_kto", "quickstart_grpo"])
def test_smoke_runs_have_no_trap(name, capsys):
    code, lines = told(capsys, name, "--smoke")
    assert code == 0
    assert "nothing found" in lines


def test_what_needs_the_network_is_not_checked(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, lines = told(capsys, "llama3_8b_dpo")
    assert code == 0
    assert any(line.startswith("not checked: the data") and "trl-lib" in line for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [["no/such-model"], ["none.yaml"], ["quickstart", "--learning_rat", "1"], ["--smoke"], ["quickstart", "7"]],
)
def test_mistakes_are_one_message(arguments, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["doctor", *arguments]) == 2
    message_of(capsys.readouterr().err)


def test_missing_data_is_a_mistake(tmp_path, capsys):
    assert main(["doctor", recipe(tmp_path), "--data_files", "none.jsonl"]) == 2
    assert "there is no file 'none.jsonl'" in message_of(capsys.readouterr().err)
