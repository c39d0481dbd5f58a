"""Samples during a training: they are the model's own greedy answers, and change nothing of the training."""

import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.integrations import MLflowCallback, TensorBoardCallback, TrackioCallback, WandbCallback

from liger_trainer.callbacks.run_report import REPORT
from liger_trainer.callbacks.throughput import ThroughputCallback
from liger_trainer.trainers.samples import SamplesCallback, send_samples
from tests.forked import torchrun
from tests.run_report.reading import Page
from tests.trainers.builders import causal, losses_and_norms, sft
from tests.trainers.parity import build
from tests.trainers.tiny import chat_dataset, llama, token_rows, tokenizer

PROMPTS = ["the cat", "a dog ran", [{"role": "user", "content": "we read"}]]
DROPOUT = {"attention_dropout": 0.2}


def saved(folder):
    """A folder with the model, from which TRL loads its reference."""
    llama(**DROPOUT).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    return str(folder / "model")


TRAINERS = {
    "causal": lambda folder, **options: causal(folder, llama(**DROPOUT), **options),
    "SFT": lambda folder, **options: sft(folder, llama(**DROPOUT), data=chat_dataset(), **options),
    "SFT lora": lambda folder, **options: sft(
        folder,
        llama(**DROPOUT),
        peft_config=LoraConfig(target_modules=["q_proj"], lora_dropout=0.3, init_lora_weights=False),
        gradient_checkpointing=True,
        **options,
    ),
    "DPO": lambda folder, **options: build("DPO", True, folder, saved(folder), **options),
    "GRPO": lambda folder, **options: build("GRPO", True, folder, saved(folder), beta=0.1, **options),
}


def with_samples(trainer, steps=1, prompts=PROMPTS, tokens=6):
    if trainer.processing_class is None:
        trainer.processing_class = tokenizer()
    trainer.add_callback(SamplesCallback(trainer, prompts, steps, tokens))
    return trainer


def samples_of(trainer):
    return {log["step"]: log["samples"] for log in trainer.state.log_history if "samples" in log}


class Greedy(TrainerCallback):
    """What the model's own `generate` answers, one prompt at a time, with a cache."""

    def __init__(self, trainer):
        self.trainer, self.answers = trainer, {}

    def on_step_end(self, args, state, control, **kwargs):
        model, asked = self.trainer.model, tokenizer()
        training = [module for module in model.modules() if module.training]
        model.eval()
        found = []
        for prompt in PROMPTS:
            if isinstance(prompt, list):
                inputs = asked.apply_chat_template(
                    prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
                )
            else:
                inputs = asked(prompt, return_tensors="pt")
            inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
            with torch.no_grad():
                ids = model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=True)
            found.append(asked.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        self.answers[state.global_step] = found
        for module in training:
            module.training = True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINERS)
def test_the_training_has_the_same_bits(name, tmp_path):
    results = []
    for sampled in (False, True):
        trainer = TRAINERS[name](tmp_path / str(sampled), max_steps=4)
        if sampled:
            with_samples(trainer, steps=2)
        trainer.train()
        draws = (torch.rand(2).tolist(), random.random(), np.random.random())
        weights = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        modes = [module.training for module in trainer.model.modules()]
        results.append((losses_and_norms(trainer), weights, draws, modes))
    (losses, weights, *plain), (with_them, weights_with_them, *sampled) = results
    assert len(set(losses)) > 2
    assert with_them == losses
    assert all(torch.equal(weights_with_them[key], value) for key, value in weights.items())
    assert sampled == plain
    assert sorted(samples_of(trainer)) == [0, 2, 4]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINERS)
def test_answers_are_the_likeliest_tokens(name, tmp_path):
    trainer = with_samples(TRAINERS[name](tmp_path, max_steps=3, learning_rate=0.5))
    greedy = Greedy(trainer)
    trainer.add_callback(greedy)
    trainer.train()
    found = samples_of(trainer)
    assert {step: [answer for _, answer in found[step]] for step in greedy.answers} == greedy.answers
    assert len({str(each) for each in found.values()}) > 1  # the training changes them
    assert [prompt for prompt, _ in found[1]] == ["the cat", "a dog ran", "we read"]


def test_an_answer_ends_where_the_model_ends_it(tmp_path):
    trainer = causal(tmp_path)
    trainer.processing_class = tokenizer()
    callback = SamplesCallback(trainer, ["the cat", "a dog"], 1, 5)
    plain = callback._answers(trainer.model.eval(), torch.device("cpu"))
    callback._ends = {plain[0][1]}
    first, second = callback._answers(trainer.model, torch.device("cpu"))
    assert first == plain[0][:2]
    assert second == plain[1][: plain[1].index(plain[0][1]) + 1] if plain[0][1] in plain[1] else plain[1]


def test_they_are_shown_kept_and_reported(tmp_path, capsys):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = with_samples(causal(tmp_path, **options), steps=2)
    trainer.train()
    out = capsys.readouterr().out
    found = samples_of(trainer)
    assert list(found) == [0, 2, 4]
    for step, samples in found.items():
        shown = out.split(f"samples at step {step}\n")[1]
        for prompt, answer in samples:
            assert f"  {prompt}\n    {answer.strip().splitlines()[0] if answer.strip() else '(nothing)'}" in shown
    page = Page((tmp_path / REPORT).read_text(encoding="utf-8"))
    assert "Samples" in page.headings
    rows = [row for row in page.rows if len(row) == 3 and row[0] in "024"]
    assert rows == [[str(step), *sample] for step, samples in found.items() for sample in samples]
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    resumed = with_samples(causal(tmp_path, **{**options, "max_steps": 6}), steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    kept = [log for log in saved["log_history"] if "samples" in log]
    assert [log for log in resumed.state.log_history if "samples" in log][:3] == kept
    assert list(samples_of(resumed)) == [0, 2, 4, 6]


def test_their_time_is_not_trained_in(tmp_path, monkeypatch):
    trainer = with_samples(causal(tmp_path))
    throughput = next(each for each in trainer.callback_handler.callbacks if isinstance(each, ThroughputCallback))
    order = []
    monkeypatch.setattr(throughput, "leave_out", lambda: order.append("left out"))
    own = SamplesCallback._answers
    monkeypatch.setattr(SamplesCallback, "_answers", lambda *args: order.append("answers") or own(*args))
    trainer.train()
    assert order[:4] == ["answers", "left out"] * 2


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([""], "the prompt '' has 0 tokens, the model 128 positions"),
        (["the cat " * 80], "tokens, the model 128 positions"),
    ],
)
def test_a_prompt_without_tokens_or_room(prompts, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        with_samples(causal(tmp_path), prompts=prompts)


def test_an_answer_has_no_more_tokens_than_the_model_positions(tmp_path):
    trainer = with_samples(causal(tmp_path, max_steps=1), prompts=["the cat " * 30], tokens=1000)
    callback = trainer.callback_handler.callbacks[-1]
    assert len(callback._ids[0]) + callback._new == 128
    trainer.train()


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_writes_nothing(tmp_path):
    trainer = build("Reward", True, tmp_path, saved(tmp_path))
    with pytest.raises(ValueError, match="LlamaForSequenceClassification is no causal language model"):
        SamplesCallback(trainer, ["the cat"], 1)


def test_split_sequences_are_refused(tmp_path, monkeypatch):
    trainer = causal(tmp_path)
    monkeypatch.setattr(trainer, "get_cp_size", lambda: 2)
    with pytest.raises(ValueError, match="split each sequence"):
        SamplesCallback(trainer, ["the cat"], 1)


class Recorder:
    """Stands for a tracker's module, and for the writer of TensorBoard."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs)) or SimpleNamespace(**kwargs)


def test_each_tracker_gets_them_in_its_own_form(monkeypatch):
    """With stand-ins for their modules; `test_trackers.py` has the real ones."""
    modules = {name: Recorder() for name in ("wandb", "trackio", "mlflow")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    kinds = (TensorBoardCallback, MLflowCallback, WandbCallback, TrackioCallback, TrainerCallback)
    callbacks = [object.__new__(kind) for kind in kinds]
    callbacks[0].tb_writer = Recorder()
    monkeypatch.setattr(MLflowCallback, "__del__", lambda self: None)
    send_samples(callbacks, 20, [("the cat", "sat\ndown"), ("a dog", "ran")])
    texts = ["**the cat**\n\nsat\ndown", "**a dog**\n\nran"]
    assert callbacks[0].tb_writer.calls == [("add_text", (f"samples/{i + 1}", texts[i], 20), {}) for i in range(2)]
    assert modules["mlflow"].calls == [("log_text", ("\n\n".join(texts), "samples/step-20.md"), {})]
    rows = [[20, "the cat", "sat\ndown"], [20, "a dog", "ran"]]
    (_, _, table), (_, (logged,), _) = modules["wandb"].calls
    assert table == {"columns": ["step", "prompt", "answer"], "data": rows}
    assert logged["train/global_step"] == 20
    (_, _, table), (_, (logged,), _) = modules["trackio"].calls
    assert table["dataframe"].values.tolist() == rows
    assert logged["samples"].dataframe is table["dataframe"]


def two_processes(folder):
    trainer = with_samples(causal(folder, rows=token_rows(), per_device_train_batch_size=2))
    trainer.train()
    kept = {"samples": samples_of(trainer), "losses": losses_and_norms(trainer)}
    (folder / f"rank{trainer.args.process_index}.json").write_text(json.dumps(kept))


def test_two_processes_show_them_once(tmp_path):
    """FSDP and ZeRO are in `tests/distributed/test_accelerate_training.py`."""
    done = torchrun(two_processes, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert list(first["samples"]) == ["0", "1", "2", "3"]
    assert done.stdout.count("samples at step 2") == 1
