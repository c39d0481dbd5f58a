"""KTO: single answers, each marked good or bad.

Without --model it runs at once: three steps of a tiny new model, offline, on a CPU too.
"""

import argparse

from datasets import load_dataset

from liger_trainer import LigerKTOConfig, LigerKTOTrainer
from liger_trainer.recipe.smoke import smoke_data, smoke_model

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a model of the Hub or a folder, such as Qwen/Qwen3-0.6B")
model = parser.parse_args().model

trainer = LigerKTOTrainer(
    model=model or smoke_model("outputs/tiny"),
    args=LigerKTOConfig(output_dir="outputs/kto", beta=0.1, max_steps=-1 if model else 3),
    train_dataset=load_dataset("trl-lib/kto-mix-14k", split="train") if model else smoke_data("unpaired"),
)
trainer.train()
