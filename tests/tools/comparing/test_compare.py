"""`liger-trainer compare`: whole comparisons of tiny models, and the mistakes it refuses.

The runs are forked from a process that has imported the libraries.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest

from liger_trainer.tools.cli import main
from liger_trainer.tools.comparing import results, side
from tests.forked import run
from tests.tools.cli.runs import TINY, message_of, write_recipe

native_start = results.start


def start(work):
    """Runs a side with `work(arguments)` in a forked process."""

    def forked(name, folder, log):
        done = run(work, [name, str(Path(folder).absolute())], cwd=Path.cwd(), environment={"DS_ACCELERATOR": "cpu"})
        log.write_text(done.stdout + done.stderr)
        return done.returncode

    return forked


@pytest.fixture(autouse=True)
def forked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "start", start(side.main))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")


def compared(*arguments, code=0):
    """The results of a comparison that ends with `code`."""
    assert main(["compare", *arguments, "--output_dir", "result"]) == code
    return json.loads(Path("result/comparison.json").read_text())


def with_a_wrong_gradient(arguments):
    """A side, of which ours has one weight with a gradient that is 1.0001 times too large."""
    native = side.trainer_of

    def wrong(recipe):
        trainer = native(recipe)
        if arguments[0] == side.OURS:
            trainer.model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * 1.0001)
        return trainer

    side.trainer_of = wrong
    return side.main(arguments)


@pytest.mark.parametrize("name", ["llama3_8b_sft", "llama3_8b_dpo_lora", "llama3_8b_grpo"])
def test_ours_agrees_with_stock(name, capsys):
    found = compared(name, "--smoke", "--steps", "3")
    stock, again, ours = (found["runs"][one] for one in side.SIDES)
    assert found["verdict"] == "agrees"
    assert len(stock["loss"]) == len(ours["loss"]) == 3
    assert stock["weights"] == again["weights"] == ours["weights"]
    assert stock["tokens"] == ours["tokens"]
    assert min(stock["tokens"]) > 50
    assert not stock["kernels"]
    assert "rms_norm" in [row[0] for row in ours["kernels"]]  # the two sides are not the same code
    noise = [one["noise"] for one in found["differences"] if "layers" in one["name"]]
    assert len(noise) >= 4
    assert all(1e-9 < one < 1e-4 for one in noise)  # the second stock run rounds otherwise, in every layer
    shown = capsys.readouterr().out
    assert "Ours agrees with stock." in shown
    page = Path("result/comparison.html").read_text()
    assert page.count("<figure>") == 4
    assert "Ours agrees with stock." in page
    assert "Completions are those of the stock run" in shown if "grpo" in name else stock["generated"] == 0
    assert (stock["generated"], again["generated"], ours["generated"]) == ((3, 3, 3) if "grpo" in name else (0, 0, 0))
    assert sorted(path.name for path in Path("result").iterdir()) == [
        *("comparison.html", "comparison.json", "ours.log", "stock.log", "stock_again.log")
    ]


def test_a_wrong_gradient_differs(monkeypatch, capsys):
    monkeypatch.setattr(results, "start", start(with_a_wrong_gradient))
    found = compared("llama3_8b_sft", "--smoke", "--steps", "1", code=1)
    assert found["verdict"] == "differs"
    assert [one["name"] for one in found["differences"] if not one["agrees"]] == ["model.layers.1.mlp"]
    (reason,) = found["reasons"]
    assert reason.startswith("At step 1, the gradient of model.layers.1.mlp differs by ")
    shown = capsys.readouterr().out
    assert "Ours differs from stock." in shown
    assert reason in shown.replace("\n", " ")


def test_a_model_in_place_of_a_recipe(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from liger_trainer.recipe.smoke import train_tokenizer

    tokenizer = train_tokenizer(["Some text to cut into tokens."], 300)
    config = LlamaConfig(**TINY, vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=1, eos_token_id=2)
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained("model")
    Path("mine.txt").write_text("".join(f"Line {number} of the text.\n" for number in range(40)))
    options = ["--data_files", "mine.txt", "--use_cpu", "true", "--logits_memory", "1MiB"]
    found = compared("model", "--steps", "2", *options)
    assert found["verdict"] == "agrees"
    assert any("'1MiB'" in note and "lack our arguments" in note for note in found["notes"])


def as_a_program(arguments):
    """`python -m liger_trainer.tools.comparing.side ARGUMENTS`."""
    sys.argv[1:] = arguments
    runpy.run_module("liger_trainer.tools.comparing.side", run_name="__main__")


def test_a_run_that_fails_is_one_line_and_leaves_its_log(monkeypatch, capsys):
    monkeypatch.setattr(results, "start", start(as_a_program))
    Path("rows.jsonl").write_text('{"text": "some words"}\n')
    values = {"trainer": "sft", "model_config": TINY, "tokenizer_vocab_size": 300, "data_files": "rows.jsonl"}
    recipe = write_recipe("mine.yaml", {**values, "use_cpu": True, "eos_token": "<no such token>"})
    assert main(["compare", recipe, "--output_dir", "result"]) == 2
    message = message_of(capsys.readouterr().err)
    assert "The run `stock` failed: " in message
    assert "`eos_token` ('<no such token>') is not found in the vocabulary" in message
    assert message.endswith("Its log is 'result/stock.log'.")
    assert [path.name for path in Path("result").iterdir()] == ["stock.log"]


def test_a_run_is_a_process_that_imports_what_this_one_does(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@"\necho "$PYTHONPATH" >&2\nexit 7\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    assert native_start("ours", Path("result"), Path("log")) == 7
    command, path = Path("log").read_text().splitlines()
    assert command == "-m liger_trainer.tools.comparing.side ours result"
    assert path.split(os.pathsep) == [place for place in sys.path if place]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quickstart", "--dataset_name", "null"], "says nothing about data"),
        (["quickstart", "--dataset_name", "null", "--data_files", "none.jsonl"], "there is no file 'none.jsonl'"),
        (["llama3_8b_stf"], "Did you mean 'llama3_8b_sft'"),
        (["no-such.yaml"], "No recipe file 'no-such.yaml'"),
        (["quickstart", "--max_steps", "3"], "`--max_steps` is given; `compare` runs the same few steps"),
        (["quickstart", "--num_processes=2"], "`--num_processes` is given, but `compare` runs one process"),
        (["quickstart", "--learning_rat", "1"], "unknown key `learning_rat`"),
        (["quickstart", "--router_z_loss_coef", "0.1"], "`router_z_loss_coef` is 0.1, which cannot be compared"),
        (["llama3_8b_grpo", "--use_vllm", "true"], "`use_vllm` is True, which cannot be compared: its completions"),
        (["quickstart", "--expert_parallel_size", "2"], "`expert_parallel_size` is 2, but `compare` runs one process"),
        (["quickstart", "--output_dir", "full"], "`--output_dir` 'full' is not empty, and nothing in it is overwrit"),
        (["quickstart", "--output_dir", "full/file"], "`--output_dir` 'full/file' cannot be created"),
    ],
)
def test_mistakes(arguments, words, capsys):
    Path("full").mkdir()
    Path("full/file").touch()
    assert main(["compare", *arguments]) == 2
    assert words in message_of(capsys.readouterr().err)
    assert sorted(path.name for path in Path().rglob("*")) == ["file", "full"]


def test_several_gpus_and_launchers_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("liger_trainer.tools.cli.train.count_gpus", lambda: 4)
    assert main(["compare", "quickstart"]) == 2
    assert "runs on one GPU, and this process sees 4; set CUDA_VISIBLE_DEVICES=0" in message_of(capsys.readouterr().err)
    monkeypatch.setenv("RANK", "0")
    assert main(["compare", "quickstart"]) == 2
    assert "was started by a launcher" in message_of(capsys.readouterr().err)


def test_ctrl_c(monkeypatch, capsys):
    def interrupted(name, folder, log):
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "start", interrupted)
    assert main(["compare", "quickstart", "--smoke", "--output_dir", "result"]) == 130
    assert "liger-trainer: interrupted" in message_of(capsys.readouterr().err)
    assert not list(Path("result").iterdir())
