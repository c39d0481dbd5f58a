"""Supervised fine-tuning on conversations.

Without --model it runs at once: three steps of a tiny new model, offline, on a CPU too.
"""

import argparse

from datasets import load_dataset

from liger_trainer import LigerSFTConfig, LigerSFTTrainer
from liger_trainer.recipe.smoke import smoke_data, smoke_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a model of the Hub or a folder, such as Qwen/Qwen3-0.6B-Base")
model = parser.parse_args().model

trainer = LigerSFTTrainer(
    model=model or smoke_model("outputs/tiny"),
    args=LigerSFTConfig(
        output_dir="outputs/sft",
        packing=True,
        max_length=1024,
        per_device_train_batch_size=2,
        max_steps=-1 if model else 3,
    ),
    train_dataset=load_dataset("trl-lib/Capybara", split="train") if model else smoke_data("messages"),
)
trainer.train()
