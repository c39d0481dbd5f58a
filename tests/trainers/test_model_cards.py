"""Model cards have our tag beside those of TRL, of the Trainer and of the caller."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model

from liger_trainer import LigerSFTConfig, LigerSFTTrainer, LigerTrainer, LigerTrainingArguments
from tests.trainers.tiny import COMMON, llama, text_dataset, token_rows, tokenizer


def tags(folder):
    return set(ModelCard.load(folder / "README.md").data.tags)


def test_of_a_run_with_trl(tmp_path):
    options = {**COMMON, "save_strategy": "steps", "save_steps": 3}
    trainer = LigerSFTTrainer(
        model=llama(),
        args=LigerSFTConfig(output_dir=str(tmp_path), **options),
        train_dataset=text_dataset(),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    assert {"trl", "sft", "liger-trainer"} <= tags(tmp_path)
    assert {"trl", "sft", "lora", "liger-trainer"} <= tags(tmp_path / "checkpoint-3")


@pytest.mark.parametrize(
    ("base", "origin"),
    [
        ("", "trained from a model without a name"),
        ("run/initial_model", "trained from scratch"),
        ("models/mine", "a fine-tuned version of `mine`"),
        ("org/mine", "a fine-tuned version of [org/mine](https://huggingface.co/org/mine)"),
    ],
)
def test_names_what_was_trained(base, origin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not base.startswith("org"):
        Path(base).mkdir(parents=True, exist_ok=True)
    model = llama()
    model.config.name_or_path = base
    args = LigerSFTConfig(output_dir="out/tuned", **COMMON)
    trainer = LigerSFTTrainer(model=model, args=args, train_dataset=text_dataset(), processing_class=tokenizer())
    trainer.create_model_card(dataset_name="a/b")
    card = Path("out/tuned/README.md").read_text()
    assert f"This model is {origin} on the [a/b](https://huggingface.co/datasets/a/b) dataset." in card
    assert 'pipeline("text-generation", model="tuned"' in card
    assert "None" not in card


@pytest.mark.parametrize(
    ("given", "kept"), [({}, set()), ({"tags": "mine"}, {"mine"}), ({"tags": ["a", "b"]}, {"a", "b"})]
)
def test_of_the_trainer(given, kept, tmp_path):
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj"]))
    args = LigerTrainingArguments(output_dir=str(tmp_path), **COMMON)
    trainer = LigerTrainer(model, args, train_dataset=token_rows())
    trainer.create_model_card(**given)
    assert tags(tmp_path) >= {*kept, "liger-trainer", "generated_from_trainer"}
    trainer.save_model()
    assert tags(tmp_path) >= {"lora", "liger-trainer"}
