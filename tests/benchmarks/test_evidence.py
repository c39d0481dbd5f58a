"""The evidence: both libraries train from the same weights on the same rows, and the tables say how far they are."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from liger_trainer.benchmarks.evidence import __main__ as command
from liger_trainer.benchmarks.evidence import prepare, training
from liger_trainer.benchmarks.evidence.held_out import Measuring
from liger_trainer.benchmarks.evidence.results import (
    SETTING,
    START,
    Evidence,
    Value,
    bootstrap,
    half_width,
    held_out_rows,
    section,
    step_rows,
)
from liger_trainer.benchmarks.evidence.training import TASKS, score
from liger_trainer.recipe.smoke import train_tokenizer

CHAT = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def turn(role, text):
    return {"role": role, "content": text}


def rows(trainer):
    for number in range(24):
        prompt, right, wrong = [turn("user", f"{number} and 1?")], str(number + 1), str(number)
        made = {
            "sft": {"completion": [turn("assistant", right)]},
            "dpo": {"chosen": [turn("assistant", right)], "rejected": [turn("assistant", wrong)]},
            "grpo": {"answer": right},
        }[trainer]
        yield {"prompt": prompt, **made, "split": "held_out" if number < 8 else "train"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A prepared folder with a tiny model."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer = train_tokenizer([f"{number} and 1? user assistant" for number in range(50)], 300)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(**sizes, **ends, vocab_size=len(tokenizer), tie_word_embeddings=True)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "model")
    for trainer in TASKS:
        (folder / f"{trainer}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(trainer)))
    return folder


def train(data, folder, variant):
    job = {"data": str(data), "trainer": "sft", "steps": 8, "device": "cpu", "output": str(folder)}
    weights = folder / "weights.safetensors"
    return training.run(job, variant, 0, weights)["steps"], weights


def test_stock_and_ours_learn_the_same(data, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "sft", dataclasses.replace(TASKS["sft"], rows=2, lr=1e-2))
    measuring = Measuring(data, "sft", torch.device("cpu"))
    start = measuring.measure()["loss"]
    found = []
    for variant in TASKS["sft"].variants[:2]:
        steps, weights = train(data, tmp_path, variant)
        measuring.load(weights)
        found.append((steps, measuring.measure()["loss"]))
    (stock, stock_end), (ours, our_end) = found
    assert len(stock["loss"]) == len(stock["seconds"]) == 8
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-4)
    assert ours["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-3)
    assert our_end == pytest.approx(stock_end, rel=1e-3)
    assert sum(stock_end) < 0.9 * sum(start)


def test_small_layers_are_trained_in_fp8(data, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "sft", dataclasses.replace(TASKS["sft"], rows=2, lr=1e-2))
    (in_fp8,) = (variant for variant in TASKS["sft"].variants if "fp8" in variant.arguments)
    without = dataclasses.replace(in_fp8, arguments={})
    losses = []
    for variant in (in_fp8, without):
        variant = dataclasses.replace(variant, arguments=variant.arguments | {"bf16": True})
        losses.append(train(data, tmp_path, variant)[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0][0] != losses[1][0]


def test_held_out_measures(data):
    measuring = Measuring(data, "sft", torch.device("cpu"))
    row = measuring.rows[3]
    prompt = measuring.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
    whole = measuring.tokenizer.apply_chat_template(row["prompt"] + row["completion"])["input_ids"]
    labels = torch.tensor([[-100] * len(prompt) + whole[len(prompt) :]])
    alone = measuring.model(input_ids=torch.tensor([whole]), labels=labels).loss.item()
    assert measuring.measure()["loss"][3] == pytest.approx(alone, rel=1e-5)  # in a padded batch, the same

    preference = Measuring(data, "dpo", torch.device("cpu"))
    assert preference.measure() == {"accuracy": [0.5] * 8, "margin": [0.0] * 8}
    with torch.no_grad():
        for weight in preference.model.parameters():
            weight.mul_(1.5)
    moved = preference.measure()
    assert moved["accuracy"] == [float(margin > 0) for margin in moved["margin"]]
    assert set(Measuring(data, "grpo", torch.device("cpu")).measure()["score"]) <= {0.0, 1.0}


def evidence(ours):
    """Two seeds of three steps and four items; ours is off by `ours` in each held-out loss."""
    values = [Value(SETTING, 0, "trainer", 0, "sft"), Value(SETTING, 0, "device", 0, "a device")]
    values += [Value(START, 0, "held-out loss", item, 4.0) for item in range(4)]
    for variant, away in ((training.STOCK, (0.0, 0.0)), ("ours", ours)):
        for seed in (0, 1):
            values += [Value(variant, seed, "held-out loss", item, 3.0 + item + away[seed]) for item in range(4)]
            for measure, series in (("loss", (4.0, 2.0, 2.0)), ("grad_norm", (1.0,) * 3), ("seconds", (9.0, 1.0, 1.0))):
                shift = 0.2 * (variant == "ours" and measure == "loss")
                steps = zip(range(1, 4), series)
                values += [Value(variant, seed, f"step {measure}", step, value + shift) for step, value in steps]
            values.append(Value(variant, seed, "peak_gibibytes", 0, 1.5 + seed))
    return Evidence(values)


@pytest.mark.parametrize(
    ("ours", "verdict", "difference"),
    [
        ((0.1, -0.1), "yes", "+0.0000 ± 1.2706"),
        ((0.1, 0.1), "no, worse", "+0.1000 ± 0.0000"),
        ((-0.1, -0.101), "no, better", "-0.1005 ± 0.0064"),
    ],
)
def test_the_verdict_is_that_of_the_interval(ours, verdict, difference):
    stock, row = held_out_rows(evidence(ours))
    assert stock == ["loss", "TRL", "4.0000", "4.5000 ± 0.0000", "", "", ""]
    assert row[4] == difference
    assert row[6] == verdict


def test_seeds_that_a_variant_lacks_are_left_out():
    whole = evidence((0.1, -0.1))
    cut = Evidence([value for value in whole.values if (value.variant, value.seed) != ("ours", 1)])
    assert (whole.seeds, cut.seeds) == ([0, 1], [0])
    assert held_out_rows(cut)[1][6] == "one seed"


def test_steps_are_beside_stock():
    _, row = step_rows(evidence((0.0, 0.0)))
    assert row == ["ours", "5.0e-02", "7.5e-02", "0.0e+00", "0.0e+00", "1000.0", "11.0", "2.50"]


def test_intervals():
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    low, high = bootstrap([0.0, 1.0] * 200)
    assert (low, high) == pytest.approx((0.45, 0.55), abs=0.01)


def test_a_file_is_read_drawn_and_printed(tmp_path, capsys):
    file = tmp_path / "any.csv"
    found = evidence((0.1, 0.1))
    found.write(file)
    assert Evidence.read(file).values == found.values
    command.main(["--plot", str(file)])
    printed = capsys.readouterr().out
    assert "Does not: ours (loss)." in printed
    assert section("sft", file) in printed
    assert (tmp_path / "any.png").stat().st_size > 10_000


def test_the_stock_process_checks_that_it_is_stock(monkeypatch, tmp_path):
    job = {"trainer": "sft", "runs": [], "ours": False, "output": str(tmp_path)}
    with pytest.raises(RuntimeError, match="liger_trainer was imported"):
        training.main(job)  # in this process it is
    monkeypatch.setattr(training, "sys", SimpleNamespace(modules={"trl": None, "liger_trainers": None}))
    training.main(job)


def test_a_command_adds_the_runs_that_its_file_lacks(data, monkeypatch, tmp_path):
    asked = []

    def trained(arguments, device, ours, runs, folder):
        asked.extend(runs)
        for name, seed in runs:
            weights = load_file(data / "model" / "model.safetensors")
            moved = {key: 1.5 * weight for key, weight in weights.items()}  # all runs alike
            save_file(moved, f"{folder}/{name} {seed}.safetensors")
            left = {"steps": {"loss": [1.0], "grad_norm": [1.0], "seconds": [1.0]}, "peak_gibibytes": None}
            Path(folder, f"{name} {seed}.json").write_text(json.dumps(left))

    monkeypatch.setattr(command, "_train", trained)
    monkeypatch.setattr(command, "draw_evidence", lambda found, file: None)
    options = ["--model", str(data), "--trainer", "dpo", "--output", str(tmp_path), "--device", "cpu", "--steps", "1"]
    command.main([*options, "--seeds", "0"])
    command.main([*options, "--seeds", "0", "1"])
    assert asked == [("TRL", 0), ("liger_trainer", 0), ("TRL", 1), ("liger_trainer", 1)]
    found = Evidence.read(tmp_path / "dpo.csv")
    assert found.seeds == [0, 1]
    assert found.of("start", 0, "held-out margin") == [0.0] * 8
    margins = [found.of(name, seed, "held-out margin") for name, seed in asked]
    assert any(margins[0])
    assert all(of_run == margins[0] for of_run in margins)  # those of a resumed file too
    with pytest.raises(SystemExit):
        command.main([*options, "--steps", "2"])


def test_rows_are_made_from_dialogues(monkeypatch, tmp_path):
    dialogues = {
        f"{name:05d}": {"messages": [[{"text": f" reply {turn}\nof"}, {"text": f"{name}"}] for turn in range(name % 7)]}
        for name in range(700)
    }
    (tmp_path / "dataset.json").write_text(json.dumps(dialogues))
    monkeypatch.setattr(prepare, "_package", lambda name: tmp_path)
    monkeypatch.setattr(prepare, "HELD_OUT", 8)
    made = prepare._dialogues()
    assert {len(turns) for turns in made} == {2, 4, 6}
    assert all(turns == [f"reply {turn} of {turns[0].split()[-1]}" for turn in range(len(turns))] for turns in made)
    pairs = [*prepare._dpo(made)]
    assert [pair["split"] for pair in pairs].count("held_out") == 8
    for pair in pairs:
        chosen, rejected = (pair[name][0]["content"].split() for name in ("chosen", "rejected"))
        assert chosen[:-1] == rejected[:-1]  # the same turn
        assert chosen[-1] != rejected[-1]  # of another dialogue
    row = next(prepare._sft(made))
    assert [message["role"] for message in row["prompt"] + row["completion"]] == ["user", "assistant"] * (
        (len(row["prompt"]) + 1) // 2
    )


def test_the_verifier():
    assert [score(text, "Jaydn") for text in ("Jaydn", " jay dn\n", "Jaydn.", "")] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "give --model and --prepare"), (["--trainer", "ppo"], "invalid choice: 'ppo'")],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err
