"""`liger-trainer bench` on the CPU: what it prints and writes, a provider file of the user's, and mistakes."""

import csv
import json

import pytest

from liger_trainer.benchmarks import registry
from liger_trainer.benchmarks.records import Run
from liger_trainer.tools.cli import main

MINE = """
from liger_trainer.benchmarks.registry import provider

@provider("dyt", "mine", slope=2)
def mine(x, alpha, gamma, beta, slope):
    return gamma * (alpha * x).tanh() * slope / 2 + beta

@provider("dyt", "mine")
def broken(x, alpha, gamma, beta):
    raise RuntimeError("not on this machine")

@provider("dyt", "absent", fast=1)
@provider("dyt", "absent")
def absent(x, alpha, gamma, beta, fast=0):
    from no_such_package_at_all import dyt
"""


@pytest.fixture(autouse=True)
def own_operations(monkeypatch):
    """A provider file registers in a copy, which ends with the test."""
    registry.load_operations()
    copies = {
        name: registry.dataclasses.replace(operation, providers=dict(operation.providers))
        for name, operation in registry.OPERATIONS.items()
    }
    monkeypatch.setattr(registry, "OPERATIONS", copies)


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def test_a_run_with_a_provider_file(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(MINE)
    out = tmp_path / "out"
    arguments = ["dyt", "--provider_file", tmp_path / "mine.py", "--providers", "torch,mine,absent", "--device", "cpu"]
    arguments += ["--tokens", "8,16", "--rounds", "2", "--output", out, "--dtype", "float32"]
    assert bench(*arguments) == 0
    shown = capsys.readouterr().out
    assert "dyt · tiny · 8×64 · float32" in shown
    assert "mine slope=2" in shown
    assert "not on this machine" in shown
    assert "skipped: absent (no_such_package_at_all is not installed)" in shown

    run = Run.read(out / "results.json")
    assert run.command.startswith("liger-trainer bench dyt --provider_file")
    assert run.machine.device == "CPU"
    assert run.machine.copy_rate > 0
    assert {"torch", "liger-trainer", "python"} <= set(run.versions)
    names = ["torch", "mine slope=2", "mine", "absent", "absent fast=1"]
    assert [(record.tokens, record.provider) for record in run.records] == [
        (n, name) for n in (8, 16) for name in names
    ]
    assert run.records[1].errors["dx"] < 1e-5
    assert run.records[2].failure == "RuntimeError: not on this machine"

    with (out / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert float(rows[1]["both"]) == run.records[1].both
    assert float(rows[1]["error of dgamma"]) == run.records[1].errors["dgamma"]
    assert rows[2]["both"] == ""
    assert rows[0]["device"] == "CPU"
    assert (out / "dyt-tiny-tokens.png").stat().st_size > 1000


def test_results_are_what_was_written(tmp_path):
    assert bench("dyt", "--providers", "torch", "--device", "cpu", "--rounds", "1", "--output", tmp_path) == 0
    run = Run.read(tmp_path / "results.json")
    run.write(tmp_path, "again")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "results.json").read_text()
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "results.csv").read_text()


def test_without_operations_it_lists_them(capsys):
    assert bench() == 0
    shown = capsys.readouterr().out
    assert "linear_cross_entropy" in shown
    assert "qwen3-30b-a3b" in shown


UNEVEN = ["training", "--device", "cpu", "--trainer"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rms_nrom"], "No operation 'rms_nrom'. Did you mean 'rms_norm'?"),
        (["rms_norm", "--model", "lama3-8b"], "No model 'lama3-8b'. Did you mean 'llama3-8b'?"),
        (["rms_norm", "--providers", "torch,liger"], "No provider 'liger'. Did you mean 'liger-kernel'?"),
        (["training", "--providers", "hff"], "No provider 'hff'. Did you mean 'hf'?"),
        (["training", "rms_norm"], "`training` is measured by itself"),
        (["rms_norm", "--device", "cuda7x"], "No device 'cuda7x'."),
        (["rms_norm", "--provider_file", "absent.py"], "No provider file 'absent.py'."),
        (["training", "--activation_memory", "auto", "--providers", "hf"], "add it to `--providers`"),
        (["training", "--activation_memory", "auto", "--no_checkpointing"], "leave `--no_checkpointing` out"),
        (["training", "--activation_memory", "auto", "--warmup", "1"], "give `--warmup` 2 or more"),
        (["training", "--activation_memory", "auto", "--steps", "2"], "`--steps` 3 or more beyond that"),
        (["rms_norm", "--expert_parallel", "2"], "`--expert_parallel` is for `bench training`; leave it out"),
        (["rms_norm", "swiglu", "--lora", "4"], "`--lora` is for `bench training`; leave it out"),
        (["all", "--no_checkpointing"], "`--no_checkpointing` is for `bench training`; leave it out"),
        (["training", "--rounds", "3"], "`--rounds` is for operations; leave it out"),
        (["longest", "--quick"], "`--quick` is for operations; leave it out"),
        (["longest", "--activation_memory", "auto"], "`--activation_memory` is for `bench training`"),
        (["training", "--activation_memory", "much"], "`activation_memory` is 'much'; give bytes"),
        (["training", "--optim", "liger_adam", "--device", "cpu"], "Did you mean 'liger_adamw'?"),
        (["training", "--optim", "liger_adamw", "--providers", "hf", "--device", "cpu"], "add it to `--providers`"),
        (["training", "--providers", "hf optim=liger_adamw", "--device", "cpu"], "No optimizer 'liger_adamw'."),
        (["longest", "--optim", "liger_adamw", "--device", "cpu"], "`--optim` is for `bench training`"),
        (["training", "--dtype", "float16", "--device", "cpu"], "`training` takes bfloat16 or float32"),
        (["longest", "--dtype", "float32", "--device", "cpu"], "`longest` takes bfloat16"),
        (["training", "--quantize", "nf4", "--device", "cpu"], "there is nothing to train; give `--lora`"),
        (["training", "--providers", "liger_trainer fp8 base", "--device", "cpu"], "trains adapters; give `--lora`"),
        (["longest", "--quantize", "nf4", "--lora", "4", "--device", "cpu"], "`--quantize` is for `bench training`"),
        (["training", "--accelerate_config", "fsdp9", "--device", "cpu"], "not a file; shipped are"),
        (["longest", "--gpus", "2", "--device", "cpu"], "`longest` runs on one GPU"),
        (["longest", "--documents", "8", "--device", "cpu"], "`--documents` is for `bench training`"),
        (["longest", "--padding", "0.5", "--device", "cpu"], "`--padding` is for `bench training`"),
        (["training", "--documents", "8", "--trainer", "dpo", "--device", "cpu"], "`sft`, not with 'dpo'"),
        (["longest", "--labelled", "0.5", "--device", "cpu"], "`--labelled` is for `bench training`"),
        (["training", "--labelled", "0.5", "--trainer", "dpo", "--device", "cpu"], "`sft`, not with 'dpo'"),
        (["training", "--padding", "0.5", "--trainer", "grpo", "--device", "cpu"], "`sft`, not with 'grpo'"),
        (["training", "--documents", "8", "--padding", "0.5", "--device", "cpu"], "leave `--padding` out"),
        (["training", "--documents", "8", "--length", "16,8", "--device", "cpu"], "sequences of 8 tokens, give 2 to 7"),
        (["training", "--documents", "1", "--device", "cpu"], "`--documents` is 1; in sequences of 4096 tokens"),
        (["training", "--padding", "0.5", "--batch", "1", "--device", "cpu"], "give `--batch` 2 or more"),
        (["training", "--padding", "0.6", "--length", "8", "--device", "cpu"], "has none, so give 0.562 or less"),
        (["training", "--padding", "0.01", "--length", "8", "--device", "cpu"], "less than one of 32 tokens"),
        (["longest", "--length", "8,16", "--device", "cpu"], "give `--length` one number"),
        (["longest", "--lengths", "8", "--prompt", "4", "--device", "cpu"], "`--lengths` is for `bench training`"),
        ([*UNEVEN, "sft", "--lengths", "4:8"], "grpo, rloo, not with 'sft'"),
        (["training", "--device", "cpu", "--prompt", "4"], "`--prompt` goes with `--trainer` dpo, orpo, cpo, reward"),
        ([*UNEVEN, "dpo", "--prompt", "4"], "`--prompt` goes with `--lengths`; give it too"),
        ([*UNEVEN, "grpo", "--group", "4"], "`--group` goes with `--lengths`; give it too"),
        ([*UNEVEN, "kto", "--lengths", "4:8", "--length", "8"], "leave `--length` out"),
        ([*UNEVEN, "dpo", "--lengths", "4:8", "--prompt", "4", "--group", "2"], "grpo or rloo, not with 'dpo'"),
        ([*UNEVEN, "dpo", "--lengths", "4:8"], "give `--prompt` too"),
        ([*UNEVEN, "rloo", "--lengths", "4:8", "--prompt", "4", "--batch", "12"], "give a multiple of 8"),
        ([*UNEVEN, "reward", "--lengths", "1:8"], "has 2 tokens or more"),
        ([*UNEVEN, "sft", "--providers", "hf,liger_trainer padded"], "not with 'sft'; leave it out"),
        ([*UNEVEN, "kto", "--providers", "liger_trainer unshared"], "grpo, rloo, not with 'kto'; leave it out"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench(*arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("from liger_trainer.benchmarks.registry import provider\n@provider('dty', 'mine')\ndef f(x): ...", "'dyt'"),
        ("raise KeyError('gone')", "fails: KeyError: 'gone'"),
        ("def f(:", "fails: SyntaxError"),
    ],
)
def test_a_provider_file_that_fails(source, message, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(source)
    assert bench("dyt", "--provider_file", tmp_path / "mine.py") == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "mine.py" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dyt", "--tokens", "8,many"], "'many' is not a whole number of 1 or more"),
        (["training", "--documents", "0"], "'0' is not a whole number of 1 or more"),
        (["training", "--padding", "half"], "'half' is not a number between 0 and 1"),
        (["training", "--labelled", "0"], "'0' is not a number between 0 and 1"),
        (["training", "--padding", "1"], "'1' is not a number between 0 and 1"),
        *(
            (["training", "--lengths", text], f"{text!r} is neither a range such as 64:1024")
            for text in ("8:4", "0:4", "4:", "1:2:3", "many")
        ),
    ],
)
def test_an_option_that_is_no_number(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench(*arguments)
    assert message in capsys.readouterr().err


def test_a_provider_that_an_operation_lacks(capsys):
    assert bench("dyt", "--providers", "trl", "--device", "cpu") == 0
    assert "dyt: none of these providers" in capsys.readouterr().out


def test_a_file_without_results(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"records": []}))
    with pytest.raises(registry.BenchmarkError, match="holds no results"):
        Run.read(tmp_path / "results.json")
